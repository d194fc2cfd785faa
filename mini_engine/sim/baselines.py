"""The baselines: slower ways to schedule, to compare with. Each is a Scheduler with another `schedule`.

`BASELINES` names them all, with the backend that computes their steps. Each gives the same tokens as the
engine; they differ in which requests wait for which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_engine.interfaces import KVManager
from mini_engine.request import Request, RequestStatus
from mini_engine.request_queue import pick_victim
from mini_engine.scheduler import Scheduler


def _admit(scheduler: Scheduler) -> Request:
    """Move the front of the queue, whose blocks are allocated, to the running requests."""
    request = scheduler.waiting.pop()
    request.status = RequestStatus.RUNNING
    scheduler.running.append(request)
    return request


def _final_length(request: Request) -> int:
    """Return the tokens that a request computes in all: the last one is sampled only."""
    return request.num_prompt_tokens + (request.max_tokens or 1) - 1


class StaticBatching(Scheduler):
    """A batch is admitted when every request of the previous one has finished.

    This was usual before Orca (Yu et al., 2022): a slot that becomes free stays empty until the whole batch
    is done. Blocks are reserved for the full length, prompt and max_tokens, so that no request runs short.
    """

    def schedule(self) -> dict[str, int]:
        if not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and self._reserve():
                _admit(self)
        return self.decide()

    def _reserve(self) -> bool:
        request = self.waiting.peek()
        if not self.kv.admit(request):
            return False
        if not self.kv.allocate(request, _final_length(request) - request.num_computed_tokens):
            self.kv.free(request)
            return False
        return True


class OneAtATime(StaticBatching):
    """A batch of one: the next request starts when the last has finished; max_num_seqs is ignored."""

    def __init__(self, kv: KVManager, **settings: Any):
        super().__init__(kv, **{**settings, "max_num_seqs": 1})


class PrefillFirst(Scheduler):
    """A step is prefill or decode, never both, and prefill goes first: nano-vLLM's scheduler.

    Prompts are never cut, so each must fit the budget. It is checked before the cached part is known, hence
    against the full length, and charged for the tokens that are computed: a long prompt may be held back
    although little of it is left to compute. A request that cannot grow preempts the youngest, which
    returns to the front of the queue (under fcfs its arrival puts it there).

    One rule differs: nano-vLLM counts its max_num_seqs over the step's prompts only, so that more may
    run; here it limits all running requests.
    """

    def add(self, request: Request) -> None:
        if (longest := _final_length(request)) > self.max_num_batched_tokens:
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
    """Chunked prefill without fusing: one prompt in flight, its chunk and the decodes computed separately.

    The chunk takes what the decodes leave of the budget, so that no decode waits. But a step with both makes
    two model calls and reads the weights twice, and a short prompt waits behind a long one.
    """

    def schedule(self) -> dict[str, int]:
        made_room = self.make_room()
        prefilling = any(not request.is_decode for request in self.running)
        if made_room or prefilling:
            return self.decide()
        # One slot more than is taken: one prompt may be admitted.
        return self.decide(self.waiting, min(self.max_num_seqs, len(self.running) + 1))


class OverCommit(Scheduler):
    """One prefill at a time, and memory that may exceed its limit for a step: admit, then preempt.

    The limit counts known tokens, including the last sampled one. A prompt is admitted if it fits now,
    without regard to the growth of the decodes. So a step may end above the limit by one token per request,
    and the next step preempts decodes until the sum fits again.

    The pool itself cannot be exceeded, so the limit is lower by what half-empty last blocks may waste;
    with a block size of 1 it is the pool. Raises ValueError if no token is left.
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
        if (longest := _final_length(request)) > self.max_kv_tokens:
            raise ValueError(
                f"request {request.request_id!r} grows to {longest} tokens, but max_kv_tokens is "
                f"{self.max_kv_tokens}; shorten it or enlarge the pool"
            )
        super().add(request)

    def schedule(self) -> dict[str, int]:
        self._admit_if_it_fits()
        self._preempt_the_excess()
        return self.decide()

    def _admit_if_it_fits(self) -> None:
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return
        if any(not request.is_decode for request in self.running):
            return
        candidate = self.waiting.peek()
        if self.num_kv_tokens + candidate.num_tokens <= self.max_kv_tokens and self.kv.admit(candidate):
            _admit(self)

    def _preempt_the_excess(self) -> None:
        while self.num_kv_tokens > self.max_kv_tokens:
            # The one prefill is never preempted: without any decode it fits.
            self.preempt(pick_victim([r for r in self.running if r.is_decode], self.policy))


@dataclass(frozen=True)
class Baseline:
    """One way to schedule: `scheduler(kv, **settings)` decides, `backend` computes (see cost_model)."""

    scheduler: Callable[..., Scheduler]
    about: str
    backend: str = "paged"

    def __call__(self, kv: KVManager, **settings: Any) -> Scheduler:
        return self.scheduler(kv, **settings)


BASELINES = {
    "one-at-a-time": Baseline(OneAtATime, "the next request starts when the last has finished"),
    "static": Baseline(StaticBatching, "a batch is admitted when all of the previous one has finished"),
    "prefill-first": Baseline(PrefillFirst, "a step is prefill or decode; prompts go first, uncut"),
    "two-pass": Baseline(TwoPass, "one prompt in chunks beside the decodes, two model calls", "two-pass"),
    "over-commit": Baseline(OverCommit, "one prompt in chunks; preempts a step after memory ran over"),
    "padded": Baseline(Scheduler, "mixed steps, fused by padding to a rectangle", "padded"),
    "mixed": Baseline(Scheduler, "the engine: decodes first, chunks of any prompts behind, one model call"),
}
