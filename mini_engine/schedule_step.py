"""Decides one step: which requests compute in it, and how many tokens each.

The running requests are served first, then waiting ones are admitted, under one token budget.
Yu et al., Orca (2022); Agrawal et al., Sarathi-Serve (2024); the names are vLLM's.
"""

from collections.abc import Callable
from typing import NamedTuple

from mini_engine.fallbacks import step_caching_kv
from mini_engine.interfaces import KVManager, Queue
from mini_engine.request import Request, RequestStatus
from mini_engine.speculative.verify import schedule_drafts

Clamp = Callable[[int, int, int], int]
ScheduleStep = Callable[..., dict[str, int]]


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """Return the tokens of one request in this step: at most `threshold` (0: no limit) and `budget`."""
    if 0 < threshold < num_new:
        num_new = threshold
    return max(0, min(num_new, budget))


class Chunk(NamedTuple):
    """The tokens that a request computes in one step, at their absolute positions."""

    token_ids: list[int]
    positions: list[int]
    is_last: bool  # it reaches num_tokens, so a token is sampled from its last row


def next_chunk(request: Request, num_tokens: int) -> Chunk:
    """Return the next `num_tokens` tokens of `request` whose keys and values are not computed yet."""
    start = request.num_computed_tokens
    end = start + num_tokens
    return Chunk(request.token_ids(start, end), list(range(start, end)), end >= request.num_tokens)


def prefill_budget(running: list[Request], budget: int) -> int:
    """Return the token budget less a token for each running decode. lab-02's; not used by the engine."""
    return budget - sum(request.is_decode for request in running)


def schedule_step(
    waiting: Queue,
    running: list[Request],
    kv: KVManager,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    long_prefill_token_threshold: int = 0,
    clamp: Clamp = clamp,
) -> dict[str, int]:
    """Decide one step: {request_id: number of tokens}, in row order.

    Admits by moving requests from `waiting` to the end of `running`. The front of the queue
    blocks those behind it: otherwise small requests could starve a large one.

    The caller has made room for a token of each running request; otherwise a RuntimeError names the
    request. The limits are those of EngineConfig.
    """
    budget, block_size = max_num_batched_tokens, kv.block_size
    scheduled: dict[str, int] = {}

    # Running first: their users are waiting for the next token.
    for request in running:
        computed = request.num_computed_tokens
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) - computed
        if num_tokens != 1 or budget < 1:  # nothing can be cut off a decode
            num_tokens = clamp(num_tokens, budget, long_prefill_token_threshold)
            if num_tokens == 0:
                continue
        # Tokens that fit into the last computed token's block need no call.
        room = -computed % block_size
        if num_tokens > room and not kv.allocate(request, num_tokens):
            raise RuntimeError(f"no KV room for running request {request.request_id!r}: make room first")
        scheduled[request.request_id] = num_tokens
        budget -= num_tokens

    if drafting := [request for request in running if request.spec_token_ids]:
        for request in drafting:
            most = clamp(
                1 + len(request.spec_token_ids), max_num_batched_tokens, long_prefill_token_threshold
            )
            request.spec_token_ids = request.spec_token_ids[: max(0, most - 1)]
        schedule_drafts(drafting, scheduled, kv, max_num_batched_tokens)
        budget = max_num_batched_tokens - sum(scheduled.values())

    num_named = 0
    while waiting and budget > 0 and len(running) < max_num_seqs:
        _let_find(running[num_named:], scheduled, kv)
        num_named = len(running)
        request = waiting.peek()
        if not kv.admit(request):
            break
        running.append(waiting.pop())
        request.status = RequestStatus.RUNNING
        # admit has set num_computed_tokens to the cached prefix: the budget pays for the rest only.
        num_tokens = clamp(request.num_new_tokens, budget, long_prefill_token_threshold)
        scheduled[request.request_id] = num_tokens
        budget -= num_tokens
    return scheduled


def _let_find(rows: list[Request], scheduled: dict[str, int], kv: KVManager) -> None:
    """Let requests that are admitted behind these rows find the blocks that they compute in this step.

    Blocks that a row of one token fills are found after the step: such rows may attend with others' blocks
    as padding (AttentionPlan), and a NaN there would reach the readers, too.
    """
    for request in rows:
        if request.request_id in scheduled and (num_tokens := scheduled[request.request_id]) > 1:
            step_caching_kv(kv).cache_scheduled_blocks(request, num_tokens)
