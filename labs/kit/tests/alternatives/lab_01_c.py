"""Another right schedule_step: one loop over a list that grows; newcomers ask for room like all others."""

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


def schedule_step(
    waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold=0, clamp=clamp
):
    scheduled, spent, turn = {}, 0, 0
    while True:
        if turn == len(running):
            if spent >= max_num_batched_tokens or not waiting or turn >= max_num_seqs:
                return scheduled
            if not kv.admit(waiting.peek()):
                return scheduled
            running.append(waiting.pop())
            running[turn].status = RequestStatus.RUNNING
        request, turn = running[turn], turn + 1
        tokens = clamp(request.num_new_tokens, max_num_batched_tokens - spent, long_prefill_token_threshold)
        if tokens:
            if not kv.allocate(request, tokens):
                raise RuntimeError(f"no room for {tokens} tokens of {request.request_id}")
            scheduled[request.request_id] = tokens
            spent += tokens
