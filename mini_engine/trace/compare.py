"""Comparing two runs: the decisions that correct implementations share, and the first that differs."""

from __future__ import annotations

from typing import Any

from mini_engine.trace.records import StepTrace, Trace

# Times differ from run to run, block ids between correct managers; `blocked` explains and decides nothing.
_COUNTS = ("num_batched_tokens", "num_running", "num_waiting", "num_free_blocks")
_DRAFTS = ("draft_token_ids", "num_accepted_tokens")
_NOT_COMPARED = ("t", "cached_blocks")  # of events


def decisions(record: StepTrace) -> dict[str, Any]:
    """Return the part of a step's record that two correct implementations share, as JSON."""
    events = (event.to_json() for event in record.events)
    return {
        "scheduled": list(record.scheduled.items()),  # with its order
        **{name: getattr(record, name) for name in _COUNTS},
        **{name: getattr(record, name) for name in _DRAFTS if record.draft_token_ids},
        "new_tokens": record.new_tokens,
        "events": [{k: v for k, v in event.items() if k not in _NOT_COMPARED} for event in events],
    }


def first_difference(trace: Trace, reference: Trace) -> int | None:
    """Return the index of the first step whose decisions differ from the reference; None if all agree."""
    for index, (ours, theirs) in enumerate(zip(trace.steps, reference.steps, strict=False)):
        if decisions(ours) != decisions(theirs):
            return index
    if len(trace.steps) != len(reference.steps):
        return min(len(trace.steps), len(reference.steps))
    return None
