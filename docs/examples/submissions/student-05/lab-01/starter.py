"""lab-01, schedule_step: your file."""

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


def schedule_step(
    waiting, running, kv, *,
    max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold=0, clamp=clamp,
):
    """Decide one step: {request_id: number of tokens to compute}, in the order of the rows."""
    tokens = {}

    def compute(request):
        used = sum(tokens.values())
        return clamp(request.num_new_tokens, max_num_batched_tokens - used, long_prefill_token_threshold)

    for request in running:
        if number := compute(request):
            if kv.allocate(request, number) is False:
                raise RuntimeError(f"request {request.request_id} has no room")
            tokens[request.request_id] = number
    while waiting:
        if len(running) >= max_num_seqs or sum(tokens.values()) >= max_num_batched_tokens:
            break
        front = waiting.peek()
        if not kv.admit(front):
            break
        waiting.pop()
        front.status = RequestStatus.RUNNING
        running.append(front)
        tokens[front.request_id] = compute(front)
    return tokens
