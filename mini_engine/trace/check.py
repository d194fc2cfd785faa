"""Checks beyond the types of the fields: sensible settings, requests that have arrived, blocks of the pool,
times that do not decrease.

The scheduler's decisions are not judged: the trace of a wrong scheduler must be readable, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from mini_engine.checks import shown
from mini_engine.config import MAX_BLOCK_SIZE, MAX_NUM_BLOCKS
from mini_engine.trace.record import Record
from mini_engine.trace.records import End, Event, Header, Queued, Scheduled, StepTrace

_DRAFTS = ("draft_token_ids", "num_accepted_tokens", "returned_blocks")
STATES = ("waiting", "prefill", "decode", "preempted", "finished")


@dataclass
class Settings(Record):
    """The types of a header's `config`."""

    what: ClassVar[str] = "the header's config"
    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    num_blocks: int
    block_size: int
    prefix_caching: bool
    watermark: int


class Check:
    """Checks a trace's records, given in order. Raises ValueError naming the field and its value."""

    def __init__(self) -> None:
        self.known: set[str] = set()  # ids of the requests that have arrived
        self.num_blocks = 0
        self.last_step, self.last_t = -1, float("-inf")

    def header(self, header: Header) -> None:
        settings = Settings.from_json(header.config)
        for name, most in (("num_blocks", MAX_NUM_BLOCKS), ("block_size", MAX_BLOCK_SIZE)):
            _within(f"the header's config's {name!r}", getattr(settings, name), 1, most)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            _within(f"the header's config's {name!r}", getattr(settings, name), 1)
        if header.clock not in ("virtual", "wall"):
            raise ValueError(f"the header's 'clock' must be virtual or wall, but is {shown(header.clock)}")
        self.num_blocks = settings.num_blocks
        self._blocks("the header's 'cached_blocks'", header.cached_blocks)
        for view in header.requests:
            if view.state not in STATES:
                rule = f"must be one of {', '.join(STATES)}, but is {shown(view.state)}"
                raise ValueError(f"the header's request's 'state' {rule}")
            self._blocks("the header's request's 'blocks'", view.blocks)
            self.known.add(view.request_id)

    def step(self, record: StepTrace) -> None:
        if record.step <= self.last_step:
            raise ValueError(f"the step's 'step' must increase, but is {record.step} after {self.last_step}")
        if not self.last_t <= record.t <= record.t_end:
            times = f"{record.t} and {record.t_end} after {self.last_t}"
            raise ValueError(f"the step's 't' and 't_end' must not decrease, but are {times}")
        self.last_step, self.last_t = record.step, record.t_end
        self._events(record.events)
        for name in ("scheduled", "blocks", "new_tokens", *_DRAFTS):
            for request_id in getattr(record, name):
                self._arrived(f"the step's {name!r}", request_id)
        for num_tokens in record.scheduled.values():
            _within("the step's 'scheduled'", num_tokens, 0)
        for name in ("blocks", "returned_blocks"):
            for blocks in getattr(record, name).values():
                self._blocks(f"the step's {name!r}", blocks)
        for request_id, drafts in record.draft_token_ids.items():
            accepted = record.num_accepted_tokens.get(request_id, 0)
            _within("the step's 'num_accepted_tokens'", accepted, 0, len(drafts))
        for name in ("num_free_blocks", "num_cached_blocks"):
            _within(f"the step's {name!r}", getattr(record, name), 0, self.num_blocks)

    def end(self, end: End) -> None:
        self._events(end.events)

    def _events(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Queued):
                _within("the event's 'num_prompt_tokens'", event.num_prompt_tokens, 0)
                self.known.add(event.id)
            self._arrived("the event's 'id'", event.id)
            if isinstance(event, Scheduled):
                _within("the event's 'num_cached_tokens'", event.num_cached_tokens, 0)
                for name in ("num_forked_tokens", "num_external_computed_tokens"):
                    _within(f"the event's {name!r}", getattr(event, name), 0, event.num_cached_tokens)
                self._blocks("the event's 'cached_blocks'", event.cached_blocks)

    def _arrived(self, field: str, request_id: str) -> None:
        if request_id not in self.known:
            raise ValueError(f"{field} names request {shown(request_id)}, which was never QUEUED")

    def _blocks(self, field: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            _within(field, block, 0, self.num_blocks - 1)


def _within(field: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or most is not None and value > most:
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{field} must be {limits}, but is {value}")
