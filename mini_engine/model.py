"""The decoder: Llama, SmolLM2, Qwen2 and Qwen3 are one model with a few switches.

`model(token_ids, positions, attend)` has no caches and no batches of its own. Attention is passed in
as `attend(layer, q, k, v)`, and the leading shape of every tensor is free: (N,) for a flat batch,
(B, T) for a padded one.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.interfaces import Attend


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a config.json that the decoder needs, under Hugging Face's names.

    `rope_scaling` has its `rope_type`, linear or llama3, and the factors of that type, or is None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def rope_inv_freq(config: ModelConfig) -> Tensor:
    """Return rotary frequencies, (head_dim / 2,) float32, in radians a position.

    Su et al., RoFormer (2021). `llama3` stretches the wavelengths that exceed the context the
    model was trained on and blends those in between (Llama 3.1).
    """
    # The device is named, so that building a model under torch.device("meta") leaves this real.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    inv_freq: Tensor = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    factor: float = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return inv_freq / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth: Tensor = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (*S, heads, head_dim) by the angles of its positions; cos, sin (*S, 1, head_dim / 2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Call torch's attention: q and the result are (B, Tq, heads, d), k and v (B, Tk, kv_heads, d).

    The mask is True where a query may attend to a key, and broadcasts to (B, heads, Tq, Tk).
    """
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=q.shape[-3] != k.shape[-3]
    )
    return out.transpose(-3, -2)


class RMSNorm(nn.Module):
    """Zhang and Sennrich, Root Mean Square Layer Normalization (2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """One layer's projections and rotation around `attend`: x (*S, hidden_size) to the same shape."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.head_dim = config.head_dim
        # Query, key and value in one matrix: one matmul instead of three.
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads[0] * config.head_dim, config.hidden_size, bias=config.o_bias)
        norm = (lambda: RMSNorm(config.head_dim, config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=-2)
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        out: Tensor = self.o_proj(attend(self.layer, q, k, v).flatten(-2))
        return out


class MLP(nn.Module):
    """SwiGLU: Shazeer, GLU Variants Improve Transformer (2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each behind a norm and added to x (*S, hidden_size)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class CausalLM(nn.Module):
    """A decoder-only language model.

    `model(token_ids, positions, attend)` returns the last hidden states (*S, hidden_size) for token
    ids and absolute positions (*S). `model.logits(rows)` turns the rows to be sampled, (*R, hidden_size),
    into logits (*R, vocab_size): the head is the widest matrix of a small model, and most rows of a
    step never need it.
    """

    quantized = False  # whether fast/ packs the weights in 4 bits, as dtype "q4" asks

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # Not a buffer: model.to(bfloat16) must not round the angles.
        self.inv_freq = rope_inv_freq(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        angles = positions.unsqueeze(-1).float() * self.inv_freq.to(positions.device)
        cos, sin = (f(angles).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def not_finite(self) -> str | None:
        """Return the name of a weight that holds NaN or infinity, or None."""
        return next((name for name, w in self.named_parameters() if not w.isfinite().all()), None)
