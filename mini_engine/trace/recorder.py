"""A scheduler that records: it stands in front of any other and writes down its decisions.

It reads public state before and after each call; the recorded scheduler writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, Protocol

from mini_engine.fallbacks import recoverable_scheduler
from mini_engine.interfaces import KVManager, Queue, SchedulerLike
from mini_engine.request import Request
from mini_engine.trace.causes import blocked, changes, preemptions
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
        self._requests = {request.request_id: request for request in requests}  # that are not finished
        there = [view_of(request, scheduler) for request in self._requests.values()]
        header = Header(self.clock.kind, self.clock.unit, backend, parts or {}, config, there)
        self.store = TraceStore(header, keep)
        self.header, self.steps = header, self.store.steps
        self.end: End | None = None
        self.step = 0
        self._events: list[Event] = []  # since the latest step was decided
        self._before: tuple[float, list[Request], dict[Request, int], int] | None = None
        self._record: StepTrace | None = None
        self._num_blocks_seen = {view.request_id: len(view.blocks) for view in there if view.running}

    def add(self, request: Request) -> None:
        """The scheduler's `add`, and a QUEUED event."""
        t = self.clock.now()  # before anything is changed: it may raise
        self.scheduler.add(request)
        name, size = request.request_id, request.num_prompt_tokens
        longest = request.max_tokens or 0  # the scheduler has resolved it
        self._events.append(Queued(name, t, size, longest, request.priority, request.arrival))
        self._requests[name] = request

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """The scheduler's `abort`, and a FINISHED event with this reason; in mid-step it is that step's."""
        try:
            return self.scheduler.abort(request_id)
        finally:
            request = self._requests.get(request_id)
            if request and request.finish_reason:
                del self._requests[request_id]
                self._num_blocks_seen.pop(request_id, None)
                events = self._events if self._record is None else self._record.events
                events.append(Finished(request_id, reason))

    def fail(self, request: Request) -> None:
        """Drop a request that cannot go on; its finish_reason becomes "error"."""
        try:
            self.abort(request.request_id, "error")
        finally:
            request.finish_reason = "error"

    def schedule(self) -> dict[str, int]:
        """The scheduler's `schedule`; its decisions begin the step's record."""
        kv, size, t = self.kv, self.kv.block_size, self.clock.now()
        before, free = list(self.running), kv.num_free_blocks
        # Only beyond the edge of a block can a request need one more.
        growing = [r for r in before if r.num_new_tokens > -r.num_computed_tokens % size]
        needs = {request: kv.num_new_blocks(request, request.num_new_tokens) for request in growing}
        self._before = t, before, needs, free
        scheduled = self.scheduler.schedule()
        self._record, self._num_blocks_seen = self._describe(scheduled)
        self._events = []
        return scheduled

    def _describe(self, scheduled: dict[str, int]) -> tuple[StepTrace, dict[str, int]]:
        """Return the record of what has been decided since `_before`, and the number of blocks seen of each
        request. Changes nothing, because what it reads may raise."""
        assert self._before is not None
        t, before, needs, free = self._before
        kv, running = self.kv, list(self.running)
        gone, admitted = changes([request for request in before if not request.finish_reason], running)
        seen = dict(self._num_blocks_seen)
        for request in gone:
            seen.pop(request.request_id, None)
        preempted = preemptions(gone, needs, free, attrgetter("request_id"))
        admissions = self._admissions(admitted, seen)
        drafting = [r for r in running if r.spec_token_ids and r.request_id in scheduled]
        record = StepTrace(
            step=self.step,
            t=t,
            t_end=t,
            scheduled=dict(scheduled),
            num_batched_tokens=sum(scheduled.values()),
            num_running=len(running),
            num_waiting=len(self.waiting),
            blocked=self._blocked(scheduled, bool(preempted)),
            blocks=self._new_blocks(scheduled, [*needs, *admitted], seen),
            new_tokens={},
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            events=[*self._events, *preempted, *admissions],
            draft_token_ids={r.request_id: r.spec_token_ids for r in drafting},
        )
        return record, seen

    def take_back(self, before: list[Request]) -> None:
        """Undo a step that was decided while `before` ran and is not computed. What the scheduler can
        undo leaves the trace; what stands is recorded as a step that computed nothing."""
        self._recovery.take_back(before)
        if self._before is None:
            return
        if self._record is not None:
            self._events = [e for e in self._record.events if isinstance(e, Queued | Finished)]
            self._record = None
        held = {request.request_id: len(self.kv.block_table(request)) for request in before}
        self._num_blocks_seen = {name: num for name, num in held.items() if num}
        record, seen = self._describe({})
        self._before = None
        if any(isinstance(event, Preempted | Scheduled) for event in record.events):
            self._events, self._num_blocks_seen = [], seen
            try:
                self._advance(record)
            finally:
                self._finish(record)

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        """The scheduler's `update`, which completes the step's record. Raises RuntimeError without a
        `schedule` before it."""
        record = self._record
        if record is None:
            raise RuntimeError("update() was called without schedule(); a step is one of each, in this order")
        rows = [request for request in self.running if request.request_id in scheduled]
        computed = rows[0].num_computed_tokens if rows else 0
        drafted = [r for r in rows if r.request_id in record.draft_token_ids]
        tables = {r: (r.num_computed_tokens, list(self.kv.block_table(r))) for r in drafted}
        known: dict[str, int] = {}
        if sum(map(len, sampled.values())) > len(sampled):  # some of several tokens may be dropped
            known = {request.request_id: len(request.output_token_ids) for request in rows}
        try:
            return self.scheduler.update(scheduled, sampled, stopped)
        finally:
            if not rows or rows[0].num_computed_tokens != computed:  # else it raised before all was done
                self._record = self._before = None
                try:
                    self._verified(record, tables)
                except Exception:
                    self._verified(record, tables)  # the step is done, so its record must be complete
                    raise
                finally:
                    try:
                        self._advance(record)  # before events have the time of the step's end
                    finally:
                        self._results(record, rows, sampled, known)
                        self._finish(record)

    def _results(
        self, record: StepTrace, rows: list[Request], sampled: dict[str, list[int]], known: dict[str, int]
    ) -> None:
        record.new_tokens = dict(sampled)
        for request in rows:
            name = request.request_id
            if name in known and name in sampled:
                record.new_tokens[name] = request.output_token_ids[known[name] :]
            if request.finish_reason:
                del self._requests[name]
                self._num_blocks_seen.pop(name, None)
                record.events.append(Finished(name, request.finish_reason))

    def _verified(self, record: StepTrace, before: dict[Request, tuple[int, list[int]]]) -> None:
        """Record what came of the drafts: how many were accepted, and the blocks of the others."""
        for request, (computed, table) in before.items():
            name, num_drafts = request.request_id, len(record.draft_token_ids[request.request_id])
            rejected = record.scheduled[name] - (request.num_computed_tokens - computed)
            record.num_accepted_tokens[name] = num_drafts - rejected
            if not request.finish_reason and (returned := table[len(self.kv.block_table(request)) :]):
                record.returned_blocks[name] = returned
                self._num_blocks_seen[name] = len(table) - len(returned)

    def _advance(self, record: StepTrace) -> None:
        self.clock.advance(record)
        record.t_end = self.clock.now()

    def _finish(self, record: StepTrace) -> None:
        self.step += 1
        with ExitStack() as calls:  # all of them, even if one raises
            for consumer in (*self.consumers, self.store):
                calls.callback(consumer.add, record)

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

    def _admissions(self, admitted: list[Request], seen: dict[str, int]) -> list[Event]:
        events: list[Event] = []
        for request in admitted:
            seen[request.request_id] = num_cached = request.num_computed_tokens // self.kv.block_size
            blocks = self.kv.block_table(request)[:num_cached]
            known = request.num_computed_tokens, blocks, request.num_forked_tokens
            events.append(Scheduled(request.request_id, *known, request.num_external_computed_tokens))
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
        self, scheduled: dict[str, int], growing: list[Request], seen: dict[str, int]
    ) -> dict[str, list[int]]:
        """Return the new blocks of each request. Computing several tokens can cross the edge of a block."""
        several = {name for name, num_tokens in scheduled.items() if num_tokens > 1}
        if several.difference(request.request_id for request in growing):
            growing = list(self.running)
        new_blocks = {}
        for request in growing:
            name, table = request.request_id, self.kv.block_table(request)
            if len(table) > (num_seen := seen.get(name, 0)):
                new_blocks[name] = table[num_seen:]
                seen[name] = len(table)
        return new_blocks
