"""lab-03, preemption: the reference, written to be read."""

import heapq

from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp, schedule_step  # yours from lab-01 and lab-02 fit in their place

POLICIES = ("fcfs", "priority")


def policy_key(request, policy):
    """Return the sort key of a request: the one with the smaller key is served earlier.

    fcfs looks at `arrival` alone. priority looks at `priority` first (0 is the most important) and
    breaks ties by `arrival`. An arrival is a sequence number, so two requests never have equal keys.
    """
    return (request.priority if policy == "priority" else 0, request.arrival)


def pick_victim(running, policy):
    """The request to preempt: the last in policy order: the newest (of the least important)."""
    # Served last, so it gives way first: one order for both. The newest has the least to recompute.
    return max(running, key=lambda request: policy_key(request, policy))


class RequestQueue:
    """Given: the waiting requests, the first in policy order at the front: a min-heap (see heapq).

    It has the methods of lab-01's queue, and sorts by your policy_key.
    """

    def __init__(self, policy="fcfs"):
        """Start empty. Raise a ValueError that names the policy if it is not one of POLICIES."""
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, but is {policy!r}")
        self.policy = policy
        self._heap = []

    def push(self, request):
        """Put a request into its place. What it is pushed with (arrival, priority) does not change."""
        heapq.heappush(self._heap, (policy_key(request, self.policy), request))

    def peek(self):
        """The request at the front, which stays there."""
        return self._heap[0][1]

    def pop(self):
        """Take the request at the front."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request):
        """Take this request out, wherever it is; the others keep their order."""
        self._heap.remove((policy_key(request, self.policy), request))
        heapq.heapify(self._heap)  # the hole has broken the heap

    def __len__(self):
        """How many wait. It gives the queue its truth value, too."""
        return len(self._heap)

    def __iter__(self):
        """All waiting requests in the order in which they would be popped; nothing is taken."""
        # sorted, not the heap as it lies: only the first element of a heap is in its place.
        return (request for _, request in sorted(self._heap, key=lambda item: item[0]))


class Scheduler:
    """The queue, the running set, and what happens to them between two forward passes.

    `waiting` and `running` alone say where a request is: schedule_step moves it from one to the other.
    `running` is kept in admission order, which is the row order of a step. `kv` is any memory with
    admit, allocate, num_new_blocks, cache_blocks, free, num_blocks, num_free_blocks and block_size.
    """

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
        """Given. Each running request needs a token every step: more seqs than budget is refused."""
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs must be between 1 and max_num_batched_tokens, but is {max_num_seqs} "
                f"with a budget of {max_num_batched_tokens}"
            )
        self.kv = kv
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.schedule_step = schedule_step
        self.clamp = clamp
        self.waiting = RequestQueue(policy)
        self.running = []
        self.num_arrivals = 0

    @property
    def has_work(self):
        """Given: whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def make_room(self):
        """See to it that every running request can compute a token; True if one had to go for it.

        kv.num_new_blocks(request, 1) says how many blocks a request would take for one token more
        (none, while it computes what admission has claimed). As long as all running requests
        together would take more than kv.num_free_blocks, preempt a victim; then count again.
        """
        made_room = False
        while sum(self.kv.num_new_blocks(r, 1) for r in self.running) > self.kv.num_free_blocks:
            self.preempt(pick_victim(self.running, self.policy))
            made_room = True
        return made_room

    def preempt(self, request):
        """Send a running request back to the queue, to be recomputed later.

        It leaves running and gives its room back (kv.free). num_computed_tokens is 0 again,
        num_preemptions counts up, the status is RequestStatus.WAITING. Outputs and arrival stay as
        they are.
        """
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        # Its old arrival puts it ahead of all that came later: nothing more is needed for that.
        self.waiting.push(request)

    def schedule(self):
        """Decide the next step: {request_id: number of tokens}, in row order.

        1. Make room (make_room).
        2. Call self.schedule_step(waiting, running, kv, max_num_batched_tokens=...,
           max_num_seqs=..., long_prefill_token_threshold=..., clamp=...) and return what it says.
           If room had to be made, hand it an empty queue, so that none is admitted in this step.
        """
        made_room = self.make_room()
        # The room is for those that stay; a request that came in now would take it from them again.
        waiting = RequestQueue(self.policy) if made_room else self.waiting
        return self.schedule_step(
            waiting,
            self.running,
            self.kv,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            clamp=self.clamp,
        )

    def add(self, request):
        """Queue a new request, or refuse it with a ValueError that names it.

        1. Refuse an id that a waiting or running request has already.
        2. Refuse a request that could not finish even alone. It needs room for prompt + max_tokens - 1
           tokens (the last token is sampled, but never computed), and at least for its prompt, however
           small max_tokens is. The whole pool has room for num_blocks * block_size.
        3. request.max_tokens None means as far as the pool goes: write that number into it. It is the
           room of the whole pool + 1 - prompt.
        4. Set request.arrival to the number of requests that were taken before (self.num_arrivals),
           count this one, and push it to the queue.

        A refusal leaves no trace: the request is as it was, and no number is used up.
        """
        if any(other.request_id == request.request_id for other in (*self.running, *self.waiting)):
            raise ValueError(f"request id {request.request_id!r} is in use by a request that is not finished")
        longest = self.kv.num_blocks * self.kv.block_size + 1 - request.num_prompt_tokens
        max_tokens = longest if request.max_tokens is None else request.max_tokens
        if max(max_tokens, 1) > longest:
            raise ValueError(
                f"request {request.request_id!r} could never finish: prompt {request.num_prompt_tokens} + "
                f"max_tokens {max(max_tokens, 1)} - 1 is more than the pool of {self.kv.num_blocks} blocks "
                f"of {self.kv.block_size} holds; shorten it or enlarge the pool"
            )
        request.max_tokens = max_tokens
        request.arrival = self.num_arrivals
        self.num_arrivals += 1
        self.waiting.push(request)

    def update(self, scheduled, sampled, stopped=()):
        """Take back a computed step; return a new list of the requests that finished in it, in row order.

        scheduled: what schedule() returned. sampled: {request_id: [tokens]} of those that reached
        num_tokens; one token each here (drafts give several). stopped: ids of requests whose text
        has reached a stop string. All three are the caller's: leave them as they are. For each running
        request that was scheduled (one aborted meanwhile is in both dicts, but runs no more):

        1. Advance num_computed_tokens by its number of tokens, then kv.cache_blocks(request).
        2. If tokens were sampled for it: should it still have new tokens, the chunk was a partial
           one, and they mean nothing: raise a ValueError that names the request, and append none
           of them (what becomes of the other rows is open: the step is lost). Otherwise append token
           after token to output_token_ids, and after each set finish_reason to
           request.check_stop(); what follows a stop is dropped.
        3. If its id is in stopped, the finish_reason is "stop", whatever check_stop() has said.
        4. If there is a finish_reason, it leaves running, gives its room back, and its status is
           RequestStatus.FINISHED.
        """
        finished = []
        for request in list(self.running):  # a copy, because the finished leave the list on the way
            if request.request_id not in scheduled:
                continue
            request.num_computed_tokens += scheduled[request.request_id]
            self.kv.cache_blocks(request)
            if request.request_id not in sampled:
                continue
            if request.num_new_tokens:
                raise ValueError(
                    f"request {request.request_id!r} got a token, but has {request.num_new_tokens} tokens "
                    "still to compute; only a chunk that ends the sequence is sampled"
                )
            for token_id in sampled[request.request_id]:
                request.output_token_ids.append(token_id)
                request.finish_reason = request.check_stop()
                if request.finish_reason:
                    break
            if request.request_id in stopped:
                request.finish_reason = "stop"
            if request.finish_reason:
                self.running.remove(request)
                self.kv.free(request)
                request.status = RequestStatus.FINISHED
                finished.append(request)
        return finished

    def abort(self, request_id):
        """Given: drop a request, wherever it is: True. False if no request of this id waits or runs."""
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                is_running = request.status is RequestStatus.RUNNING
                (self.running if is_running else self.waiting).remove(request)
                self.kv.free(request)
                request.finish_reason = "abort"
                request.status = RequestStatus.FINISHED
                return True
        return False
