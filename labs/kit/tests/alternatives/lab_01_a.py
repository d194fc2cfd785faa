"""Another right schedule_step: candidates from a generator, a Counter as the result, an error of its own."""

from collections import Counter

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


class NoRoom(RuntimeError):
    def __init__(self, request):
        super().__init__(f"{request.request_id!r} runs, and finds no room")


def schedule_step(
    waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold=0, clamp=clamp
):
    def candidates():
        for request in tuple(running):
            yield request, True
        while len(waiting) and len(running) < max_num_seqs:
            yield waiting.peek(), False

    scheduled = Counter()
    for request, is_running in candidates():
        left = max_num_batched_tokens - scheduled.total()
        if left <= 0:
            break
        if not is_running:
            if not kv.admit(request):
                break
            waiting.remove(request)
            request.status = RequestStatus.RUNNING
            running += [request]
        count = clamp(request.num_new_tokens, left, long_prefill_token_threshold)
        if is_running and not kv.allocate(request, count):
            raise NoRoom(request)
        if count:
            scheduled[request.request_id] = count
    return scheduled
