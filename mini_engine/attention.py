"""The KV pool, and attention that reads and writes it through block tables.

Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
(2023). Here the pages are gathered for torch's own attention; fast/kernels.cpp reads them in place.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor

from mini_engine.batch import Batch, build_batch
from mini_engine.interfaces import Attend, KVManager, Row
from mini_engine.model import CausalLM, ModelConfig, sdpa
from mini_engine.request import Request
from mini_engine.schedule_step import Chunk, next_chunk

NextChunk = Callable[[Request, int], Chunk]
WriteKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
PagedAttention = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]


class KVPool:
    """Keys and values of all blocks: k and v (num_layers, num_blocks, block_size, num_kv_heads, head_dim)."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        heads = (config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, num_blocks, block_size, *heads)
        self.k, self.v = (self._zeros(shape, dtype, torch.device(device)) for _ in "kv")

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros. On the CPU the system maps its pages when they are first written, so a large pool
        costs nothing yet. They must be zeros: padding is read and masked, and 0 * NaN is NaN."""
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE}
        memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, **private)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values of one token, in all layers."""
        per_layer = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
        return config.num_hidden_layers * per_layer


# Groups of decodes that attend together, as positions in the list of their numbers of tokens.
Grouping = Callable[[list[int]], list[list[int]]]


def all_together(seq_lens: list[int]) -> list[list[int]]:
    """One group of all decodes, in their order."""
    return [list(range(len(seq_lens)))] if seq_lens else []


class AttentionPlan:
    """The plan of a batch's attention: worked out once a step, used in every layer.

    decodes  (rows, block ids (R, M), mask (R, 1, 1, L)) for each group of requests with one new token. They
             attend as one padded batch: the padding is in the gathered keys only, and is masked
    chunks   (first row, end row, block ids (M,), mask (T, L)) for each longer chunk, which attends by
             itself; None for the mask of a prompt's first chunk, which is plainly causal

    A mask is True where a query may look, or of `additive` type: 0 there and minus infinity elsewhere.
    """

    def __init__(self, batch: Batch, group: Grouping = all_together, additive: torch.dtype | None = None):
        self.decodes: list[tuple[Tensor | slice, Tensor, Tensor]] = []
        self.chunks: list[tuple[int, int, Tensor, Tensor | None]] = []
        device, size = batch.token_ids.device, batch.block_size

        def mask(seen: Tensor) -> Tensor:
            if additive is None:
                return seen
            return torch.zeros(seen.shape, dtype=additive, device=device).masked_fill_(~seen, -torch.inf)

        single, end = [], 0
        for i, (n, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            start, end = end, end + n
            if n == 1:
                single.append((seq_len, start, i))
                continue
            table = batch.block_tables[i, : -(-seq_len // size)]
            seen = None
            if n < seq_len:
                slots = torch.arange(len(table) * size, device=device)
                seen = mask(slots <= batch.positions[start:end, None])
            self.chunks.append((start, end, table, seen))
        for members in group([seq_len for seq_len, _, _ in single]):
            chosen = torch.tensor([single[m] for m in members], device=device)
            lens, rows, owners = chosen.unbind(1)
            tables = batch.block_tables[owners, : -(-int(lens.max()) // size)]
            slots = torch.arange(tables.shape[1] * size, device=device)
            in_order = members == list(range(len(batch.query_lens)))  # then the rows need not be gathered
            self.decodes.append(
                (slice(None) if in_order else rows, tables, mask(slots < lens[:, None])[:, None, None])
            )


def write_kv(k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v, (N, num_kv_heads, head_dim), in the slots (N,) of one layer's cache
    (num_blocks, block_size, num_kv_heads, head_dim)."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
    """Attend from each of the N flat rows to its own request's positions up to itself.

    q and the result are (N, num_heads, head_dim); the caches are one layer's,
    (num_blocks, block_size, num_kv_heads, head_dim), with this step's keys already written.
    """
    if batch.plan is None:  # made in the first layer, kept for the others
        batch.plan = AttentionPlan(batch)
    plan = cast(AttentionPlan, batch.plan)
    out = torch.empty_like(q)
    for rows, tables, mask in plan.decodes:
        k, v = (_gather(cache, tables) for cache in (k_cache, v_cache))
        out[rows] = sdpa(q[rows].unsqueeze(1), k, v, mask).squeeze(1)
    for start, end, table, chunk_mask in plan.chunks:
        k, v = (_gather(cache, table.unsqueeze(0)) for cache in (k_cache, v_cache))
        out[start:end] = sdpa(q[None, start:end], k, v, chunk_mask, is_causal=chunk_mask is None)[0]
    return out


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """Return the blocks of each table in a row: (R, M) ids to (R, M * block_size, heads, head_dim)."""
    blocks = cache.index_select(0, tables.flatten())
    return blocks.view(len(tables), -1, *cache.shape[2:])


class PagedBackend:
    """The engine's own backend: one forward pass over the flat batch, KV in the paged pool.

    lab-05's functions can replace the two that read and write the pool.
    """

    name = "paged"
    writes_before_reading = True  # see `attend`

    def __init__(
        self,
        model: CausalLM,
        kv: KVManager,
        next_chunk: NextChunk = next_chunk,
        *,
        write_kv: WriteKV = write_kv,
        paged_attention: PagedAttention = paged_attention,
    ):
        self.model, self.kv = model, kv
        self.next_chunk = next_chunk
        self.write_kv, self.paged_attention = write_kv, paged_attention
        self.pool = KVPool(model.config, kv.num_blocks, kv.block_size, model.dtype, model.device)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Compute the scheduled rows. Return logits (S, vocab_size) of the S that end their sequence."""
        chunks = [self.next_chunk(row.request, row.num_tokens) for row in rows]
        batch = build_batch(rows, self.kv, self.model.device, chunks)
        return self.model.logits(self.compute(batch)[batch.last_rows])

    def compute(self, batch: Batch) -> Tensor:
        """Run the model over a batch. Return the last hidden states (N, hidden_size)."""
        hidden: Tensor = self.model(batch.token_ids, batch.positions, self.attention_of(batch))
        return hidden

    def attention_of(self, batch: Batch) -> Attend:
        """Return what the layers call for the batch's attention."""
        return partial(self.attend, batch)

    def compute_alone(self, request: Request) -> Tensor:
        """Return the logits (vocab_size,) after the request's last token, computed in a batch of its own.

        A NaN in another request's block can reach it: masked, but 0 times NaN is NaN. So the rest of its
        own blocks is cleared first, and it reads nothing else.
        """
        end = len(self.kv.block_table(request)) * self.kv.block_size
        self.clear(self.kv.slot_mapping(request, request.num_tokens, end))
        return self.forward([Row(request, request.num_new_tokens, True)])[0]

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first keys and values of a block into another, in every layer."""
        for pool in (self.pool.k, self.pool.v):
            pool[:, target, :num_tokens] = pool[:, source, :num_tokens]

    def clear(self, slots: list[int]) -> None:
        """Write zeros into these slots of every layer."""
        for pool in (self.pool.k, self.pool.v):
            pool.flatten(1, 2)[:, slots] = 0

    def attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the batch's keys and values to one layer's pool and attend over it."""
        k_cache, v_cache = self.pool.k[layer], self.pool.v[layer]
        self.write_kv(k_cache, v_cache, batch.slot_mapping, k, v)
        return self.paged_attention(q, k_cache, v_cache, batch)
