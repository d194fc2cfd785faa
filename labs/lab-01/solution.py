"""lab-01, schedule_step: the reference, written to be read."""

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

    - max_num_batched_tokens is the budget: in one step all requests together compute at most that many.
    - The running requests are served first, in their order. Then waiting ones are admitted, from the front.
    - clamp says how many tokens a request gets, from its num_new_tokens, the budget that is left, and
      long_prefill_token_threshold. A running request that gets 0 is left out of the result.
    - A running request needs room for its tokens: kv.allocate(request, num_tokens). The caller has made
      sure of it; if the answer is still False, raise a RuntimeError that names the request.
    - A waiting request is admitted if there is budget left, fewer than max_num_seqs requests run, and
      kv.admit(request) says True: that claims room for the whole sequence, and sets
      request.num_computed_tokens to what is cached already. It leaves the queue, joins running at the
      end with the status RequestStatus.RUNNING (from mini_engine.request import RequestStatus), and
      computes in this step. When the front is not admitted, no request behind it is tried.
    - The result is a new dict in each step. Of a request you set the status and nothing else, and only
      after its admission; the caller counts what has been computed, after the step.
    """
    budget = max_num_batched_tokens
    scheduled = {}

    # Readers watch the running requests' text appear; of those in the queue they have seen nothing yet.
    for request in running:
        num_tokens = clamp(request.num_new_tokens, budget, long_prefill_token_threshold)
        if num_tokens == 0:
            continue
        if not kv.allocate(request, num_tokens):
            raise RuntimeError(f"no KV room for the running request {request.request_id!r}")
        scheduled[request.request_id] = num_tokens
        budget -= num_tokens

    while waiting and budget > 0 and len(running) < max_num_seqs:
        request = waiting.peek()
        if not kv.admit(request):
            break  # skipping past the front would let small requests starve a large one
        waiting.pop()
        running.append(request)
        request.status = RequestStatus.RUNNING
        # Only now: admit has just set how much of the sequence is cached.
        num_tokens = clamp(request.num_new_tokens, budget, long_prefill_token_threshold)
        scheduled[request.request_id] = num_tokens
        budget -= num_tokens

    return scheduled
