"""Traces: the schema on real runs, files, and replay against the scheduler's own state."""

import copy
import json

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.scheduler import Scheduler, schedule_step
from mini_engine.tests.helpers import (
    SlotEngine,
    make_request,
    random_run,
    random_workload,
    scripted_engine,
)
from mini_engine.trace import (
    LineWriter,
    Trace,
    VirtualClock,
    WallClock,
    describe,
    first_difference,
    read_trace,
    replay,
    write_trace,
)
from mini_engine.trace.records import Blocked, End, Finished, Header, Preempted, Queued, Scheduled

SEEDS = range(40)
REASONS = {"preempted", "slots", "budget", "memory", "empty"}


@pytest.fixture(scope="module")
def runs():
    return [random_run(seed) for seed in SEEDS]


# ------------------------------------------------------------------------------------- schema

STEP = {
    "step", "t", "t_end", "scheduled", "num_batched_tokens", "num_running", "num_waiting", "blocked",
    "blocks", "new_tokens", "num_free_blocks", "num_cached_blocks", "events",
}  # fmt: skip
EVENTS = {
    "QUEUED": {"type", "id", "t", "num_prompt_tokens", "max_tokens", "priority", "arrival"},
    "SCHEDULED": {"type", "id", "num_cached_tokens", "cached_blocks"},
    "PREEMPTED": {"type", "id", "for", "needs", "free"},
    "FINISHED": {"type", "id", "reason"},
}


def check_schema(trace, path):
    """Types and ranges are those that read_trace checks; keys and sums are checked here."""
    write_trace(path, trace)
    assert read_trace(path) == trace
    header, config = trace.header.to_json(), trace.header.config
    assert header.keys() == {"trace", "version", "clock", "unit", "backend", "parts", "config"}
    for number, record in enumerate(trace.steps):
        line = record.to_json()
        assert line.keys() == STEP and record.step == number
        assert record.scheduled and min(record.scheduled.values()) > 0
        total = sum(record.scheduled.values())
        assert record.num_batched_tokens == total <= config["max_num_batched_tokens"]
        assert record.num_running == len(record.scheduled) <= config["max_num_seqs"]
        assert record.blocked.reason in REASONS and ("id" in line["blocked"]) == (record.num_waiting > 0)
        assert record.blocked.needs is None or record.blocked.needs > record.blocked.free
        assert {*record.new_tokens, *record.blocks} <= {*record.scheduled}
        assert all([*record.new_tokens.values(), *record.blocks.values()])
        for event in record.events:
            assert event.to_json().keys() == EVENTS[event.type]
            if isinstance(event, Scheduled):
                assert event.num_cached_tokens == len(event.cached_blocks) * config["block_size"]
                assert config["prefix_caching"] or not event.cached_blocks
            if isinstance(event, Preempted):
                assert event.needs > event.free and event.id not in record.scheduled
                assert event.for_ in record.scheduled or event.for_ == event.id
            assert event.type != "FINISHED" or event.reason in ("stop", "length", "abort")


def test_every_field_of_a_random_run(runs, tmp_path):
    """Each has the type and the range that the schema gives it, and there is no other. All five reasons
    occur; "none" would be a scheduler that wastes room."""
    for engine in runs:
        check_schema(engine.trace, tmp_path / "trace.jsonl")
    records = [record for engine in runs for record in engine.trace.steps]
    assert {record.blocked.reason for record in records} == REASONS
    assert sum(event.type == "PREEMPTED" for record in records for event in record.events) > 20


def test_every_field_of_a_run_of_the_engine(tmp_path):
    """In wall time, with a real engine, aborts and an end."""
    engine = scripted_engine({}, num_blocks=6, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    for name in "abc":
        engine.add_request("hello", request_id=name)
    engine.step()
    engine.abort("c")
    while engine.has_work:
        engine.step()
    trace = engine.trace
    check_schema(trace, tmp_path / "trace.jsonl")
    assert (trace.header.clock, trace.header.unit) == ("wall", "s")
    assert trace.end == End("drained", len(trace.steps), num_free_blocks=6)
    assert trace.header.backend == "scripted"
    times = [t for record in trace.steps for t in (record.t, record.t_end)]
    assert times == sorted(times)


def test_the_header_has_the_settings_and_the_parts():
    engine = scripted_engine({}, policy="priority", long_prefill_token_threshold=3, watermark=2, num_blocks=9)
    assert engine.trace.header.config == {
        "policy": "priority",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "long_prefill_token_threshold": 3,
        "num_blocks": 9,
        "block_size": 4,
        "prefix_caching": True,
        "watermark": 2,
    }
    engine = scripted_engine({}, part_names={"clamp": "lab-02"})
    assert engine.trace.header.parts == {"clamp": "lab-02"}


# ------------------------------------------------------------------- why no request was admitted


def lazy(waiting, running, kv, **limits):
    """Admit one request at most, although more would fit."""
    return schedule_step(waiting, running, kv, **limits | {"max_num_seqs": 1})


@pytest.mark.parametrize(
    ("settings", "requests", "expected"),
    [
        ({"max_num_seqs": 2}, ["a", "b", "c"], Blocked("slots", "c")),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 4}, [("a", 9), "b"], Blocked("budget", "b")),
        (
            {"num_blocks": 5, "watermark": 1},
            [("a", 8), ("b", 9), ("c", 1)],
            Blocked("memory", "b", needs=4, free=3),
        ),
        ({"num_blocks": 2}, ["a", "b"], Blocked("preempted", "b")),
        ({}, ["a"], Blocked("empty")),
        ({"schedule_step": lazy}, ["a", "b"], Blocked("none", "b")),
    ],
    ids=lambda value: value.reason if isinstance(value, Blocked) else "",
)
def test_why_the_front_of_the_queue_waits(settings, requests, expected):
    """ "none" is a scheduler that admits no request although it could."""
    engine = SlotEngine(**settings).add(*(make_request(*given) for given in requests))
    engine.step()
    if expected.reason == "preempted":
        engine.step()
    assert engine.trace.steps[-1].blocked == expected


# ------------------------------------------------------------------------------------- events


def test_a_preemption_says_for_whom_and_why():
    """`for` is the first remaining request that could not have grown; needs and free are those before it."""
    engine = SlotEngine(num_blocks=5, block_size=4)
    engine.add(make_request("a", 3, 9), make_request("b", 4, 9), make_request("c", 9, 4))
    engine.step()
    engine.step()
    (event,) = [e for e in engine.trace.steps[-1].events if e.type == "PREEMPTED"]
    assert event == Preempted("c", for_="b", needs=1, free=0)
    assert event.to_json() == {"type": "PREEMPTED", "id": "c", "for": "b", "needs": 1, "free": 0}


def test_events_of_a_life():
    """QUEUED, SCHEDULED, tokens, PREEMPTED, SCHEDULED again, FINISHED; each once, in this order."""
    engine = SlotEngine(num_blocks=3, block_size=4)
    engine.add(make_request("a", 4, 6), make_request("b", 4, 6, priority=3)).run()
    result = [(r.step, e.type) for r in engine.trace.steps for e in r.events if e.id == "b"]
    assert [kind for _, kind in result] == ["QUEUED", "SCHEDULED", "PREEMPTED", "SCHEDULED", "FINISHED"]
    steps = [step for step, _ in result]
    assert steps[:3] == [0, 0, 1] and steps == sorted(steps)
    assert engine.trace.steps[0].events[1] == Queued("b", 0.0, 4, 6, priority=3, arrival=1)


def test_aborts_are_recorded_before_and_after_the_last_step():
    engine = SlotEngine().add(make_request("a", 4, 9), make_request("b", 4, 2))
    assert engine.abort("unknown") is False
    engine.step()
    assert {e.type for e in engine.trace.steps[0].events} == {"QUEUED", "SCHEDULED"}
    engine.abort("a")
    engine.step()
    assert Finished("a", "abort") in engine.trace.steps[1].events
    engine.add(make_request("c"))
    engine.abort("c")
    end = engine.recorder.close("drained").end
    assert [e.type for e in end.events] == ["QUEUED", "FINISHED"]
    assert end.num_free_blocks == engine.kv.num_blocks


# ------------------------------------------------------------------------------------- clocks


def test_virtual_time_is_what_the_cost_says():
    """One per step, or milliseconds computed from the record."""
    engine = SlotEngine().add(make_request("a", 5, 3)).run()
    assert [(r.t, r.t_end) for r in engine.trace.steps] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    engine = SlotEngine()
    engine.recorder.clock = VirtualClock(lambda record: 0.5 + record.num_batched_tokens)
    engine.add(make_request("a", 5, 3)).run()
    assert [r.t_end for r in engine.trace.steps] == [5.5, 7.0, 8.5]
    assert (engine.recorder.clock.kind, engine.recorder.clock.unit) == ("virtual", "ms")
    clock = WallClock()
    assert 0 <= clock.now() <= clock.now() and (clock.kind, clock.unit) == ("wall", "s")


# ------------------------------------------------------------------------------------- replay


def test_replay_agrees_with_the_scheduler_at_each_step():
    """Counters, outputs, blocks and states of every request, as they were while the step ran."""
    for seed in SEEDS:
        settings, arrivals = random_workload(seed)
        engine, step, truth = SlotEngine(**settings), 0, []
        compute = engine.compute

        def noting(running, scheduled, engine=engine, truth=truth, compute=compute):
            truth.append({
                name: (
                    len(request.output_token_ids),
                    list(engine.kv.block_table(request)),
                    request.num_preemptions,
                    scheduled.get(name, 0),
                    request.is_decode and request in running,
                    request.num_computed_tokens if request.finish_reason is None else None,
                )
                for name, request in engine.requests.items()
            })  # fmt: skip
            return compute(running, scheduled)

        engine.compute = noting
        while arrivals or engine.scheduler.has_work:
            while arrivals and arrivals[0][0] <= step:
                engine.add(arrivals.pop(0)[1])
            if step == 5:
                engine.abort("q1")
            if engine.scheduler.has_work:
                engine.step()
            step += 1
        for (record, views), expected in zip(replay(engine.trace), truth, strict=True):
            assert views.keys() == expected.keys()
            for name, view in views.items():
                *counts, computed = expected[name]
                found = [view.num_output_tokens, view.blocks, view.num_preemptions, view.num_scheduled]
                assert [*found, view.state == "decode"] == counts, (seed, record.step, name)
                assert computed is None or view.num_computed_tokens == computed
                assert view.state != "finished" or computed is None
                if view.state in ("waiting", "preempted"):
                    assert not view.num_scheduled and computed is not None


# -------------------------------------------------------------------------------------- files


def test_two_runs_may_write_the_same_file(tmp_path, runs, monkeypatch):
    """Each writes a file of its own; the last to finish stays, whole."""
    path = tmp_path / "trace.jsonl"
    first, second = (run.recorder.close("drained") for run in runs[:2])
    monkeypatch.setattr("os.getpid", iter([1, 2]).__next__)
    with LineWriter(path) as file:
        file.add(first.header)
        write_trace(path, second)
        for line in first.lines()[1:]:
            file.add(line)
    assert read_trace(path) == first
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_run_without_an_end_can_be_read(tmp_path, runs):
    """A cut that leaves whole lines is a shorter run, not an error."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, Trace(runs[0].trace.header, runs[0].trace.steps[:3]))
    assert read_trace(path).end is None and len(read_trace(path).steps) == 3


CONFIG = describe(Scheduler(BlockManager(4, 4), max_num_batched_tokens=8, max_num_seqs=2))
HEADER = json.dumps(Header("virtual", "step", "paged", {}, CONFIG).to_json()) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file, not a trace"),
        ("hello\n", "line 1: not JSON"),
        ("\udc89PNG\udcff\udcfe\x00", "line 1: not JSON"),
        ('{"trace":"mini-engine","version":1}\n', "trace version 1; this reads versions 2 and 3"),
        ('{"trace":"mini-engine","version":2}\n', "line 1: the header has no 'clock'"),
        (HEADER + '{"step":0\n', "line 2: not JSON"),
        (HEADER + '{"end":"drained","step":0}\n{"st', "line 3: not JSON"),
        (HEADER + "\n", "line 2: not JSON"),
        (HEADER + '{"other":0}\n', "line 2: neither a step nor the end"),
        (HEADER + '{"step":0,"t":0.0}\n', "line 2: the step has no 't_end'"),
        (HEADER + '{"end":"drained"}\n', "line 2: the end has no 'step'"),
    ],
)
def test_a_malformed_file_is_one_clear_error(tmp_path, text, message):
    """It names the file, and the line where there is one. test_input_errors.py has wrong fields."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert "bad.jsonl" in str(error.value)


# ---------------------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.scheduled.update({next(iter(r.scheduled)): 99}),
        lambda r: setattr(r, "scheduled", dict(reversed(r.scheduled.items()))),
        lambda r: r.new_tokens.update(q0=[77]),
        lambda r: r.draft_token_ids.update(q0=[5]),
        lambda r: setattr(r, "num_free_blocks", r.num_free_blocks + 1),
        lambda r: setattr(r, "num_waiting", r.num_waiting + 1),
        lambda r: setattr(r, "num_running", r.num_running + 1),
        lambda r: r.events.append(Finished("q0", "stop")),
        lambda r: r.events.clear(),
    ],
)
def test_first_difference_finds_the_step(change):
    """The scheduled tokens and their order, drafts, new tokens, counts and events all count."""
    trace = next(
        t
        for t in (random_run(seed).trace for seed in SEEDS)
        if any(len(r.scheduled) > 1 and r.events for r in t.steps[2:])
    )
    index = next(i for i, r in enumerate(trace.steps) if i > 1 and len(r.scheduled) > 1 and r.events)
    other = copy.deepcopy(trace)
    change(other.steps[index])
    assert first_difference(other, trace) == index


def test_as_many_drafts_must_be_accepted():
    trace, other = (copy.deepcopy(random_run(1).trace) for _ in "12")
    for one in (trace, other):
        one.steps[4].draft_token_ids["q0"] = [5, 6]
    assert first_difference(other, trace) is None
    other.steps[4].num_accepted_tokens["q0"] = 1
    assert first_difference(other, trace) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda r: (setattr(r, "t", 9.5), setattr(r, "t_end", 10.5)),
        lambda r: setattr(r, "blocks", {"q0": [1]}),
        lambda r: setattr(r.blocked, "reason", "memory"),
        lambda r: setattr(r.events[0], "t", 5.0),
    ],
)
def test_times_block_ids_and_reasons_do_not_count(change):
    """A comparison ignores them, and changes no record."""
    trace, other = (copy.deepcopy(random_run(1).trace) for _ in "12")
    change(other.steps[0])
    changed = copy.deepcopy(other)
    assert first_difference(other, trace) is None
    assert other == changed, "comparing changes no record"


def test_a_shorter_run_differs_at_its_end():
    trace = random_run(1).trace
    shorter = Trace(trace.header, trace.steps[:-2])
    assert first_difference(shorter, trace) == first_difference(trace, shorter) == len(trace.steps) - 2


def test_update_needs_a_schedule_before_it():
    """A Recorder writes a step after its update; without a decision there is no step."""
    engine = scripted_engine({})
    engine.add_request("hello", request_id="a")
    engine.step()
    with pytest.raises(RuntimeError, match="without schedule"):
        engine.scheduler.update({"a": 1}, {"a": [1]})
    assert [record.step for record in engine.trace.steps] == [0]
