"""lab-05, paged KV: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-05     Stuck? python -m labs hint lab-05
"""


class BlockManager:
    """Which request holds which blocks of the KV pool: the memory that the scheduler asks for room.

    The pool has num_blocks blocks of block_size slots, numbered from 0; a slot holds one token's
    keys and values. Each request has a block table: the ids of its blocks, in order of position.
    Nothing here is a tensor.

    Requests are told apart by request_id: another Request object with the same id is the same request.
    """

    def __init__(self, num_blocks, block_size, *, watermark=None):
        """An empty pool. The attributes num_blocks, block_size and watermark are read from outside.

        watermark: blocks that an admission must leave free for the decodes that already run; 0 is
        none, None is one percent of the pool, rounded down. Raises ValueError for num_blocks or
        block_size below 1, and for a watermark below 0 or as large as the pool.

        Make two containers here. self._free holds the ids of the free blocks; of which kind is your choice.
        self._tables is a dict: the block table, a list, of each request_id that holds blocks. Taking a
        free block and giving one back must cost O(1) a block, however large the pool is and however
        many requests hold blocks: a real pool may have a hundred thousand.
        """
        raise NotImplementedError("lab-05: BlockManager.__init__ is not written yet")

    @property
    def num_free_blocks(self) -> int:
        """Given: how many blocks no request holds."""
        return len(self._free)

    def block_table(self, request) -> list[int]:
        """Given: the ids of the request's blocks, in order of position; [] if it holds none."""
        return self._tables.get(request.request_id, [])

    def admit(self, request) -> bool:
        """Claim room for the whole sequence as it stands, prompt and outputs. False changes nothing.

        1. A request that holds blocks already is a mistake of the caller: ValueError with its id.
        2. It needs blocks for request.num_tokens tokens. As long as any other request holds blocks, the
           watermark must stay free after this admission; in an empty pool no watermark is kept.
        3. On success set request.num_computed_tokens to 0: nothing of it is computed (until lab-06).
        """
        raise NotImplementedError("lab-05: BlockManager.admit is not written yet")

    def num_new_blocks(self, request, num_new_tokens) -> int:
        """How many blocks `allocate` would take, 0 or more: what is needed for
        request.num_computed_tokens + num_new_tokens tokens, less what the request holds."""
        raise NotImplementedError("lab-05: BlockManager.num_new_blocks is not written yet")

    def allocate(self, request, num_new_tokens) -> bool:
        """Make sure that there is room for num_new_tokens more than are computed; else False.

        Takes `num_new_blocks` blocks, to the end of the table: none for what admission has claimed,
        one when a decode outgrows its last block. False changes nothing: no half allocation. If no block
        is needed nothing changes either: a request that held no block still holds none. The watermark
        does not count here: it is kept for the requests that run.
        """
        raise NotImplementedError("lab-05: BlockManager.allocate is not written yet")

    def free(self, request) -> None:
        """Take back all blocks of the request, of which nothing changes; nothing happens if it holds none."""
        raise NotImplementedError("lab-05: BlockManager.free is not written yet")

    def cache_blocks(self, request) -> None:
        """Given: called after each step of the request. Nothing to do before lab-06."""

    def slot_mapping(self, request, start, end) -> list[int]:
        """The slots of the positions start to end - 1: where their keys and values lie in the pool.

        Position p is in entry p // block_size of the table, at offset p % block_size of that block; its
        slot is block id * block_size + offset. Raises ValueError, with the request's id, if the range
        reaches beyond the room that the request holds, or begins below 0.
        """
        raise NotImplementedError("lab-05: BlockManager.slot_mapping is not written yet")


def write_kv(k_cache, v_cache, slot_mapping, k, v) -> None:
    """Store the new keys and values of one layer in their slots, in place.

    k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), this layer's pool.
    slot_mapping: (N,) int64, the slot of each of the step's N tokens, all requests together.
    k, v: (N, num_kv_heads, head_dim); they and slot_mapping are only read. The order of the slots
    means nothing, and all other slots stay as they are.

    `import torch`, if you need it, belongs inside this function: programs that load no torch keep books.
    """
    raise NotImplementedError("lab-05: write_kv is not written yet")


def paged_attention(q, k_cache, v_cache, batch):
    """Let each of the step's N tokens attend to its own request's tokens, up to itself.

    q and the result: (N, num_heads, head_dim) of one dtype, all requests' rows one after the other.
    k_cache, v_cache: as in write_kv, with this step's keys and values already written.
    batch: a mini_engine.batch.Batch. Of request r it says
        query_lens[r]    how many of the N rows are its own (they come after those of r - 1)
        seq_lens[r]      how many tokens it has in the cache, those of this step included
        block_tables[r]  its block ids, (M,), perhaps more than seq_lens[r] needs; the rest of the row
                         is filled up with zeros
    and of row i, positions[i]; block_size is the same for all. query_lens and seq_lens are lists
    of int, block_tables and positions int64 tensors. Everything that is given is only read.

    For each request:
    1. Gather its blocks, as many as seq_lens[r] needs, in the order of the table, and lay them end
       to end: keys and values (seq_len, num_kv_heads, head_dim), in order of position. What the last
       block holds after seq_len tokens is an earlier owner's.
    2. The query at position p sees the keys 0 to p.
    3. `mini_engine.model.sdpa(q, k, v, mask)` wants a batch dimension in front: q (1, T, ...), k and
       v (1, seq_len, ...), mask (T, seq_len) bool. It knows how to share keys among heads.
    """
    raise NotImplementedError("lab-05: paged_attention is not written yet")
