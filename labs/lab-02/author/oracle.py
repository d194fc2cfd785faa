"""lab-02's contract, one token at a time: nothing is counted or sliced that can be tried out instead."""

from typing import NamedTuple


class Chunk(NamedTuple):
    token_ids: list[int]
    positions: list[int]
    is_last: bool


def clamp(num_new, budget, threshold):
    """Give tokens, 4,096 at a time and then one by one, as long as no limit forbids the next ones."""
    given = 0
    for more in (4096, 1):
        while all(given + more <= limit for limit in (num_new, budget, threshold or num_new)):
            given += more
    return given


def next_chunk(request, num_tokens):
    """Walk over the whole sequence, and take what is not computed, until there is enough."""
    token_ids, positions, sequence = [], [], [*request.prompt_token_ids, *request.output_token_ids]
    for position, token_id in enumerate(sequence):
        if position >= request.num_computed_tokens and len(positions) < num_tokens:
            token_ids.append(token_id)
            positions.append(position)
    return Chunk(token_ids, positions, len(sequence) - 1 in positions)


def prefill_budget(running, budget):
    """Let each request that has answered already, and whose last token alone is not computed, pay one."""
    for request in running:
        known = len(request.prompt_token_ids) + len(request.output_token_ids)
        if len(request.output_token_ids) > 0 and request.num_computed_tokens == known - 1:
            budget -= 1
    return budget
