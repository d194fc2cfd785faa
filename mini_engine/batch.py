"""A schedule turned into tensors: one flat, unpadded row of tokens for the whole step.

Prefill chunks and decodes stand in a row. They differ only in how many tokens each request computes
(`query_lens`) and how many it attends to (`seq_lens`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mini_engine.interfaces import KVManager, Row
from mini_engine.schedule_step import Chunk, next_chunk


@dataclass
class Batch:
    """One step's input. N tokens in all, R requests, M blocks in the longest block table.

    token_ids, positions and slot_mapping are (N,) int64; block_tables is (R, M) int64, padded with
    block 0; query_lens and seq_lens have R entries. `last_rows` are the rows, of the N, that end a
    sequence and are sampled; with k drafts, the last 1 + k of a request.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: list[int]
    seq_lens: list[int]
    last_rows: list[int]
    block_size: int
    plan: object = None  # a backend's attention plan, made once a step


def build_batch(
    rows: Sequence[Row],
    kv: KVManager,
    device: torch.device | str = "cpu",
    chunks: Sequence[Chunk] | None = None,
) -> Batch:
    """Lay out the scheduled rows, in their order; `chunks` are their tokens, if they are cut already."""
    if chunks is None:
        chunks = [next_chunk(row.request, row.num_tokens) for row in rows]
    query_lens = [len(chunk.token_ids) for chunk in chunks]
    seq_lens = [chunk.positions[-1] + 1 for chunk in chunks]
    tables = [kv.block_table(row.request) for row in rows]
    width = max(map(len, tables))
    token_ids = torch.tensor([t for chunk in chunks for t in chunk.token_ids])
    positions = torch.tensor([p for chunk in chunks for p in chunk.positions])
    block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    owner = torch.repeat_interleave(torch.tensor(query_lens))
    blocks = block_tables[owner, positions // kv.block_size]
    slot_mapping = blocks * kv.block_size + positions % kv.block_size
    ends = accumulate(query_lens)
    last_rows = [i for row, end in zip(rows, ends, strict=True) for i in range(end - row.num_logits, end)]
    flat = (token_ids, positions, slot_mapping, block_tables)
    ids, places, slots, padded = (tensor.to(device) for tensor in flat)
    return Batch(ids, places, slots, padded, query_lens, seq_lens, last_rows, kv.block_size)
