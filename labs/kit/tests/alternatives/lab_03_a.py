"""Another right lab-03: a sorted list for the queue, a dict of all who are here beside it, and a new
list of the running requests whenever one leaves."""

from bisect import insort

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp, schedule_step


def policy_key(request, policy):
    if policy == "fcfs":
        return (request.arrival,)
    return (request.priority, request.arrival)


class RequestQueue:
    def __init__(self, policy="fcfs"):
        if policy not in {"fcfs", "priority"}:
            raise ValueError(f"no policy called {policy!r}")
        self.key = lambda request: policy_key(request, policy)
        self.requests = []

    def push(self, request):
        insort(self.requests, request, key=self.key)

    def peek(self):
        return self.requests[0]

    def pop(self):
        return self.requests.pop(0)

    def remove(self, request):
        self.requests.remove(request)

    def __len__(self):
        return len(self.requests)

    def __iter__(self):
        return iter(tuple(self.requests))


def pick_victim(running, policy):
    return sorted(running, key=lambda request: policy_key(request, policy)).pop()


class Scheduler:
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
        self.kv, self.policy, self.schedule_step, self.clamp = kv, policy, schedule_step, clamp
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.waiting, self.running, self.arrivals = RequestQueue(policy), [], 0
        self.requests = {}  # by id: all who have come and have not left

    @property
    def has_work(self):
        return len(self.waiting) + len(self.running) > 0

    def leave(self, request, reason):
        if request in self.running:
            self.running = [other for other in self.running if other is not request]
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        self.kv.free(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason

    def add(self, request):
        if request.request_id in self.requests:
            raise ValueError(f"there is a request {request.request_id!r} already")
        most = self.kv.num_blocks * self.kv.block_size - request.num_prompt_tokens + 1
        limit = most if request.max_tokens is None else request.max_tokens
        if most < 1 or limit > most:
            raise ValueError(f"request {request.request_id!r} is too long for the whole pool")
        request.max_tokens = limit
        request.arrival, self.arrivals = self.arrivals, self.arrivals + 1
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def make_room(self):
        before = len(self.running)
        needs = {r: self.kv.num_new_blocks(r, 1) for r in self.running}
        last_first = sorted(needs, key=lambda request: policy_key(request, self.policy), reverse=True)
        while sum(needs.values()) > self.kv.num_free_blocks:
            self.preempt(last_first.pop(0))
            needs = {r: n for r, n in needs.items() if r in self.running}
        return len(self.running) < before

    def preempt(self, request):
        self.kv.free(request)
        self.running = [other for other in self.running if other is not request]
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
        request.num_preemptions = request.num_preemptions + 1
        self.waiting.push(request)

    def schedule(self):
        made_room = self.make_room()
        seqs = len(self.running) if made_room else self.max_num_seqs  # no place is free in such a step
        return self.schedule_step(
            self.waiting,
            self.running,
            self.kv,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            clamp=self.clamp,
        )

    def update(self, scheduled, sampled, stopped=()):
        rows = [request for request in self.running if request.request_id in scheduled]
        for request in rows:
            request.num_computed_tokens += scheduled[request.request_id]
            self.kv.cache_blocks(request)
            if request.request_id in sampled and request.num_new_tokens > 0:
                raise ValueError(f"a token for {request.request_id!r} in the middle of its sequence")
        done = []
        for request in rows:
            if request.request_id in sampled:
                reason = None
                for token in sampled[request.request_id]:
                    if not reason:
                        request.output_token_ids.append(token)
                        reason = request.check_stop()
                if reason := "stop" if request.request_id in stopped else reason:
                    self.leave(request, reason)
                    done.append(request)
        return done

    def abort(self, request_id):
        if request_id not in self.requests:
            return False
        self.leave(self.requests[request_id], "abort")
        return True
