"""Computed blocks, found by their content: chained hashes of full blocks, as in vLLM.

A block is found if its content and all that precedes it are equal; the hash only says where to look.
"""

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

from mini_engine.request import Request

HashBlock = Callable[[bytes, tuple[int, ...]], bytes]

_as_bytes = Struct(">q").pack


def hash_block(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """Return the hash of a full block: of its tokens and, through `parent`, of all before them.

    It is fast, and prompts can be made that collide: these are found more slowly, and never wrongly.
    """
    # Python hashes numbers alike in every run. The 1 in front keeps leading zeros of a parent, say a salt.
    return _as_bytes(hash((int.from_bytes(b"\1" + parent, "big"), token_ids)))


@dataclass
class PrefixCacheStats:
    """Tokens looked up and found, counted once for each admission; preempted requests separately."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, request: Request, times: int) -> None:
        """Count an admission so many times: once, or -1 when it is undone."""
        num_hits = request.num_cached_tokens - request.num_forked_tokens
        if request.num_preemptions:
            self.preempted_queries += times * request.num_tokens
            self.preempted_hits += times * num_hits
        else:
            self.queries += times * request.num_tokens
            self.hits += times * num_hits


class PrefixCache:
    """The blocks that can be found, by hash. The manager holds and frees them.

    A block is its number: its index in each list, its key in `_prefixes`. An entry is valid while
    `block_hashes` has a hash at that index.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_block: HashBlock = hash_block):
        self.block_size = block_size
        self.hash_block = hash_block
        self.num_blocks = 0  # that can be found
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self._token_ids: list[tuple[int, ...]] = [()] * num_blocks
        # A prefix number names the whole content from the first token to the block's last. What precedes
        # the block is then its parent's number, or the cache salt of a first block.
        self._prefixes: dict[int, int] = {}
        self._parents: list[str | int] = [""] * num_blocks
        self._num_prefixes = 0
        self._named: dict[bytes, tuple[int, ...]] = {}  # by hash; rarely more than one

    def find_longest_cache_hit(self, request: Request, most: int) -> list[int]:
        """Return the longest run of blocks, at most `most`, that the sequence starts with."""
        hits: list[int] = []
        parent: str | int = request.cache_salt
        size = self.block_size
        for index in range(most):
            token_ids = tuple(request.token_ids(index * size, (index + 1) * size))
            named = self._named.get(self._hash(request, index, token_ids), ())
            block_id = self._match(named, token_ids, parent)
            if block_id is None:
                break
            hits.append(block_id)
            parent = self._prefixes[block_id]
        return hits

    def cache_full_blocks(self, request: Request, table: list[int], first: int, end: int) -> None:
        """Let the blocks `table[first:end]` be found. They are full, and those before them can be found."""
        parent = self._prefixes[table[first - 1]] if first else request.cache_salt
        size = self.block_size
        all_ids = tuple(request.token_ids(first * size, end * size))
        parts = [all_ids[at : at + size] for at in range(0, len(all_ids), size)]
        # Hashing may raise, so it comes before the first change.
        hashes = [self._hash(request, first + i, token_ids) for i, token_ids in enumerate(parts)]
        for block_id, token_ids, hash in zip(table[first:end], parts, hashes, strict=True):
            named = self._named.get(hash, ())
            twin = self._match(named, token_ids, parent)
            self._named[hash] = named + (block_id,)
            self.block_hashes[block_id] = hash
            self._token_ids[block_id] = token_ids
            self._parents[block_id] = parent
            if twin is None:
                self._num_prefixes += 1
            # Two requests that computed the same at the same time keep a copy each, under one prefix number.
            parent = self._num_prefixes if twin is None else self._prefixes[twin]
            self._prefixes[block_id] = parent
        self.num_blocks += end - first

    def evict(self, block_id: int) -> None:
        """Let the block be found no more: its content is about to be overwritten, or wrong."""
        hash = self.block_hashes[block_id]
        if hash is None:
            return
        if others := tuple(other for other in self._named.pop(hash) if other != block_id):
            self._named[hash] = others
        self.block_hashes[block_id] = None
        self.num_blocks -= 1

    def block_ids(self) -> set[int]:
        return {block_id for named in self._named.values() for block_id in named}

    def is_consistent(self) -> bool:
        """Whether hashes, map and count name the same blocks."""
        hashed = {i for i, name in enumerate(self.block_hashes) if name is not None}
        return hashed == self.block_ids() and self.num_blocks == len(hashed)

    def _match(self, named: tuple[int, ...], token_ids: tuple[int, ...], parent: str | int) -> int | None:
        """Return the block, among those that share a hash, that has this content after this parent."""
        for block_id in named:
            if self._parents[block_id] == parent and self._token_ids[block_id] == token_ids:
                return block_id
        return None

    def _hash(self, request: Request, index: int, token_ids: tuple[int, ...]) -> bytes:
        """Return the hash of a full block of the sequence. The chain is kept on the request, because a
        blocked head of the queue is looked up again in every step."""
        hashes = request.block_hashes
        if index == len(hashes):
            parent = hashes[-1] if hashes else request.cache_salt.encode()
            hashes.append(self.hash_block(parent, token_ids))
        return hashes[index]
