"""lab-03 in slow motion: what a scheduler that preempts has to do, with no cleverness at all.

Nothing is kept but a history of what happened to which request; the queue and the running set are
read out of it anew at each call. random_scripts.py compares every other lab-03 with this one.
"""

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp, schedule_step  # lab-01's and lab-02's, which are not judged here

CAME, ADMITTED, PREEMPTED, LEFT = "came", "admitted", "preempted", "left"


def comes_before(a, b, policy):
    """Whether request a is served before request b."""
    if policy == "priority" and a.priority != b.priority:
        return a.priority < b.priority
    return a.arrival < b.arrival


def first_of(requests, policy):
    """The one that none of the others comes before."""
    return next(a for a in requests if not any(comes_before(b, a, policy) for b in requests))


def policy_key(request, policy):
    """One number: arrivals stay below 2**40, so the priority decides first."""
    return request.arrival + (request.priority * 2**40 if policy == "priority" else 0)


def pick_victim(running, policy):
    """The one that comes before none of the others."""
    return next(a for a in running if not any(comes_before(a, b, policy) for b in running))


class RequestQueue:
    """A list in the order of the pushes: each look at the front goes through all of it."""

    def __init__(self, policy="fcfs"):
        if policy != "fcfs" and policy != "priority":
            raise ValueError(f"there is no policy {policy!r}")
        self.policy = policy
        self.pushed = []

    def push(self, request):
        self.pushed.append(request)

    def peek(self):
        return first_of(self.pushed, self.policy)

    def remove(self, request):
        self.pushed = [other for other in self.pushed if other is not request]

    def pop(self):
        request = self.peek()
        self.remove(request)
        return request

    def __len__(self):
        return len(self.pushed)

    def __iter__(self):
        left = RequestQueue(self.policy)
        left.pushed = list(self.pushed)
        return iter([left.pop() for _ in self.pushed])


class Scheduler:
    """A history; waiting and running follow from the last thing that happened to each request."""

    def __init__(self, kv, *, policy="fcfs", schedule_step=schedule_step, clamp=clamp, **limits):
        self.kv, self.policy, self.schedule_step = kv, policy, schedule_step
        self.settings = {"clamp": clamp, "long_prefill_token_threshold": 0} | limits
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
        self.preempt(pick_victim(self.running, self.policy))
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
