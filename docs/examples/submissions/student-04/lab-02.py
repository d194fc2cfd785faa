"""lab-02, clamp: your file."""

from typing import NamedTuple


class Chunk(NamedTuple):
    """The tokens that a request computes in one step, at their absolute positions."""

    token_ids: list[int]
    positions: list[int]
    is_last: bool  # it reaches num_tokens, so a token is sampled from its last row


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """How many of a request's `num_new` tokens it may compute in this step."""
    if threshold > 0:
        num_new = min(num_new, threshold)
    if budget < num_new:
        num_new = budget
    return max(num_new, 0)


def next_chunk(request, num_tokens: int) -> Chunk:
    """The next `num_tokens` tokens of `request` that are not computed yet."""
    first = request.num_computed_tokens
    after = first + num_tokens
    ids = request.token_ids(first, after)
    return Chunk(ids, [first + i for i in range(num_tokens)], after == request.num_tokens)


def prefill_budget(running, budget: int) -> int:
    """Return the part of the token budget that the decodes among the running requests leave for prompts."""
    return budget - len([one for one in running if one.is_decode])
