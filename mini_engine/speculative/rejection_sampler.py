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
        """Return True with this probability; 1 or more is always True."""

    def draw(self, row: Probabilities) -> int:
        """Return a token id, drawn from a row."""


def residual(p: Probabilities, q: Probabilities) -> list[Any]:
    """Return what `p` has more than `q`, scaled to add up to 1; `p` itself if it has nothing more."""
    more = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    total = sum(more)
    return [part / total for part in more] if total else list(p)


def accept(token_id: int, p: Probabilities, q: Probabilities, chance: Chance) -> int:
    """Return a draft that was drawn from `q` with probability min(1, p / q), else a draw from the residual:
    the result is distributed as `p`."""
    return token_id if chance.flip(p[token_id] / q[token_id]) else chance.draw(residual(p, q))


def rejection_sample(
    draft_token_ids: Sequence[int],
    target: Sequence[Probabilities],
    draft: Sequence[Probabilities],
    chance: Chance,
) -> list[int]:
    """Return 1 to k + 1 tokens for k drafts, each drawn from its row of `draft`. `target` has k + 1 rows.

    The first draft that is not accepted is replaced; if all are, the last row of the target yields a token
    more.
    """
    for i, token_id in enumerate(draft_token_ids):
        if (said := accept(token_id, target[i], draft[i], chance)) != token_id:
            return [*draft_token_ids[:i], said]
    return [*draft_token_ids, chance.draw(target[len(draft_token_ids)])]
