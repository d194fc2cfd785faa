"""The fold: by hand, from the middle of a run on, and in the player's JavaScript; and what is kept."""

import gc
import json
import random
import shutil
import subprocess
from dataclasses import asdict
from importlib.resources import files

import pytest

from mini_engine.show.perfetto import to_perfetto
from mini_engine.show.player import payload
from mini_engine.sim.cluster import simulate_cluster
from mini_engine.sim.cost_model import LoadMeter, step_loads
from mini_engine.sim.workloads import workload
from mini_engine.tests import test_fork
from mini_engine.tests.helpers import SlotEngine, make_request, random_trace, random_workload
from mini_engine.trace import Fold, Recorder, Trace, read_trace, replay, write_trace
from mini_engine.trace.metrics import Metrics, request_metrics, summary
from mini_engine.trace.records import Blocked, Finished, Header, Queued, RequestView, Scheduled, StepTrace


def folded(trace: Trace) -> list[tuple[int, dict, set]]:
    """Return (number, views as dicts, cached blocks) for each step."""
    fold = Fold(trace.header)
    return [
        (record.step, {name: asdict(view) for name, view in fold.add(record).items()}, set(fold.cached))
        for record in trace.steps
    ]


# --------------------------------------------------------------------------------------- the fold


def step(number, events=(), scheduled=None, new_tokens=None, blocks=None):
    t, counts = 10.0 * number, (sum((scheduled or {}).values()), len(scheduled or {}), 0)
    given = blocks or {}, new_tokens or {}
    return StepTrace(number, t, t + 8, scheduled or {}, *counts, Blocked("empty"), *given, 8, 0, list(events))


HEADER = Header("virtual", "ms", "paged", {}, {"num_blocks": 8, "block_size": 2, "prefix_caching": True})


def test_a_record_may_be_folded_before_it_is_complete():
    """A clock reads it before tokens and ends are written; the fold takes those when the step is settled."""
    fold = Fold(HEADER, keep_finished=False)
    record = step(0, [Queued("a", 0.0, 1, 1, 0, 0), Scheduled("a", 0, [])], {"a": 1}, blocks={"a": [0]})
    view = fold.add(record)["a"]
    record.new_tokens["a"] = [5]
    record.events.append(Finished("a", "length"))
    assert fold.settle() == {} and fold.cached == set()
    assert (view.state, view.num_output_tokens, view.t_finished) == ("finished", 1, 8.0)


def test_an_id_that_is_used_again_starts_anew():
    """After an abort, the next request of that name may arrive before the next step."""
    fold = Fold(HEADER)
    old = fold.add(step(0, [Queued("a", 0.0, 3, 1, 0, 0), Scheduled("a", 0, [])], {"a": 1}))["a"]
    new = fold.add(step(1, [Finished("a", "abort"), Queued("a", 9.0, 1, 1, 0, 1)]))["a"]
    assert (old.finish_reason, old.t_finished) == ("abort", 10.0)
    assert (new.finish_reason, new.num_prompt_tokens, new.state) == (None, 1, "waiting")


@pytest.mark.parametrize("record", [step(3, scheduled={"x": 1}), step(3, [Finished("x", "stop")])])
def test_an_unknown_request_is_named(record):
    with pytest.raises(ValueError, match="step 3 of the trace names request 'x', which was never QUEUED"):
        Fold(HEADER).add(record)


def test_requests_that_were_there_before_are_in_the_header():
    """The trace of a recorder in front of a busy scheduler begins with their state, and can be folded."""
    engine = SlotEngine(max_num_batched_tokens=6, max_num_seqs=2)
    engine.add(make_request("a", 3, 5), make_request("b", 9, 2), make_request("c", 2, 1))
    for _ in range(2):
        engine.step()
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    engine.recorder = Recorder(engine.scheduler, requests=[*running, *waiting])
    engine.step()
    assert [(v.request_id, v.state, v.running) for v in engine.trace.header.requests] == [
        ("a", "decode", True), ("b", "prefill", True), ("c", "waiting", False),
    ]  # fmt: skip
    _, views = next(replay(engine.trace))
    assert [(v.num_computed_tokens, v.num_output_tokens) for v in views.values()] == [(4, 2), (8, 0), (0, 0)]
    for request in running:
        assert views[request.request_id].blocks == engine.kv.block_table(request)
    result = request_metrics(engine.trace)["a"]
    assert result.num_output_tokens == 3
    assert (result.ttft, result.queue_time, result.itl, result.e2e) == (None,) * 4


# ----------------------------------------------------------------------------------------- a ring


@pytest.mark.parametrize("keep", [1, 3, 10])
def test_a_ring_folds_to_what_the_whole_run_folds_to(keep, tmp_path):
    """At the same steps, for every request that was not done before them; from memory and from a file."""
    compared = 0
    for seed in range(13):
        for stop_after in (None, 7):
            whole, ring = random_trace(seed, True, stop_after), random_trace(seed, keep, stop_after)
            assert ring.steps == whole.steps[-keep:] and ring.end == whole.end
            write_trace(tmp_path / "ring.jsonl", ring)
            assert read_trace(tmp_path / "ring.jsonl") == ring
            expected = folded(whole)[-keep:]
            gone = {i for i, view in expected[0][1].items() if view["state"] == "finished"}
            gone -= {e.id for e in ring.steps[0].events if isinstance(e, Finished)}
            first = ring.steps[0].step
            for (number, views, cached), ours in zip(expected, folded(ring), strict=True):
                views = {i: v for i, v in views.items() if i not in gone or v["queued_step"] >= first}
                assert ours == (number, views, cached), (seed, keep)
                compared += len(views)
    assert compared > 50 * keep


def test_metrics_of_a_ring_are_right_or_none():
    """A value is that of the whole run, or None if the ring cannot have it."""
    known = unknown = 0
    for seed in range(30):
        whole, ring = request_metrics(random_trace(seed)), random_trace(seed, keep=6)
        for name, ours in request_metrics(ring).items():
            theirs = whole[name]
            for field in ("queue_time", "queue_steps", "prefill_time", "ttft", "tpot", "e2e", "finish_reason",
                          "num_output_tokens", "num_preemptions", "num_cached_tokens"):  # fmt: skip
                assert getattr(ours, field) == pytest.approx(getattr(theirs, field)), (seed, name, field)
            assert ours.itl is None or ours.itl == pytest.approx(theirs.itl)
            known, unknown = known + (ours.itl is not None), unknown + (ours.itl is None)
        result = summary(ring)
        if ring.steps[0].step:
            assert (result.duration, result.output_throughput, result.goodput) == (None, None, None)
        assert result.num_steps == len(ring.steps)
    assert known > 40 and unknown > 5


def test_other_readers_of_a_ring():
    """The loads of its steps are those of the whole run; figures and the export can be made."""
    matplotlib = pytest.importorskip("matplotlib.pyplot", reason="figures need matplotlib")
    matplotlib.switch_backend("Agg")
    from mini_engine.show import figures

    for seed in range(2):
        whole, ring = random_trace(seed), random_trace(seed, keep=9)
        meter = LoadMeter()
        loads = [meter(record) for record in whole.steps][-9:]
        assert list(step_loads(ring)) == loads
        first = len(whole.steps) - len(ring.steps)
        data = figures.timeline_data(ring)
        theirs = figures.timeline_data(whole, (first, len(whole.steps) - 1))
        assert (data["steps"], data["used_blocks"]) == (theirs["steps"], theirs["used_blocks"])
        rows = zip(theirs["ids"], theirs["states"], strict=True)
        assert data["states"] == [states for name, states in rows if name in data["ids"]]
        held = [figures.block_map_data(trace, [at]) for trace, at in ((ring, 0), (whole, first))]
        assert held[0] | {"steps": [first]} == held[1]
        assert json.loads(json.dumps(to_perfetto(ring), allow_nan=False))["traceEvents"]
    for axes in (
        figures.timeline(ring), figures.budget(ring), figures.waste(ring), figures.block_map(ring),
        figures.latency({"": ring}), figures.compare(ring, ring),
    ):  # fmt: skip
        matplotlib.close((axes[0] if isinstance(axes, tuple) else axes).figure)


def test_a_snapshot_changes_nothing_and_is_not_changed():
    """Snapshots have no effect on the run, however often they are taken."""
    for keep in (True, 4):
        settings, arrivals = random_workload(3)
        engine = SlotEngine(**settings)
        engine.recorder = Recorder(engine.scheduler, keep=keep)
        engine.add(*(request for _, request in arrivals))
        engine.step()
        early = engine.recorder.snapshot()
        copy = [json.dumps(record.to_json()) for record in early.lines()]
        while engine.scheduler.has_work:
            assert engine.recorder.snapshot() == engine.recorder.snapshot()
            engine.step()
        assert [json.dumps(record.to_json()) for record in early.lines()] == copy
        assert (early.end.end, engine.recorder.snapshot().end.end) == ("max_steps", "drained")
        assert engine.recorder.end is None


# ----------------------------------------------------------------------------------------- a file


def recorded_to(path) -> SlotEngine:
    engine = SlotEngine()
    engine.recorder = Recorder(engine.scheduler, keep=path)
    engine.add(make_request("a", 5, 4))
    engine.step()
    return engine


def test_a_path_takes_the_steps_as_they_come(tmp_path):
    """A .part file until the run is closed, then the whole file; no steps in memory."""
    path = tmp_path / "new" / "trace.jsonl"
    engine = recorded_to(path)
    assert [file.suffix for file in path.parent.iterdir()] == [".part"]
    while engine.scheduler.has_work:
        engine.step()
    trace = engine.recorder.close("drained")
    assert trace.steps == engine.trace.steps == [] and trace.end.step == 4
    assert [file.name for file in path.parent.iterdir()] == ["trace.jsonl"]
    written = read_trace(path)
    assert (written.header, written.end, len(written.steps)) == (trace.header, trace.end, 4)
    assert engine.recorder.close("drained").end == trace.end, "closing twice is allowed"


def test_a_recording_that_is_dropped_leaves_no_file(tmp_path):
    """Discarded or garbage-collected, its .part file is removed."""
    engine = recorded_to(tmp_path / "trace.jsonl")
    engine.recorder.store.discard()
    assert list(tmp_path.iterdir()) == []
    engine = recorded_to(tmp_path / "trace.jsonl")
    del engine
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_tokens_after_a_stop_are_not_in_the_trace():
    """A step may have several tokens; those that the scheduler dropped are not outputs."""
    engine = SlotEngine()
    metrics = Metrics(engine.recorder.header)
    engine.recorder.consumers.append(metrics)
    engine.add(make_request("a", 3, 9, stop_token_ids=[7]))
    for sampled in ([1, 2], [3, 7, 4]):
        engine.recorder.update(engine.recorder.schedule(), {"a": sampled})
    assert [record.new_tokens for record in engine.trace.steps] == [{"a": [1, 2]}, {"a": [3, 7]}]
    result = metrics.requests()["a"]
    assert (result.num_output_tokens, result.itl, result.tpot) == (4, (0.0, 1.0, 0.0), 1 / 3)


# ------------------------------------------------------------------------------------ the player's

NODE = """
const trace = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const result = trace.map((one) => {
  const fold = new Fold(one);
  return one.order.map((index) => {
    const plain = (view) => Object.fromEntries(FIELDS.map((field) => [field, view[field]]));
    const views = Object.fromEntries([...fold.at(index)].map(([id, view]) => [id, plain(view)]));
    return [one.steps[index].step, views, [...fold.cached.keys()].filter((block) => fold.cached[block])];
  });
});
console.log(JSON.stringify(result));
"""


def test_the_player_folds_as_python_does():
    """Fifteen random runs and the ends of them, and runs with forks and with moved blocks, step by step and
    jumping about."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; test_player.py compares the folds in a browser")
    rng, data, expected = random.Random(0), [], []
    traces = [random_trace(seed, keep) for seed in range(15) for keep in (True, 7)]
    moved = simulate_cluster(workload("shared-prefix", 12, output_length=20), 3, prefill=1).traces
    for trace in [*traces, *moved, *(test_fork.serve(seed).trace for seed in range(4))]:
        order = [*range(len(trace.steps)), *rng.choices(range(len(trace.steps)), k=10)]
        data.append({**payload(trace)["traces"][0], "order": order})
        by_step = folded(trace)
        expected.append([[by_step[i][0], by_step[i][1], sorted(by_step[i][2])] for i in order])
    source = (files("mini_engine.show.player") / "fold.js").read_text("utf-8")
    script = f"{source}\nconst FIELDS = {json.dumps(RequestView.__slots__)};\n{NODE}"
    command = {"args": [node, "-e", script], "input": json.dumps(data)}
    ran = subprocess.run(**command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    for number, (ours, theirs) in enumerate(zip(json.loads(ran.stdout), expected, strict=True)):
        assert ours == theirs, f"trace {number}"
