"""Shortest: the least work first, prompt and answer together; a request gains on those that come after it."""

from mini_engine.scheduler import schedule_step as engines_step

MOST = 1100  # tokens of a step
AGE = 15  # tokens of work that a request is let off for each one that came after it


def policy_key(request, policy):
    left = request.num_new_tokens + request.max_tokens - len(request.output_token_ids)
    return left + AGE * request.arrival, request.arrival


def schedule_step(waiting, running, kv, *, max_num_batched_tokens, **limits):
    return engines_step(
        waiting, running, kv, max_num_batched_tokens=min(MOST, max_num_batched_tokens), **limits
    )


def pick_victim(running, policy):
    """Take memory from the one that has most left to do."""
    return max(running, key=lambda request: request.max_tokens - len(request.output_token_ids))
