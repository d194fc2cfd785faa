"""The decoder: Llama, SmolLM2, Qwen2 and Qwen3 are one model with a few switches.

`model(token_ids, positions, attend)` knows nothing of caches or batches. Attention itself is
handed in as `attend(layer, q, k, v)`, and the leading shape of every tensor is free: (N,) for a
flat batch, (B, T) for a padded one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# attend(layer, q, k, v) -> out. q and out: (*S, num_heads, head_dim); k and v: (*S,
# num_kv_heads, head_dim), RoPE already applied. It stores k and v wherever it likes.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# The kinds of rope scaling, and what each must say.
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a config.json that the decoder needs, under Hugging Face's own names."""

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
    rope_scaling: dict | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_dict(cls, config: dict, source: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face config. Raises ValueError naming `source` and the key at fault."""
        model_type = config.get("model_type")
        if model_type not in ("llama", "qwen2", "qwen3"):
            raise ValueError(
                f"{source}: model_type {model_type!r} is not supported; "
                "mini-engine runs llama (SmolLM2 too), qwen2 and qwen3"
            )

        def need(key):
            if config.get(key) is None:
                raise ValueError(f"{source}: the key {key!r} is missing")
            return config[key]

        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{source}: hidden_act {config['hidden_act']!r} is not supported; only silu is")
        if config.get("use_sliding_window"):
            raise ValueError(f"{source}: use_sliding_window is not supported; every layer attends to all")

        # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_KEYS:
            raise ValueError(
                f"{source}: rope scaling {kind!r} is not supported; default, linear and llama3 are"
            )
        for key in ROPE_KEYS[kind]:
            if rope.get(key) is None:
                raise ValueError(f"{source}: rope scaling {kind!r} needs the key {key!r}, which is missing")
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise ValueError(f"{source}: partial_rotary_factor {partial} is not supported; heads turn whole")
        heads, hidden = need("num_attention_heads"), need("hidden_size")
        attention_bias = bool(config.get("attention_bias", False))
        self = cls(
            model_type=model_type,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            num_hidden_layers=need("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            # Qwen3's heads are 128 wide unless its config says otherwise, whatever hidden_size is.
            head_dim=config.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads),
            max_position_embeddings=need("max_position_embeddings"),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            rope_scaling=None if kind == "default" else {**rope, "rope_type": kind},
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias and model_type != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{source}: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        return self


def rope_inv_freq(config: ModelConfig) -> Tensor:
    """Rotary frequencies, (head_dim / 2,) float32, in radians a position.

    Su et al., RoFormer (2021). `llama3` stretches the wavelengths that exceed the context the
    model was trained on and blends those in between (Llama 3.1's release).
    """
    # The device is named, so that building a model under torch.device("meta") leaves this real.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return inv_freq / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (*S, heads, head_dim) by the angles of its positions; cos, sin (*S, 1, head_dim / 2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's attention with heads last but one: q (B, Tq, heads, d), k and v (B, Tk, kv_heads, d)."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=q.shape[-3] != k.shape[-3]
    )
    return out.transpose(-3, -2)


class RMSNorm(nn.Module):
    """Zhang and Sennrich, Root Mean Square Layer Normalization (2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
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
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: Shazeer, GLU Variants Improve Transformer (2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalLM(nn.Module):
    """A decoder-only language model.

    `model(token_ids, positions, attend)` gives the last hidden states (*S, hidden_size) for token
    ids and absolute positions (*S). `model.logits(rows)` turns the rows that are to be sampled,
    (*R, hidden_size), into logits (*R, vocab_size): the head is the widest matrix of a small
    model, and most rows of a step never need it.
    """

    def __init__(self, config: ModelConfig):
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
        x = self.embed_tokens(token_ids)
        angles = positions.unsqueeze(-1).float() * self.inv_freq.to(positions.device)
        cos, sin = (f(angles).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))
