"""Loading a CausalLM, ready to run, from a folder or a GGUF file.

Each parameter is allocated once, in its final dtype and on its device, and filled from the file:
query, key and value (and gate and up) are read straight into their place in the fused matrix.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mini_engine.loading.files import GGUFFile, ModelPath, opened
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.loading.weights import Weights, open_folder, open_gguf
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.text.tokenizer import Tokenizer

Dtype = str | torch.dtype
Device = str | torch.device
Share = Callable[[Weights], Weights]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load(
    model: str | Path, dtype: Dtype = "auto", device: Device = "auto", share: Share | None = None
) -> tuple[CausalLM, Tokenizer]:
    """Return model and tokenizer of a name or path (see `resolve`), opened once. See load_model."""
    source = opened(resolve(model))
    loaded = load_model(source, dtype, device, share)
    return loaded, _tokenizer_for(loaded.config, source)


def read_model(model: str | Path) -> tuple[Tokenizer, ModelConfig]:
    """Return the tokenizer and the config of a name or path, as `load` does, without the weights."""
    source = opened(resolve(model))
    config = _open(source).config
    return _tokenizer_for(config, source), config


def _tokenizer_for(config: ModelConfig, source: Path | GGUFFile) -> Tokenizer:
    tokenizer = load_tokenizer(source)
    if tokenizer.vocab_size > config.vocab_size:
        where = source if isinstance(source, Path) else source.path
        raise ValueError(
            f"{where}: {tokenizer.vocab_size} tokens, but embeddings for {config.vocab_size} only"
        )
    tokenizer.max_characters = config.max_position_embeddings * tokenizer.longest_token
    return tokenizer


def _open(source: Path | GGUFFile) -> Weights:
    return open_folder(source) if isinstance(source, Path) else open_gguf(source)


def load_model(
    path: ModelPath, dtype: Dtype = "auto", device: Device = "auto", share: Share | None = None
) -> CausalLM:
    """Return the model in `path`, ready for inference: eval mode, no gradients.

    `path` is a folder in Hugging Face layout (config.json, and model.safetensors or its shards) or
    a .gguf file. `dtype` "auto" is float32 on the CPU and the checkpoint's own on CUDA (bfloat16
    for a quantized GGUF file, whose weights are dequantized here). "q4" is float32 with weights that an
    engine packs in 4 bits. `device` "auto" is CUDA when there is one. `share` cuts the weights to the
    part that this process is to hold.

    Raises FileNotFoundError or ValueError naming the file and the key or tensor at fault.
    """
    device, source = choose_device(device), opened(path)
    weights = _open(source)
    if share is not None:
        weights = share(weights)
    if dtype == "q4":
        model = _build(weights, torch.float32, device)
        model.quantized = True
        return model
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else weights.dtype
    else:
        dtype = _dtype(dtype)
    return _build(weights, dtype, device)


def _dtype(dtype: Dtype) -> torch.dtype:
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in (*DTYPES.values(), torch.float16):
        raise ValueError(
            f"dtype must be auto, {', '.join(DTYPES)}, q4 or a torch dtype for floats, but is {dtype!r}"
        )
    return chosen


def choose_device(device: Device = "auto") -> torch.device:
    """Return the device; "auto" is CUDA when there is one. Raises ValueError if it is unknown or missing."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda"):
            raise RuntimeError
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be auto, cpu or cuda, but is {str(device)!r}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here for {str(device)!r}; use auto or cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there are {torch.cuda.device_count()} CUDA devices, and no {str(device)!r}")
    return chosen


def uninitialized(config: ModelConfig, device: Device) -> CausalLM:
    """Return a model whose parameters have no values yet; on torch's device "meta" they take no memory."""
    with torch.device(device), _SkipInit():
        return CausalLM(config).requires_grad_(False)


def _build(weights: Weights, dtype: torch.dtype, device: torch.device) -> CausalLM:
    config = weights.config
    weights.check_sizes()
    model = uninitialized(config, "meta")
    empty = ((n, torch.empty(p.shape, dtype=dtype, device=device)) for n, p in model.named_parameters())
    state = dict(empty)
    unused = {name for name in weights.files if not name.endswith("rotary_emb.inv_freq")} - {"lm_head.weight"}
    for name, target in parts(model, state):
        weights.fill(target, name)
        unused.discard(name)
    if name := min(unused, default=""):
        why = f"tensor {name!r} has no place in the model that {weights.source} describes"
        raise ValueError(f"{weights.files[name]}: {why}")
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight  # one Parameter again
    if weights.rope_factors is not None:
        model.inv_freq = model.inv_freq / weights.rope_factors
    return model.eval()


def parts(
    model: CausalLM, state: Mapping[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters (or `state`, by their names) under Hugging Face's names without "model.".

    Fused matrices are split, as views. A tied lm_head does not appear.
    """
    config = model.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        names = FUSED.get(module, (module,))
        even = len(parameter) // len(names)
        rows = [n * config.head_dim for n in heads] if module == "qkv_proj" else even
        tensors = torch.split((state or {}).get(name, parameter.data), rows)
        yield from zip((name.replace(module, part) for part in names), tensors, strict=True)


class _SkipInit(TorchFunctionMode):
    """Leave out torch.nn.init: on meta tensors it does nothing but import torch's compiler (2 s)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))
