"""The order of requests: the policy's key, the queue that it sorts, and the victim.

fcfs orders by arrival, priority by the request's priority first. Admission and preemption use one order.
"""

import heapq
from collections.abc import Iterator
from itertools import count

from mini_engine.config import POLICIES
from mini_engine.request import Request


def policy_key(request: Request, policy: str) -> tuple[int, int]:
    """Return the sort key: smaller is served earlier. `arrival` is unique, so two requests never tie."""
    return (request.priority if policy == "priority" else 0, request.arrival)


# The key, a number that decides between equal keys of marked entries, the request.
_Entry = tuple[int, int, int, Request]


class RequestQueue:
    """The waiting requests, first in policy order on top: a min-heap over `policy_key`.

    Every method but iteration takes O(log n): a removed request stays in the heap, marked, until it
    comes to the top or half of the heap is marked. Raises ValueError for an unknown policy.
    """

    def __init__(self, policy: str = "fcfs"):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, but is {policy!r}")
        self.policy = policy
        self._heap: list[_Entry] = []
        self._entries: dict[Request, int] = {}  # the number of each request's entry; others are marked
        self._numbers = count()

    def push(self, request: Request) -> None:
        """Put a request in its place. Once more changes nothing, so a call that raised can be repeated."""
        number = self._entries[request] = next(self._numbers)
        heapq.heappush(self._heap, (*policy_key(request, self.policy), number, request))

    def peek(self) -> Request:
        """Return the first request, without taking it. Raises IndexError when the queue is empty."""
        return self._heap[0][-1]

    def pop(self) -> Request:
        """Take the first request. Raises IndexError when the queue is empty."""
        request = heapq.heappop(self._heap)[-1]
        del self._entries[request]
        self._drop_marked()
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. Raises ValueError when it is not there."""
        if request not in self._entries:
            raise ValueError(f"request {request.request_id!r} is not in the queue")
        del self._entries[request]
        if len(self._heap) > 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        self._drop_marked()

    def _drop_marked(self) -> None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_live(self, entry: _Entry) -> bool:
        *_, number, request = entry
        return self._entries.get(request) == number

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which they would be popped."""
        return (entry[-1] for entry in sorted(self._heap) if self._is_live(entry))


def pick_victim(running: list[Request], policy: str) -> Request:
    """Return the request to preempt: the last in policy order, so the newest of the least important."""
    return max(running, key=lambda request: policy_key(request, policy))
