"""Attention over the paged pool, faster on a CPU: by kernels.cpp where it is built, else with torch.

With torch alone the way with the fewest bytes is the fastest. A prompt's first chunk needs no pages: its
keys and values are at hand. Decodes of similar length attend together, so little is gathered that is
masked. The query heads that share a key head lie side by side as queries, so no key is repeated.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention import AttentionPlan, NextChunk, PagedBackend
from mini_engine.batch import Batch
from mini_engine.fast.kernels import PagedAttend
from mini_engine.fast.model import FastLM
from mini_engine.interfaces import Attend, KVManager
from mini_engine.model import CausalLM
from mini_engine.schedule_step import next_chunk

# A decode joins a longer one's group while the group's padding stays below so many keys: gathering
# and masking those costs about as much as another call.
PADDING = 512
TILE = 16  # rows of a chunk that a thread takes at a time; of decodes that share keys, half as many
SHARED = 64  # keys that decodes must share for these to be read once for several


def paged_backend(model: CausalLM, kv: KVManager, next_chunk: NextChunk = next_chunk) -> PagedBackend:
    """Return the paged backend that is made for this model."""
    if isinstance(model, FastLM):
        return FastBackend(model, kv, next_chunk)
    return PagedBackend(model, kv, next_chunk)


class FastBackend(PagedBackend):
    """A drop-in for PagedBackend, under the same name in traces. Its model is a FastLM."""

    def __init__(self, model: FastLM, kv: KVManager, next_chunk: NextChunk = next_chunk) -> None:
        super().__init__(model, kv, next_chunk)
        self.kernels = model.kernels
        self.room: list[Tensor] = []  # for gathered keys and values; the layers take turns

    def attention_of(self, batch: Batch) -> Attend:
        if not self.kernels:
            return super().attention_of(batch)
        heads, eps = self.model.config.num_attention_heads, self.model.config.rms_norm_eps
        return PagedAttend(self.kernels, batch, tiles(batch), self.pool, heads, eps)

    def attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.pool.k[layer], self.pool.v[layer]
        self.write_kv(k_cache, v_cache, batch.slot_mapping, k, v)
        if batch.plan is None:
            batch.plan = AttentionPlan(batch, groups_of_similar_length, q.dtype)
        return self._attend_gathered(cast(AttentionPlan, batch.plan), q, k, v, k_cache, v_cache)

    def _attend_gathered(
        self, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        for start, end, table, chunk_mask in plan.chunks:
            keys, values = k[start:end], v[start:end]
            if chunk_mask is not None:
                keys, values = self._gather(k_cache, v_cache, table)
            out[start:end] = _sdpa(q[start:end], keys, values, chunk_mask, is_causal=chunk_mask is None)
        kv_heads, dim = k.shape[1:]
        for rows, tables, mask in plan.decodes:
            keys, values = (
                x.view(len(tables), -1, kv_heads, dim).transpose(1, 2)
                for x in self._gather(k_cache, v_cache, tables.flatten())
            )
            queries = q[rows].view(len(tables), kv_heads, -1, dim)  # the heads of a group are rows
            out[rows] = F.scaled_dot_product_attention(queries, keys, values, mask).flatten(1, 2)
        return out

    def _gather(self, k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> list[Tensor]:
        """Return k and v of these blocks in a row: (len(blocks) * block_size, kv_heads, head_dim) each."""
        shape = (len(blocks), *k_cache.shape[1:])
        if not self.room or self.room[0].numel() < shape[0] * k_cache[0].numel():
            self.room = [torch.empty(shape, dtype=k_cache.dtype).flatten() for _ in "kv"]
        found = []
        for cache, room in zip((k_cache, v_cache), self.room, strict=True):
            pages = room[: shape[0] * cache[0].numel()].view(shape)
            torch.index_select(cache, 0, blocks, out=pages)
            found.append(pages.flatten(0, 1))
        return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Attend for one request's rows. Key heads are the batch, so that no key is copied for its group."""
    queries = q.reshape(len(q), k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)  # (kv_heads, group, T, d)
    keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def groups_of_similar_length(seq_lens: list[int]) -> list[list[int]]:
    """Cut the decodes into groups, the longest first, that need at most PADDING keys of padding."""
    groups: list[list[int]] = []
    padding = PADDING
    for seq_len, i in sorted(zip(seq_lens, range(len(seq_lens)), strict=True), reverse=True):
        padding += seq_lens[groups[-1][0]] - seq_len if groups else 1
        if padding > PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(i)
    return groups


def tiles(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the pieces of work for the kernel, the longest first, and the members that they refer to.

    A piece is (request, first row, end row, 0); or, for decodes whose tables begin with the same blocks,
    (a request that has them, first member, end member, keys that they share). A member is (request, row).
    """
    found, members, end = [], [(0, 0)], 0
    decodes: dict[int, list[tuple[int, int]]] = {}  # by their first block
    first_blocks = batch.block_tables[:, 0].tolist()
    for i, (num, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        start, end = end, end + num
        if num == 1 and length > SHARED:
            decodes.setdefault(first_blocks[i], []).append((i, start))
            continue
        for row in range(start, end, TILE):
            found.append((-length * min(TILE, end - row), i, row, min(row + TILE, end), 0))
    for group in decodes.values():
        shared = _shared_keys(batch, [i for i, _ in group]) if len(group) > 1 else 0
        if shared < SHARED:
            found += [(-batch.seq_lens[i], i, row, row + 1, 0) for i, row in group]
            continue
        for at in range(0, len(group), TILE // 2):
            part = group[at : at + TILE // 2]
            cost = shared + sum(batch.seq_lens[i] - shared for i, _ in part)
            found.append((-cost, part[0][0], len(members), len(members) + len(part), shared))
            members += part
    return torch.tensor([tile[1:] for tile in sorted(found)]), torch.tensor(members)


def _shared_keys(batch: Batch, requests: list[int]) -> int:
    """Return with how many keys, in whole blocks, the tables of all these requests begin alike."""
    tables = batch.block_tables[requests]
    alike = int((tables == tables[0]).all(0).int().cumprod(0).sum())
    seen = min(batch.seq_lens[i] for i in requests) - 1  # the last key is a row's own
    return min(alike, seen // batch.block_size) * batch.block_size
