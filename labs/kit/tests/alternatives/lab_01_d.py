"""Another right schedule_step: a counter as the result, recursion over the queue, an error of its own."""

from collections import Counter

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


class NoRoom(RuntimeError):
    def __init__(self, request):
        super().__init__(f"{request.request_id!r} runs, and finds no room")


def schedule_step(
    waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold=0, clamp=clamp
):
    rows = Counter()

    def left():
        return max_num_batched_tokens - rows.total()

    def share(request):
        return clamp(request.num_new_tokens, left(), long_prefill_token_threshold)

    def admit_front():
        if min(len(waiting), left(), max_num_seqs - len(running)) > 0 and kv.admit(front := waiting.peek()):
            assert waiting.pop() is front
            front.status = RequestStatus.RUNNING
            running.append(front)
            rows[front.request_id] = share(front)
            admit_front()

    for request in running:
        if tokens := share(request):
            if kv.allocate(request, tokens):
                rows[request.request_id] = tokens
            else:
                raise NoRoom(request)
    admit_front()
    return rows
