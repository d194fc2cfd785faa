"""A third right lab-05: free blocks linked through an array, and one attention call over all rows."""

from dataclasses import dataclass, field


@dataclass
class Table:
    blocks: list = field(default_factory=list)


class BlockManager:
    """next_free[b] is the free block behind b; `head` is the first, -1 the end of the chain."""

    def __init__(self, num_blocks, block_size, *, watermark=None):
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size start at 1")
        if watermark is None:
            watermark = num_blocks // 100
        if watermark not in range(num_blocks):
            raise ValueError("watermark must be smaller than the pool")
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        self.next_free = [*range(1, num_blocks), -1]
        self.head = 0
        self._num_free = num_blocks
        self.tables = {}

    num_free_blocks = property(lambda self: self._num_free)

    def num_new_blocks(self, request, num_new_tokens):
        room = len(self.block_table(request)) * self.block_size
        missing = request.num_computed_tokens + num_new_tokens - room
        return (missing + self.block_size - 1) // self.block_size if missing > 0 else 0

    def _give(self, request, count):
        if not count:
            return
        table = self.tables.setdefault(request.request_id, Table())
        for _ in range(count):
            block, self.head = self.head, self.next_free[self.head]
            table.blocks.append(block)
        self._num_free -= count

    def admit(self, request):
        if request.request_id in self.tables:
            raise ValueError(f"request {request.request_id} was admitted before")
        count = (request.num_tokens + self.block_size - 1) // self.block_size
        if self.tables:
            if count > self._num_free - self.watermark:
                return False
        elif count > self._num_free:
            return False
        self._give(request, count)
        request.num_computed_tokens = 0
        return True

    def allocate(self, request, num_new_tokens):
        count = self.num_new_blocks(request, num_new_tokens)
        if count <= self._num_free:
            self._give(request, count)
            return True
        return False

    def free(self, request):
        table = self.tables.pop(request.request_id, None)
        if table is None:
            return
        for block in table.blocks:
            self.next_free[block], self.head = self.head, block
        self._num_free += len(table.blocks)

    def cache_blocks(self, request):
        return None

    def block_table(self, request):
        table = self.tables.get(request.request_id)
        return table.blocks if table else []

    def slot_mapping(self, request, start, end):
        table = self.block_table(request)
        if start < 0 or end < start or end > self.block_size * len(table):
            raise ValueError(f"no room for positions {start}..{end} of request {request.request_id}")
        slots = []
        for position in range(start, end):
            page, offset = divmod(position, self.block_size)
            slots.append(table[page] * self.block_size + offset)
        return slots


def write_kv(k_cache, v_cache, slot_mapping, k, v):
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def paged_attention(q, k_cache, v_cache, batch):
    """All rows at once over the whole pool; a mask says which slot is whose, and at which position."""
    import torch

    from mini_engine.model import sdpa

    size = batch.block_size
    num_slots = k_cache.shape[0] * size
    mask = torch.zeros(len(q), num_slots, dtype=torch.bool)
    row = 0
    for request, count in enumerate(batch.query_lens):
        for _ in range(count):
            seen = torch.arange(int(batch.positions[row]) + 1)
            mask[row, batch.block_tables[request, seen // size] * size + seen % size] = True
            row += 1
    return sdpa(q[None], k_cache.flatten(0, 1)[None], v_cache.flatten(0, 1)[None], mask)[0]
