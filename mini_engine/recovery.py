"""After a fault: undo a step that failed, end one request that cannot go on, compute one alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from mini_engine.fallbacks import (
    recoverable_backend,
    recoverable_kv,
    recoverable_scheduler,
    step_caching_kv,
)
from mini_engine.interfaces import Backend, SamplerLike, SchedulerLike
from mini_engine.model import CausalLM
from mini_engine.output_processor import OUT_OF_MEMORY, OutputProcessor, Sampled
from mini_engine.request import Request
from mini_engine.sampler import NotFiniteError
from mini_engine.speculative.verify import verify

T = TypeVar("T")


class SharedNotFiniteError(NotFiniteError):
    """Logits of a step are NaN in which requests share what it computes."""


class Recovery:
    """Repairs an engine's parts; a part that cannot undo its work is left as it is (fallbacks.py)."""

    def __init__(self, model: CausalLM, scheduler: SchedulerLike, backend: Backend, sampler: SamplerLike):
        self.model, self.sampler = model, sampler
        self.block_size = scheduler.kv.block_size
        self.kv, self.step_kv = recoverable_kv(scheduler.kv), step_caching_kv(scheduler.kv)
        self.decided, self.scheduler = scheduler, recoverable_scheduler(scheduler)
        self.backend = recoverable_backend(backend)

    def roll_back(self, before: list[Request], outputs: OutputProcessor) -> list[Request]:
        """Undo a step that failed, with `before` running when it began. Return the requests with news.

        What was computed is dropped and what was admitted waits again. Preemptions stand, because other
        requests may have overwritten the victims' blocks. If the scheduler has been given the step's
        tokens already, the step stands, and its Deltas are still to be made: the news.
        """
        outputs.undo()
        self.scheduler.take_back(before)
        return outputs.news()

    def run(self, step: Callable[[], T], before: list[Request], outputs: OutputProcessor) -> T:
        """Return what `step` returns. If it shares what may be NaN, undo it and compute it without sharing.

        A NaN reaches the tokens before it in its chunk, where it is masked, and so blocks that others found.
        """
        try:
            return step()
        except SharedNotFiniteError:
            self.roll_back(before, outputs)
            self.step_kv.caches_scheduled = False
            try:
                return step()
            finally:
                self.step_kv.caches_scheduled = True

    def _shares_within_step(self) -> bool:
        """Whether a request has a block that another one computes in this step."""
        tables = {request: self.decided.kv.block_table(request) for request in self.decided.running}
        held = Counter(block_id for table in tables.values() for block_id in table)
        new = (table[request.num_computed_tokens // self.block_size :] for request, table in tables.items())
        return any(held[block_id] > 1 for table in new for block_id in table)

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """Sample from logits (S, vocab_size): a row for each request, and one more for each of its drafts.

        If that fails, sample request by request: one that fails alone, too, is ended and left out.
        Raises ValueError unless there are so many rows.
        """
        counts = [1 + len(request.spec_token_ids) for request in requests]
        num_rows = 0 if logits is None else len(logits)
        if num_rows != sum(counts):
            raise ValueError(
                f"sample() got {num_rows} rows of logits for {len(requests)} requests; "
                "it takes a row for each request that ends its sequence in this step"
            )
        if not requests:
            return []
        parts = torch.split(logits, counts)
        try:
            owners = [request for request, n in zip(requests, counts, strict=True) for _ in range(n)]
            chosen = iter(self.sampler(logits, owners))
            token_ids = [list(islice(chosen, n)) for n in counts]
            return [
                (request, verify(request, ids, _as_chosen), part)
                for request, ids, part in zip(requests, token_ids, parts, strict=True)
            ]
        except Exception as error:
            finite = bool(logits.amax(1).isfinite().all())
            if self.step_kv.caches_scheduled and not finite and self._shares_within_step():
                raise SharedNotFiniteError from error
            alone = [self._sample_one(part, r) for part, r in zip(parts, requests, strict=True)]
            failed = [(r, one) for r, one in zip(requests, alone, strict=True) if isinstance(one, Exception)]
            undrafted = any(
                not isinstance(one, Exception) and len(one[2]) < len(part)
                for one, part in zip(alone, parts, strict=True)
            )
            if not failed and not undrafted and not isinstance(error, NotFiniteError):
                raise  # it did not come again, so it is no request's own
        for request, reason in failed:
            self.fail(request, reason)
        return [one for one in alone if not isinstance(one, Exception)]

    def _sample_one(self, logits: Tensor, request: Request) -> tuple[Request, list[int], Tensor] | Exception:
        try:
            finite = bool(logits.amax(1).isfinite().all())
            if not finite and (alone := self.backend.compute_alone(request)) is not None:
                logits = alone[None]  # without its drafts
            token_ids = self.sampler(logits, [request] * len(logits))
            return request, verify(request, token_ids, _as_chosen), logits
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            # A logits processor may refuse drafts that could not be: the first row has none before it.
            return error if len(logits) == 1 else self._sample_one(logits[:1], request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request that cannot go on, and keep what it computed from all others if that is NaN."""
        if request.finish_reason == "error":  # and now the rest of its text cannot be made either
            return
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, NotFiniteError):
            weight = self.model.not_finite()
            message = f"{error}; the model's {weight} holds NaN or infinity" if weight else str(error)
            slots = [b * self.block_size for b in self.kv.evict_blocks(request)]
            self.backend.clear([slot + i for slot in slots for i in range(self.block_size)])
        request.error = f"request {request.request_id!r}: {message}"
        self.scheduler.fail(request)


def _as_chosen(token_id: int, index: int) -> int:
    """Return a token that the sampler has chosen for its row already, a whole batch at once."""
    return token_id
