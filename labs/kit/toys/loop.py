"""The loop around `schedule_step`, without what labs 01 and 02 ask for."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from mini_engine.interfaces import KVManager, Queue
from mini_engine.request import Request, RequestStatus


class RequestQueue:
    """The waiting requests, first come first served: a deque, so that both ends cost O(1).

    A list would move every other element on `pop(0)`. In lab-03 you write the version that also
    knows priorities; the methods stay the same.
    """

    def __init__(self, requests: Iterable[Request] = ()):
        self._requests: deque[Request] = deque(requests)

    def push(self, request: Request) -> None:
        self._requests.append(request)

    def peek(self) -> Request:
        """Return the request at the front, which stays there."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the request at the front."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class StepLoop:
    """The caller of `schedule_step` in labs 01 and 02: a queue, a running list, and taking back a step.

    It never preempts: give it room for the decodes. lab-03 replaces it by a Scheduler of your own.
    """

    policy = "fcfs"

    def __init__(self, kv: KVManager, schedule_step: Callable[..., dict[str, int]], **settings: Any):
        self.kv = kv
        self.schedule_step = schedule_step
        self.settings = settings
        self.max_num_batched_tokens = settings["max_num_batched_tokens"]
        self.max_num_seqs = settings["max_num_seqs"]
        self.long_prefill_token_threshold = settings.setdefault("long_prefill_token_threshold", 0)
        self.waiting: Queue = RequestQueue()
        self.running: list[Request] = []
        self.num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        request.arrival = self.num_arrivals
        self.num_arrivals += 1
        self.waiting.push(request)

    def schedule(self) -> dict[str, int]:
        return self.schedule_step(self.waiting, self.running, self.kv, **self.settings)

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        """Take back a computed step; the finished ones give up their room at once."""
        finished = []
        for request in list(self.running):
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            for token_id in sampled.get(request.request_id, ()):
                request.output_token_ids.append(token_id)
                request.finish_reason = request.check_stop()
                if request.finish_reason:
                    self._leave(request)
                    finished.append(request)
                    break
        return finished

    def abort(self, request_id: str) -> bool:
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                request.finish_reason = "abort"
                self._leave(request)
                return True
        return False

    def _leave(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
