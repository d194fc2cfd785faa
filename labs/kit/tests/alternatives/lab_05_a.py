"""Another right lab-05: a deque of free blocks, the owner of each block, and attention written by hand."""

from collections import deque


class BlockManager:
    def __init__(self, num_blocks, block_size, *, watermark=None):
        if min(num_blocks, block_size) <= 0:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} slots cannot be")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.watermark = int(0.01 * num_blocks) if watermark is None else watermark
        if self.watermark < 0 or self.watermark >= num_blocks:
            raise ValueError(f"watermark {watermark} of {num_blocks} blocks")
        self.free_blocks = deque(range(num_blocks))
        self.tables = {}
        self.taken = 0

    @property
    def num_free_blocks(self):
        return self.num_blocks - self.taken

    def blocks_for(self, num_tokens):
        full, rest = divmod(num_tokens, self.block_size)
        return full + (rest > 0)

    def num_new_blocks(self, request, num_new_tokens):
        wanted = self.blocks_for(request.num_computed_tokens + num_new_tokens)
        return max(wanted - len(self.block_table(request)), 0)

    def take(self, request, count):
        self.taken += count
        self.tables.setdefault(request.request_id, []).extend(
            self.free_blocks.popleft() for _ in range(count)
        )

    def admit(self, request):
        if request.request_id in self.tables:
            raise ValueError(f"{request.request_id} is in already")
        count = self.blocks_for(request.num_tokens)
        left = self.num_free_blocks - count
        if left < 0 or (self.taken and left < self.watermark):
            return False
        self.take(request, count)
        request.num_computed_tokens = 0
        return True

    def allocate(self, request, num_new_tokens):
        count = self.num_new_blocks(request, num_new_tokens)
        fits = count <= self.num_free_blocks
        if fits and count:
            self.take(request, count)
        return fits

    def free(self, request):
        for block in self.tables.pop(request.request_id, []):
            self.free_blocks.append(block)
            self.taken -= 1

    def cache_blocks(self, request):
        pass

    def block_table(self, request):
        return list(self.tables.get(request.request_id, ()))

    def slot_mapping(self, request, start, end):
        size = self.block_size
        slots = [block * size + offset for block in self.block_table(request) for offset in range(size)]
        if start < 0 or end < start or end > len(slots):
            raise ValueError(f"{request.request_id} has no slots for {start} to {end}, only {len(slots)}")
        return slots[start:end]


def write_kv(k_cache, v_cache, slot_mapping, k, v):
    size = k_cache.shape[1]
    k_cache[slot_mapping // size, slot_mapping % size] = k
    v_cache[slot_mapping // size, slot_mapping % size] = v


def paged_attention(q, k_cache, v_cache, batch):
    import torch

    group = q.shape[1] // k_cache.shape[2]
    out, row = [], 0
    for request, count in enumerate(batch.query_lens):
        for _ in range(count):
            seen = torch.arange(int(batch.positions[row]) + 1)
            block = batch.block_tables[request][seen // batch.block_size]
            k = k_cache[block, seen % batch.block_size].repeat_interleave(group, dim=1)
            v = v_cache[block, seen % batch.block_size].repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,thd->ht", q[row], k).div(q.shape[-1] ** 0.5).softmax(dim=-1)
            out.append(torch.einsum("ht,thd->hd", weights, v))
            row += 1
    return torch.stack(out)
