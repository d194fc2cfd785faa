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

import torch
from torch import Tensor

from mini_engine.batch import Batch, build_batch
from mini_engine.interfaces import KVManager, Row
from mini_engine.model import CausalLM, ModelConfig, sdpa
from mini_engine.request import Request
from mini_engine.scheduler import Chunk, next_chunk

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
        """On the CPU, pages that the system hands out, zeroed, when they are first written: a large
        pool costs nothing yet. Zeros they must be: padding is read and masked, and 0 * NaN is NaN."""
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE}
        memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, **private)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Of keys and values together, in all layers."""
        per_layer = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
        return config.num_hidden_layers * per_layer


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


def plan_of(batch: Batch) -> AttentionPlan:
    """The batch's plan, made in the first layer and kept for the others."""
    if not isinstance(batch.plan, AttentionPlan):
        batch.plan = AttentionPlan(batch)
    return batch.plan


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
    plan = plan_of(batch)
    if plan.single_tables is not None:
        rows = q if plan.single_rows is None else q[plan.single_rows]
        k, v = (_gather(cache, plan.single_tables) for cache in (k_cache, v_cache))
        single = sdpa(rows.unsqueeze(1), k, v, plan.single_mask).squeeze(1)
        if plan.single_rows is None:
            return single
    out = torch.empty_like(q)
    if plan.single_tables is not None:
        out[plan.single_rows] = single
    for start, end, table, mask in plan.chunks:
        k, v = (_gather(cache, table.unsqueeze(0)) for cache in (k_cache, v_cache))
        out[start:end] = sdpa(q[None, start:end], k, v, mask)[0]
    return out


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """The blocks of each table, one behind the other: (R, M) ids to (R, M * block_size, heads, head_dim)."""
    blocks = cache.index_select(0, tables.flatten())
    return blocks.view(len(tables), -1, *cache.shape[2:])


class PagedBackend:
    """How the engine computes a step: one forward pass over the flat batch, KV in the paged pool.

    lab-05's functions may stand in for the two that read and write the pool.
    """

    name = "paged"

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
        """Compute the scheduled rows; logits (S, vocab_size) of the S that end their sequence."""
        chunks = [self.next_chunk(row.request, row.num_tokens) for row in rows]
        batch = build_batch(rows, self.kv, self.model.device, chunks)
        hidden = self.model(batch.token_ids, batch.positions, partial(self.attend, batch))
        return self.model.logits(hidden[batch.last_rows])

    def compute_alone(self, request: Request) -> Tensor:
        """Return the logits (vocab_size,) after the request's last token, computed in a batch of its own.

        A NaN in another request's block can reach it: masked, but 0 times NaN is NaN. So the rest of its
        own blocks is cleared first, and it reads nothing else.
        """
        end = len(self.kv.block_table(request)) * self.kv.block_size
        self.clear(self.kv.slot_mapping(request, request.num_tokens, end))
        return self.forward([Row(request, request.num_new_tokens, True)])[0]

    def clear(self, slots: list[int]) -> None:
        """Write zeros into these slots of every layer."""
        for pool in (self.pool.k, self.pool.v):
            pool.flatten(1, 2)[:, slots] = 0

    def attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer's attention over the pool, the batch's own keys and values first written to it."""
        k_cache, v_cache = self.pool.k[layer], self.pool.v[layer]
        self.write_kv(k_cache, v_cache, batch.slot_mapping, k, v)
        return self.paged_attention(q, k_cache, v_cache, batch)
