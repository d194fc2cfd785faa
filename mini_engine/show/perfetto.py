"""A trace as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

One track a request (queued, prefill chunks, decode, preempted), one of the steps, and counters;
an arrow leads from each preemption to the resumption. Google, Trace Event Format (2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mini_engine.trace import Finished, Preempted, Queued, RequestView, StepTrace, Trace, replay

# Chrome traces count microseconds; a step of virtual time is shown as a millisecond.
MICROSECONDS = {"step": 1e3, "ms": 1e3, "s": 1e6, "us": 1.0}
ENGINE, REQUESTS = 1, 2  # process ids, which is how the viewers group tracks
STEPS = 1  # the thread id of the engine's one track
REQUEST, PHASE, CHUNK, POINT = range(4)  # what encloses what: where times are equal, the outer comes first


@dataclass
class _Track:
    """What is open on a request's track."""

    tid: int
    queued: float
    phase: str = "queued"
    since: float = 0.0
    until: float = 0.0  # the end of the latest step that the phase took part in
    flow: int | None = None  # an arrow that waits for the resumption


class _Writer:
    """Collects events; times come in the trace's unit and go out in microseconds."""

    def __init__(self, unit: str):
        if unit not in MICROSECONDS:
            raise ValueError(f"time unit must be one of {', '.join(MICROSECONDS)}, but is {unit!r}")
        self.scale = MICROSECONDS[unit]
        self.names: list[dict[str, Any]] = []
        self.events: list[tuple[float, int, dict[str, Any]]] = []
        self.num_tracks = 0

    def at(self, t: float) -> float:
        return round(t * self.scale, 3)  # whole nanoseconds, so that nested slices end exactly together

    def add(
        self, ph: str, name: str, t: float, pid: int, tid: int = 0, *, depth: int = POINT, **more: Any
    ) -> None:
        ts = self.at(t)
        self.events.append((ts, depth, {"ph": ph, "name": name, "ts": ts, "pid": pid, "tid": tid, **more}))

    def slice(self, depth: int, name: str, start: float, end: float, pid: int, tid: int, **args: Any) -> None:
        dur = round(self.at(end) - self.at(start), 3)
        if dur > 0:
            self.add("X", name, start, pid, tid, depth=depth, dur=dur, cat="mini-engine", args=args)

    def name(self, kind: str, name: str, pid: int, tid: int = 0, sort_index: int = 0) -> None:
        for label, args in (
            (f"{kind}_name", {"name": name}),
            (f"{kind}_sort_index", {"sort_index": sort_index}),
        ):
            self.names.append({"ph": "M", "name": label, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def track(self, request_id: str, queued: float, phase: str = "queued", since: float = 0.0) -> _Track:
        self.num_tracks += 1
        self.name("thread", request_id, REQUESTS, self.num_tracks, self.num_tracks)
        return _Track(self.num_tracks, queued, phase, since)

    def finish(self) -> list[dict[str, Any]]:
        self.events.sort(key=lambda item: item[:2])
        return self.names + [event for _, _, event in self.events]


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """The Chrome trace of a run, ready for json.dump: {"traceEvents": [...], ...}, sorted by time.

    Raises ValueError for a unit of time that we cannot turn into microseconds.
    """
    out = _Writer(trace.header.unit)
    out.name("process", "engine", ENGINE, sort_index=ENGINE)
    out.name("process", "requests", REQUESTS, sort_index=REQUESTS)
    out.name("thread", "steps", ENGINE, STEPS)
    num_flows = 0
    end = trace.steps[0].t if trace.steps else 0.0
    views = {view.request_id: view for view in trace.header.requests}
    tracks = {name: _track_so_far(out, view, end) for name, view in views.items()}
    for record, views in replay(trace):
        start, end = record.t, record.t_end
        for event in record.events:
            if isinstance(event, Queued):
                tracks[event.id] = out.track(event.id, event.t, since=event.t)
            elif event.id not in tracks:
                continue  # a wrong scheduler goes on with what has finished: it has no track any more
            elif isinstance(event, Preempted):
                num_flows += 1
                track = tracks[event.id]
                _close(out, track, start)
                _open(track, "preempted", start)
                track.flow = num_flows
                out.add("s", "resumption", start, REQUESTS, track.tid, id=num_flows, cat="preemption")
            elif isinstance(event, Finished) and event.reason == "abort":  # other ends come with the step
                _finish(out, tracks.pop(event.id), views[event.id], start, "abort")
        _step(out, record, trace.header.config)
        for request_id in filter(tracks.__contains__, record.scheduled):
            _work(out, tracks[request_id], views[request_id], record)
        for event in record.events:
            if isinstance(event, Finished) and event.reason != "abort" and event.id in tracks:
                _finish(out, tracks.pop(event.id), views[event.id], end, event.reason)
    for event in trace.end.events if trace.end else ():
        # Requests queued after the last step have no track.
        if isinstance(event, Finished) and event.id in tracks:
            _finish(out, tracks.pop(event.id), views[event.id], end, event.reason)
    for request_id, track in tracks.items():  # still there when the recording stopped
        _finish(out, track, views[request_id], end, None)
    return {
        "traceEvents": out.finish(),
        "displayTimeUnit": "ms",
        "otherData": {"config": trace.header.config},
    }


def _track_so_far(out: _Writer, view: RequestView, t: float) -> _Track:
    """Of a request that was there before the trace begins: its phases are not known from before then."""
    waiting = "preempted" if view.num_preemptions else "queued"
    queued = t if view.t_queued is None else view.t_queued
    return out.track(view.request_id, queued, view.state if view.running else waiting, t)


def _work(out: _Writer, track: _Track, view: RequestView, record: StepTrace) -> None:
    """A request's part in a step: a slice a prefill chunk, one slice for decodes that follow on."""
    start, end = record.t, record.t_end
    if track.phase != view.state:
        _close(out, track, start)
        _open(track, view.state, start)
        if track.flow is not None:
            place = start, REQUESTS, track.tid
            out.add("f", "resumption", *place, id=track.flow, cat="preemption", bp="e")
            track.flow = None
    if view.state == "prefill":
        first = view.num_computed_tokens
        name = f"chunk of {view.num_scheduled}"
        args = {"step": record.step, "first_position": first, "num_cached_tokens": view.num_cached_tokens}
        out.slice(CHUNK, name, start, end, REQUESTS, track.tid, **args)
    track.until = end


def _open(track: _Track, phase: str, t: float) -> None:
    track.phase, track.since, track.until = phase, t, t


def _close(out: _Writer, track: _Track, t: float) -> None:
    # Work ends with its last step, waiting with what follows it.
    until = track.until if track.phase in ("prefill", "decode") else t
    out.slice(PHASE, track.phase, track.since, until, REQUESTS, track.tid)


def _finish(out: _Writer, track: _Track, view: RequestView, t: float, reason: str | None) -> None:
    _close(out, track, t)
    args = {
        "num_prompt_tokens": view.num_prompt_tokens,
        "max_tokens": view.max_tokens,
        "priority": view.priority,
        "num_preemptions": view.num_preemptions,
        "finish_reason": reason,
    }
    out.slice(REQUEST, view.request_id, track.queued, t, REQUESTS, track.tid, **args)


def _step(out: _Writer, record: StepTrace, config: dict[str, Any]) -> None:
    start = record.t
    args = {"scheduled": record.scheduled, "blocked": record.blocked.to_json()}
    out.slice(PHASE, f"step {record.step}", start, record.t_end, ENGINE, STEPS, **args)
    counters = {
        "KV blocks in use": config["num_blocks"] - record.num_free_blocks,
        "waiting requests": record.num_waiting,
        "running requests": record.num_running,
        "tokens in the step": record.num_batched_tokens,
    }
    for name, value in counters.items():
        out.add("C", name, start, ENGINE, args={"value": value})
