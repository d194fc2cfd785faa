"""lab-01, schedule_step: your file."""

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


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
    """Decide one step: {request_id: number of tokens to compute}, in the order of the rows."""
    plan = {}
    left = max_num_batched_tokens

    for request in running:
        n = clamp(request.num_new_tokens, left, long_prefill_token_threshold)
        if n > 0:
            if not kv.allocate(request, n):
                raise RuntimeError(f"no room for {request.request_id}")
            plan[request.request_id] = n
            left -= n

    while len(running) <= max_num_seqs and left > 0 and waiting and kv.admit(waiting.peek()):
        request = waiting.pop()
        request.status = RequestStatus.RUNNING
        running.append(request)
        n = clamp(request.num_new_tokens, left, long_prefill_token_threshold)
        plan[request.request_id] = n
        left -= n
    return plan
