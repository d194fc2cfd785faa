"""Requests for tests: waiting ones, and ones that were admitted in an earlier step."""

import zlib
from functools import lru_cache
from typing import Any

from mini_engine.interfaces import KVManager
from mini_engine.request import Request, RequestStatus, SamplingParams

VOCAB = 5000


def make_request(
    request_id: str, prompt: int | list[int], max_tokens: int | None = 4, **fields: Any
) -> Request:
    """A greedy request. `prompt` is a list of tokens, or how many of them to make up."""
    if isinstance(prompt, int):
        seed = zlib.crc32(request_id.encode())
        repeats = [(seed + 17 * i * i + i) % VOCAB for i in range(min(prompt, VOCAB))]
        prompt = (repeats * (prompt // VOCAB + 1))[:prompt]  # which is the same formula: its period is VOCAB
    sampling = greedy(max_tokens, tuple(fields.pop("stop_token_ids", ())))
    return Request(request_id, prompt, sampling, **fields)


@lru_cache(typed=True)
def greedy(max_tokens: int | None, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Frozen, so that requests may share it: a random_scripts makes thousands."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop_token_ids)


def make_running(
    kv: KVManager, request_id: str, prompt: int, *, outputs: int = 0, computed: int | None = None
) -> Request:
    """A request that was admitted in an earlier step and has `computed` tokens in the cache.

    By default it is a decode: all is computed but the last token.
    """
    request = make_request(request_id, prompt, max_tokens=64)
    request.output_token_ids = list(range(outputs))
    if not kv.admit(request):
        raise ValueError(f"the pool of {kv.num_blocks} slots has no room for {request_id!r}")
    request.num_computed_tokens = request.num_tokens - 1 if computed is None else computed
    request.status = RequestStatus.RUNNING
    return request
