"""lab-02, clamp: your file."""

from typing import NamedTuple


class Chunk(NamedTuple):
    """The tokens that a request computes in one step, at their absolute positions."""

    token_ids: list[int]
    positions: list[int]
    is_last: bool  # it reaches num_tokens, so a token is sampled from its last row


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """How many of a request's `num_new` tokens it may compute in this step."""
    return max(0, min(num_new, budget, threshold or num_new))


def next_chunk(request, num_tokens: int) -> Chunk:
    """The next `num_tokens` tokens of `request` that are not computed yet."""
    raise NotImplementedError("lab-02: next_chunk is not written yet")


def prefill_budget(running, budget: int) -> int:
    """Return the part of the token budget that the decodes among the running requests leave for prompts."""
    raise NotImplementedError("lab-02: prefill_budget is not written yet")
