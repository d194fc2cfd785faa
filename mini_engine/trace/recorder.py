"""A scheduler that records: it stands in front of any other and writes down its decisions.

It reads public state before and after each call; the recorded scheduler writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from mini_engine.fallbacks import recoverable_scheduler
from mini_engine.interfaces import KVManager, Queue, SchedulerLike
from mini_engine.request import Request
from mini_engine.trace.clock import Clock, VirtualClock
from mini_engine.trace.describe import describe, view_of
from mini_engine.trace.records import (
    Blocked,
    End,
    Event,
    Finished,
    Header,
    Preempted,
    Queued,
    Scheduled,
    StepTrace,
    Trace,
)
from mini_engine.trace.retention import Retention, TraceStore

Key = TypeVar("Key")


class Consumer(Protocol):
    """Takes each step's record when it is complete: Metrics, a file, a page that follows the run."""

    def add(self, record: StepTrace) -> Any: ...


def _forwarded(name: str) -> Any:
    return property(attrgetter(f"scheduler.{name}"))


class Recorder:
    """The same interface as the scheduler behind it, and `snapshot` and `close`, which return the trace.

    keep       the steps to keep (see TraceStore): True all, False none, a number the latest, a path a file
    consumers  take each record as it is finished, whatever is kept
    config     the header's, if the scheduler does not have the settings
    backend    paged, padded or two-pass; empty if no model computes the steps
    parts      the parts that are not the engine's own, and their source
    requests   the requests that the scheduler already has
    """

    kv: KVManager = _forwarded("kv")
    policy: str = _forwarded("policy")
    max_num_batched_tokens: int = _forwarded("max_num_batched_tokens")
    max_num_seqs: int = _forwarded("max_num_seqs")
    long_prefill_token_threshold: int = _forwarded("long_prefill_token_threshold")
    waiting: Queue = _forwarded("waiting")
    running: list[Request] = _forwarded("running")
    has_work: bool = _forwarded("has_work")

    def __init__(
        self,
        scheduler: SchedulerLike,
        *,
        keep: Retention = True,
        consumers: Iterable[Consumer] = (),
        clock: Clock | None = None,
        config: dict[str, Any] | None = None,
        backend: str = "",
        parts: dict[str, str] | None = None,
        requests: Iterable[Request] = (),
    ):
        self.scheduler = scheduler
        self._recovery = recoverable_scheduler(scheduler)
        self.clock: Clock = clock or VirtualClock()
        self.consumers = list(consumers)
        config = describe(scheduler) if config is None else config
        there = [view_of(request, scheduler) for request in requests]
        header = Header(self.clock.kind, self.clock.unit, backend, parts or {}, config, there)
        self.store = TraceStore(header, keep)
        self.header, self.steps = header, self.store.steps
        self.end: End | None = None
        self.step = 0
        self._events: list[Event] = []  # since the latest step was decided
        self._record: StepTrace | None = None
        self._num_blocks_seen = {view.request_id: len(view.blocks) for view in there if view.running}

    def add(self, request: Request) -> None:
        """The scheduler's `add`, and a QUEUED event."""
        self.scheduler.add(request)
        name, size = request.request_id, request.num_prompt_tokens
        longest = request.max_tokens or 0  # the scheduler has resolved it
        arrived = Queued(name, self.clock.now(), size, longest, request.priority, request.arrival)
        self._events.append(arrived)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """The scheduler's `abort`, and a FINISHED event with this reason; in mid-step it is that step's."""
        found = self.scheduler.abort(request_id)
        if found:
            self._num_blocks_seen.pop(request_id, None)
            events = self._events if self._record is None else self._record.events
            events.append(Finished(request_id, reason))
        return found

    def fail(self, request: Request) -> None:
        """Drop a request that cannot go on; its finish_reason becomes "error"."""
        self.abort(request.request_id, "error")
        request.finish_reason = "error"

    def schedule(self) -> dict[str, int]:
        """The scheduler's `schedule`; its decisions begin the step's record."""
        kv, size, t = self.kv, self.kv.block_size, self.clock.now()
        before, free = list(self.running), kv.num_free_blocks
        # Only at the edge of a block can a request need one more.
        at_edge = [request for request in before if request.num_computed_tokens % size == 0]
        needs = {request: kv.num_new_blocks(request, 1) for request in at_edge}
        error, scheduled = None, {}
        try:
            scheduled = self.scheduler.schedule()
        except Exception as failed:
            error = failed
        running, events, self._events = list(self.running), self._events, []
        gone, admitted = _changes(before, running)
        preempted = self._preemptions(gone, needs, free)
        events += [*preempted, *self._admissions(admitted)]
        self._record = StepTrace(
            step=self.step,
            t=t,
            t_end=t,
            scheduled=dict(scheduled),
            num_batched_tokens=sum(scheduled.values()),
            num_running=len(running),
            num_waiting=len(self.waiting),
            blocked=self._blocked(scheduled, bool(preempted)),
            blocks=self._new_blocks(scheduled, at_edge, admitted),
            new_tokens={},
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            events=events,
        )
        if error is not None:  # the record has what was done by then; see take_back
            raise error
        return scheduled

    def take_back(self, before: list[Request]) -> None:
        """Undo a step that was decided while `before` ran and is not computed. What the scheduler can
        undo leaves the trace; what stands is recorded as a step that computed nothing."""
        self._recovery.take_back(before)
        record, self._record = self._record, None
        if record is None:
            return
        running, seen = {request.request_id: request for request in self.running}, self._num_blocks_seen
        for name, blocks in record.blocks.items():
            held = seen.pop(name, 0) - len(blocks)
            if request := running.get(name):
                del blocks[max(0, len(self.kv.block_table(request)) - held) :]
                seen[name] = held + len(blocks)
        if any(
            isinstance(e, Preempted) or isinstance(e, Scheduled) and e.id in running for e in record.events
        ):
            record.blocks = {name: blocks for name, blocks in record.blocks.items() if blocks}
            record.scheduled, record.num_batched_tokens = {}, 0
            record.num_free_blocks = self.kv.num_free_blocks
            self.clock.advance(record)
            record.t_end = self.clock.now()
            self._finish(record)
        else:
            self._events[:0] = [event for event in record.events if not isinstance(event, Scheduled)]

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        """The scheduler's `update`, which completes the step's record. Raises RuntimeError without a
        `schedule` before it."""
        if self._record is None:
            raise RuntimeError("update() was called without schedule(); a step is one of each, in this order")
        known: dict[str, int] = {}
        if sum(map(len, sampled.values())) > len(sampled):  # some of several tokens may be dropped
            known = {request.request_id: len(request.output_token_ids) for request in self.running}
        finished = self.scheduler.update(scheduled, sampled, stopped)
        record, self._record = self._record, None
        self.clock.advance(record)
        record.t_end = self.clock.now()
        record.new_tokens = dict(sampled)
        for request in finished:
            name = request.request_id
            self._num_blocks_seen.pop(name, None)
            record.events.append(Finished(name, request.finish_reason or ""))
            if len(sampled.get(name, ())) > 1:  # the tokens after a stop were dropped
                record.new_tokens[name] = request.output_token_ids[known[name] :]
        self._finish(record)
        return finished

    def _finish(self, record: StepTrace) -> None:
        self.step += 1
        for consumer in (*self.consumers, self.store):
            consumer.add(record)

    def snapshot(self) -> Trace:
        """Return the trace so far, as far as it is kept; later steps do not change it."""
        return self.store.trace(self.end or self._end("max_steps" if self.has_work else "drained"))

    def close(self, end: str, **details: Any) -> Trace:
        """End the recording with drained, stuck, max_steps or error, finish the file, and return the trace.
        `details` are fields of End."""
        self.end = self._end(end, **details)
        self.store.finish(self.end)
        return self.snapshot()

    def _end(self, end: str, **details: Any) -> End:
        # Events after the last step, such as an abort, belong to the end.
        return End(end, self.step, self.kv.num_free_blocks, events=list(self._events), **details)

    # -------------------------------------------------------------------------- the fields of a step

    def _preemptions(self, gone: list[Request], needs: dict[Request, int], free: int) -> list[Event]:
        """Return an event for each request that is gone; the cause is the first other that was short."""
        if not gone:
            return []
        short, total = first_short(needs, set(gone), free), sum(needs.values())
        for request in gone:
            self._num_blocks_seen.pop(request.request_id, None)
        return [Preempted(r.request_id, (short or r).request_id, total, free) for r in gone]

    def _admissions(self, admitted: list[Request]) -> list[Event]:
        events: list[Event] = []
        for request in admitted:
            cached = request.num_computed_tokens // self.kv.block_size
            blocks = self.kv.block_table(request)[:cached]
            events.append(Scheduled(request.request_id, request.num_computed_tokens, blocks))
            self._num_blocks_seen[request.request_id] = cached
        return events

    def _blocked(self, scheduled: dict[str, int], preempted: bool) -> Blocked:
        """Return why the front of the queue was not admitted in this step."""
        if not len(self.waiting):
            return Blocked("empty")
        kv, request = self.kv, self.waiting.peek()
        needs = kv.num_new_blocks(request, request.num_new_tokens) + (kv.watermark if self.running else 0)
        room = needs, kv.num_free_blocks
        return blocked(request.request_id, self.header, scheduled, len(self.running), preempted, *room)

    def _new_blocks(
        self, scheduled: dict[str, int], at_edge: list[Request], admitted: list[Request]
    ) -> dict[str, list[int]]:
        """Return the new blocks of each request. Computing several tokens can cross the edge of a block."""
        growing = [*at_edge, *admitted]
        several = {name for name, num_tokens in scheduled.items() if num_tokens > 1}
        if several.difference(request.request_id for request in growing):
            growing = list(self.running)
        new_blocks = {}
        for request in growing:
            name, table = request.request_id, self.kv.block_table(request)
            seen = self._num_blocks_seen.get(name, 0)
            if len(table) > seen:
                new_blocks[name] = table[seen:]
                self._num_blocks_seen[name] = len(table)
        return new_blocks


def _changes(before: list[Request], after: list[Request]) -> tuple[list[Request], list[Request]]:
    """Return the running requests that are gone, and those that are new."""
    if after[: len(before)] == before:  # nearly always
        return [], after[len(before) :]
    were, are = set(before), set(after)
    return [r for r in before if r not in are], [r for r in after if r not in were]


def blocked(
    name: str, header: Header, scheduled: dict[str, int], running: int, preempted: bool, needs: int, free: int
) -> Blocked:
    """Return why the front of the queue, which needs so many blocks, was not admitted in a step."""
    if preempted:
        return Blocked("preempted", name)
    if running >= header.config["max_num_seqs"]:
        return Blocked("slots", name)
    if sum(scheduled.values()) >= header.config["max_num_batched_tokens"]:
        return Blocked("budget", name)
    if needs > free:
        return Blocked("memory", name, needs, free)
    return Blocked("none", name)  # it could have been admitted: a bug in the scheduler


def first_short(needs: dict[Key, int], gone: set[Key], free: int) -> Key | None:
    """Return the first surviving request that could not have grown with the blocks that were free."""
    for request, num_blocks in needs.items():
        free -= num_blocks
        if free < 0 and num_blocks and request not in gone:
            return request
    return next((r for r, num_blocks in needs.items() if num_blocks and r not in gone), None)
