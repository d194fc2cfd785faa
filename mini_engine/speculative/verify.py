"""Drafts in a step: room for them, the tokens that are kept, and the request afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mini_engine.interfaces import KVManager, RecoverableKV
from mini_engine.request import Request

LogitsRow = TypeVar("LogitsRow")


class ShrinkingKV(KVManager, RecoverableKV, Protocol):
    """A KVManager that takes back the room of rejected drafts."""


def schedule_drafts(
    running: Sequence[Request], scheduled: dict[str, int], kv: KVManager, budget: int
) -> None:
    """Schedule the drafts of decodes, behind all rows: as many as budget, max_tokens and pool allow.

    Drafts that get no room are dropped from `spec_token_ids`; drafts preempt no request.
    """
    left = budget - sum(scheduled.values())
    for request in running:
        if not request.is_decode or request.request_id not in scheduled:
            request.spec_token_ids = []
            continue
        # A pass yields a token more than the drafts that are accepted.
        most = (request.max_tokens or 1) - len(request.output_token_ids) - 1
        num_drafts = max(min(len(request.spec_token_ids), left, most), 0)
        while num_drafts and not kv.allocate(request, 1 + num_drafts):
            num_drafts -= 1
        request.spec_token_ids = request.spec_token_ids[:num_drafts]
        scheduled[request.request_id] += num_drafts
        left -= num_drafts


def verify(request: Request, rows: Sequence[LogitsRow], sample: Callable[[LogitsRow, int], int]) -> list[int]:
    """Return the tokens that 1 + k rows yield: the drafts that `sample` says, and the token after them.

    `sample(row, index)` chooses the request's output `index`, by the random number of (seed, index): a draft
    is kept only where plain decoding would have said it, so the text is the same.
    """
    num_outputs, drafts = len(request.output_token_ids), request.spec_token_ids
    token_ids: list[int] = []
    for i, row in enumerate(rows):
        token_ids.append(sample(row, num_outputs + i))
        if i < len(drafts) and token_ids[i] != drafts[i]:
            break
    return token_ids


def rewind(request: Request, token_ids: Sequence[int], kv: ShrinkingKV) -> int:
    """Take the verified tokens into the request, up to a stop. Return the number of accepted drafts.

    The counter and the cache then stand behind the last accepted token; blocks of rejected drafts are free.
    """
    num_before = len(request.output_token_ids)
    for token_id in token_ids:
        request.output_token_ids.append(token_id)
        if reason := request.check_stop():
            request.finish_reason = reason
            break
    request.spec_token_ids = []
    request.num_computed_tokens = request.num_tokens - 1
    kv.cache_blocks(request)  # after the counter: what was rejected is never published
    kv.shrink(request)
    return len(request.output_token_ids) - num_before - 1
