"""Another right lab-02: arithmetic without min and max, chunks cut off what is left, the status asked."""

from collections import namedtuple

from mini_engine.request import RequestStatus

Chunk = namedtuple("Chunk", "token_ids positions is_last")


def clamp(num_new, budget, threshold):
    if budget <= 0:
        return 0
    allowed = budget if threshold == 0 or threshold > budget else threshold
    return num_new if num_new < allowed else allowed


def next_chunk(request, num_tokens):
    left = request.token_ids(request.num_computed_tokens)
    chunk, rest = left[:num_tokens], left[num_tokens:]
    first = request.num_tokens - len(left)
    return Chunk(chunk, [first + i for i, _ in enumerate(chunk)], not rest)


def prefill_budget(running, budget):
    really_running = [request for request in running if request.status is RequestStatus.RUNNING]
    return budget - len([request for request in really_running if request.is_decode])
