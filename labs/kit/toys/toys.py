"""Toys with the interfaces of the real things, so that a lab's failures are its own.

`FakeKV` is KV memory with one slot a token. `ToyModel` samples a hash of what that memory really
holds. `StepLoop` is the loop around `schedule_step` with nothing in it that labs 01 and 02 ask for.
"""

import hashlib
import zlib
from collections import deque

from mini_engine.request import Request, RequestStatus, SamplingParams

VOCAB = 5000


def make_request(request_id: str, prompt: int | list[int], max_tokens: int = 4, **fields) -> Request:
    """A greedy request. `prompt` is a list of tokens, or how many of them to make up."""
    if isinstance(prompt, int):
        seed = zlib.crc32(request_id.encode())
        prompt = [(seed + 17 * i * i + i) % VOCAB for i in range(prompt)]
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, stop_token_ids=tuple(fields.pop("stop_token_ids", ()))
    )
    return Request(request_id, prompt, sampling, **fields)


def make_running(
    kv, request_id: str, prompt: int, *, outputs: int = 0, computed: int | None = None
) -> Request:
    """A request that was admitted in an earlier step and has `computed` tokens in the cache.

    By default it is a decode: all is computed but the last token.
    """
    request = make_request(request_id, prompt, max_tokens=64)
    request.output_token_ids = list(range(outputs))
    if not kv.admit(request):
        raise ValueError(f"the pool of {kv.num_blocks} slots has no room for {request_id!r}")
    request.num_computed_tokens = request.num_tokens - 1 if computed is None else computed
    request.status = RequestStatus.RUNNING
    return request


class FakeKV:
    """KV memory with one slot a token: `num_blocks` blocks of size 1, the protocol of BlockManager.

    `cached` makes a prefix hit: {"r0": 6} says that the first 6 tokens of r0 are found at admission.
    `watermark` slots stay free at admission, unless nothing runs.
    """

    block_size = 1

    def __init__(self, num_blocks: int, *, watermark: int = 0, cached: dict[str, int] | None = None):
        self.num_blocks = num_blocks
        self.watermark = watermark
        self.cached = cached or {}
        self._free = deque(range(num_blocks))
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def admit(self, request: Request) -> bool:
        """Claim room for the whole sequence as it stands and set `num_computed_tokens` to what is
        cached of it. False changes nothing."""
        if request.request_id in self._tables:
            raise ValueError(f"request {request.request_id!r} was admitted already; it holds its slots")
        reserve = self.watermark if self._tables else 0
        if request.num_tokens + reserve > self.num_free_blocks:
            return False
        hit = min(self.cached.get(request.request_id, 0), request.num_tokens - 1)
        request.num_computed_tokens = request.num_cached_tokens = hit
        self._tables[request.request_id] = self._take(request.num_tokens)
        return True

    def num_new_blocks(self, request: Request, num_new_tokens: int) -> int:
        """How many slots `allocate` would take."""
        held = len(self._tables.get(request.request_id, ()))
        return max(0, request.num_computed_tokens + num_new_tokens - held)

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make sure that `num_new_tokens` more fit. False changes nothing."""
        num_new = self.num_new_blocks(request, num_new_tokens)
        if num_new > self.num_free_blocks:
            return False
        self._tables.setdefault(request.request_id, []).extend(self._take(num_new))
        return True

    def publish(self, request: Request) -> None:
        """Nothing to publish: sharing comes in lab-06."""

    def free(self, request: Request) -> None:
        self._free.extend(self._tables.pop(request.request_id, ()))

    def block_table(self, request: Request) -> list[int]:
        return self._tables.get(request.request_id, [])

    def slot_mapping(self, request: Request, start: int, end: int) -> list[int]:
        return self.block_table(request)[start:end]

    def check(self) -> None:
        """Every slot is free or has one owner; RuntimeError otherwise."""
        slots = [*self._free, *(slot for table in self._tables.values() for slot in table)]
        if sorted(slots) != list(range(self.num_blocks)):
            raise RuntimeError(f"KV slots were lost or given out twice: {len(slots)} of {self.num_blocks}")

    def _take(self, count: int) -> list[int]:
        return [self._free.popleft() for _ in range(count)]


class ToyModel:
    """A model whose next token is a hash of the (position, token) pairs that its KV really holds.

    So a wrong position, a stale entry or a missing one changes the text, as it would with a real
    model. `forwards` counts the steps.
    """

    def __init__(self, kv):
        self.kv = kv
        self.memory: dict[int, tuple[int, int]] = {}  # slot: (position, token)
        self.forwards = 0

    def forward(self, rows: list[tuple[Request, list[int], list[int], bool]]) -> dict[str, int]:
        """Rows of (request, token_ids, positions, sample); {request_id: token} of those that sample.

        Row i of a request's chunk is written to the slot of the i-th position that is not computed.
        """
        self.forwards += 1
        for request, token_ids, positions, _ in rows:
            start = request.num_computed_tokens
            slots = self.kv.slot_mapping(request, start, start + len(token_ids))
            self.memory.update(zip(slots, zip(positions, token_ids, strict=True), strict=True))
        sampled = {}
        for request, token_ids, _, sample in rows:
            if sample:
                end = request.num_computed_tokens + len(token_ids)
                held = [self.memory.get(slot) for slot in self.kv.slot_mapping(request, 0, end)]
                digest = hashlib.blake2b(repr(held).encode(), digest_size=4).digest()
                sampled[request.request_id] = int.from_bytes(digest, "big") % VOCAB
        return sampled


class RequestQueue:
    """The waiting requests, first come first served: a deque, so that both ends cost O(1).

    A list would move every other element on `pop(0)`. In lab-03 you write the version that also
    knows priorities; the methods stay the same.
    """

    def __init__(self, requests=()):
        self._requests: deque[Request] = deque(requests)

    def push(self, request: Request) -> None:
        self._requests.append(request)

    def peek(self) -> Request:
        """The request at the front, which stays there."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the request at the front."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):
        return iter(self._requests)


class StepLoop:
    """What calls `schedule_step` in labs 01 and 02: a queue, a running list, and taking back a step.

    It never preempts: give it room for the decodes. lab-03 replaces it by a Scheduler of your own.
    """

    policy = "fcfs"

    def __init__(self, kv, schedule_step, **settings):
        self.kv = kv
        self.schedule_step = schedule_step
        self.settings = settings
        self.max_num_batched_tokens = settings["max_num_batched_tokens"]
        self.max_num_seqs = settings["max_num_seqs"]
        self.long_prefill_token_threshold = settings.setdefault("long_prefill_token_threshold", 0)
        self.waiting = RequestQueue()
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

    def update(self, scheduled: dict[str, int], sampled: dict[str, int]) -> list[Request]:
        """Take back a computed step; the finished ones give up their room at once."""
        finished = []
        for request in list(self.running):
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if request.request_id in sampled:
                request.output_token_ids.append(sampled[request.request_id])
                request.finish_reason = request.check_stop()
                if request.finish_reason:
                    self._leave(request)
                    finished.append(request)
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
