"""Another right lab-03: a queue of marked entries, room made by recursion, a dict of all requests beside it,
and a new list of the running requests whenever one leaves."""

import heapq

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp, schedule_step


def policy_key(request, policy):
    return (request.arrival,) if policy == "fcfs" else (request.priority, request.arrival)


class RequestQueue:
    def __init__(self, policy="fcfs"):
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"{policy} is no policy")
        self.policy, self.entries, self.heap = policy, {}, []

    def push(self, request):
        self.entries[request] = entry = [policy_key(request, self.policy), request]
        heapq.heappush(self.heap, entry)

    def peek(self):
        while self.entries.get(self.heap[0][1]) is not self.heap[0]:
            heapq.heappop(self.heap)
        return self.heap[0][1]

    def pop(self):
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request):
        del self.entries[request]

    def __len__(self):
        return len(self.entries)

    def __iter__(self):
        return iter(sorted(self.entries, key=lambda request: policy_key(request, self.policy)))


def pick_victim(running, policy):
    first, *others = running
    for other in others:
        if policy_key(other, policy) > policy_key(first, policy):
            first = other
    return first


class Scheduler:
    def __init__(self, kv, *, policy="fcfs", schedule_step=schedule_step, clamp=clamp, **limits):
        self.kv, self.policy, self.step = kv, policy, schedule_step
        self.settings = {"long_prefill_token_threshold": 0, "clamp": clamp} | limits
        self.waiting, self.running, self.count = RequestQueue(policy), [], 0
        self.requests = {}  # by id: all that have come and have not left

    def __getattr__(self, name):
        if name in self.__dict__.get("settings", {}):
            return self.settings[name]
        raise AttributeError(name)

    @property
    def has_work(self):
        return bool(self.running) or bool(self.waiting)

    def make_room(self):
        if sum(self.kv.num_new_blocks(r, 1) for r in self.running) <= self.kv.num_free_blocks:
            return False
        self.preempt(pick_victim(self.running, self.policy))
        return self.make_room() or True

    def preempt(self, request):
        self.move(request, RequestStatus.WAITING)
        request.num_preemptions, request.num_computed_tokens = request.num_preemptions + 1, 0
        self.waiting.push(request)

    def move(self, request, status):
        if request in self.running:
            self.running = [other for other in self.running if other is not request]
        else:
            self.waiting.remove(request)
        self.kv.free(request)
        request.status = status
        if status is RequestStatus.FINISHED:
            del self.requests[request.request_id]

    def schedule(self):
        queue = RequestQueue(self.policy) if self.make_room() else self.waiting
        return self.step(queue, self.running, self.kv, **self.settings)

    def add(self, request):
        if request.request_id in self.requests:
            raise ValueError(f"{request.request_id} is taken")
        rest = self.kv.num_blocks * self.kv.block_size - request.num_prompt_tokens  # room behind the prompt
        if rest < 0 or (request.max_tokens or 0) - 1 > rest:
            raise ValueError(f"{request.request_id} is too large")
        if request.max_tokens is None:
            request.max_tokens = rest + 1
        request.arrival, self.count = self.count, self.count + 1
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def update(self, scheduled, sampled, stopped=()):
        return [
            r
            for r in tuple(self.running)
            if r.request_id in scheduled and self.ends(r, scheduled, sampled, stopped)
        ]

    def ends(self, request, scheduled, sampled, stopped):
        name = request.request_id
        request.num_computed_tokens += scheduled[name]
        self.kv.cache_blocks(request)
        tokens = list(sampled.get(name, ()))
        if tokens and request.num_new_tokens > 0:
            raise ValueError(f"no token of {name} can be known yet")
        while tokens and not request.finish_reason:
            request.output_token_ids.append(tokens.pop(0))
            request.finish_reason = request.check_stop()
        if name in sampled and name in stopped:
            request.finish_reason = "stop"
        if request.finish_reason:
            self.move(request, RequestStatus.FINISHED)
        return bool(request.finish_reason)

    def abort(self, request_id):
        request = self.requests.get(request_id)
        if request:
            self.move(request, RequestStatus.FINISHED)
            request.finish_reason = "abort"
        return bool(request)
