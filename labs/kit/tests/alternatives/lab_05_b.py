"""lab-05 around the two given methods: a set of free blocks, tables that grow by slices, padded attention."""


class BlockManager:
    def __init__(self, num_blocks, block_size, *, watermark=None):
        self.watermark = watermark if watermark is not None else num_blocks // 100
        if num_blocks < 1 or block_size < 1 or not 0 <= self.watermark < num_blocks:
            raise ValueError(f"a pool of {num_blocks} x {block_size} slots with a watermark of {watermark}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = set(range(num_blocks))
        self._tables = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def block_table(self, request) -> list[int]:
        return self._tables.get(request.request_id, [])

    def admit(self, request):
        if self.block_table(request):
            raise ValueError(f"{request.request_id} has a table")
        count = (request.num_tokens - 1) // self.block_size + 1
        if self.num_free_blocks - count < (self.watermark if self._tables else 0):
            return False
        self._tables[request.request_id] = [self._free.pop() for _ in range(count)]
        request.num_computed_tokens = 0
        return True

    def num_new_blocks(self, request, num_new_tokens):
        last = request.num_computed_tokens + num_new_tokens - 1
        return max(last // self.block_size + 1 - len(self.block_table(request)), 0)

    def allocate(self, request, num_new_tokens):
        count = self.num_new_blocks(request, num_new_tokens)
        if count > self.num_free_blocks:
            return False
        if count:
            new = [self._free.pop() for _ in range(count)]
            self._tables[request.request_id] = self.block_table(request) + new
        return True

    def free(self, request):
        if request.request_id in self._tables:
            self._free.update(self._tables.pop(request.request_id))

    def cache_blocks(self, request):
        pass

    def slot_mapping(self, request, start, end):
        table, size = self.block_table(request), self.block_size
        if start < 0 or start > end or end > size * len(table):
            raise ValueError(
                f"request {request.request_id}: {start} to {end} is not all in {len(table)} blocks"
            )
        room = [slot for block in table for slot in range(block * size, (block + 1) * size)]
        return room[start:end]


def write_kv(k_cache, v_cache, slot_mapping, k, v):
    import torch

    blocks = torch.div(slot_mapping, k_cache.shape[1], rounding_mode="floor")
    offsets = slot_mapping - blocks * k_cache.shape[1]
    k_cache.index_put_((blocks, offsets), k)
    v_cache.index_put_((blocks, offsets), v)


def paged_attention(q, k_cache, v_cache, batch):
    """All requests at once, each padded to the longest: gathered keys, and a mask for each row."""
    import torch

    from mini_engine.model import sdpa

    owner = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
    longest = max(batch.seq_lens)
    width = (longest - 1) // batch.block_size + 1
    table = batch.block_tables[:, :width][owner]
    k, v = (cache[table].flatten(1, 2)[:, :longest] for cache in (k_cache, v_cache))
    seen = torch.arange(longest) <= batch.positions[:, None]
    v = v.masked_fill(~seen[:, :, None, None], 0)
    return sdpa(q[:, None], k, v, seen[:, None, None])[:, 0]
