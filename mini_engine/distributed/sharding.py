"""The share of a checkpoint that one rank of tensor parallel holds.

Shoeybi et al., Megatron-LM (2019). The first matrices of attention and of the MLP are cut by rows, so each
rank has whole heads and whole channels. The second ones are cut by columns, so each rank's product is one
part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from mini_engine.loading.weights import Weights
from mini_engine.model import ModelConfig

CUT_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_BY_COLUMNS = ("o_proj", "down_proj")


def local_config(config: ModelConfig, size: int, source: object = "the model") -> ModelConfig:
    """Return the config of one of `size` equal shares.

    Raises ValueError, with the sizes that work, unless `size` divides the heads, the key-value heads and the
    channels of the MLP.
    """
    counts = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    if any(count % size for count in counts):
        most = gcd(*counts)
        works = " or ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        has = "{} heads, {} key-value heads and {} channels".format(*counts)
        raise ValueError(f"tensor_parallel_size {size} does not divide the {has} of {source}; use {works}")
    heads, kv_heads, channels = (count // size for count in counts)
    return replace(
        config, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=channels
    )


def share(weights: Weights, rank: int, size: int) -> Weights:
    """Return the weights of one rank: those of a smaller model, whose products o and down are to be summed.

    A tensor is read whole and cut, one at a time. Embedding, norms and head are on every rank. The bias of a
    sum is on rank 0 alone. Raises ValueError as `local_config` does, and for a damaged checkpoint.
    """
    weights.check_sizes()

    def read(name: str) -> tuple[tuple[int, ...], Iterable[Tensor]]:
        shape, pieces = weights.read(name)
        module, kind = name.split(".")[-2:]
        if module in CUT_BY_COLUMNS and kind == "bias":
            return shape, pieces if rank == 0 else [torch.zeros(shape)]
        if module not in CUT_BY_ROWS + CUT_BY_COLUMNS:
            return shape, pieces
        whole = torch.cat([*pieces]).view(shape)
        part = whole.chunk(size, dim=int(module in CUT_BY_COLUMNS))[rank]
        return tuple(part.shape), [part.flatten()]

    return replace(weights, config=local_config(weights.config, size, weights.source), read=read)
