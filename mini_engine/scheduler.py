"""The scheduler: the queue, the running requests, preemption, and the update after each step.

`schedule_step` (schedule_step.py, importable from here too) decides what computes in a step.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from mini_engine.config import SchedulerPolicy, check_limits
from mini_engine.fallbacks import recoverable_kv
from mini_engine.interfaces import KVManager, Queue
from mini_engine.renamed import adopt
from mini_engine.request import Request, RequestStatus
from mini_engine.request_queue import RequestQueue, pick_victim
from mini_engine.schedule_step import (
    Chunk,
    Clamp,
    ScheduleStep,
    clamp,
    next_chunk,
    prefill_budget,
    schedule_step,
)

__all__ = ["Chunk", "Scheduler", "clamp", "next_chunk", "prefill_budget", "schedule_step"]


class Scheduler:
    """The queue of waiting requests, the running requests, and the decisions of each step.

    `running` is kept in admission order, which is also the row order of a step. The settings are those of
    EngineConfig; `schedule_step` and `clamp` may be others with the same signature. Raises ValueError for
    settings that cannot work.

    When a part raises, a call has not happened, or it is done and raises afterwards: the books here change
    first, and the calls of parts that follow from it stay in `_pending` until they are made.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        policy: SchedulerPolicy = "fcfs",
        max_num_batched_tokens: int,
        max_num_seqs: int,
        long_prefill_token_threshold: int = 0,
        schedule_step: ScheduleStep = schedule_step,
        clamp: Clamp = clamp,
    ):
        check_limits(policy, max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold)
        self.kv = adopt(kv)
        self._recovery = recoverable_kv(self.kv)
        self.policy: str = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.schedule_step = schedule_step
        self.clamp = clamp
        self.waiting: Queue = RequestQueue(policy)
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}  # all that wait or run, by id
        self._num_arrivals = 0
        self._most_tokens = 1  # that a request was given in one step
        self._is_decided = False  # a step that `update` has not had
        # Calls of parts that may be made twice: queueing, freeing.
        self._pending: deque[tuple[Callable[[Request], object], Request]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could not finish even with the pool to itself.

        A refused request is left unchanged, and gets no arrival number.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request that is not finished")
        room = self.kv.num_blocks * self.kv.block_size
        # The last token is sampled but never computed, so it needs no room.
        longest = room + 1 - request.num_prompt_tokens
        max_tokens = longest if request.max_tokens is None else request.max_tokens
        if (at_least := max(max_tokens, 1)) > longest:
            raise ValueError(
                f"request {request.request_id!r} needs KV room for "
                f"{request.num_prompt_tokens + at_least - 1} tokens "
                f"(prompt {request.num_prompt_tokens} + max_tokens {at_least} - 1), but the whole "
                f"pool holds {room}; shorten it or enlarge the pool"
            )
        unresolved, request.max_tokens, request.arrival = request.max_tokens, max_tokens, self._num_arrivals
        try:
            self.waiting.push(request)
        except BaseException:
            self._unqueue(request)
            request.max_tokens, request.arrival = unresolved, -1
            raise
        self._num_arrivals += 1
        self._requests[request.request_id] = request

    def schedule(self) -> dict[str, int]:
        """Decide the next step: {request_id: number of tokens}, in row order.

        If a part raises, what was decided is taken back.
        """
        self._run_pending()
        before, self._is_decided = list(self.running), True
        try:
            # A request just preempted must not be admitted again in this step, nor another in its place.
            return self.decide(None if self.make_room() else self.waiting)
        except BaseException:
            self.take_back(before)
            raise

    def decide(self, waiting: Queue | None = None, max_num_seqs: int | None = None) -> dict[str, int]:
        """Call `schedule_step` with the settings; without a queue no request is admitted."""
        return self.schedule_step(
            RequestQueue(self.policy) if waiting is None else waiting,
            self.running,
            self.kv,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=max_num_seqs or self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            clamp=self.clamp,
        )

    def make_room(self) -> bool:
        """Preempt until every running request can compute all it has; True if any was preempted.

        Nothing is scheduled yet, so nothing of a victim's must be undone.
        """
        made_room = False
        # A token takes one block at most, so with a free block for each there is nothing to count.
        while len(self.running) * self._most_tokens > self.kv.num_free_blocks and self._is_short():
            self.preempt(pick_victim(self.running, self.policy))
            made_room = True
        return made_room

    def _is_short(self) -> bool:
        needed = sum(self.kv.num_new_blocks(request, request.num_new_tokens) for request in self.running)
        return needed > self.kv.num_free_blocks

    def preempt(self, request: Request) -> None:
        """Put a request back into the queue, to be recomputed. It keeps its outputs and its arrival, so it
        stays ahead of all that came later."""
        self.running.remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        request.status = RequestStatus.WAITING
        self._pending += (self.waiting.push, request), (self.kv.free, request)
        self._run_pending()

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        """Take in a computed step: what was scheduled, and the tokens sampled from it.

        `sampled` is {request_id: token ids}, for the requests that reached the end of their sequence.
        `stopped` are the ids of requests whose text has reached a stop string. Return the requests
        that have finished; their blocks are free in the next step. Raises ValueError for a token of
        a request that has more to compute. Whatever raises, no request is changed.
        """
        rows, finished = [], []
        token_ids: Sequence[int]
        reason: str | None
        cache_blocks, most = self.kv.cache_blocks, max(map(len, sampled.values()), default=1)
        try:
            for request in self.running:
                request_id = request.request_id
                if (num_tokens := scheduled.get(request_id)) is None:
                    continue
                before = request.num_computed_tokens
                computed = before + num_tokens
                token_ids, reason = (), None
                if (given := sampled.get(request_id)) is not None:
                    if len(request.prompt_token_ids) + len(request.output_token_ids) > computed:
                        raise ValueError(
                            f"request {request_id!r} got a token with {request.num_tokens - computed} tokens "
                            "still to compute; only a chunk that ends the sequence is sampled"
                        )
                    token_ids = given
                    if most > 1:
                        token_ids, reason = request.until_stop(token_ids)
                    elif token_ids:
                        reason = request.check_stop(token_ids)
                    if stopped and request_id in stopped:
                        reason = "stop"
                if request.spec_token_ids:  # those that were rejected count for nothing
                    computed -= len(request.spec_token_ids) - request.num_accepted(token_ids)
                rows.append((request, before, token_ids, reason))
                request.num_computed_tokens = computed
                cache_blocks(request)
        except BaseException:
            for request, before, _, _ in rows:
                request.num_computed_tokens = before
            for request in self.running:
                self._recovery.uncache_blocks(request)
            raise
        self._is_decided, self._most_tokens = False, max(most, self._most_tokens)
        for request, _, token_ids, reason in rows:
            request.output_token_ids += token_ids
            if request.spec_token_ids:
                request.spec_token_ids = []
                self._pending.append((self._recovery.shrink, request))
            if reason:
                self._end(request, reason)
                finished.append(request)
        self._run_pending()
        return finished

    def take_back(self, before: list[Request]) -> None:
        """Undo a step that was decided while `before` ran and is not computed: requests that it admitted
        wait again, and room for new tokens is given back. Preemptions stand, because others may have
        overwritten the victims' keys and values."""
        if not self._is_decided:
            return
        self._is_decided = False
        self.running[:] = [request for request in before if request.status is RequestStatus.RUNNING]
        running, queued = set(self.running), set(self.waiting)
        for request in self._requests.values():
            if request in running:
                request.spec_token_ids = []
                self._pending += (self._recovery.uncache_blocks, request), (self._recovery.shrink, request)
                continue
            request.status = RequestStatus.WAITING
            if request not in queued:
                self._pending.append((self.waiting.push, request))
            if request not in before and self.kv.block_table(request):
                self._pending.append((self._recovery.unadmit, request))
        self._run_pending()

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort")
        self._run_pending()
        return True

    def fail(self, request: Request) -> None:
        """Drop a request that cannot go on; its finish_reason becomes "error"."""
        self._end(request, "error")
        self._run_pending()

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason, request.status = reason, RequestStatus.FINISHED
        del self._requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        else:
            self._pending.append((self._unqueue, request))
        if self._is_decided:  # the step's blocks may not be computed, or wrong
            self._pending.append((self._recovery.uncache_blocks, request))
        self._pending.append((self.kv.free, request))

    def _unqueue(self, request: Request) -> None:
        with suppress(ValueError):  # it is not there
            self.waiting.remove(request)

    def _run_pending(self) -> None:
        """Make the calls that are pending. One that raises is tried again at once, then by the next call."""
        try:
            self._try_pending()
        except BaseException:
            with suppress(Exception):
                self._try_pending()
            raise

    def _try_pending(self) -> None:
        while self._pending:
            call, request = self._pending[0]
            call(request)
            self._pending.popleft()
