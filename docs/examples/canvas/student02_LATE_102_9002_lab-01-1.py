"""lab-01, schedule_step: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-01     Stuck? python -m labs hint lab-01
"""

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
    """Decide one step: {request_id: number of tokens to compute}, in the order of the rows.

    waiting: the queue (peek, pop, len, truth value); its front is next.
    running: list of requests, in the order in which they were admitted. It is changed in place.
    kv: KV memory, with `admit(request)` and `allocate(request, num_tokens)`, both True or False.
    clamp(num_new, budget, threshold): how many of num_new tokens a request may compute, given what
    is left of the budget. You write it in lab-02; here you call the one you are given.

    1. The budget of this step is max_num_batched_tokens. It is one pool, for all requests.
    2. Running. For each running request, in order: n = clamp(request.num_new_tokens, budget,
       long_prefill_token_threshold). If n is 0, leave the request out. Otherwise call
       kv.allocate(request, n), write n into the result and pay for it out of the budget. The
       caller has made sure that there is room; if allocate still says False, raise a RuntimeError
       that names the request.
    3. Waiting. While a request waits, there is budget left, and fewer than max_num_seqs are running:
       look at the front (peek). kv.admit(request) claims room for the whole sequence and sets
       request.num_computed_tokens to what is cached already. If it says False, stop: no request
       behind the front is tried. If it says True, take the request off the queue, append it to
       running, and set request.status to RequestStatus.RUNNING (from mini_engine.request import
       RequestStatus). Then n = clamp(...) as in 2, write n into the result and pay for it. There is
       no allocate here: admit has claimed the room.
    4. Return the result, a new dict in each step. Of a request you set the status and nothing else, and
       only after its admission; the caller counts what has been computed, after the step.
    """
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
