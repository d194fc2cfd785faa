"""The decoder of model.py with packed products and as few passes over memory as possible.

It can replace a CausalLM anywhere: the same call, the same logits up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.fast import blocks, kernels, onednn, panels, steps
from mini_engine.interfaces import Attend
from mini_engine.model import CausalLM, DecoderLayer, RMSNorm

Fast = bool | Literal["torch"]
Product = onednn.Linear | panels.Linear | blocks.Linear


def prepare(model: CausalLM, fast: Fast = True) -> CausalLM:
    """Return a FastLM where that is faster (float32 and bfloat16 on the CPU), else the model itself.

    `fast` True uses kernels.cpp where it is built, "torch" never, and False changes nothing. Raises
    ValueError for a quantized model if kernels.cpp may not or cannot be used.
    """
    if fast not in (True, False, "torch"):
        raise ValueError(f'fast must be True, False or "torch", but is {fast!r}')
    if not isinstance(model, CausalLM) or isinstance(model, FastLM):
        return model
    if model.quantized:
        if (kind := model.device.type) != "cpu" or fast is not True:
            raise ValueError(f"dtype q4 needs the CPU and fast=True, but has {kind}, fast={fast!r}")
        if not kernels.load(model.dtype):
            raise ValueError("dtype q4 needs the kernels; run `mini-engine kernels build`")
    if not fast:
        return model
    use_kernels = fast is True
    if model.device.type != "cpu" or product_of(model.dtype, _kernels(model.dtype, use_kernels)) is None:
        return model
    return FastLM(model, use_kernels)


def _kernels(dtype: torch.dtype, use_kernels: bool) -> kernels.Kernels | None:
    return kernels.load(dtype) if use_kernels else None


def product_of(dtype: torch.dtype, built: kernels.Kernels | None) -> Callable[..., Product] | None:
    """Return what packs a weight of this type on this machine, or None."""
    can_pack = onednn.can_pack(dtype)
    if built and (dtype == torch.bfloat16 and not can_pack or dtype == torch.float32 and panels.are_faster()):
        return partial(panels.Linear, built)
    return onednn.Linear if can_pack else None


class FastLM(CausalLM):
    """A CausalLM prepared for the CPU. It shares the embedding and the norms with `model`, and holds a
    packed copy of every matrix: as much memory again, until `model` is dropped. A tied head is packed
    too, beside the embedding, which is still needed to look tokens up.

    `use_kernels` False does not use kernels.cpp.
    """

    def __init__(self, model: CausalLM, use_kernels: bool = True) -> None:
        nn.Module.__init__(self)
        self.config, self.inv_freq, self.quantized = model.config, model.inv_freq, model.quantized
        self.embed_tokens, self.norm = model.embed_tokens, model.norm
        self.kernels = _kernels(model.dtype, use_kernels)
        product = product_of(model.dtype, self.kernels) or onednn.Linear
        head = product
        if model.quantized and self.kernels:
            # The head, from which each token is chosen, keeps 8 bits, as in GGUF files.
            product, head = (partial(blocks.Linear, self.kernels, bits) for bits in (4, 8))
        self.packed_layers = [_Layer(cast(DecoderLayer, layer), product) for layer in model.layers]
        self.head = head(model.lm_head.weight)
        self.steps = self.kernels or steps

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = F.embedding(token_ids.flatten(), self.embed_tokens.weight)
        cos, sin = self._angles(positions.flatten())
        shape, eps = token_ids.shape, self.config.rms_norm_eps
        mix = (
            attend.of_qkv([layer.norms for layer in self.packed_layers], cos, sin)
            if isinstance(attend, kernels.PagedAttend)
            else partial(self._attend, attend, shape, cos, sin)
        )
        delta: Tensor | None = None  # the last product; added to x by the next norm
        for i, layer in enumerate(self.packed_layers):
            qkv = layer.qkv(self.steps.add_rms_norm(x, delta, layer.input_norm, eps))
            delta = layer.o(mix(i, qkv))
            gate_up = layer.gate_up(self.steps.add_rms_norm(x, delta, layer.post_attention_norm, eps))
            delta = layer.down(self.steps.silu_mul(gate_up))
        if delta is not None:
            x += delta
        return x.view(*shape, x.shape[1])

    def _attend(
        self, attend: Attend, shape: torch.Size, cos: Tensor, sin: Tensor, i: int, qkv: Tensor
    ) -> Tensor:
        """Do what PagedAttend.of_qkv does in one pass, with any `attend`."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = qkv.view(len(qkv), -1, self.config.head_dim)
        q, k, _ = parts = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        for x, norm in zip((q, k), self.packed_layers[i].norms, strict=True):
            if norm is not None:
                x.copy_(F.rms_norm(x, norm.shape, norm, self.config.rms_norm_eps))
        steps.rope(qkv[:, : heads + kv_heads], cos, sin)
        q, k, v = (part.view(*shape, *part.shape[1:]) for part in parts)
        return attend(i, q, k, v).reshape(len(qkv), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = self.norm(hidden).reshape(-1, hidden.shape[-1])
        logits = self.head(rows).view(*hidden.shape[:-1], self.config.vocab_size)
        # torch finds the largest of many bfloat16 values more slowly than it widens them.
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def not_finite(self) -> str | None:
        """Return the name of a weight that holds NaN or infinity, or None."""
        named: dict[str, Tensor] = {"embed_tokens.weight": self.embed_tokens.weight}
        for i, layer in enumerate(self.packed_layers):
            for name, weight in layer.weights().items():
                named[f"layers.{i}.{name}"] = weight
        named |= {"norm.weight": self.norm.weight, "lm_head.weight": self.head.sums()}
        return next((name for name, w in named.items() if not w.isfinite().all()), None)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (N, head_dim / 2); the kernels take them unrounded."""
        angles = positions.unsqueeze(1).float() * self.inv_freq
        dtype = torch.promote_types(self.dtype, torch.float32) if self.kernels else self.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


class _Layer:
    """The weights of one DecoderLayer, as FastLM uses them."""

    def __init__(self, layer: DecoderLayer, product: Callable[..., Product]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = layer.input_layernorm.weight
        self.post_attention_norm = layer.post_attention_layernorm.weight
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.norms: kernels.Norms = (
            q_norm.weight if isinstance(q_norm, RMSNorm) else None,
            k_norm.weight if isinstance(k_norm, RMSNorm) else None,
        )
        self.qkv, self.o, self.gate_up, self.down = (
            product(linear.weight, linear.bias)
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        )

    def weights(self) -> dict[str, Tensor]:
        """Return each weight, or the sums of its rows, by its name in a DecoderLayer."""
        named: dict[str, Tensor] = {
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.post_attention_norm,
        }
        for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=True):
            if norm is not None:
                named[f"self_attn.{name}"] = norm
        for name in ("qkv", "o"):
            named[f"self_attn.{name}_proj"] = getattr(self, name).sums()
        for name in ("gate_up", "down"):
            named[f"mlp.{name}_proj"] = getattr(self, name).sums()
        return {f"{name}.weight": weight for name, weight in named.items()}
