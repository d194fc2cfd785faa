"""Schedules each step: the requests that compute in it, and how many tokens each.

`schedule_step` serves the running requests, then admits waiting ones, under one token budget.
`Scheduler` adds the queue, preemption, and the update after the step.
Yu et al., Orca (2022); Agrawal et al., Sarathi-Serve (2024); the names are vLLM's.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from mini_engine.config import SchedulerPolicy, check_limits
from mini_engine.fallbacks import recoverable_kv
from mini_engine.interfaces import KVManager, Queue
from mini_engine.renamed import adopt
from mini_engine.request import Request, RequestStatus
from mini_engine.request_queue import RequestQueue, pick_victim

Clamp = Callable[[int, int, int], int]
ScheduleStep = Callable[..., dict[str, int]]


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """Return the tokens of one request in this step: at most `threshold` (0: no limit) and `budget`."""
    if 0 < threshold < num_new:
        num_new = threshold
    return max(0, min(num_new, budget))


class Chunk(NamedTuple):
    """The tokens that a request computes in one step, at their absolute positions."""

    token_ids: list[int]
    positions: list[int]
    is_last: bool  # it reaches num_tokens, so a token is sampled from its last row


def next_chunk(request: Request, num_tokens: int) -> Chunk:
    """Return the next `num_tokens` tokens of `request` whose keys and values are not computed yet."""
    start = request.num_computed_tokens
    end = start + num_tokens
    return Chunk(request.token_ids(start, end), list(range(start, end)), end >= request.num_tokens)


def prefill_budget(running: list[Request], budget: int) -> int:
    """Return the token budget less a token for each running decode. lab-02's; not used by the engine."""
    return budget - sum(request.is_decode for request in running)


def schedule_step(
    waiting: Queue,
    running: list[Request],
    kv: KVManager,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    long_prefill_token_threshold: int = 0,
    clamp: Clamp = clamp,
) -> dict[str, int]:
    """Decide one step: {request_id: number of tokens}, in row order.

    Admits by moving requests from `waiting` to the end of `running`. The front of the queue
    blocks those behind it: otherwise small requests could starve a large one.

    The caller has made room for a token of each running request; otherwise a RuntimeError names the
    request. The limits are those of EngineConfig.
    """
    budget, block_size = max_num_batched_tokens, kv.block_size
    scheduled: dict[str, int] = {}

    # Running first: their users are waiting for the next token.
    for request in running:
        computed = request.num_computed_tokens
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) - computed
        if num_tokens != 1 or budget < 1:  # nothing can be cut off a decode
            num_tokens = clamp(num_tokens, budget, long_prefill_token_threshold)
            if num_tokens == 0:
                continue
        # Tokens that fit into the last computed token's block need no call.
        room = -computed % block_size
        if num_tokens > room and not kv.allocate(request, num_tokens):
            raise RuntimeError(f"no KV room for running request {request.request_id!r}: make room first")
        scheduled[request.request_id] = num_tokens
        budget -= num_tokens

    # Drafts take what the others leave of the budget and of the pool, and preempt nobody.
    for request in [r for r in running if r.spec_token_ids]:
        num_tokens = scheduled.get(request.request_id, 0)
        num_drafts = 0
        if num_tokens == request.num_new_tokens:
            end = request.num_computed_tokens + num_tokens
            num_drafts = min(
                len(request.spec_token_ids),
                (request.max_tokens or 1) - len(request.output_token_ids) - 1,
                -end % block_size + kv.num_free_blocks * block_size,
                clamp(
                    num_tokens + len(request.spec_token_ids),
                    num_tokens + budget,
                    long_prefill_token_threshold,
                )
                - num_tokens,
            )
        request.spec_token_ids = request.spec_token_ids[: max(0, num_drafts)]
        if request.spec_token_ids:
            kv.allocate(request, num_tokens + num_drafts)
            scheduled[request.request_id] += num_drafts
            budget -= num_drafts

    while waiting and budget > 0 and len(running) < max_num_seqs:
        request = waiting.peek()
        if not kv.admit(request):
            break
        running.append(waiting.pop())
        request.status = RequestStatus.RUNNING
        # admit has set num_computed_tokens to the cached prefix: the budget pays for the rest only.
        num_tokens = clamp(request.num_new_tokens, budget, long_prefill_token_threshold)
        scheduled[request.request_id] = num_tokens
        budget -= num_tokens
    return scheduled


def until_stop(request: Request, token_ids: Sequence[int]) -> tuple[Sequence[int], str | None]:
    """Return the tokens up to the one with which the request ends, and why it ends; None if it goes on."""
    for end in range(1, len(token_ids) + 1):
        if reason := request.check_stop(token_ids[:end]):
            return token_ids[:end], reason
    return token_ids, None


def num_accepted(request: Request, token_ids: Sequence[int]) -> int:
    """Return how many of the request's drafts are among the tokens that it is given, less the last of these,
    which is not computed."""
    pairs = zip(request.spec_token_ids, token_ids[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Scheduler:
    """The queue of waiting requests, the running requests, and the decisions of each step.

    `running` is kept in admission order, which is also the row order of a step. The settings are those of
    EngineConfig; `schedule_step` and `clamp` may be others with the same signature. Raises ValueError for
    settings that cannot work.

    When a part raises, a call has not happened, or it is done and raises afterwards: the books here change
    first, and what is owed to the parts then is kept in `_owed` until it is paid.
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
        self._owed: deque[tuple[Callable[[Request], object], Request]] = deque()

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
        self._pay()
        before, self._is_decided = list(self.running), True
        try:
            made_room = self.make_room()
            # A request just preempted must not be admitted again in this step, nor another in its place.
            waiting = RequestQueue(self.policy) if made_room else self.waiting
            return self.schedule_step(
                waiting,
                self.running,
                self.kv,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                clamp=self.clamp,
            )
        except BaseException:
            self.take_back(before)
            raise

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
        size, several = self.kv.block_size, self._most_tokens > 1
        at_edge = (request for request in self.running if several or request.num_computed_tokens % size == 0)
        needed = sum(self.kv.num_new_blocks(request, request.num_new_tokens) for request in at_edge)
        return needed > self.kv.num_free_blocks

    def preempt(self, request: Request) -> None:
        """Put a request back into the queue, to be recomputed. It keeps its outputs and its arrival, so it
        stays ahead of all that came later."""
        self.running.remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        request.status = RequestStatus.WAITING
        self._owed += (self._queue, request), (self.kv.free, request)
        self._pay()

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
                if request_id not in scheduled:
                    continue
                before = request.num_computed_tokens
                computed = before + scheduled[request_id]
                token_ids, reason = (), None
                if request_id in sampled:
                    if len(request.prompt_token_ids) + len(request.output_token_ids) > computed:
                        raise ValueError(
                            f"request {request_id!r} got a token with {request.num_tokens - computed} tokens "
                            "still to compute; only a chunk that ends the sequence is sampled"
                        )
                    token_ids = sampled[request_id]
                    if most > 1:
                        token_ids, reason = until_stop(request, token_ids)
                    elif token_ids:
                        reason = request.check_stop(token_ids)
                    if request_id in stopped:
                        reason = "stop"
                if request.spec_token_ids:  # those that were rejected count for nothing
                    computed -= len(request.spec_token_ids) - num_accepted(request, token_ids)
                rows += [(request, before, token_ids, reason)]
                request.num_computed_tokens = computed
                cache_blocks(request)
        except BaseException:
            for request, before, _, _ in rows:
                request.num_computed_tokens = before
                self._recovery.uncache_blocks(request)
            raise
        self._is_decided, self._most_tokens = False, max(most, self._most_tokens)
        for request, _, token_ids, reason in rows:
            request.output_token_ids += token_ids
            if request.spec_token_ids:
                request.spec_token_ids = []
                self._owed.append((self._recovery.shrink, request))
            if reason:
                self._end(request, reason)
                finished.append(request)
        self._pay()
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
                self._owed.append((self._recovery.shrink, request))
                continue
            request.status = RequestStatus.WAITING
            if request not in queued:
                self._owed.append((self._queue, request))
            if request not in before and self.kv.block_table(request):
                self._owed.append((self._recovery.unadmit, request))
        self._pay()

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort")
        self._pay()
        return True

    def fail(self, request: Request) -> None:
        """Drop a request that cannot go on; its finish_reason becomes "error"."""
        self._end(request, "error")
        self._pay()

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason, request.status = reason, RequestStatus.FINISHED
        del self._requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        else:
            self._owed.append((self._unqueue, request))
        self._owed.append((self.kv.free, request))

    def _queue(self, request: Request) -> None:
        self._unqueue(request)
        self.waiting.push(request)

    def _unqueue(self, request: Request) -> None:
        with suppress(ValueError):  # it is not there
            self.waiting.remove(request)

    def _pay(self) -> None:
        """Make the calls that are owed. One that raises is tried again at once, then by the next call."""
        try:
            self._pay_once()
        except BaseException:
            with suppress(Exception):
                self._pay_once()
            raise

    def _pay_once(self) -> None:
        while self._owed:
            call, request = self._owed[0]
            call(request)
            self._owed.popleft()
