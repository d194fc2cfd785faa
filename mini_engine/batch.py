"""A schedule turned into tensors: one flat, unpadded row of tokens for the whole step.

Prefill chunks and decodes lie one behind the other. What tells them apart is only how many tokens
each request brings (`query_lens`) and how many it can then look back on (`seq_lens`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mini_engine.request import Request
from mini_engine.scheduler import Chunk, next_chunk


@dataclass
class Batch:
    """One step's input. N tokens in all, R requests, M blocks in the longest block table.

    token_ids, positions and slot_mapping are (N,) int64; block_tables is (R, M) int64, padded with
    block 0; query_lens and seq_lens have R entries. `last_rows` are the rows, of the N, that end a
    sequence and are sampled.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: list[int]
    seq_lens: list[int]
    last_rows: list[int]
    block_size: int

    @cached_property
    def plan(self) -> "AttentionPlan":
        return AttentionPlan(self)


class AttentionPlan:
    """What attention needs to know of a batch, worked out once a step and used in every layer.

    Requests with a single new token (decodes, mostly) attend together as one padded batch; the
    padding is in the gathered keys only and is masked. Longer chunks attend one by one.
    """

    def __init__(self, batch: Batch):
        device, size = batch.token_ids.device, batch.block_size
        starts = [0]
        for n in batch.query_lens:
            starts.append(starts[-1] + n)
        single = [i for i, n in enumerate(batch.query_lens) if n == 1]
        # Rows of the flat batch; None if that is simply all of them, in order.
        self.single_rows = None
        self.single_tables = self.single_mask = None
        if single:
            seq_lens = torch.tensor([batch.seq_lens[i] for i in single], device=device)
            num_blocks = -(-int(seq_lens.max()) // size)
            self.single_tables = batch.block_tables[single, :num_blocks]
            slots = torch.arange(num_blocks * size, device=device)
            self.single_mask = (slots < seq_lens[:, None])[:, None, None]  # (D, 1, 1, L)
            if len(single) < len(batch.query_lens):
                self.single_rows = torch.tensor([starts[i] for i in single], device=device)
        # (first row, end row, block ids, causal mask (T, L)) of each longer chunk.
        self.chunks: list[tuple[int, int, Tensor, Tensor]] = []
        for i, n in enumerate(batch.query_lens):
            if n > 1:
                num_blocks = -(-batch.seq_lens[i] // size)
                slots = torch.arange(num_blocks * size, device=device)
                mask = slots <= batch.positions[starts[i] : starts[i + 1], None]
                self.chunks.append((starts[i], starts[i + 1], batch.block_tables[i, :num_blocks], mask))


def build_batch(
    rows: list[tuple[Request, int]],
    kv,
    device: torch.device | str = "cpu",
    next_chunk: Callable[[Request, int], Chunk] = next_chunk,
) -> Batch:
    """Lay out the scheduled `rows`, (request, number of tokens), in schedule order."""
    chunks = [next_chunk(request, num_tokens) for request, num_tokens in rows]
    query_lens = [len(chunk.token_ids) for chunk in chunks]
    seq_lens = [chunk.positions[-1] + 1 for chunk in chunks]
    tables = [kv.block_table(request) for request, _ in rows]
    width = max(map(len, tables))
    token_ids = torch.tensor([t for chunk in chunks for t in chunk.token_ids])
    positions = torch.tensor([p for chunk in chunks for p in chunk.positions])
    block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    owner = torch.repeat_interleave(torch.tensor(query_lens))
    blocks = block_tables[owner, positions // kv.block_size]
    slot_mapping = blocks * kv.block_size + positions % kv.block_size
    last_rows, end = [], 0
    for chunk, n in zip(chunks, query_lens, strict=True):
        end += n
        if chunk.is_last:
            last_rows.append(end - 1)
    tensors = (t.to(device) for t in (token_ids, positions, slot_mapping, block_tables))
    return Batch(*tensors, query_lens, seq_lens, last_rows, kv.block_size)
