"""Proposals by a small model that says what the large one may say: Leviathan et al., Chen et al. (2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from mini_engine.request import Request


class DraftCache(Protocol):
    """The keys and values that a draft model has computed for one text."""

    token_ids: list[int]  # whose keys and values it holds, from position 0 on

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens`."""


class DraftModel(Protocol):
    """A model that proposes, with the vocabulary of the model that verifies."""

    def new_cache(self) -> DraftCache:
        """Return an empty cache."""

    def forward(self, cache: Any, token_ids: Sequence[int]) -> int:
        """Compute these tokens, at least one, behind the cache's. Return the most likely next token."""


class DraftModelProposer:
    """Proposes what the draft model says, greedily. A request's cache is kept from step to step."""

    def __init__(self, draft_model: DraftModel, num_speculative_tokens: int = 4):
        self.draft_model = draft_model
        self.num_speculative_tokens = num_speculative_tokens
        self._caches: WeakKeyDictionary[Request, DraftCache] = WeakKeyDictionary()

    def propose(self, request: Request, most: int | None = None) -> list[int]:
        """Return `most` tokens behind the text, None: num_speculative_tokens. The cache is rewound to what
        the text still has: the drafts behind that were rejected."""
        token_ids = request.token_ids()
        if (cache := self._caches.get(request)) is None:
            cache = self._caches[request] = self.draft_model.new_cache()
        known = min(len(cache.token_ids), len(token_ids) - 1)  # the last one's row says what comes next
        differs = (i for i in range(known) if cache.token_ids[i] != token_ids[i])
        num_kept = next(differs, known)
        cache.truncate(num_kept)
        drafts: list[int] = []
        new = token_ids[num_kept:]
        for _ in range(self.num_speculative_tokens if most is None else most):
            drafts.append(self.say(request, cache, new))
            new = drafts[-1:]
        return drafts

    def say(self, request: Request, cache: Any, token_ids: Sequence[int]) -> int:
        """Return the next token behind these."""
        return self.draft_model.forward(cache, token_ids)
