"""Another right lab-02: arithmetic with infinity, ranges and tuples for lists, requests in sets and by id."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    token_ids: Sequence[int]
    positions: Sequence[int]
    is_last: bool

    def __iter__(self):
        return iter(astuple(self))


def clamp(num_new, budget, threshold):
    return max(0, min(num_new, budget, threshold or float("inf")))


def next_chunk(request, num_tokens):
    cut = slice(request.num_computed_tokens, request.num_computed_tokens + num_tokens)
    positions = range(request.num_tokens)[cut]
    return Chunk(tuple(request.token_ids())[cut], positions, num_tokens == request.num_new_tokens)


def prefill_budget(running, budget):
    by_id = {request.request_id: request for request in running}
    decodes = {request for request in by_id.values() if request.is_decode}
    return budget - len(decodes)
