"""The seam between a grammar and the sampler: logits in, logits with only the allowed tokens out."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from mini_engine.structured.grammar import StructuredOutputGrammar


class GrammarProcessor:
    """A logits processor that leaves only tokens a grammar allows; all others get minus infinity.

    It is called with a request's output so far and one row of logits. Where the output is not what it was
    last called with, the grammar is rolled back to what both have in common, so drafts that were rejected
    and requests that are preempted need nothing. Raise ValueError for an output the grammar does not allow.
    """

    def __init__(self, grammar: StructuredOutputGrammar):
        self.grammar = grammar
        self._accepted: list[int] = []

    def __call__(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        mask = self._mask(output_token_ids)
        return logits.masked_fill(~allowed(mask, len(logits)).to(logits.device), -torch.inf)

    def validate(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Return the first drafts, as many as may follow the output."""
        self._follow(output_token_ids)
        return self.grammar.validate_tokens(drafts)

    def is_complete(self, output_token_ids: Sequence[int], eos_token_id: int) -> bool:
        """Return whether the output has ended, or could end here."""
        mask = self._mask(output_token_ids)
        return self.grammar.is_terminated() or bool(mask >> eos_token_id & 1)

    def _mask(self, output_token_ids: Sequence[int]) -> int:
        self._follow(output_token_ids)
        bitmask = [0]
        self.grammar.fill_bitmask(bitmask, 0)
        return bitmask.pop()

    def _follow(self, output_token_ids: Sequence[int]) -> None:
        both = zip(self._accepted, output_token_ids, strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
        self.grammar.rollback(len(self._accepted) - common)
        del self._accepted[common:]
        new = list(output_token_ids[common:])
        if not self.grammar.accept_tokens(new):
            raise ValueError(f"the grammar does not allow {new} behind {common} tokens of the output")
        self._accepted += new


def allowed(mask: int, vocab_size: int) -> Tensor:
    """Return a mask as (vocab_size,) bool."""
    kept = mask & ((1 << vocab_size) - 1)
    octets = np.frombuffer(kept.to_bytes(-(-vocab_size // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(octets, count=vocab_size, bitorder="little").view(bool))
