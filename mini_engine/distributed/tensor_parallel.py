"""Tensor parallel: one model on several processes, each with a share of every layer's heads and channels.

Rank 0 has the engine. The other ranks have a backend with a pool of their own heads, and make each of its
calls. So requests, schedules, aborts and steps that are taken back are decided once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from mini_engine.attention import NextChunk, PagedBackend
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.batch import Batch
from mini_engine.distributed.ranks import Ranks
from mini_engine.distributed.sharding import share
from mini_engine.fast.attention import paged_backend
from mini_engine.fast.model import Fast, FastLM, Product, prepare
from mini_engine.interfaces import KVManager
from mini_engine.loading.checkpoint import Device, Dtype, choose_device, load
from mini_engine.model import CausalLM, DecoderLayer
from mini_engine.text.tokenizer import Tokenizer

# What changes the pool, or reads it: all ranks do it with theirs.
AGREED = ("compute", "copy_block", "clear")


def load_share(
    ranks: Ranks, model: str | Path, dtype: Dtype = "auto", device: Device = "auto", fast: Fast = True
) -> tuple[CausalLM, Tokenizer]:
    """Return this rank's share of a model, whose layers are summed over all ranks, and the tokenizer.

    Raises ValueError if the number of ranks does not divide the heads; else as `load` does.
    """
    chosen = choose_device(device)
    if chosen.type == "cuda":
        chosen = choose_device(f"cuda:{ranks.device_index}")
    loaded, tokenizer = load(model, dtype, chosen, partial(share, rank=ranks.rank, size=ranks.size))
    return connect(prepare(loaded, fast), ranks), tokenizer


def connect(model: CausalLM, ranks: Ranks) -> CausalLM:
    """Sum the model's products o and down over the ranks, and let all compute what rank 0 computes."""
    if isinstance(model, FastLM):
        for packed in model.packed_layers:
            packed.o = cast(Product, _Summed(packed.o, ranks))
            packed.down = cast(Product, _Summed(packed.down, ranks))
    else:
        for layer in map(partial(cast, DecoderLayer), model.layers):
            for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
                product.register_forward_hook(lambda module, args, part: ranks.sum(part))
    if ranks.rank == 0:  # a prompt's log probabilities are computed beside the backend, one text at a time
        shared = ranks.everywhere("forward", model.forward, lambda ids, positions, attend: (ids, positions))
        model.forward = shared  # type: ignore[method-assign]  # each call goes to the ranks first
    return model


class _Summed:
    """A packed product that is one part of a sum."""

    def __init__(self, product: Product, ranks: Ranks):
        self.product, self.ranks = product, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.sum(self.product(x))

    def sums(self) -> Tensor:
        """Return the sum of each row of this rank's part."""
        return self.product.sums()


def parallel_backend(ranks: Ranks) -> Callable[..., PagedBackend]:
    """Return an engine's `attend_backend` on rank 0, which has the other ranks compute their parts."""

    def make(model: CausalLM, kv: KVManager, next_chunk: NextChunk) -> PagedBackend:
        backend = paged_backend(model, kv, next_chunk)
        ranks.everywhere("make", lambda *size: None)(kv.num_blocks, kv.block_size)
        sent: dict[str, Any] = {"compute": lambda batch: (moved(batch, "cpu"),)}
        for name in AGREED:
            shared = ranks.everywhere(name, getattr(backend, name), *(sent[n] for n in sent if n == name))
            setattr(backend, name, shared)
        return backend

    return make


def moved(batch: Batch, device: Device) -> Batch:
    """Return the batch with its tensors on a device."""
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


class Worker:
    """A rank without an engine: its share of the model, and a backend like rank 0's."""

    def __init__(self, model: CausalLM):
        self.model = model
        self.backend: PagedBackend | None = None
        self.cache = DenseCache(model.config, model.dtype, model.device)

    @torch.inference_mode()
    def work(self, ranks: Ranks) -> None:
        """Compute this rank's part of all that rank 0 computes, until it ends."""
        ranks.obey(lambda name: getattr(self, name, None) or getattr(self.backend, name))

    def make(self, num_blocks: int, block_size: int) -> None:
        """Make the pool of an engine that begins on rank 0."""
        # All that a backend needs of a KVManager to make its own pool.
        size = SimpleNamespace(num_blocks=num_blocks, block_size=block_size)
        self.backend = paged_backend(self.model, cast(KVManager, size))

    def compute(self, batch: Batch) -> None:
        """Compute a step."""
        assert self.backend is not None
        self.backend.compute(moved(batch, self.model.device))

    def forward(self, token_ids: Tensor, positions: Tensor) -> None:
        """Compute a piece of a text that is in no pool; position 0 begins another text."""
        device = self.model.device
        if positions[0] == 0:
            self.cache = DenseCache(self.model.config, self.model.dtype, device)
        self.model(token_ids.to(device), positions.to(device), dense_attend(self.cache))
