"""The slower ways to serve, kept to be compared with: each is a Scheduler with another `schedule`.

`BASELINES` names them all, with the backend that computes their steps. Every one gives the same
tokens as the engine; they differ in which requests wait for which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_engine.interfaces import KVManager, Queue
from mini_engine.request import Request, RequestStatus
from mini_engine.request_queue import RequestQueue, pick_victim
from mini_engine.scheduler import Scheduler


def _admit(scheduler: Scheduler) -> Request:
    """Move the front of the queue, whose room is claimed, to the running."""
    request = scheduler.waiting.pop()
    request.status = RequestStatus.RUNNING
    scheduler.running.append(request)
    return request


def _step(
    scheduler: Scheduler, waiting: Queue | None = None, max_num_seqs: int | None = None
) -> dict[str, int]:
    """`schedule_step` with the scheduler's settings; nobody is admitted unless a queue is given."""
    return scheduler.schedule_step(
        RequestQueue(scheduler.policy) if waiting is None else waiting,
        scheduler.running,
        scheduler.kv,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=max_num_seqs or scheduler.max_num_seqs,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        clamp=scheduler.clamp,
    )


class StaticBatching(Scheduler):
    """A batch is admitted whole, when the previous one has wholly finished.

    As it was before Orca (Yu et al., 2022): a place that falls free stays empty until the last of
    the batch is done, and room is reserved for the full length, prompt and max_tokens, so that
    nothing ever runs short.
    """

    def schedule(self) -> dict[str, int]:
        if not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and self._reserve():
                _admit(self)
        return _step(self)

    def _reserve(self) -> bool:
        request = self.waiting.peek()
        if not self.kv.admit(request):
            return False
        final_length = request.num_prompt_tokens + (request.max_tokens or 1) - 1
        if not self.kv.allocate(request, final_length - request.num_computed_tokens):
            self.kv.free(request)
            return False
        return True


class OneAtATime(StaticBatching):
    """A batch of one: the next request starts when the last has finished, whatever max_num_seqs says."""

    def __init__(self, kv: KVManager, **settings: Any):
        super().__init__(kv, **{**settings, "max_num_seqs": 1})


class PrefillFirst(Scheduler):
    """A step is prefill or decode, never both, and prefill goes first: nano-vLLM's scheduler.

    Whole prompts only, so each must fit the budget. It is checked before the cached part is known,
    hence against the full length, and charged what is really computed: a long prompt may be held
    back although hardly any of it is left to do. Room is made in the loop: a request that cannot
    grow evicts the youngest, which returns to the front of the queue (under fcfs its arrival puts it there).

    One rule differs: nano-vLLM counts its max_num_seqs over the step's prompts only, so more may
    run; here it holds for all that run.
    """

    def add(self, request: Request) -> None:
        longest = request.num_prompt_tokens + (request.max_tokens or 1) - 1
        if longest > self.max_num_batched_tokens:
            raise ValueError(
                f"request {request.request_id!r} may have to prefill {longest} tokens at once (prompt + "
                f"max_tokens - 1), but max_num_batched_tokens is {self.max_num_batched_tokens}; "
                "prefill-first cuts no prompts: raise the budget or shorten the request"
            )
        super().add(request)

    def schedule(self) -> dict[str, int]:
        return self._prefill() or self._decode()

    def _prefill(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        num_batched = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            if num_batched + request.num_tokens > self.max_num_batched_tokens or not self.kv.admit(request):
                break
            _admit(self)
            scheduled[request.request_id] = request.num_new_tokens
            num_batched += request.num_new_tokens
        return scheduled

    def _decode(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            while request in self.running and not self.kv.allocate(request, 1):
                self.preempt(self.running[-1])
            if request in self.running:
                scheduled[request.request_id] = 1
        return scheduled


class TwoPass(Scheduler):
    """Chunked prefill before fusing: one prompt in flight, its chunk and the decodes computed apart.

    The chunk takes what the decodes leave of the budget, so no decode waits; but a step with both
    makes two model calls and reads the weights twice, and a short prompt waits behind a long one.
    """

    def schedule(self) -> dict[str, int]:
        made_room = self.make_room()
        prefilling = any(not request.is_decode for request in self.running)
        if made_room or prefilling:
            return _step(self)
        # One place more than is taken: one prompt may enter.
        return _step(self, self.waiting, min(self.max_num_seqs, len(self.running) + 1))


class OverCommit(Scheduler):
    """One prefill at a time, and memory that may run over for a step: admit, then evict.

    The limit counts known tokens, the last sampled one included. A prompt enters if it fits now;
    nobody asks whether the decodes beside it have room to grow. So a step may end above the limit
    by a token for each request, and the next one evicts decodes until the sum fits again.

    The pool itself cannot run over, so the limit lies below it by what half-empty last blocks may
    waste; with a block size of 1 it is the pool. Raises ValueError if nothing is left.
    """

    def __init__(self, kv: KVManager, *, max_kv_tokens: int | None = None, **settings: Any):
        super().__init__(kv, **settings)
        most = kv.num_blocks * kv.block_size - self.max_num_seqs * (kv.block_size - 1)
        self.max_kv_tokens = most if max_kv_tokens is None else max_kv_tokens
        if not 0 < self.max_kv_tokens <= most:
            raise ValueError(
                f"max_kv_tokens must be 1 to {most} (the pool less a block's waste for each of "
                f"{self.max_num_seqs} requests), but is {self.max_kv_tokens}; enlarge the pool"
            )

    @property
    def num_kv_tokens(self) -> int:
        return sum(request.num_tokens for request in self.running)

    def add(self, request: Request) -> None:
        longest = request.num_prompt_tokens + (request.max_tokens or 1) - 1
        if longest > self.max_kv_tokens:
            raise ValueError(
                f"request {request.request_id!r} grows to {longest} tokens, but max_kv_tokens is "
                f"{self.max_kv_tokens}; shorten it or enlarge the pool"
            )
        super().add(request)

    def schedule(self) -> dict[str, int]:
        self._admit_what_fits()
        self._evict_what_is_over()
        return _step(self)

    def _admit_what_fits(self) -> None:
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return
        if any(not request.is_decode for request in self.running):
            return
        candidate = self.waiting.peek()
        if self.num_kv_tokens + candidate.num_tokens <= self.max_kv_tokens and self.kv.admit(candidate):
            _admit(self)

    def _evict_what_is_over(self) -> None:
        while self.num_kv_tokens > self.max_kv_tokens:
            # The one prefill is spared, and with all decodes gone it fits.
            self.preempt(pick_victim([r for r in self.running if r.is_decode], self.policy))


@dataclass(frozen=True)
class Baseline:
    """One way to serve: `scheduler(kv, **settings)` decides, `backend` computes (see cost_model)."""

    scheduler: Callable[..., Scheduler]
    about: str
    backend: str = "paged"

    def __call__(self, kv: KVManager, **settings: Any) -> Scheduler:
        return self.scheduler(kv, **settings)


BASELINES = {
    "one-at-a-time": Baseline(OneAtATime, "the next request starts when the last has finished"),
    "static": Baseline(StaticBatching, "a batch is admitted when the previous one has wholly finished"),
    "prefill-first": Baseline(PrefillFirst, "a step is prefill or decode; prompts go first, uncut"),
    "two-pass": Baseline(TwoPass, "one prompt in chunks beside the decodes, two model calls", "two-pass"),
    "over-commit": Baseline(OverCommit, "one prompt in chunks; memory runs over for a step, then evicts"),
    "padded": Baseline(Scheduler, "mixed steps, fused by padding to a rectangle", "padded"),
    "mixed": Baseline(Scheduler, "the engine: decodes first, chunks of any prompts behind, one model call"),
}
