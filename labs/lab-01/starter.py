"""lab-01, schedule_step: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-01     Stuck? python -m labs hint lab-01
"""


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """Given: how many of `num_new` tokens a request may compute in this step.

    At most `threshold` (0 means no limit), at most what is left of the `budget`, never below 0.
    You write it yourself in lab-02.
    """
    if 0 < threshold < num_new:
        num_new = threshold
    return max(0, min(num_new, budget))


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
    running: list of requests, in the order in which they were admitted.
    kv: KV memory, with `admit(request)` and `allocate(request, num_tokens)`, both True or False.

    1. The budget of this step is max_num_batched_tokens. It is one pool, for everybody.
    2. Running. For each running request, in order: n = clamp(request.num_new_tokens, budget,
       long_prefill_token_threshold). If n is 0, leave it out. Otherwise kv.allocate(request, n),
       then write n into the result and pay for it out of the budget. The caller has made sure that
       there is room; if allocate still says False, raise a RuntimeError that names the request.
    3. Waiting. While somebody waits, there is budget left, and fewer than max_num_seqs are running:
       look at the front (peek). kv.admit(request) claims room for the whole sequence and sets
       request.num_computed_tokens to what is cached already. If it says False, stop: nobody behind
       the front is tried. If it says True, take the request off the queue, append it to running,
       set request.status to RequestStatus.RUNNING (from mini_engine.request import RequestStatus),
       then clamp, write and pay as above.
    4. Return the result.
    """
    raise NotImplementedError("lab-01: schedule_step is not written yet")
