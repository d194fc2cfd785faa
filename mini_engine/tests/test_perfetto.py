"""The Chrome trace export: the schema, the nesting of slices, flows and counters, against the trace.

trace_processor itself is a downloaded binary, so the format's rules are checked here instead.
"""

import copy
import json

import pytest

from mini_engine.show.perfetto import ENGINE, MICROSECONDS, REQUESTS, to_perfetto
from mini_engine.show.player import ready_setup
from mini_engine.tests import test_speculation
from mini_engine.tests.helpers import SlotEngine, make_request, random_trace, tokens_of
from mini_engine.trace import replay

PHASES = {"queued", "prefill", "decode", "preempted"}
NUMBER = 10  # of traces


def with_gaps(trace):
    """Return the trace as on a wall clock, with time between two steps."""
    trace = copy.deepcopy(trace)
    for record in trace.steps:
        late = 0.25 * record.step
        record.t, record.t_end = record.t + late, record.t_end + late
        for event in record.events:
            if event.type == "QUEUED":
                event.t += late
    return trace


@pytest.fixture(scope="module")
def traces():
    said = {name: tokens_of(deltas) for name, deltas in test_speculation.serve(2)[0].items()}
    drafted = test_speculation.serve(2, test_speculation.Drafts(2, said))[1].trace
    assert any(n for record in drafted.steps for n in record.num_accepted_tokens.values())
    found = [ready_setup(), *map(random_trace, range(NUMBER - 3)), with_gaps(random_trace(8)), drafted]
    events = [event for trace in found for record in trace.steps for event in record.events]
    assert any(e.type == "PREEMPTED" for e in events)
    assert any(getattr(e, "reason", "") == "abort" for e in events)
    return found


@pytest.fixture(scope="module", params=range(NUMBER))
def exported(request, traces):
    trace = traces[request.param]
    return trace, json.loads(json.dumps(to_perfetto(trace), allow_nan=False))


def test_every_event_meets_the_format(exported):
    """Phase, time, process and thread are there, with the fields that each phase asks for."""
    needed = {
        "X": {"dur", "args"},
        "C": {"args"},
        "M": {"args"},
        "s": {"id", "cat"},
        "f": {"id", "cat", "bp"},
    }
    _, chrome = exported
    events = chrome["traceEvents"]
    for event in events:
        assert {"ph", "name", "ts", "pid", "tid"} <= event.keys()
        assert needed[event["ph"]] <= event.keys(), event
        assert event["ts"] >= 0 and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_slices_nest_on_every_track(exported):
    """Read in file order, each slice lies wholly inside or wholly after the one before it."""
    _, chrome = exported
    open_slices = {}
    for event in chrome["traceEvents"]:
        if event["ph"] != "X":
            continue
        stack = open_slices.setdefault((event["pid"], event["tid"]), [])
        start, end = event["ts"], event["ts"] + event["dur"]
        while stack and stack[-1][1] <= start + 1e-6:
            stack.pop()
        if stack:
            assert end <= stack[-1][1] + 1e-6, (event, stack)
        inside = [name for name, _ in stack]
        assert len(inside) == {"chunk": 2, "phase": 1, "request": 0, "step": 0}[kind(event)], (event, inside)
        stack.append((event["name"], end))


def kind(event) -> str:
    if event["pid"] == ENGINE:
        return "step"
    if event["name"].startswith("chunk of "):
        return "chunk"
    return "phase" if event["name"] in PHASES else "request"


def test_the_tracks_agree_with_the_trace(exported):
    """A track a request, in order of arrival. Chunks carry all prefill tokens, decode lasts as long as its
    steps, counters repeat the records."""
    trace, chrome = exported
    scale = MICROSECONDS[trace.header.unit]
    slices = [event for event in chrome["traceEvents"] if event["ph"] == "X"]
    chunks, decoded_in = [], {}
    for record, views in replay(trace):
        for request_id, num_tokens in record.scheduled.items():
            if views[request_id].state == "prefill":
                chunks.append(num_tokens)
            else:
                decoded_in.setdefault(request_id, []).append(record)
    assert sorted(int(e["name"].split()[-1]) for e in slices if kind(e) == "chunk") == sorted(chunks)
    decodes = [e for e in slices if e["name"] == "decode"]
    named = [e for e in chrome["traceEvents"] if e["name"] == "thread_name" and e["pid"] == REQUESTS]
    ids = {e["tid"]: e["args"]["name"] for e in named}
    queued = [e.id for record in trace.steps for e in record.events if e.type == "QUEUED"]
    assert list(ids.values()) == queued
    for request_id, records in decoded_in.items():
        # Slices of consecutive steps: they begin and end with one, and cover each step whole.
        own = [(e["ts"], e["ts"] + e["dur"]) for e in decodes if ids[e["tid"]] == request_id]
        starts, ends = [r.t * scale for r in records], [r.t_end * scale for r in records]
        for start, end in own:
            assert min(abs(t - start) for t in starts) < 1e-2 and min(abs(t - end) for t in ends) < 1e-2
        for start, end in zip(starts, ends, strict=True):
            assert any(a <= start + 1e-2 and end <= b + 1e-2 for a, b in own)
    counted = [e["args"]["value"] for e in chrome["traceEvents"] if e["name"] == "tokens in the step"]
    assert counted == [record.num_batched_tokens for record in trace.steps]
    for record in trace.steps:
        at = record.t * scale
        accepted, rejected = (
            next(e["args"]["value"] for e in chrome["traceEvents"] if (e["name"], e["ts"]) == (name, at))
            for name in ("accepted drafts", "rejected drafts")
        )
        assert accepted == sum(record.num_accepted_tokens.values())
        assert accepted + rejected == sum(map(len, record.draft_token_ids.values()))
    used = [e["args"]["value"] for e in chrome["traceEvents"] if e["name"] == "KV blocks in use"]
    assert used == [trace.header.config["num_blocks"] - r.num_free_blocks for r in trace.steps]


def test_an_arrow_leads_from_each_preemption_to_its_resumption(exported):
    """Each arrow starts with a preempted slice and ends where the same track's work goes on."""
    trace, chrome = exported
    events = chrome["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    preemptions = [e for r in trace.steps for e in r.events if e.type == "PREEMPTED"]
    assert len(starts) == len(preemptions) and ends.keys() <= starts.keys()
    begins = {(e["name"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for flow, start in starts.items():
        assert ("preempted", start["tid"], start["ts"]) in begins
        if flow in ends:
            end = ends[flow]
            assert end["tid"] == start["tid"] and end["ts"] > start["ts"]
            assert begins & {(work, end["tid"], end["ts"]) for work in ("prefill", "decode")}


def test_requests_queued_after_the_last_step_have_no_track_and_an_unknown_unit_is_refused():
    engine = SlotEngine().add(make_request("a", 1, 1))
    engine.step()
    engine.add(make_request("b"), make_request("c"))
    engine.abort("b")
    events = to_perfetto(engine.recorder.close("max_steps"))["traceEvents"]
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    assert named == {"a"}
    engine.trace.header.unit = "fortnight"
    with pytest.raises(ValueError, match="time unit must be one of .*'fortnight'"):
        to_perfetto(engine.trace)
