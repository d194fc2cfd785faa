"""Reading config.json, in transformers' words, into the decoder's ModelConfig."""

from math import isfinite
from typing import Any, NoReturn

from mini_engine.checks import shown
from mini_engine.model import ModelConfig

REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
MOST = {"num_hidden_layers": 10_000}  # each is an object
# The kinds of rope scaling, and the keys that each needs.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(config: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Return a Hugging Face config as ModelConfig. Raises ValueError naming `source` and the key at fault."""
    read = _Reader(config, source)
    model_type = config.get("model_type")
    if model_type not in ("llama", "qwen2", "qwen3"):
        runs = "mini-engine runs llama (SmolLM2 too), qwen2 and qwen3"
        raise ValueError(f"{source}: model_type {shown(model_type)} is not supported; {runs}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act {shown(config['hidden_act'])} is not supported; only silu is")
    if read.flag("use_sliding_window"):
        raise ValueError(f"{source}: use_sliding_window is not supported; every layer attends to all")
    theta, scaling = _rope(config, source)
    if missing := [key for key in REQUIRED if config.get(key) is None]:
        raise ValueError(f"{source}: the key {missing[0]!r} is missing")
    sizes = {key: read.size(key) for key in REQUIRED}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        multiple = f"is not a multiple of num_key_value_heads {kv_heads}"
        raise ValueError(f"{source}: num_attention_heads {heads} {multiple}")
    # Qwen3's heads are 128 wide unless its config says otherwise, whatever hidden_size is.
    head_dim = read.size("head_dim", 128 if model_type == "qwen3" else hidden // heads)
    if head_dim % 2 or not head_dim:  # RoPE rotates pairs
        raise ValueError(f"{source}: head_dim must be even and at least 2, but is {head_dim}")
    attention_bias = read.flag("attention_bias")
    return ModelConfig(
        model_type=model_type,
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias and model_type != "qwen2",
        mlp_bias=read.flag("mlp_bias") and model_type == "llama",
        qk_norm=model_type == "qwen3",
    )


class _Reader:
    """Values of a JSON object by kind; one that is missing or null is the default."""

    def __init__(self, config: dict[str, Any], source: str):
        self.config, self.source = config, source

    def size(self, key: str, default: int = 0) -> int:
        value, most = self.config.get(key), MOST.get(key, 2**31 - 1)
        if value is None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            self._refuse(key, f"a whole number from 1 to {most}", value)
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self._given(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30 or not isfinite(value):
            self._refuse(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._given(key, False)
        if type(value) is not bool:
            self._refuse(key, "true or false", value)
        return bool(value)

    def _given(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def _refuse(self, key: str, what: str, value: Any) -> NoReturn:
        raise ValueError(f"{self.source}: {key} must be {what}, but is {shown(value)}")


def _rope(config: dict[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """Return RoPE's base, and its scaling or None."""
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{source}: rope scaling must be an object, but is {shown(given)}")
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        known = "default, linear and llama3 are"
        raise ValueError(f"{source}: rope scaling {shown(kind)} is not supported; {known}")
    read = _Reader({"rope_theta": config.get("rope_theta")} | rope, source)
    theta = read.number("rope_theta", 10000.0)
    for key in ROPE_KEYS[kind]:
        if key not in rope:
            raise ValueError(f"{source}: rope scaling {kind!r} needs the key {key!r}, which is missing")
        rope[key] = read.number(key, 0)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        raise ValueError(f"{source}: low_freq_factor {low} must be below high_freq_factor {high}")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        why = "RoPE must rotate whole heads"
        raise ValueError(f"{source}: partial_rotary_factor {shown(partial)} is not supported; {why}")
    rope.pop("rope_theta", None)
    return theta, None if kind == "default" else {**rope, "rope_type": kind}
