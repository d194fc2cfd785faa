"""Steps of paged attention made by hand, and a pool whose slots show what they hold. It needs torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labs.kit.tensor_toys.models import random_model
from mini_engine.attention import PagedBackend
from mini_engine.batch import Batch
from mini_engine.interfaces import Row
from mini_engine.model import sdpa

POISON = 1e4  # lies in slots that no request may read, or that nothing was written to
MADE_UP = 512  # tokens, more than a script needs
Step = Sequence[tuple[int, int, list[int]]]  # of each request: tokens in the cache, new tokens, block table


def batch_of(step: Step, block_size: int, width: int = 0) -> tuple[Batch, list[list[int]]]:
    """Return the Batch of a step, and the slots of each request's tokens; tables are padded to `width`."""
    new = [new for _, new, _ in step]
    places = [range(past + new) for past, new, _ in step]
    slots = [
        [table[p // block_size] * block_size + p % block_size for p in seq]
        for seq, (*_, table) in zip(places, step, strict=True)
    ]
    positions = torch.tensor([p for seq, n in zip(places, new, strict=True) for p in seq[-n:]])
    width = width or max(len(table) for *_, table in step)
    batch = Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=torch.tensor([slot for own, n in zip(slots, new, strict=True) for slot in own[-n:]]),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for *_, table in step]),
        query_lens=new,
        seq_lens=list(map(len, places)),
        last_rows=[sum(new[: r + 1]) - 1 for r in range(len(new))],
        block_size=block_size,
    )
    return batch, slots


def step_tensors(
    step: Step,
    block_size: int = 4,
    num_blocks: int = 12,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Batch, Tensor]:
    """Return (q, k_cache, v_cache, batch, expected) of a step, everything float64.

    The caches hold the keys of each request where its table says, and POISON in all other slots.
    `expected` is attention over each request's own keys, computed without any block.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, slots = batch_of(step, block_size)
    caches = torch.full((2, num_blocks * block_size, num_kv_heads, head_dim), POISON, dtype=torch.float64)
    queries, expected = [], []
    for (past, new, _), own in zip(step, slots, strict=True):
        kv, q = noise(2, past + new, num_kv_heads, head_dim), noise(new, num_heads, head_dim)
        caches[:, own] = kv
        mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
        queries.append(q)
        expected.append(sdpa(q[None], kv[:1], kv[1:], mask)[0])
    k_cache, v_cache = caches.view(2, num_blocks, block_size, num_kv_heads, head_dim)
    return torch.cat(queries), k_cache, v_cache, batch, torch.cat(expected)


class MarkedPool:
    """Keys and values of one layer, made up so that each slot shows whose token it holds."""

    def __init__(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str):
        noise, form = torch.Generator().manual_seed(0), (num_kv_heads, head_dim)
        made = torch.randn(MADE_UP, *form, generator=noise, dtype=torch.float64)
        self.made = made.to(getattr(torch, dtype))  # keys of all tokens; their values are -keys
        self.tokens = 0  # that were made up so far
        self.caches = torch.full((2, num_blocks, block_size, *form), POISON, dtype=self.made.dtype)

    def make_up(self, count: int) -> Tensor:
        """Return the keys of the next tokens: (count, num_kv_heads, head_dim)."""
        self.tokens += count
        return self.made[self.tokens - count : self.tokens].clone()

    def held(self) -> dict[str, dict[str, str]]:
        """Return the slots that were written to: {"keys": {"slot 3": "k5"}, "values": {"slot 3": "v5"}}."""
        made = self.made[: self.tokens].flatten(1)
        known = torch.cat([made, -made, torch.full_like(made[:1], POISON)])
        words = [f"{kind}{token}" for kind in "kv" for token in range(self.tokens)] + [""]
        held = {}
        for kind, cache in zip(("keys", "values"), self.caches, strict=True):
            found = (cache.flatten(0, 1).flatten(1)[:, None] == known).all(dim=-1)
            word = {slot: words[where] for slot, where in found.nonzero().tolist()}
            slots = {f"slot {slot}": word.get(slot, "something else") for slot in range(len(found))}
            held[kind] = {slot: word for slot, word in slots.items() if word}
        return held


class PagedModel:
    """A random model on pages: two tensor functions of a lab around the engine's pool.

    `kv` is a block manager that knows in `held` the requests that hold blocks. Before each step every slot
    that holds no computed token is poisoned.
    """

    def __init__(self, lab: Any, kv: Any):
        parts = {"write_kv": lab.write_kv, "paged_attention": lab.paged_attention}
        self.kv, self.backend = kv, PagedBackend(random_model(), kv, **parts)

    def forward(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        """Rows of (request, token_ids, positions, sample); {request_id: [token]} of those that sample."""
        if not rows:
            return {}
        stale = torch.ones(self.kv.num_blocks * self.kv.block_size, dtype=torch.bool)
        for request in self.kv.held.values():
            stale[list(self.kv.slot_mapping(request, 0, request.num_computed_tokens))] = False
        for cache in (self.backend.pool.k, self.backend.pool.v):
            cache.flatten(1, 2)[:, stale] = POISON
        step = [Row(request, len(tokens), last) for request, tokens, _, last in rows]
        tokens = self.backend.forward(step).argmax(dim=-1, keepdim=True).tolist()
        return dict(zip([row.request.request_id for row in step if row.is_last], tokens, strict=True))
