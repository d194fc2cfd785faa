"""Another right lab-03, vLLM's way: no room is made first. A request that finds none in the loop preempts
the last in policy order at once, and what the victim had been given in this step is refunded.

test_two_ways.py beside this file shows that the schedules are those of making room first.
"""

import heapq

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp, schedule_step


def policy_key(request, policy):
    return (0 if policy == "fcfs" else request.priority, request.arrival)


class RequestQueue(list):
    """A heap that is a list; its items are (priority or 0, arrival, request)."""

    def __init__(self, policy="fcfs"):
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"{policy!r} is not a policy: take fcfs or priority")
        super().__init__()
        self.policy = policy

    def item(self, request):
        return (*policy_key(request, self.policy), request)

    def push(self, request):
        heapq.heappush(self, self.item(request))

    def peek(self):
        return self[0][-1]

    def pop(self):
        return heapq.heappop(self)[-1]

    def remove(self, request):
        self[:] = sorted(item for item in list.__iter__(self) if item[-1] is not request)

    def __iter__(self):
        return iter([item[-1] for item in sorted(list.__iter__(self))])


def pick_victim(running, policy):
    return max(running, key=lambda request: policy_key(request, policy))


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
        self.kv = kv
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.schedule_step = schedule_step
        self.clamp = clamp
        self.waiting = RequestQueue(policy)
        self.running = []
        self.next_arrival = 0

    @property
    def has_work(self):
        return len(self.waiting) > 0 or len(self.running) > 0

    def add(self, request):
        known = [*self.running, *self.waiting]
        if request.request_id in [other.request_id for other in known]:
            raise ValueError(f"{request.request_id!r} is not finished; take another id")
        room = self.kv.num_blocks * self.kv.block_size
        needed = request.num_prompt_tokens + max((request.max_tokens or 1) - 1, 0)
        if needed > room:
            raise ValueError(f"{request.request_id!r} needs more room than there is")
        if request.max_tokens is None:
            request.max_tokens = room - request.num_prompt_tokens + 1
        request.arrival = self.next_arrival
        self.next_arrival += 1
        self.waiting.push(request)

    def schedule(self):
        budget = self.max_num_batched_tokens
        scheduled = {}
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for somebody before it
            num_tokens = self.clamp(request.num_new_tokens, budget, self.long_prefill_token_threshold)
            if num_tokens == 0:
                continue
            while not self.kv.allocate(request, num_tokens):
                victim = pick_victim(self.running, self.policy)
                budget += scheduled.pop(victim.request_id, 0)  # the refund
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break  # those behind it are served all the same
            else:
                scheduled[request.request_id] = num_tokens
                budget -= num_tokens
        if preempted:
            return scheduled
        newcomers = []
        scheduled |= self.schedule_step(
            self.waiting,
            newcomers,
            self.kv,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs - len(self.running),
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            clamp=self.clamp,
        )
        self.running += newcomers
        return scheduled

    def preempt(self, request):
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def update(self, scheduled, sampled, stopped=()):
        finished, stay = [], []
        for request in self.running:
            advanced = scheduled.get(request.request_id, 0)
            request.num_computed_tokens += advanced
            if advanced:
                self.kv.cache_blocks(request)
            tokens = sampled.get(request.request_id)
            if tokens is not None:
                if request.num_computed_tokens < request.num_tokens:
                    raise ValueError(f"{request.request_id!r} is not computed to its end, so it has no token")
                tokens = iter(tokens)
                while request.finish_reason is None and (token := next(tokens, None)) is not None:
                    request.output_token_ids += [token]
                    request.finish_reason = request.check_stop()
                if request.request_id in stopped:
                    request.finish_reason = "stop"
            (finished if request.finish_reason else stay).append(request)
        self.running[:] = stay
        for request in finished:
            self.kv.free(request)
            request.status = RequestStatus.FINISHED
        return finished

    def abort(self, request_id):
        for place in (self.running, self.waiting):
            for request in list(place):
                if request.request_id == request_id:
                    place.remove(request)
                    self.kv.free(request)
                    request.finish_reason = "abort"
                    request.status = RequestStatus.FINISHED
                    return True
        return False
