"""lab-02, clamp: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-02     Stuck? python -m labs hint lab-02
"""

from typing import NamedTuple


class Chunk(NamedTuple):
    """The tokens that a request computes in one step, at their absolute positions."""

    token_ids: list[int]
    positions: list[int]
    is_last: bool  # it reaches num_tokens, so a token is sampled from its last row


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """How many of a request's `num_new` tokens it may compute in this step.

    At most `threshold`, if there is one (0 means no limit); at most what is left of the `budget`;
    never below 0, though the budget may be.
    """
    if threshold > 0:
        num_new = min(num_new, threshold)
    if budget < num_new:
        num_new = budget
    return max(num_new, 0)


def next_chunk(request, num_tokens: int) -> Chunk:
    """The next `num_tokens` tokens of `request` that are not computed yet.

    num_tokens: at least 1, at most request.num_new_tokens.
    token_ids: those of the positions from request.num_computed_tokens on (request.token_ids(start,
    end) knows prompt and outputs). positions: counted from the beginning of the sequence, in every
    chunk. is_last: whether the chunk reaches request.num_tokens, so that the next token can be
    sampled from its last row.

    Changes nothing: the request's counters go on when the model has run, not here. The lists are new
    ones, and the caller's: when they are changed the request is not, nor is any other chunk.
    """
    first = request.num_computed_tokens
    after = first + num_tokens
    ids = request.token_ids(first, after)
    return Chunk(ids, list(range(num_tokens)), after == request.num_tokens)


def prefill_budget(running, budget: int) -> int:
    """Return the part of the token budget that the decodes among the running requests leave for prompts.

    A decode (request.is_decode) computes one token. Every other request has a prompt, or outputs to
    be recomputed, in front of it, and shares what is left. With more decodes than budget the answer
    is below 0, by as much as the budget is overdrawn: there is no floor here, it is in clamp.
    Changes nothing.
    """
    return budget - len([one for one in running if one.is_decode])
