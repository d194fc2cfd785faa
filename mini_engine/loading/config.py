"""config.json, in transformers' words, as the numbers that the decoder needs."""

from typing import Any

from mini_engine.model import ModelConfig

REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
# The kinds of rope scaling, and what each must say.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(config: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face config. Raises ValueError naming `source` and the key at fault."""
    model_type = config.get("model_type")
    if model_type not in ("llama", "qwen2", "qwen3"):
        runs = "mini-engine runs llama (SmolLM2 too), qwen2 and qwen3"
        raise ValueError(f"{source}: model_type {model_type!r} is not supported; {runs}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act {config['hidden_act']!r} is not supported; only silu is")
    if config.get("use_sliding_window"):
        raise ValueError(f"{source}: use_sliding_window is not supported; every layer attends to all")
    theta, scaling = _rope(config, source)
    if missing := [key for key in REQUIRED if config.get(key) is None]:
        raise ValueError(f"{source}: the key {missing[0]!r} is missing")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        multiple = f"is not a multiple of num_key_value_heads {kv_heads}"
        raise ValueError(f"{source}: num_attention_heads {heads} {multiple}")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        model_type=model_type,
        **{key: config[key] for key in REQUIRED},
        num_key_value_heads=kv_heads,
        # Qwen3's heads are 128 wide unless its config says otherwise, whatever hidden_size is.
        head_dim=config.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
    )


def _rope(config: dict[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """The rotary base, and the scaling, None for none."""
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KEYS:
        raise ValueError(f"{source}: rope scaling {kind!r} is not supported; default, linear and llama3 are")
    for key in ROPE_KEYS[kind]:
        if rope.get(key) is None:
            raise ValueError(f"{source}: rope scaling {kind!r} needs the key {key!r}, which is missing")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"{source}: partial_rotary_factor {partial} is not supported; heads turn whole")
    return float(theta), None if kind == "default" else {**rope, "rope_type": kind}
