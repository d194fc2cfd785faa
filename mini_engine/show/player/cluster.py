"""The player's data for a cluster: a trace for each engine, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mini_engine.trace import Blocked, Fold, StepTrace, Trace, read_trace


def read_cluster(folder: Path) -> dict[str, Trace]:
    """Return the traces in a folder by the names of their files, as `mini-engine simulate --out` writes them.

    Raise ValueError if there are none, or if their clocks are not one: a virtual clock that counts the same.
    """
    paths = sorted(folder.glob("*.jsonl"), key=_order)
    traces = {path.stem: read_trace(path) for path in paths}
    if not traces:
        raise ValueError(f"{folder} has no traces; `mini-engine simulate --replicas 2 --out` writes some")
    clocks = {(trace.header.clock, trace.header.unit) for trace in traces.values()}
    if len(clocks) > 1 or clocks.pop()[0] != "virtual":
        raise ValueError(f"{folder} has traces of different clocks; a cluster's have one virtual clock")
    return traces


def _order(path: Path) -> tuple[bool, str, int, str]:
    """Return a key that puts engines that prefill before those that decode, and engine-2 before engine-10."""
    kind, _, number = path.stem.rpartition("-")
    return kind != "prefill", kind, int(number) if number.isdecimal() else 0, path.stem


def with_idle(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """Return traces in which a step without a request fills each time in which an engine does nothing."""
    end = max((trace.steps[-1].t_end for trace in traces.values() if trace.steps), default=0.0)
    return {name: Trace(trace.header, list(_filled(trace, end)), trace.end) for name, trace in traces.items()}


def _filled(trace: Trace, end: float) -> Iterator[StepTrace]:
    fold, t, config = Fold(trace.header), 0.0, trace.header.config

    def idle(step: int, until: float) -> StepTrace:
        cached = len(fold.cached)
        return StepTrace(
            step, t, until, {}, 0, 0, 0, Blocked("empty"), {}, {}, config["num_blocks"], cached, []
        )

    for record in trace.steps:
        if record.t > t:
            yield idle(record.step, record.t)
        yield record
        fold.add(record)
        fold.settle()
        t = record.t_end
    if t < end:
        yield idle(fold.step, end)
