"""lab-03 in slow motion: what a scheduler that preempts has to do, with no cleverness at all.

Nothing is kept but a history of what happened to which request; the queue and the running set are
read out of it anew at each call. random_scripts.py compares every other lab-03 with this one.
"""

from mini_engine.request import RequestStatus

CAME, ADMITTED, PREEMPTED, LEFT = "came", "admitted", "preempted", "left"


def clamp(num_new, budget, threshold):
    limits = [num_new, budget] + ([threshold] if threshold else [])
    return max(0, min(limits))


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
    """lab-01's two phases: the running ones, then from the front of the queue whatever still fits."""
    scheduled = {}

    def left():
        return max_num_batched_tokens - sum(scheduled.values())

    def give(request):
        return clamp(request.num_new_tokens, left(), long_prefill_token_threshold)

    for request in running:
        if num_tokens := give(request):
            if not kv.allocate(request, num_tokens):
                raise RuntimeError(f"no room was made for {request.request_id!r}")
            scheduled[request.request_id] = num_tokens
    while len(waiting) > 0 and left() > 0 and len(running) < max_num_seqs and kv.admit(waiting.peek()):
        request = waiting.pop()
        request.status = RequestStatus.RUNNING
        running.append(request)
        scheduled[request.request_id] = give(request)
    return scheduled


def comes_before(a, b, policy):
    """Whether request a is served before request b."""
    if policy == "priority" and a.priority != b.priority:
        return a.priority < b.priority
    return a.arrival < b.arrival


def first_of(requests, policy):
    """The one that none of the others comes before."""
    first = requests[0]
    for request in requests:
        if comes_before(request, first, policy):
            first = request
    return first


def last_of(requests, policy):
    """The one that comes before none of the others."""
    last = requests[0]
    for request in requests:
        if comes_before(last, request, policy):
            last = request
    return last


def policy_key(request, policy):
    """One number: arrivals stay below 2**40, so the priority decides first."""
    return request.arrival + (request.priority * 2**40 if policy == "priority" else 0)


def pick_victim(running, policy):
    return last_of(running, policy)


class RequestQueue:
    """A heap of paper on a desk: each look at the front goes through all of it."""

    def __init__(self, policy="fcfs"):
        if policy != "fcfs" and policy != "priority":
            raise ValueError(f"there is no policy {policy!r}")
        self.policy = policy
        self.papers = []

    def push(self, request):
        self.papers.append(request)

    def peek(self):
        return first_of(self.papers, self.policy)

    def remove(self, request):
        self.papers = [other for other in self.papers if other is not request]

    def pop(self):
        request = self.peek()
        self.remove(request)
        return request

    def __len__(self):
        return len(self.papers)

    def __iter__(self):
        left = list(self.papers)
        while left:
            request = first_of(left, self.policy)
            left.remove(request)
            yield request


class Scheduler:
    """A history; waiting and running follow from the last thing that happened to each request."""

    def __init__(
        self,
        kv,
        *,
        policy="fcfs",
        max_num_batched_tokens,
        max_num_seqs,
        long_prefill_token_threshold=0,
        schedule_step=schedule_step,
        clamp=clamp,
    ):
        self.kv, self.policy = kv, policy
        self.settings = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "long_prefill_token_threshold": long_prefill_token_threshold,
            "clamp": clamp,
        }
        self.schedule_step = schedule_step
        self.history = []  # (what happened, request)

    def now(self, *kinds):
        """The requests to which one of these happened last, in the order in which it happened."""
        last = {request: kind for kind, request in self.history}
        when = {request: time for time, (_, request) in enumerate(self.history)}
        return sorted((r for r, kind in last.items() if kind in kinds), key=when.get)

    @property
    def running(self):
        return self.now(ADMITTED)

    @property
    def waiting(self):
        queue = RequestQueue(self.policy)
        for request in self.now(CAME, PREEMPTED):
            queue.push(request)
        return queue

    @property
    def has_work(self):
        return self.now(CAME, PREEMPTED, ADMITTED) != []

    def add(self, request):
        for other in self.now(CAME, PREEMPTED, ADMITTED):
            if other.request_id == request.request_id:
                raise ValueError(f"{request.request_id!r} is here already")
        slots = self.kv.num_blocks * self.kv.block_size
        # The keys and values of prompt, first token, ... up to the last token but one.
        most = slots - request.num_prompt_tokens + 1
        wanted = most if request.max_tokens is None else request.max_tokens
        if request.num_prompt_tokens > slots or wanted > most:
            raise ValueError(f"{request.request_id!r} can never finish")
        request.max_tokens = wanted
        request.arrival = sum(kind == CAME for kind, _ in self.history)
        self.history.append((CAME, request))

    def preempt(self, request):
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self.history.append((PREEMPTED, request))
        request.num_preemptions = sum(entry == (PREEMPTED, request) for entry in self.history)

    def make_room(self):
        needed = [self.kv.num_new_blocks(request, 1) for request in self.running]
        if sum(needed) <= self.kv.num_free_blocks:
            return False
        self.preempt(last_of(self.running, self.policy))
        self.make_room()
        return True

    def schedule(self):
        queue = RequestQueue(self.policy) if self.make_room() else self.waiting
        running = self.running
        here = len(running)
        scheduled = self.schedule_step(queue, running, self.kv, **self.settings)
        self.history += [(ADMITTED, request) for request in running[here:]]
        return scheduled

    def leave(self, request, reason):
        self.kv.free(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        self.history.append((LEFT, request))

    def update(self, scheduled, sampled, stopped=()):
        finished = []
        for request in self.running:
            name = request.request_id
            if name not in scheduled:
                continue
            request.num_computed_tokens += scheduled[name]
            self.kv.cache_blocks(request)
            if name not in sampled:
                continue
            if request.num_computed_tokens < len(request.prompt_token_ids + request.output_token_ids):
                raise ValueError(f"{name!r} has not been computed to its end")
            reasons = []
            for token_id in sampled[name]:
                if not any(reasons):
                    request.output_token_ids = [*request.output_token_ids, token_id]
                    reasons.append(request.check_stop())
            reason = "stop" if name in stopped else reasons[-1]
            if reason:
                self.leave(request, reason)
                finished.append(request)
        return finished

    def abort(self, request_id):
        for request in self.now(CAME, PREEMPTED, ADMITTED):
            if request.request_id == request_id:
                self.leave(request, "abort")
                return True
        return False
