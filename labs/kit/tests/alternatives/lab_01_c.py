"""Another right schedule_step: recursion, rows written before the room is asked for, decodes only asked."""

from collections import Counter

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


class NoRoom(RuntimeError):
    pass


def schedule_step(
    waiting,
    running,
    kv,
    *,
    max_num_batched_tokens,
    max_num_seqs,
    long_prefill_token_threshold=0,
    clamp=clamp,
):
    rows = Counter()

    def serve(requests):
        left = max_num_batched_tokens - rows.total()
        if requests and left > 0:
            first, *rest = requests
            if count := clamp(first.num_new_tokens, left, long_prefill_token_threshold):
                rows[first.request_id] = count
            # A prompt's room was claimed at its admission, so only a decode can ask for more.
            if first.is_decode and not kv.allocate(first, 1):
                raise NoRoom(f"{first!r}")
            serve(rest)

    def admit():
        has_budget = rows.total() < max_num_batched_tokens
        if waiting and has_budget and len(running) < max_num_seqs and kv.admit(waiting.peek()):
            running[len(running) :] = [waiting.pop()]
            running[-1].status = RequestStatus.RUNNING
            serve(running[-1:])
            admit()

    serve(list(running))
    admit()
    return rows
