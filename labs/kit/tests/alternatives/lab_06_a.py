"""lab-06 in another shape: no hashes at all. A cached block is filed under its whole content.

The annotations of its dataclass are text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


def hash_block(parent, token_ids):
    return hashlib.blake2b(repr((parent, tuple(token_ids))).encode()).digest()


@dataclass
class Block:
    users: set = field(default_factory=set)
    content: tuple | None = None
    last_used: float = 0


class BlockManager:
    def __init__(
        self, num_blocks, block_size, *, enable_prefix_caching=True, watermark=None, hash_block=hash_block
    ):
        if min(num_blocks, block_size) < 1 or not 0 <= (watermark or 0) < num_blocks:
            raise ValueError("this pool makes no sense")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark = int(0.01 * num_blocks) if watermark is None else watermark
        self.blocks = {i: Block() for i in range(num_blocks)}
        self.tables = {}
        self.time = 0

    @property
    def num_free_blocks(self):
        return sum(not block.users for block in self.blocks.values())

    @property
    def num_cached_blocks(self):
        return sum(block.content is not None for block in self.blocks.values())

    def num_new_blocks(self, request, num_new_tokens):
        needed = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, needed - len(self.block_table(request)))

    def allocate(self, request, num_new_tokens):
        num_new = self.num_new_blocks(request, num_new_tokens)
        if num_new > self.num_free_blocks:
            return False
        if num_new:
            self._take(request, num_new)
        return True

    def block_table(self, request):
        return self.tables.get(request.request_id, [])

    def slot_mapping(self, request, start, end):
        table, size = self.block_table(request), self.block_size
        if start < 0 or end > len(table) * size:
            raise ValueError(f"{request.request_id} has no room at {start} to {end}")
        return [table[p // size] * size + p % size for p in range(start, end)]

    def get_computed_blocks(self, request):
        found, where = [], {block.content: i for i, block in self.blocks.items() if block.content}
        last = (request.num_tokens - 1) // self.block_size if self.enable_prefix_caching else 0
        while len(found) < last and self._content(request, len(found)) in where:
            found.append(self.blocks[where[self._content(request, len(found))]])
        return found

    def cache_blocks(self, request):
        if self.enable_prefix_caching:
            for index in range(request.num_computed_tokens // self.block_size):
                self.blocks[self.tables[request.request_id][index]].content = self._content(request, index)

    def admit(self, request):
        if request.request_id in self.tables:
            raise ValueError(f"{request.request_id} is here already")
        hits = self.get_computed_blocks(request)
        num_new = -(-request.num_tokens // self.block_size) - len(hits)
        for block in hits:
            block.users.add(request.request_id)
        if num_new + (self.watermark if self.tables else 0) > self.num_free_blocks:
            for block in hits:
                block.users.discard(request.request_id)
            return False
        self.tables[request.request_id] = [i for hit in hits for i, b in self.blocks.items() if b is hit]
        self._take(request, num_new)
        request.num_computed_tokens = request.num_cached_tokens = len(hits) * self.block_size
        return True

    def free(self, request):
        for i in reversed(self.tables.pop(request.request_id, [])):
            self.time += 1
            self.blocks[i].users.discard(request.request_id)
            self.blocks[i].last_used = self.time

    def reset_prefix_cache(self):
        for block in () if self.tables else self.blocks.values():
            block.content = None
        return not self.tables

    def check(self):
        for i, block in self.blocks.items():
            if block.users != {name for name, table in self.tables.items() if i in table}:
                raise RuntimeError(f"the users of block {i} are wrong")

    def _content(self, request, index):
        return (request.cache_salt, tuple(request.token_ids(0, (index + 1) * self.block_size)))

    def _take(self, request, num_blocks):
        for _ in range(num_blocks):
            free = [i for i, block in self.blocks.items() if not block.users]
            i = min(free, key=lambda i: (self.blocks[i].content is not None, self.blocks[i].last_used))
            self.blocks[i] = Block({request.request_id})
            self.tables.setdefault(request.request_id, []).append(i)
