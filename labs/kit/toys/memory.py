"""KV memory with one slot a token, and a model whose tokens show what it holds, right or wrong."""

import hashlib
from collections import deque

from labs.kit.toys.requests import VOCAB
from mini_engine.interfaces import KVManager
from mini_engine.renamed import alias
from mini_engine.request import Request


class FakeKV:
    """KV memory with one slot a token: `num_blocks` blocks of size 1, the protocol of BlockManager.

    `cached` makes a prefix hit: {"r0": 6} says that the first 6 tokens of r0 are found at admission.
    `watermark` slots stay free at admission, unless nothing runs.
    """

    block_size = 1
    enable_prefix_caching = False
    num_cached_blocks = 0

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
        """Return how many slots `allocate` would take."""
        held = len(self._tables.get(request.request_id, ()))
        return max(0, request.num_computed_tokens + num_new_tokens - held)

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make sure that `num_new_tokens` more fit. False changes nothing."""
        num_new = self.num_new_blocks(request, num_new_tokens)
        if num_new > self.num_free_blocks:
            return False
        self._tables.setdefault(request.request_id, []).extend(self._take(num_new))
        return True

    def cache_blocks(self, request: Request) -> None:
        """Nothing to cache: sharing comes in lab-06."""

    publish = alias("cache_blocks")

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

    So a wrong position, a stale entry or a missing one changes the text, as it would with a real model.
    """

    def __init__(self, kv: KVManager):
        self.kv = kv
        self.memory: dict[int, tuple[int, int]] = {}  # slot: (position, token)

    def forward(self, rows: list[tuple[Request, list[int], list[int], bool]]) -> dict[str, list[int]]:
        """Rows of (request, token_ids, positions, sample); {request_id: [token]} of those that sample.

        Row i of a request's chunk is written to the slot of the i-th position that is not computed.
        """
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
                sampled[request.request_id] = [int.from_bytes(digest, "big") % VOCAB]
        return sampled
