"""Another right schedule_step: an object gives out the rows, and newcomers ask for room like all others."""

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


class Step:
    def __init__(self, kv, budget, threshold, clamp):
        self.kv, self.budget, self.threshold, self.clamp = kv, budget, threshold, clamp
        self.rows = []

    def give(self, request):
        count = self.clamp(request.num_new_tokens, self.budget, self.threshold)
        if count and self.kv.allocate(request, count) is False:
            raise RuntimeError("cannot serve " + request.request_id)
        self.rows += [(request.request_id, count)] * bool(count)
        self.budget -= count


def schedule_step(
    waiting, running, kv, *, max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold=0, clamp=clamp
):
    step = Step(kv, max_num_batched_tokens, long_prefill_token_threshold, clamp)
    for request in running:
        step.give(request)
    for _ in range(max_num_seqs - len(running)):
        if step.budget == 0 or not waiting or not kv.admit(waiting.peek()):
            break
        newcomer = waiting.pop()
        newcomer.status = RequestStatus.RUNNING
        running.append(newcomer)
        step.give(newcomer)
    return dict(step.rows)
