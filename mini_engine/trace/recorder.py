"""A scheduler that remembers: stands in front of any other and writes down what it decides.

It looks at public state before and after each call; the code under observation writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, Protocol

from mini_engine.interfaces import Clock, KVManager, Queue, SchedulerLike
from mini_engine.request import Request
from mini_engine.trace.clock import VirtualClock
from mini_engine.trace.keep import Keep, Kept
from mini_engine.trace.records import (
    Blocked,
    End,
    Event,
    Finished,
    Header,
    Preempted,
    Queued,
    RequestView,
    Scheduled,
    StepTrace,
    Trace,
)


class Consumer(Protocol):
    """Takes each step's record when it is complete: Metrics, a file, a page that follows the run."""

    def add(self, record: StepTrace) -> Any: ...


def _forwarded(name: str) -> Any:
    return property(attrgetter(f"scheduler.{name}"))


class Recorder:
    """The same interface as the scheduler behind it, and `snapshot` and `close`, which give the trace.

    keep       which steps (see Kept): True all, False none, a number the latest so many, a path a file
    consumers  take each record as it is finished, whatever is kept
    config     of the header, if the scheduler cannot be asked for it
    backend    of the steps: paged, padded, two-pass; nothing if no model computes them
    parts      which are not the engine's own, and whose
    requests   that the scheduler has already
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
        keep: Keep = True,
        consumers: Iterable[Consumer] = (),
        clock: Clock | None = None,
        config: dict[str, Any] | None = None,
        backend: str = "",
        parts: dict[str, str] | None = None,
        requests: Iterable[Request] = (),
    ):
        self.scheduler = scheduler
        self.clock: Clock = clock or VirtualClock()
        self.consumers = list(consumers)
        config = describe(scheduler) if config is None else config
        there = [_view(request, scheduler) for request in requests]
        header = Header(self.clock.kind, self.clock.unit, backend, parts or {}, config, there)
        self.kept = Kept(header, keep)
        self.header, self.steps = header, self.kept.steps
        self.end: End | None = None
        self.step = 0
        self._events: list[Event] = []  # since the latest step was decided
        self._record: StepTrace | None = None
        self._num_blocks_seen = {view.request_id: len(view.blocks) for view in there if view.running}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        name, size = request.request_id, request.num_prompt_tokens
        longest = request.max_tokens or 0  # the scheduler has resolved it
        arrived = Queued(name, self.clock.now(), size, longest, request.priority, request.arrival)
        self._events.append(arrived)

    def abort(self, request_id: str) -> bool:
        found = self.scheduler.abort(request_id)
        if found:
            self._num_blocks_seen.pop(request_id, None)
            self._events.append(Finished(request_id, "abort"))
        return found

    def schedule(self) -> dict[str, int]:
        kv, t = self.kv, self.clock.now()
        before, free = list(self.running), self.kv.num_free_blocks
        needs = [(request.request_id, kv.num_new_blocks(request, 1)) for request in before]
        scheduled = self.scheduler.schedule()
        events, self._events = self._events, []
        preempted = self._preemptions(needs, free)
        events += [*preempted, *self._admissions({request.request_id for request in before})]
        self._record = StepTrace(
            step=self.step,
            t=t,
            t_end=t,
            scheduled=dict(scheduled),
            num_batched_tokens=sum(scheduled.values()),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            blocked=self._blocked(scheduled, bool(preempted)),
            blocks=self._new_blocks(),
            new_tokens={},
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            events=events,
        )
        return scheduled

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        if self._record is None:
            raise RuntimeError("update() was called without schedule(); a step is one of each, in this order")
        known = {r.request_id: len(r.output_token_ids) for r in self.running if r.request_id in sampled}
        finished = self.scheduler.update(scheduled, sampled, stopped)
        record, self._record = self._record, None
        self.clock.advance(record)
        record.t_end = self.clock.now()
        record.new_tokens = {request_id: list(tokens) for request_id, tokens in sampled.items()}
        for request in finished:
            name = request.request_id
            self._num_blocks_seen.pop(name, None)
            record.events.append(Finished(name, request.finish_reason or ""))
            if len(sampled.get(name, ())) > 1:  # what follows a stop was dropped
                record.new_tokens[name] = request.output_token_ids[known[name] :]
        self.step += 1
        for consumer in (*self.consumers, self.kept):
            consumer.add(record)
        return finished

    def snapshot(self) -> Trace:
        """The trace so far, as far as it is kept. Changes nothing, and later steps do not change it."""
        return self.kept.trace(self.end or self._end("max_steps" if self.has_work else "drained"))

    def close(self, end: str, **details: Any) -> Trace:
        """Say how the run ended (drained, stuck, max_steps or error), finish the file, and hand over the
        trace. `details` are fields of End."""
        self.end = self._end(end, **details)
        self.kept.finish(self.end)
        return self.snapshot()

    def _end(self, end: str, **details: Any) -> End:
        # What came after the last step, an abort for one, stands in the end.
        return End(end, self.step, self.kv.num_free_blocks, events=list(self._events), **details)

    # ------------------------------------------------------------------------- what a step is made of

    def _preemptions(self, needs: list[tuple[str, int]], free: int) -> list[Event]:
        """Of the requests that ran before: those that are gone, for the first that was short of blocks."""
        running = {request.request_id for request in self.running}
        gone = [name for name, _ in needs if name not in running]
        short = _first_short(needs, running, free)
        total = sum(num_blocks for _, num_blocks in needs)
        for name in gone:
            self._num_blocks_seen.pop(name, None)
        return [Preempted(name, short or name, total, free) for name in gone]

    def _admissions(self, before: set[str]) -> list[Event]:
        events: list[Event] = []
        for request in self.running:
            if request.request_id not in before:
                cached = request.num_computed_tokens // self.kv.block_size
                blocks = self.kv.block_table(request)[:cached]
                events.append(Scheduled(request.request_id, request.num_computed_tokens, blocks))
                self._num_blocks_seen[request.request_id] = cached
        return events

    def _blocked(self, scheduled: dict[str, int], preempted: bool) -> Blocked:
        """Why the front of the queue was not admitted in this step."""
        kv, config = self.kv, self.header.config
        if not len(self.waiting):
            return Blocked("empty")
        request = self.waiting.peek()
        needs = kv.num_new_blocks(request, request.num_new_tokens)
        needs += kv.watermark if self.running else 0
        if preempted:
            return Blocked("preempted", request.request_id)
        if len(self.running) >= config["max_num_seqs"]:
            return Blocked("slots", request.request_id)
        if sum(scheduled.values()) >= config["max_num_batched_tokens"]:
            return Blocked("budget", request.request_id)
        if needs > kv.num_free_blocks:
            return Blocked("memory", request.request_id, needs, kv.num_free_blocks)
        return Blocked("none", request.request_id)  # it could have been admitted: a bug of the scheduler

    def _new_blocks(self) -> dict[str, list[int]]:
        new_blocks = {}
        for request in self.running:
            table = self.kv.block_table(request)
            seen = self._num_blocks_seen.get(request.request_id, 0)
            if len(table) > seen:
                new_blocks[request.request_id] = table[seen:]
                self._num_blocks_seen[request.request_id] = len(table)
        return new_blocks


def describe(scheduler: SchedulerLike) -> dict[str, Any]:
    """The settings of a scheduler and its KV manager, as a header's `config`."""
    kv = scheduler.kv
    return {
        "policy": scheduler.policy,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "num_blocks": kv.num_blocks,
        "block_size": kv.block_size,
        "prefix_caching": kv.enable_prefix_caching,
        "watermark": kv.watermark,
    }


def _view(request: Request, scheduler: SchedulerLike) -> RequestView:
    """A request that was there before the recording, as far as it can be seen."""
    sizes = request.num_prompt_tokens, request.max_tokens or 0
    view = RequestView(request.request_id, *sizes, request.priority, request.arrival)
    view.num_computed_tokens, view.num_output_tokens = (
        request.num_computed_tokens,
        len(request.output_token_ids),
    )
    view.num_preemptions, view.blocks = request.num_preemptions, list(scheduler.kv.block_table(request))
    if request in scheduler.running:
        view.running, view.state = True, "decode" if view.is_decode else "prefill"
    return view


def _first_short(needs: list[tuple[str, int]], survivors: set[str], free: int) -> str | None:
    """The first surviving request that could not have grown with the blocks that were free."""
    for request_id, num_blocks in needs:
        free -= num_blocks
        if free < 0 and num_blocks and request_id in survivors:
            return request_id
    return next((i for i, n in needs if n and i in survivors), None)
