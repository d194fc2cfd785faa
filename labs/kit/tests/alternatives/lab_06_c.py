"""lab-06 in another shape: one queue of free blocks, as in vLLM, names that are kept for the next step, and
annotations that are text."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass


def hash_block(parent, token_ids):
    digest = hashlib.blake2b(b"%d " % len(parent) + parent, digest_size=16)
    for token_id in token_ids:
        digest.update(b" %d" % token_id)
    return digest.digest()


@dataclass
class Block:
    block_id: int
    ref_count: int = 0
    hash: bytes | None = None
    content: tuple | None = None


class BlockManager:
    """Empty blocks stand in front of the queue, cached ones behind them in the order of their last use."""

    def __init__(
        self, num_blocks, block_size, *, enable_prefix_caching=True, watermark=None, hash_block=hash_block
    ):
        watermark = num_blocks // 100 if watermark is None else watermark
        if num_blocks < 1 or block_size < 1 or watermark < 0 or watermark >= num_blocks:
            raise ValueError(f"no pool: {num_blocks} blocks of {block_size}, watermark {watermark}")
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        self.enable_prefix_caching, self.hash_block = enable_prefix_caching, hash_block
        self.queue = OrderedDict((i, Block(i)) for i in range(num_blocks))  # of the free blocks
        self.tables: dict[str, list[Block]] = {}
        self.cached: dict[bytes, OrderedDict] = {}  # hash: {block id: Block}
        self.names: dict[tuple, bytes] = {}  # (salt, all tokens up to the end of a block): its hash

    @property
    def num_free_blocks(self):
        return len(self.queue)

    @property
    def num_cached_blocks(self):
        return sum(map(len, self.cached.values()))

    def num_new_blocks(self, request, num_new_tokens):
        wanted = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, wanted - len(self.tables.get(request.request_id, ())))

    def allocate(self, request, num_new_tokens):
        count = self.num_new_blocks(request, num_new_tokens)
        if count <= len(self.queue):
            if count:
                self.tables.setdefault(request.request_id, []).extend(self.take(count))
            return True
        return False

    def block_table(self, request):
        return [block.block_id for block in self.tables.get(request.request_id, ())]

    def slot_mapping(self, request, start, end):
        table, size = self.block_table(request), self.block_size
        if not 0 <= start <= end <= len(table) * size:
            raise ValueError(f"{request.request_id} has no slots for {start} to {end}")
        return [table[p // size] * size + p % size for p in range(start, end)]

    def contents(self, request, num_blocks):
        """The hash and the content of each of the first blocks, one after the other."""
        parent = request.cache_salt.encode()
        for end in range(self.block_size, num_blocks * self.block_size + 1, self.block_size):
            content = request.cache_salt, tuple(request.token_ids(0, end))
            if content not in self.names:
                self.names[content] = self.hash_block(parent, content[1][-self.block_size :])
            parent = self.names[content]
            yield parent, content

    def get_computed_blocks(self, request):
        hits = []
        if self.enable_prefix_caching:
            for name, content in self.contents(request, (request.num_tokens - 1) // self.block_size):
                equal = [b for b in self.cached.get(name, {}).values() if b.content == content]
                if not equal:
                    break
                hits.append(equal[-1])
        return hits

    def cache_blocks(self, request):
        if self.enable_prefix_caching:
            table, full = self.tables[request.request_id], request.num_computed_tokens // self.block_size
            for block, (name, content) in zip(table, self.contents(request, full), strict=False):
                if block.hash is None:
                    block.hash, block.content = name, content
                    self.cached.setdefault(name, OrderedDict())[block.block_id] = block

    def admit(self, request):
        if request.request_id in self.tables:
            raise ValueError(f"{request.request_id} is in the pool already")
        hits = self.get_computed_blocks(request)
        count = -(-request.num_tokens // self.block_size) - len(hits)
        others = len(self.queue.keys() - {block.block_id for block in hits})
        if others < count + (self.watermark if self.tables else 0):
            return False
        for block in hits:
            self.queue.pop(block.block_id, None)
            block.ref_count += 1
        self.tables[request.request_id] = hits + self.take(count)
        request.num_computed_tokens = request.num_cached_tokens = len(hits) * self.block_size
        return True

    def take(self, count):
        taken = [self.queue.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            block.ref_count = 1
            self.forget(block)
        return taken

    def forget(self, block):
        if block.hash is not None:
            copies = self.cached[block.hash]
            del copies[block.block_id]
            if not copies:
                del self.cached[block.hash]
            block.hash = block.content = None

    def free(self, request):
        for block in reversed(self.tables.pop(request.request_id, [])):
            block.ref_count -= 1
            if not block.ref_count:
                self.queue[block.block_id] = block
                self.queue.move_to_end(block.block_id, last=block.hash is not None)

    def reset_prefix_cache(self):
        if not self.tables:
            for block in self.queue.values():
                self.forget(block)
        return not self.tables

    def check(self):
        held = {block.block_id for table in self.tables.values() for block in table}
        if held & self.queue.keys() or len(held) + len(self.queue) != self.num_blocks:
            raise RuntimeError("a block is held and free, or lost")
