"""A trace as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

One track per request (queued, prefill chunks, decode, preempted), one of the steps, and counters;
an arrow leads from each preemption to the resumption. Google, Trace Event Format (2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mini_engine.trace import Finished, Preempted, Queued, RequestView, StepTrace, Trace, replay

# Chrome traces count microseconds; a step of virtual time is shown as a millisecond.
MICROSECONDS = {"step": 1e3, "ms": 1e3, "s": 1e6, "us": 1.0}
ENGINE, REQUESTS = 1, 2  # process ids, by which the viewers group tracks
STEPS = 1  # the thread id of the engine's one track
SHOWN = (  # of a request
    "num_prompt_tokens", "max_tokens", "priority", "num_preemptions", "num_draft_tokens",
    "num_accepted_tokens",
)  # fmt: skip
REQUEST, PHASE, CHUNK, POINT = range(4)  # the nesting: where times are equal, the outer one comes first


@dataclass
class _Phase:
    """A part of a request's life; a wait ends (`end` None) where the next phase starts."""

    name: str
    start: float
    end: float | None = None


@dataclass
class _Track:
    """A request's track: its thread id, when it was queued, and its phases so far."""

    tid: int
    queued: float
    phases: list[_Phase]


class _Events:
    """The events of a Chrome trace. Times are given in the trace's unit and written in microseconds."""

    def __init__(self, unit: str):
        if unit not in MICROSECONDS:
            raise ValueError(f"time unit must be one of {', '.join(MICROSECONDS)}, but is {unit!r}")
        self.scale = MICROSECONDS[unit]
        self.names: list[dict[str, Any]] = []
        self.events: list[tuple[float, int, dict[str, Any]]] = []
        self.num_tracks = self.num_arrows = 0

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
        for label, value in (("name", name), ("sort_index", sort_index)):
            named = {"ph": "M", "name": f"{kind}_{label}", "pid": pid, "tid": tid, "ts": 0}
            self.names.append(named | {"args": {label: value}})

    def track(self, request_id: str, queued: float, phase: _Phase) -> _Track:
        self.num_tracks += 1
        self.name("thread", request_id, REQUESTS, self.num_tracks, self.num_tracks)
        return _Track(self.num_tracks, queued, [phase])

    def sorted(self) -> list[dict[str, Any]]:
        return self.names + [event for _, _, event in sorted(self.events, key=lambda item: item[:2])]


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """Return the Chrome trace of a run for json.dump: {"traceEvents": [...], ...}, sorted by time.

    Raise ValueError for a unit of time that cannot be converted to microseconds.
    """
    out = _Events(trace.header.unit)
    out.name("process", "engine", ENGINE, sort_index=ENGINE)
    out.name("process", "requests", REQUESTS, sort_index=REQUESTS)
    out.name("thread", "steps", ENGINE, STEPS)
    end = trace.steps[0].t if trace.steps else 0.0
    views = {view.request_id: view for view in trace.header.requests}
    tracks = {name: _earlier(out, view, end) for name, view in views.items()}
    for record, views in replay(trace):
        start, end = record.t, record.t_end
        for event in record.events:
            if isinstance(event, Queued):
                tracks[event.id] = out.track(event.id, event.t, _Phase("queued", event.t))
            elif event.id not in tracks:
                continue  # a wrong scheduler may go on with a finished request, whose track is closed
            elif isinstance(event, Preempted):
                tracks[event.id].phases.append(_Phase("preempted", start))
            elif isinstance(event, Finished) and event.reason == "abort":  # other ends come with the step
                _finish(out, tracks.pop(event.id), views[event.id], start, "abort")
        _step(out, record, trace.header.config)
        for request_id in filter(tracks.__contains__, record.scheduled):
            _work(out, tracks[request_id], views[request_id], record)
        for event in record.events:
            if isinstance(event, Finished) and event.reason != "abort" and event.id in tracks:
                _finish(out, tracks.pop(event.id), views[event.id], end, event.reason)
    for event in trace.end.events if trace.end else ():
        # A request that was queued after the last step has no track.
        if isinstance(event, Finished) and event.id in tracks:
            _finish(out, tracks.pop(event.id), views[event.id], end, event.reason)
    for request_id, track in tracks.items():  # not finished when the recording stopped
        _finish(out, track, views[request_id], end, None)
    about = {"displayTimeUnit": "ms", "otherData": {"config": trace.header.config}}
    return {"traceEvents": out.sorted(), **about}


def _earlier(out: _Events, view: RequestView, t: float) -> _Track:
    """Open the track of a request from before the trace; its phases until then are unknown."""
    waiting = "preempted" if view.num_preemptions else "queued"
    phase = _Phase(view.state, t, t) if view.running else _Phase(waiting, t)
    return out.track(view.request_id, t if view.t_queued is None else view.t_queued, phase)


def _work(out: _Events, track: _Track, view: RequestView, record: StepTrace) -> None:
    """Add a request's part in a step: a slice per prefill chunk; steps of one phase extend it."""
    if track.phases[-1].name != view.state:
        track.phases.append(_Phase(view.state, record.t))
    track.phases[-1].end = record.t_end
    if view.state == "prefill":
        first = view.num_computed_tokens
        name = f"chunk of {view.num_scheduled}"
        args = {"step": record.step, "first_position": first, "num_cached_tokens": view.num_cached_tokens}
        out.slice(CHUNK, name, record.t, record.t_end, REQUESTS, track.tid, **args)


def _finish(out: _Events, track: _Track, view: RequestView, t: float, reason: str | None) -> None:
    """Write a request's slice, those of its phases, and the arrows of its preemptions."""
    place, flow = (REQUESTS, track.tid), "preemption"
    for phase, following in zip_longest(track.phases, track.phases[1:]):
        until = following.start if following else t
        out.slice(PHASE, phase.name, phase.start, until if phase.end is None else phase.end, *place)
        if phase.name == "preempted":
            out.num_arrows += 1
            out.add("s", "resumption", phase.start, *place, id=out.num_arrows, cat=flow)
            if following:
                out.add("f", "resumption", until, *place, id=out.num_arrows, cat=flow, bp="e")
    args = {name: getattr(view, name) for name in SHOWN}
    out.slice(REQUEST, view.request_id, track.queued, t, *place, **args, finish_reason=reason)


def _step(out: _Events, record: StepTrace, config: dict[str, Any]) -> None:
    start = record.t
    args = {"scheduled": record.scheduled, "blocked": record.blocked.to_json()}
    out.slice(PHASE, f"step {record.step}", start, record.t_end, ENGINE, STEPS, **args)
    num_drafts = sum(map(len, record.draft_token_ids.values()))
    num_accepted = sum(record.num_accepted_tokens.values())
    counters = {
        "KV blocks in use": config["num_blocks"] - record.num_free_blocks,
        "waiting requests": record.num_waiting,
        "running requests": record.num_running,
        "tokens in the step": record.num_batched_tokens,
        "accepted drafts": num_accepted,
        "rejected drafts": num_drafts - num_accepted,
    }
    for name, value in counters.items():
        out.add("C", name, start, ENGINE, args={"value": value})
