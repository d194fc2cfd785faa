"""Two runs: the decisions in which correct implementations must agree, and where they first part."""

from __future__ import annotations

from typing import Any

from mini_engine.trace.records import StepTrace, Trace

# Times differ from run to run, block ids between correct managers, and `blocked` is commentary.
_COUNTS = ("num_batched_tokens", "num_running", "num_waiting", "num_free_blocks")
_NOT_COMPARED = ("t", "cached_blocks")  # of events


def decisions(record: StepTrace) -> dict[str, Any]:
    """The part of a step's record in which two correct implementations must agree, as JSON."""
    events = (event.to_json() for event in record.events)
    return {
        "scheduled": list(record.scheduled.items()),  # with its order
        **{name: getattr(record, name) for name in _COUNTS},
        "new_tokens": record.new_tokens,
        "events": [{k: v for k, v in event.items() if k not in _NOT_COMPARED} for event in events],
    }


def first_difference(trace: Trace, reference: Trace) -> int | None:
    """The index of the first step whose decisions depart from the reference; None if none does."""
    for index, (ours, theirs) in enumerate(zip(trace.steps, reference.steps, strict=False)):
        if decisions(ours) != decisions(theirs):
            return index
    if len(trace.steps) != len(reference.steps):
        return min(len(trace.steps), len(reference.steps))
    return None
