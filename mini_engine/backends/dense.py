"""Attention over one contiguous cache, for one sequence: the reference for all other ways."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mini_engine.interfaces import Attend
from mini_engine.model import CausalLM, ModelConfig, sdpa


class DenseCache:
    """The keys and values of one sequence, all layers; `len(cache)` tokens of them.

    The capacity doubles when it runs out: concatenating at every token would copy the whole past.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ):
        shape = (config.num_hidden_layers, 16, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self._lens = [0] * config.num_hidden_layers

    def __len__(self) -> int:
        return self._lens[-1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Append k and v (n, num_kv_heads, head_dim) to a layer."""
        start, end = self._lens[layer], self._lens[layer] + len(k)
        while end > self.k.shape[1]:
            self.k, self.v = (torch.cat((x, torch.zeros_like(x)), dim=1) for x in (self.k, self.v))
        self.k[layer, start:end], self.v[layer, start:end] = k, v
        self._lens[layer] = end

    def truncate(self, num_tokens: int) -> None:
        """Keep at most the first `num_tokens`."""
        self._lens = [min(n, num_tokens) for n in self._lens]

    def get(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values so far, (n, num_kv_heads, head_dim) each, as views."""
        n = self._lens[layer]
        return self.k[layer, :n], self.v[layer, :n]


def dense_attend(cache: DenseCache) -> Attend:
    """Return `attend` for one sequence: its new rows, (T, heads, head_dim), see the past and themselves."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(layer, k, v)
        k, v = cache.get(layer)
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        return sdpa(q[None], k[None], v[None], mask)[0]

    return attend


def prompt_logits(model: CausalLM, token_ids: list[int], num_rows: int = 256) -> Iterator[Tensor]:
    """Yield logits (num_rows or fewer, vocab_size) after each token but the last, in order.

    It is a forward pass beside the engine's, in pieces: so chunks, preemption and cached prefixes, whose
    tokens are not computed again, do not matter.
    """
    cache = DenseCache(model.config, model.dtype, model.device)
    for start in range(0, len(token_ids) - 1, num_rows):
        end = min(start + num_rows, len(token_ids) - 1)
        piece = torch.tensor(token_ids[start:end], device=model.device)
        positions = torch.arange(start, end, device=model.device)
        yield model.logits(model(piece, positions, dense_attend(cache)))
