"""The rule for drafts that were sampled: the tokens are distributed as the target model's own.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023); Chen et al.,
Accelerating Large Language Model Decoding with Speculative Sampling (2023).
"""

from collections.abc import Sequence
from typing import Any, Protocol

Probabilities = Sequence[Any]  # one for each token: floats, or fractions where it has to be exact


class Chance(Protocol):
    """A source of random decisions."""

    def flip(self, probability: Any) -> bool:
        """Return True with this probability."""

    def draw(self, row: Probabilities) -> int:
        """Return a token id, drawn from a row."""


def residual(p: Probabilities, q: Probabilities) -> list[Any]:
    """Return what `p` has more than `q`, scaled to add up to 1; `p` itself if it has nothing more."""
    more = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    total = sum(more)
    return [part / total for part in more] if total else list(p)


def rejection_sample(
    draft_token_ids: Sequence[int],
    target: Sequence[Probabilities],
    draft: Sequence[Probabilities],
    chance: Chance,
) -> list[int]:
    """Return 1 to k + 1 tokens for k drafts, each drawn from its row of `draft`. `target` has k + 1 rows.

    A draft with probabilities p and q is accepted with min(1, p / q). The first that is not is replaced by a
    draw from the residual; if all are accepted, the last row of the target yields a token more.
    """
    for i, token_id in enumerate(draft_token_ids):
        p, q = target[i][token_id], draft[i][token_id]
        if not (p >= q or chance.flip(p / q)):
            return [*draft_token_ids[:i], chance.draw(residual(target[i], draft[i]))]
    return [*draft_token_ids, chance.draw(target[len(draft_token_ids)])]
