"""Careful: a request is admitted only if its whole answer will fit, so that none gives its memory back."""

from mini_engine.scheduler import schedule_step as engines_step

MOST = 1100  # tokens of a step


def blocks(request, kv):
    return -(-(request.num_prompt_tokens + request.max_tokens) // kv.block_size)


def schedule_step(waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, **limits):
    promised = sum(blocks(request, kv) for request in running)
    slots = len(running)
    for request in waiting:
        promised += blocks(request, kv)
        if promised > kv.num_blocks:
            break
        slots += 1
    limits["max_num_seqs"] = min(slots, max_num_seqs)
    return engines_step(
        waiting, running, kv, max_num_batched_tokens=min(MOST, max_num_batched_tokens), **limits
    )
