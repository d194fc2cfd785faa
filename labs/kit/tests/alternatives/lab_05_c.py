"""A fourth right lab-05: ids made on demand, a failed taking undone, all rows attending at once."""


class BlockManager:
    """Ids from `fresh` on were never given out; those that came back wait in `recycled`."""

    def __init__(self, num_blocks, block_size, *, watermark=None):
        if not (num_blocks > 0 and block_size > 0):
            raise ValueError(f"{num_blocks} blocks of {block_size} slots")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.watermark = int(num_blocks * 0.01) if watermark is None else watermark
        if not -1 < self.watermark < num_blocks:
            raise ValueError(f"watermark {watermark} in a pool of {num_blocks} blocks")
        self.fresh, self.recycled, self.tables = 0, [], {}

    @property
    def num_free_blocks(self):
        return self.num_blocks - self.fresh + len(self.recycled)

    def blocks_for(self, num_tokens):
        return len(range(0, num_tokens, self.block_size))

    def num_new_blocks(self, request, num_new_tokens):
        held = len(self.tables.get(request.request_id, ()))
        return max(0, self.blocks_for(request.num_computed_tokens + num_new_tokens) - held)

    def take(self):
        if self.recycled:
            return self.recycled.pop()
        if self.fresh == self.num_blocks:
            raise MemoryError
        self.fresh += 1
        return self.fresh - 1

    def extend(self, request, count):
        taken = []
        try:
            while len(taken) < count:
                taken.append(self.take())
        except MemoryError:
            self.recycled += taken
            return False
        # A new list: the caller that asked for the table before keeps what it got.
        if taken:
            self.tables[request.request_id] = self.tables.get(request.request_id, []) + taken
        return True

    def admit(self, request):
        if request.request_id in self.tables:
            raise ValueError(f"{request.request_id} has its blocks already")
        count = self.blocks_for(request.num_tokens)
        if self.tables and self.num_free_blocks - count < self.watermark:
            return False
        admitted = self.extend(request, count)
        if admitted:
            request.num_computed_tokens = 0
        return admitted

    def allocate(self, request, num_new_tokens):
        return self.extend(request, self.num_new_blocks(request, num_new_tokens))

    def free(self, request):
        self.recycled += self.tables.pop(request.request_id, [])

    def cache_blocks(self, request):
        pass

    def block_table(self, request):
        return self.tables.get(request.request_id, [])[:]

    def slot_mapping(self, request, start, end):
        table, size = self.block_table(request), self.block_size
        if start < 0:
            raise ValueError(f"{request.request_id} has no position {start}")
        try:
            return [table[position // size] * size + position % size for position in range(start, end)]
        except IndexError:
            raise ValueError(f"{request.request_id} has no room for position {end - 1}") from None


def write_kv(k_cache, v_cache, slot_mapping, k, v):
    for cache, new in ((k_cache, k), (v_cache, v)):
        slots = cache.view(-1, *cache.shape[2:])
        slots.scatter_(0, slot_mapping[:, None, None].expand_as(new), new)


def paged_attention(q, k_cache, v_cache, batch):
    import torch

    owner = torch.repeat_interleave(torch.tensor(batch.query_lens))
    k, v = (cache[batch.block_tables[owner]].flatten(1, 2) for cache in (k_cache, v_cache))
    q = q.unflatten(1, (k.shape[2], -1))  # (N, num_kv_heads, group, head_dim)
    scores = torch.einsum("nhgd,nchd->nhgc", q, k) * q.shape[-1] ** -0.5
    hidden = torch.arange(k.shape[1]) > batch.positions[:, None]
    bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = (scores + bias[:, None, None]).softmax(dim=-1)
    return torch.einsum("nhgc,nchd->nhgd", weights, v).flatten(1, 2)
