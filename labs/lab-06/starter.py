"""lab-06, prefix cache: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-06     Stuck? python -m labs hint lab-06
"""

from collections import OrderedDict
from dataclasses import dataclass


def hash_block(parent, token_ids):
    """The name of a full block: bytes that depend on its tokens and on all that comes before them.

    parent: the hash of the block before, as bytes (for a first block: the request's cache salt, of
    any length). token_ids: a tuple of ints. The same input gives the same bytes in every run of
    Python, which the built-in hash() of strings does not promise; hashlib has what you need.

    Mind the seams. Between numbers: (1, 23) and (12, 3) are different blocks. Between parent and
    tokens: a parent whose last bytes look like a token must not pass for that token.
    """
    raise NotImplementedError("lab-06: hash_block is not written yet")


@dataclass
class Block:
    """One block of the pool. hash and content are None as long as it cannot be found."""

    block_id: int
    ref_count: int = 0  # requests that hold it
    hash: bytes | None = None
    content: tuple | None = None  # (cache salt, all tokens from the first to the block's last)


class BlockManager:
    """lab-05's block manager, with a memory for what its blocks hold.

    A block is in one of three places: in a table (or several), in `free_blocks` (free, holds
    nothing that could be asked for), or in `free_cached` (free, but it can still be found).
    """

    def __init__(
        self, num_blocks, block_size, *, enable_prefix_caching=True, watermark=None, hash_block=hash_block
    ):
        """Given. watermark blocks stay free at admission (default 1 %), unless nothing runs."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark = num_blocks // 100 if watermark is None else watermark
        if not 0 <= self.watermark < num_blocks:
            raise ValueError(f"watermark must be 0 to {num_blocks - 1} blocks, but is {watermark}")
        self.hash_block = hash_block
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_blocks = list(reversed(range(num_blocks)))  # ids; the next one is taken off the end
        self.free_cached = OrderedDict()  # id: None, the least recently used first
        self.tables = {}  # request_id: block ids, in order of position
        self.cached = {}  # hash: list of Blocks; rarely more than one

    @property
    def num_free_blocks(self):
        """Given: a cached block that no request holds is free, too."""
        return len(self.free_blocks) + len(self.free_cached)

    @property
    def num_cached_blocks(self):
        """Given: blocks that can be found, held or free."""
        return sum(len(blocks) for blocks in self.cached.values())

    def blocks_for(self, num_tokens):
        """Given: how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def block_tokens(self, request, index):
        """Given: the tokens of one block of the sequence, as a tuple."""
        return tuple(request.token_ids(index * self.block_size, (index + 1) * self.block_size))

    def content_of(self, request, index):
        """Given: what makes two blocks the same: the salt and every token up to the block's end."""
        return (request.cache_salt, tuple(request.token_ids(0, (index + 1) * self.block_size)))

    def num_new_blocks(self, request, num_new_tokens):
        """Given, from lab-05: how many blocks `allocate` would take."""
        held = len(self.block_table(request))
        return max(0, self.blocks_for(request.num_computed_tokens + num_new_tokens) - held)

    def allocate(self, request, num_new_tokens):
        """Given, from lab-05: room for so many tokens more, or False, and nothing has changed."""
        num_new = self.num_new_blocks(request, num_new_tokens)
        if num_new > self.num_free_blocks:
            return False
        if num_new:  # no empty table for a request that holds nothing
            self.tables.setdefault(request.request_id, []).extend(self.take(num_new))
        return True

    def block_table(self, request):
        """Given, from lab-05: the request's block ids; empty if it holds none."""
        return self.tables.get(request.request_id, [])

    def slot_mapping(self, request, start, end):
        """Given, from lab-05: the slots of the positions [start, end)."""
        table, size = self.block_table(request), self.block_size
        if not 0 <= start <= end <= len(table) * size:
            raise ValueError(
                f"request {request.request_id!r} holds room for {len(table) * size} tokens, "
                f"but the positions {start} to {end - 1} were asked for"
            )
        return [table[p // size] * size + p % size for p in range(start, end)]

    def get_computed_blocks(self, request):
        """The Blocks that hold the beginning of this sequence already, in order. Changes nothing.

        1. Nothing is found with enable_prefix_caching off.
        2. Go through the sequence block by block, but only through the first
           (num_tokens - 1) // block_size: at least one token has to be computed, or there is
           nothing to sample from.
        3. Name each block: its hash is self.hash_block(hash of the one before, its tokens); for the
           first one, request.cache_salt.encode() stands in place of the hash before.
        4. self.cached says which Blocks go by that hash. Take one whose content is
           self.content_of(request, index): a hash says where to look, not what is there.
        5. Stop at the first block that is not found. What comes after it is of no use.
        """
        raise NotImplementedError("lab-06: BlockManager.get_computed_blocks is not written yet")

    def cache_blocks(self, request):
        """After a step: what has been computed can be found from now on.

        With enable_prefix_caching on: for each block of the request that is full and whose tokens
        are all computed (num_computed_tokens), and that has no hash yet: give it its hash and its
        content, and enter it into self.cached. A block of another request with equal content may
        be there already; both stay, each with its own keys and values.
        """
        raise NotImplementedError("lab-06: BlockManager.cache_blocks is not written yet")

    def admit(self, request):
        """Claim room for the whole sequence, less what is cached; True, or False and no change at all.

        1. As in lab-05, a request that holds blocks already is a mistake of the caller: ValueError with
           its id.
        2. Find the prefix. The rest of the blocks_for(num_tokens) must be new blocks.
        3. Find out whether there is room. Free blocks are room, except those that are hits: the
           request uses them already. As long as other requests hold blocks, `watermark` blocks must
           still be free when this one is in.
        4. Take the hits: one reference more each, and off free_cached if no request held them.
           Then take the new ones (self.take). The table is the hits' ids and then the new ids.
        5. num_computed_tokens and num_cached_tokens become the number of tokens in the hits.
        """
        raise NotImplementedError("lab-06: BlockManager.admit is not written yet")

    def take(self, num_blocks):
        """Take this many free blocks and return their ids. Each now has one reference.

        There are enough: the caller has made sure of that. Blocks without content go first. When
        there are none left, the least recently used of free_cached goes: its content will be written
        over, so it loses hash and content and leaves self.cached.
        """
        raise NotImplementedError("lab-06: BlockManager.take is not written yet")

    def forget(self, block):
        """Given: this block can no longer be found."""
        self.cached[block.hash].remove(block)
        if not self.cached[block.hash]:
            del self.cached[block.hash]
        block.hash = block.content = None

    def free(self, request):
        """Give back what the request holds; if it holds nothing, nothing happens.

        Each of its blocks loses a reference. A block that has none left goes to free_cached if it
        can be found, else to free_blocks. Free the last block first: the tail of a sequence is
        useless without its head, so it should be the first to be evicted.
        """
        raise NotImplementedError("lab-06: BlockManager.free is not written yet")

    def reset_prefix_cache(self):
        """Forget all content (after new weights were loaded, say) and return True.

        Every block in free_cached loses its hash and its content, leaves self.cached, and becomes
        an ordinary free block. As long as any request holds a block: False, and no change at all.
        """
        raise NotImplementedError("lab-06: BlockManager.reset_prefix_cache is not written yet")

    def check(self):
        """Given: raise a RuntimeError if the books are wrong."""
        held = [block_id for table in self.tables.values() for block_id in table]
        free = [*self.free_blocks, *self.free_cached]
        for block in self.blocks:
            owners = held.count(block.block_id)
            if block.ref_count != owners:
                raise RuntimeError(f"block {block.block_id} counts {block.ref_count} owners and has {owners}")
        if len(free) != len(set(free)) or set(free) | set(held) != set(range(self.num_blocks)):
            raise RuntimeError("a block is free twice, or lost")
        if set(free) & set(held):
            raise RuntimeError(f"blocks {sorted(set(free) & set(held))} are held and free at once")
