"""Familiar: prompts that begin like one that is being answered go first, and never beside one that is read.

So a shared beginning is computed once, and the others find its blocks.
"""

from mini_engine.scheduler import schedule_step as engines_step

MOST, BEGINNING = 1100, 64  # tokens of a step; tokens that must be alike
read, reading = set(), set()


def beginning(request):
    return tuple(request.prompt_token_ids[:BEGINNING])


def policy_key(request, policy):
    start = beginning(request)
    return start in reading, start not in read, request.arrival


def schedule_step(waiting, running, kv, *, max_num_batched_tokens, **limits):
    read.clear()
    read.update(beginning(request) for request in running if request.is_decode)
    reading.clear()
    reading.update(beginning(request) for request in running if not request.is_decode)
    return engines_step(
        waiting, running, kv, max_num_batched_tokens=min(MOST, max_num_batched_tokens), **limits
    )
