"""lab-06 in another shape: parents are named by number instead of by all their tokens, as the engine does it,
and a block keeps what it held until it is really written over."""

import hashlib
from collections import deque

from mini_engine.block_manager import BlockManager as EngineBlockManager


def hash_block(parent, token_ids):
    return hashlib.sha1(hashlib.sha1(parent).digest() + ",".join(map(str, token_ids)).encode()).digest()


class BlockManager(EngineBlockManager):
    """The engine's books with a queue of free blocks in place of its stack."""

    def __init__(self, num_blocks, block_size, **settings):
        super().__init__(num_blocks, block_size, **{"hash_block": hash_block} | settings)
        self._free = deque(range(num_blocks))

    def _get_new_blocks(self, num_blocks):
        taken = []
        for _ in range(num_blocks):
            if not self._free:
                oldest, _ = self._free_cached.popitem(last=False)
                self._cache.evict(oldest)
                self._free.append(oldest)
            block_id = self._free.popleft()
            self._ref_cnts[block_id] = 1
            taken.append(block_id)
        return taken


__all__ = ["BlockManager", "hash_block"]
