"""Finding computed blocks by their content: chained hashes of full blocks, as in vLLM's prefix caching.

What is found is decided by content and what precedes it; the hash only says where to look.
"""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from mini_engine.request import Request

HashBlock = Callable[[bytes, tuple[int, ...]], bytes]


def hash_block(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """The hash of a full block: of its tokens and, through `parent`, of all that precede them."""
    seam = len(parent).to_bytes(8, "little")  # a parent, say a salt, must not end like a token
    return hashlib.blake2b(seam + parent + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(slots=True)
class Block:
    """One block of the pool. The last four fields are set while it can be found by its content."""

    block_id: int
    ref_count: int = 0
    hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    # What precedes the block: the cache salt for a first block, else its parent's prefix_id.
    parent: str | int = ""
    prefix_id: int = -1  # names the whole content from the first token to the block's last


class PrefixCache:
    """The blocks that can be found, by hash. Holds no blocks and frees none: the manager does."""

    def __init__(self, block_size: int, hash_block: HashBlock = hash_block):
        self.block_size = block_size
        self.hash_block = hash_block
        self.num_blocks = 0
        self._blocks: dict[bytes, list[Block]] = {}
        self._num_prefixes = 0

    def find(self, request: Request, most: int) -> list[Block]:
        """The longest run of blocks, at most so many, that the sequence starts with."""
        hits: list[Block] = []
        parent: str | int = request.cache_salt
        while len(hits) < most and (block := self._lookup(request, len(hits), parent)):
            hits.append(block)
            parent = block.prefix_id
        return hits

    def publish(self, request: Request, blocks: list[Block], first: int) -> None:
        """Let `blocks`, the sequence's full ones, be found from index `first` on."""
        for index in range(first, len(blocks)):
            block = blocks[index]
            block.parent = blocks[index - 1].prefix_id if index else request.cache_salt
            twin = self._lookup(request, index, block.parent)
            if twin is None:
                self._num_prefixes += 1
            # Two requests that computed the same side by side keep a copy each, under one name.
            block.prefix_id = twin.prefix_id if twin else self._num_prefixes
            block.token_ids = self._tokens(request, index)
            block.hash = self._hash(request, index)
            self._blocks.setdefault(block.hash, []).append(block)
            self.num_blocks += 1

    def forget(self, block: Block) -> None:
        """The block's content goes: it cannot be found any more."""
        assert block.hash is not None
        blocks = self._blocks[block.hash]
        blocks.remove(block)
        if not blocks:
            del self._blocks[block.hash]
        self.num_blocks -= 1
        block.hash, block.token_ids, block.parent, block.prefix_id = None, (), "", -1

    def block_ids(self) -> set[int]:
        return {block.block_id for blocks in self._blocks.values() for block in blocks}

    def _lookup(self, request: Request, index: int, parent: str | int) -> Block | None:
        candidates = self._blocks.get(self._hash(request, index))
        if candidates:
            token_ids = self._tokens(request, index)
            for block in candidates:
                if block.parent == parent and block.token_ids == token_ids:
                    return block
        return None

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.token_ids(index * self.block_size, (index + 1) * self.block_size))

    def _hash(self, request: Request, index: int) -> bytes:
        # Kept on the request: a blocked head of the queue is looked up again every step.
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else request.cache_salt.encode()
            hashes.append(self.hash_block(parent, self._tokens(request, len(hashes))))
        return hashes[index]
