"""Another right lab-02: cases instead of a minimum, iterators over the sequence, a tuple for the chunk."""

from collections import namedtuple
from itertools import chain, islice

Chunk = namedtuple("Chunk", "token_ids positions is_last")


def clamp(num_new, budget, threshold):
    if budget <= 0:
        return 0
    if threshold and threshold <= min(num_new, budget):
        return threshold
    return budget if budget < num_new else num_new


def next_chunk(request, num_tokens):
    sequence = enumerate(chain(request.prompt_token_ids, request.output_token_ids))
    start = request.num_computed_tokens
    positions, token_ids = zip(*islice(sequence, start, start + num_tokens), strict=True)
    return Chunk(token_ids, positions, positions[-1] + 1 == request.num_tokens)


def prefill_budget(running, budget):
    for request in running:
        if request.output_token_ids and request.num_computed_tokens + 1 == request.num_tokens:
            budget -= 1
    return budget
