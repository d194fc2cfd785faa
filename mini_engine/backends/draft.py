"""A small model that drafts for a large one of the same vocabulary, with a dense cache for each request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.checks import shown
from mini_engine.config import SpeculativeConfig
from mini_engine.fast.model import Fast, prepare
from mini_engine.loading.checkpoint import load
from mini_engine.model import CausalLM
from mini_engine.request import Request
from mini_engine.sampler import draw, probabilities, random_number
from mini_engine.speculative.draft_model import DraftModelProposer
from mini_engine.text.tokenizer import Tokenizer


class DraftTokens:
    """The tokens of one text that the draft model has computed: a DraftCache."""

    def __init__(self, model: CausalLM):
        self.token_ids: list[int] = []
        self.kv = DenseCache(model.config, model.dtype, model.device)

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens`."""
        del self.token_ids[num_tokens:]
        self.kv.truncate(num_tokens)


class DraftLM:
    """A CausalLM as a DraftModel."""

    def __init__(self, model: CausalLM):
        self.model = model

    def new_cache(self) -> DraftTokens:
        """Return an empty cache."""
        return DraftTokens(self.model)

    def logits(self, cache: DraftTokens, token_ids: Sequence[int]) -> Tensor:
        """Compute these tokens behind the cache's. Return logits (vocab_size,) of the token after them."""
        start, device = len(cache.token_ids), self.model.device
        positions = torch.arange(start, start + len(token_ids), device=device)
        hidden = self.model(torch.tensor(token_ids, device=device), positions, dense_attend(cache.kv))
        cache.token_ids += token_ids
        return self.model.logits(hidden[-1:])[0]

    def forward(self, cache: DraftTokens, token_ids: Sequence[int]) -> int:
        """Compute these tokens behind the cache's. Return the most likely next token."""
        return int(self.logits(cache, token_ids).argmax())


class DraftLMProposer(DraftModelProposer):
    """Proposes what a DraftLM says, as far as its context goes: the best tokens, or with a `seed` draws, for
    requests that draw. Their distributions are in `spec_probs`, for the rule that accepts them."""

    def __init__(self, draft_model: DraftLM, num_speculative_tokens: int, seed: int | None = None):
        super().__init__(draft_model, num_speculative_tokens)
        self.lm, self.seed = draft_model, seed

    def propose(self, request: Request, most: int | None = None) -> list[int]:
        """Return at most `most` tokens, None: num_speculative_tokens."""
        most = self.num_speculative_tokens if most is None else most
        request.spec_probs = []
        return super().propose(
            request, min(most, self.lm.model.config.max_position_embeddings - request.num_tokens)
        )

    def say(self, request: Request, cache: DraftTokens, token_ids: Sequence[int]) -> int:
        """Return the next token: the best, or a draw with the number of its output."""
        params = request.sampling_params
        if self.seed is None or params.temperature == 0:
            return super().say(request, cache, token_ids)
        probs = probabilities(self.lm.logits(cache, token_ids), params)
        index = len(request.output_token_ids) + len(request.spec_probs)
        request.spec_probs = [*request.spec_probs, probs.tolist()]
        return int(draw(probs, random_number(self.seed, request, index, "draft")))


def draft_proposer(
    settings: SpeculativeConfig, seed: int, model: CausalLM, tokenizer: Tokenizer | None, fast: Fast
) -> DraftLMProposer:
    """Return the proposer of a SpeculativeConfig, its model loaded for the engine's dtype and device.

    Raises ValueError for a model whose tokens are others than the engine's.
    """
    draft, other = load(str(settings.model), model.dtype, model.device)
    same = draft.config.vocab_size == model.config.vocab_size
    if not same or (tokenizer and tokenizer.token_bytes != other.token_bytes):
        raise ValueError(f"the draft model {shown(settings.model)} has another tokenizer than the model")
    sampled = settings.draft_sample_method == "probabilistic"
    return DraftLMProposer(
        DraftLM(prepare(draft, fast)), settings.num_speculative_tokens, seed if sampled else None
    )
