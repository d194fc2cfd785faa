"""The course's ways to schedule, as policies of the arena."""

from types import SimpleNamespace
from typing import Any

from mini_engine.interfaces import KVManager, Queue
from mini_engine.request import Request
from mini_engine.request_queue import policy_key
from mini_engine.schedule_step import schedule_step

CHUNK = 256  # tokens of one prompt in a step
CHUNKS = 512  # tokens of all prompts together


def chunked(waiting: Queue, running: list[Request], kv: KVManager, **limits: Any) -> dict[str, int]:
    return schedule_step(waiting, running, kv, **limits | {"long_prefill_token_threshold": CHUNK})


def decode_first(
    waiting: Queue, running: list[Request], kv: KVManager, *, max_num_batched_tokens: int, **limits: Any
) -> dict[str, int]:
    """Give each decode its token, then a chunk to the prompts together, as Sarathi-Serve."""
    decodes = [request for request in running if request.is_decode]
    scheduled = schedule_step(NONE, decodes, kv, max_num_batched_tokens=max_num_batched_tokens, **limits)
    prompts = [request for request in running if not request.is_decode]
    left = min(CHUNKS, max_num_batched_tokens - len(scheduled))
    limits["max_num_seqs"] -= len(decodes)
    before = len(prompts)
    scheduled |= schedule_step(waiting, prompts, kv, max_num_batched_tokens=left, **limits)
    running += prompts[before:]
    return scheduled


def prefill_first(
    waiting: Queue, running: list[Request], kv: KVManager, *, max_num_batched_tokens: int, **limits: Any
) -> dict[str, int]:
    """Compute prompts or decodes, never both, and prompts first, as nano-vLLM."""
    prompts = [request for request in running if not request.is_decode]
    decodes = len(running) - len(prompts)
    before = len(prompts)
    limits["max_num_seqs"] -= decodes
    scheduled = schedule_step(waiting, prompts, kv, max_num_batched_tokens=max_num_batched_tokens, **limits)
    if scheduled:
        running += prompts[before:]
        return scheduled
    return schedule_step(NONE, running, kv, max_num_batched_tokens=max_num_batched_tokens, **limits)


NONE: Any = ()

COURSE: dict[str, Any] = {
    "fcfs": SimpleNamespace(),
    "priority": SimpleNamespace(policy_key=lambda request, policy: policy_key(request, "priority")),
    "shortest-first": SimpleNamespace(
        policy_key=lambda request, policy: (request.num_tokens, request.arrival)
    ),
    "chunked": SimpleNamespace(schedule_step=chunked),
    "decode-first": SimpleNamespace(schedule_step=decode_first),
    "prefill-first": SimpleNamespace(schedule_step=prefill_first),
}
