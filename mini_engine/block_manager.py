"""The KV memory: a pool of equal blocks, a block table for each request, shared prefixes.

Pure bookkeeping; the tensors are in attention.py. Kwon et al., PagedAttention (2023); sharing is
vLLM's automatic prefix caching: reference counts, least recently used out first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from mini_engine.prefix_cache import HashBlock, PrefixCache, PrefixCacheStats, hash_block
from mini_engine.renamed import alias
from mini_engine.request import Request, RequestStatus


class BlockManager:
    """The KV protocol that the scheduler speaks, over `num_blocks` blocks of `block_size` tokens.

    Admission claims room for the whole sequence, so a chunk of a prompt never has to allocate; only
    a decode that grows past its last block can run short. `watermark` blocks (default 1 %) stay free
    at admission, for the decodes that already run; none when nothing runs. Raises ValueError for sizes
    below 1 and for a watermark as large as the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        watermark: int | None = None,
        hash_block: HashBlock = hash_block,
    ):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark = int(0.01 * num_blocks) if watermark is None else watermark
        if not 0 <= self.watermark < num_blocks:
            raise ValueError(f"watermark must be 0 to {num_blocks - 1} blocks, but is {watermark}")
        self.stats = PrefixCacheStats()
        self.caches_scheduled = False
        # Copies the first num_tokens of a block into another: (source, target, num_tokens). The backend's.
        self.copy_block: Callable[[int, int, int], object] | None = None
        self._ref_cnts = [0] * num_blocks  # by block id: the number of tables that have it
        # Free blocks without content are taken first (a stack: the last freed is warmest in the
        # processor's cache), then those whose content may still be looked up, oldest first.
        self._free = list(reversed(range(num_blocks)))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._req_to_blocks: dict[str, list[int]] = {}
        self._num_cached_block: dict[str, int] = {}  # leading blocks of a table that can be found
        self._num_scheduled_block: dict[str, int] = {}  # of these, those that this step computes
        self._num_admitted_block: dict[str, int] = {}  # blocks that admission claimed
        self._cache = PrefixCache(num_blocks, block_size, hash_block)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds, cached ones included."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_cached_blocks(self) -> int:
        """The number of computed blocks that can be found by their content, in use or free."""
        return self._cache.num_blocks - sum(self._num_scheduled_block.values())

    def num_new_blocks(self, request: Request, num_new_tokens: int) -> int:
        """Return the number of blocks that `allocate` would take."""
        needed = self._blocks_for(request.num_computed_tokens + num_new_tokens)
        return max(0, needed - len(self._req_to_blocks.get(request.request_id, ())))

    def admit(self, request: Request) -> bool:
        """Claim room for the whole sequence, less the cached prefix it starts with.

        Sets `num_computed_tokens` to the length of that prefix, at most num_tokens - 1. A request with a
        sibling that has computed their prompt is forked from it. False changes nothing. Raises ValueError
        for a request that holds blocks already.
        """
        needed = min(request.num_prompt_tokens, request.num_tokens - 1)
        for sibling in request.siblings if self.copy_block else ():
            # What was found at its admission may be computed in this step only, too late to be copied.
            computed = max(needed, sibling.num_cached_tokens + 1)
            if sibling.status is RequestStatus.RUNNING and sibling.num_computed_tokens >= computed:
                return self.fork(sibling, request)
        hits = self.get_computed_blocks(request)
        return self._claim(request, hits, len(hits) * self.block_size)

    def fork(self, parent: Request, child: Request) -> bool:
        """Admit a request that has the prompt of another, which runs and has computed it.

        The full blocks of that prompt are shared. The tokens after them are copied into a block of the
        child's own, because both requests write into that block next. Sets `num_computed_tokens` to the
        tokens of the prompt, at most num_tokens - 1. False changes nothing. Raises ValueError for another
        prompt, for one that is not computed, and without `copy_block`.
        """
        if self.copy_block is None:
            raise ValueError("a fork copies a block; set copy_block, as a backend does")
        num_tokens = min(child.num_prompt_tokens, child.num_tokens - 1)
        table, num_full = self.block_table(parent), num_tokens // self.block_size
        alike = (parent.prompt_token_ids, parent.cache_salt) == (child.prompt_token_ids, child.cache_salt)
        if not alike or min(parent.num_computed_tokens, len(table) * self.block_size) < num_tokens:
            raise ValueError(
                f"request {parent.request_id!r} has not computed the prompt of {child.request_id!r}"
            )
        hits = self.get_computed_blocks(child)
        num_hits = len(hits) * self.block_size
        if num_hits >= num_tokens:  # after a preemption its outputs may be cached, too
            return self._claim(child, hits, num_hits)
        if not self._claim(child, table[:num_full], num_hits, num_tokens - num_hits):
            return False
        if num_copied := num_tokens % self.block_size:
            self.copy_block(table[num_full], self.block_table(child)[num_full], num_copied)
        return True

    def _claim(self, request: Request, shared: list[int], num_hits: int, num_forked: int = 0) -> bool:
        """Give a request the blocks that have so many of its first tokens, and new ones for the rest."""
        if request.request_id in self._req_to_blocks:
            raise ValueError(f"request {request.request_id!r} holds blocks already; free it first")
        num_new = self._blocks_for(request.num_tokens) - len(shared)
        # A free block that is itself shared cannot also be room for something new.
        room = self.num_free_blocks - sum(self._ref_cnts[block_id] == 0 for block_id in shared)
        if num_new + (self.watermark if self._req_to_blocks else 0) > room:
            return False
        for block_id in shared:
            if self._ref_cnts[block_id] == 0:
                del self._free_cached[block_id]
            self._ref_cnts[block_id] += 1
        self._req_to_blocks[request.request_id] = shared + self._get_new_blocks(num_new)
        self._num_admitted_block[request.request_id] = len(shared) + num_new
        self._num_cached_block[request.request_id] = len(shared)
        request.num_computed_tokens = request.num_cached_tokens = num_hits + num_forked
        request.num_forked_tokens = num_forked
        self._record_stats(request)
        return True

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make sure there is room for `num_new_tokens` more. False changes nothing."""
        num_new = self.num_new_blocks(request, num_new_tokens)
        if num_new > self.num_free_blocks:
            return False
        if num_new:
            self._req_to_blocks.setdefault(request.request_id, []).extend(self._get_new_blocks(num_new))
        return True

    def shrink(self, request: Request) -> None:
        """Give back the blocks that admission did not claim and that no computed token needs."""
        admitted, table = self._num_admitted_block.get(request.request_id, 0), self.block_table(request)
        needed = max(self._blocks_for(request.num_computed_tokens), admitted)
        self._free_blocks(table[needed:])
        del table[needed:]

    def unadmit(self, request: Request) -> None:
        """Undo `admit`: give back its blocks, and do not count it in the statistics."""
        if request.request_id in self._req_to_blocks:
            self._record_stats(request, -1)
            self.uncache_blocks(request)
            self.free(request)
            request.num_computed_tokens = request.num_cached_tokens = request.num_forked_tokens = 0

    def evict_blocks(self, request: Request) -> list[int]:
        """Remove what the request computed from the prefix cache, because it is wrong. Return its blocks
        that no other request holds."""
        own = [i for i in self.block_table(request) if self._ref_cnts[i] == 1]
        for block_id in own:
            self._cache.evict(block_id)
        return own

    def free(self, request: Request) -> None:
        """Give back all blocks of the request; a no-op if it holds none."""
        self._num_cached_block.pop(request.request_id, None)
        self._num_admitted_block.pop(request.request_id, None)
        self._free_blocks(self._req_to_blocks.pop(request.request_id, ()))

    def _free_blocks(self, block_ids: Sequence[int]) -> None:
        # Last block first: of a cached sequence the tail is evicted before the head it needs.
        ref_cnts, hashes = self._ref_cnts, self._cache.block_hashes
        for block_id in reversed(block_ids):
            ref_cnts[block_id] -= 1
            if ref_cnts[block_id] == 0:
                if hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._free_cached[block_id] = None

    def block_table(self, request: Request) -> list[int]:
        """Return the request's block ids, in order of position. Do not change the list."""
        return self._req_to_blocks.get(request.request_id, [])

    def slot_mapping(self, request: Request, start: int, end: int) -> list[int]:
        """Return the pool slots of the positions [start, end): block id times block_size plus offset.

        Raises ValueError for positions beyond the request's blocks.
        """
        table, size = self.block_table(request), self.block_size
        if not 0 <= start <= end <= len(table) * size:
            raise ValueError(
                f"request {request.request_id!r} has room for positions 0 to {len(table) * size - 1}, "
                f"but [{start}, {end}) was asked for"
            )
        return [table[p // size] * size + p % size for p in range(start, end)]

    # ------------------------------------------------------------------------- the prefix cache

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Return the longest run of cached blocks that the sequence starts with.

        At most (num_tokens - 1) // block_size blocks, so that a token is left to compute: without
        one there are no logits to sample from.
        """
        if not self.enable_prefix_caching:
            return []
        return self._cache.find_longest_cache_hit(request, (request.num_tokens - 1) // self.block_size)

    def cache_blocks(self, request: Request) -> None:
        """After a step: let the full blocks whose keys and values are computed be found."""
        self._cache_first(request, request.num_computed_tokens)
        self._num_scheduled_block.pop(request.request_id, None)

    def cache_scheduled_blocks(self, request: Request, num_new_tokens: int) -> None:
        """While a step is decided, if `caches_scheduled`: let requests admitted behind this one find the full
        blocks that it computes in the step, as in vLLM. Its drafts are never found."""
        if self.caches_scheduled:
            end = min(request.num_computed_tokens + num_new_tokens, request.num_tokens)
            self._num_scheduled_block[request.request_id] = self._cache_first(request, end)

    def _cache_first(self, request: Request, num_tokens: int) -> int:
        """Let the full blocks of its first tokens be found. Return how many could not be found before."""
        full, first = num_tokens // self.block_size, self._num_cached_block.get(request.request_id, 0)
        if full <= first or not self.enable_prefix_caching:
            return 0
        self._cache.cache_full_blocks(request, self._req_to_blocks[request.request_id], first, full)
        self._num_cached_block[request.request_id] = full
        return full - first

    def uncache_blocks(self, request: Request) -> None:
        """Let no block be found that the request does not count as computed."""
        self._num_scheduled_block.pop(request.request_id, None)
        if table := self.block_table(request):
            keep = request.num_computed_tokens // self.block_size
            cached = self._num_cached_block.get(request.request_id, 0)
            for block_id in table[keep:cached]:
                self._cache.evict(block_id)
            self._num_cached_block[request.request_id] = min(keep, cached)
            del request.block_hashes[keep:]

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content, as after a change of weights; False while blocks are held."""
        if self._req_to_blocks:
            return False
        for block_id in self._free_cached:
            self._cache.evict(block_id)
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self.stats = PrefixCacheStats()
        return True

    find_prefix, publish = alias("get_computed_blocks"), alias("cache_blocks")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _get_new_blocks(self, num_blocks: int) -> list[int]:
        taken = []
        for _ in range(num_blocks):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._free_cached.popitem(last=False)
                self._cache.evict(block_id)
            self._ref_cnts[block_id] = 1
            taken.append(block_id)
        return taken

    def _record_stats(self, request: Request, times: int = 1) -> None:
        if self.enable_prefix_caching:
            self.stats.record(request, times)

    def check(self) -> None:
        """Raise RuntimeError, naming what is wrong, if an invariant of the pool is broken."""

        def require(holds: bool, what: str) -> None:
            if not holds:
                raise RuntimeError(f"block manager: {what}")

        owners = [0] * self.num_blocks
        for request_id, table in self._req_to_blocks.items():
            require(len(set(table)) == len(table), f"request {request_id!r} holds a block twice: {table}")
            for block_id in table:
                owners[block_id] += 1
        free = [*self._free, *self._free_cached]
        require(len(set(free)) == len(free), "a block is free twice")
        for i, (count, held) in enumerate(zip(self._ref_cnts, owners, strict=True)):
            require(count == held, f"block {i} counts {count} of {held} owners")
        require(set(free) == {i for i, n in enumerate(owners) if n == 0}, "free and unowned blocks differ")
        require(
            all(self._cache.block_hashes[i] is None for i in self._free), "an uncached free block has a hash"
        )
        require(self._cache.is_consistent(), "the hash map is stale, or the count of cached blocks is off")
        kept = set(self._free_cached) <= self._cache.block_ids()
        require(kept, "a free block without content is kept as cached")
