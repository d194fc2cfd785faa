"""A scheduler's settings and requests, as a trace's header has them."""

from __future__ import annotations

from typing import Any

from mini_engine.interfaces import SchedulerLike
from mini_engine.request import Request
from mini_engine.trace.records import RequestView


def describe(scheduler: SchedulerLike) -> dict[str, Any]:
    """Return the settings of a scheduler and its KV manager, as a header's `config`."""
    kv = scheduler.kv
    return {
        "policy": scheduler.policy,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "num_blocks": kv.num_blocks,
        "block_size": kv.block_size,
        "prefix_caching": kv.enable_prefix_caching,
        "watermark": kv.watermark,
    }


def view_of(request: Request, scheduler: SchedulerLike) -> RequestView:
    """Return how a request stands that was there before the recording."""
    sizes = request.num_prompt_tokens, request.max_tokens or 0
    view = RequestView(request.request_id, *sizes, request.priority, request.arrival)
    view.num_computed_tokens = request.num_computed_tokens
    view.num_output_tokens = len(request.output_token_ids)
    view.num_preemptions, view.blocks = request.num_preemptions, list(scheduler.kv.block_table(request))
    if request in scheduler.running:
        view.running, view.state = True, "decode" if view.is_decode else "prefill"
    return view
