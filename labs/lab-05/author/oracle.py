"""The contract of lab-05 as a slow oracle: a list of what has happened, and numbers one by one.

Who holds which block is not kept anywhere: it is worked out of the whole list at each question. Attention
is written in plain numbers, one key after the other.
"""

from math import exp, sqrt


class BlockManager:
    """`history` has an entry for each block that was taken, (request_id, block), and for each request
    that left, (request_id, None)."""

    def __init__(self, num_blocks, block_size, *, watermark=None):
        if watermark is None:
            watermark = num_blocks // 100
        if num_blocks < 1 or block_size < 1 or watermark < 0 or watermark >= num_blocks:
            raise ValueError("no such pool")
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        self.history = []

    def _owners(self):
        """Block: the id of the request that holds it, in the order in which the blocks were taken."""
        owners = {}
        for request_id, block in self.history:
            if block is None:
                owners = {b: owner for b, owner in owners.items() if owner != request_id}
            else:
                owners[block] = request_id
        return owners

    def _free(self):
        owners = self._owners()
        return [block for block in range(self.num_blocks) if block not in owners]

    @property
    def num_free_blocks(self):
        return len(self._free())

    def block_table(self, request):
        return [block for block, owner in self._owners().items() if owner == request.request_id]

    def num_new_blocks(self, request, num_new_tokens):
        """A block is added for each place behind the held ones at which one begins."""
        held = len(self.block_table(request)) * self.block_size
        return len(range(held, request.num_computed_tokens + num_new_tokens, self.block_size))

    def admit(self, request):
        if self.block_table(request):
            raise ValueError(f"{request.request_id} holds blocks")
        wanted = len(range(0, request.num_tokens, self.block_size))
        left = len(self._free()) - wanted
        if left < 0 or (self._owners() and left < self.watermark):
            return False
        self._take(request, wanted)
        request.num_computed_tokens = 0
        return True

    def allocate(self, request, num_new_tokens):
        wanted = self.num_new_blocks(request, num_new_tokens)
        if len(self._free()) < wanted:
            return False
        self._take(request, wanted)
        return True

    def _take(self, request, count):
        self.history += [(request.request_id, block) for block in self._free()[:count]]

    def free(self, request):
        self.history.append((request.request_id, None))

    def slot_mapping(self, request, start, end):
        room = []
        for block in self.block_table(request):
            first = block * self.block_size
            room += range(first, first + self.block_size)
        if start < 0 or end > len(room):
            raise ValueError(f"{request.request_id} has no such positions")
        return room[start:end]


def write_kv(k_cache, v_cache, slot_mapping, k, v):
    block_size = k_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[slot // block_size, slot % block_size] = new[row]


def paged_attention(q, k_cache, v_cache, batch):
    heads_per_key = q.shape[1] // k_cache.shape[2]
    queries, keys, values = q.tolist(), k_cache.tolist(), v_cache.tolist()
    owners = [r for r, count in enumerate(batch.query_lens) for _ in range(count)]
    out = []
    for row, position in enumerate(batch.positions.tolist()):
        table = batch.block_tables[owners[row]].tolist()
        places = [(table[p // batch.block_size], p % batch.block_size) for p in range(position + 1)]
        heads = []
        for head, query in enumerate(queries[row]):
            seen = [keys[block][offset][head // heads_per_key] for block, offset in places]
            scores = [sum(a * b for a, b in zip(query, key, strict=True)) / sqrt(len(query)) for key in seen]
            weights = [exp(score - max(scores)) for score in scores]
            mixed = [0.0] * len(query)
            for weight, (block, offset) in zip(weights, places, strict=True):
                value = values[block][offset][head // heads_per_key]
                mixed = [m + weight / sum(weights) * x for m, x in zip(mixed, value, strict=True)]
            heads.append(mixed)
        out.append(heads)
    return q.new_tensor(out)
