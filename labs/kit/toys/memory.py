"""KV memory with one slot a token: what admission and room are about, and nothing more."""

from collections import deque

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
