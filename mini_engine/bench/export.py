"""The same weights for all contestants: a folder in Hugging Face layout, and a GGUF file.

A quantized model is dequantized first, so that each contestant reads the same number of bits.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.loading.checkpoint import DTYPES, load_model, parts
from mini_engine.loading.weights import KEYS, NAMES
from mini_engine.model import CausalLM, ModelConfig, rope_inv_freq

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
GGUF_NAMES = {theirs.split(".")[-1]: name for name, theirs in NAMES.items()}


def export(model: Path, dtype: str, folder: Path) -> tuple[Path, Path]:
    """Write the folder and the GGUF file, once, and return both. For "q4" the folder has float32, and the
    file is the model's own. Raises ValueError for an unfit dtype."""
    if dtype == "q4" and model.suffix == ".gguf":
        return export(model, "float32", folder)[0], model
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"dtype must be float32 or bfloat16, the same for all, or q4 for a .gguf file, but is {dtype!r}"
        )
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    place = folder / f"{model.stem}-{size:x}-{dtype}"
    gguf = place / "model.gguf"
    if not gguf.exists():
        loaded = load_model(model, DTYPES[dtype], "cpu")
        place.mkdir(parents=True, exist_ok=True)
        if not torch.equal(loaded.inv_freq, rope_inv_freq(replace(loaded.config, rope_scaling=None))):
            raise ValueError(f"{model}: its RoPE is scaled, which cannot be written for the others yet")
        write_folder(loaded, place)
        write_gguf(loaded, gguf)
    return place, gguf


def write_folder(model: CausalLM, folder: Path) -> None:
    """Write config.json and model.safetensors, in the model's own dtype."""
    from safetensors.torch import save_file

    head = "lm_head.weight"
    named = {name if name == head else f"model.{name}": t.contiguous() for name, t in parts(model)}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(model.config) | {"dtype": str(model.dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Return a config.json; no token ends a text in it, because all requests run to their length."""
    names = ("model_type", "vocab_size", "tie_word_embeddings", *KEYS)
    return {
        "architectures": [ARCHITECTURES[config.model_type]],
        **{name: getattr(config, name) for name in names},
        "hidden_act": "silu", "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def write_gguf(model: CausalLM, file: Path) -> None:
    """Write a GGUF file in llama.cpp's layout. Vectors stay float32, as its own converter leaves them."""
    from gguf import GGMLQuantizationType, GGUFWriter

    config, arch = model.config, model.config.model_type
    writer = GGUFWriter(file.with_suffix(".part"), arch)
    writer.add_tokenizer_model("none")  # prompts are token ids
    writer.add_vocab_size(config.vocab_size)
    for name, key in KEYS.items():
        value = getattr(config, name)
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    for name, tensor in parts(model):
        *layer, module, kind = name.split(".")
        block = f"blk.{layer[1]}." if layer else ""
        if arch == "llama" and module in ("q_proj", "k_proj"):
            tensor = interleaved(tensor, config.head_dim)
        as_bfloat16 = tensor.ndim > 1 and tensor.dtype == torch.bfloat16
        writer.add_tensor(
            f"{block}{GGUF_NAMES[module]}.{kind}",
            tensor.contiguous().view(torch.uint8).numpy() if as_bfloat16 else tensor.float().numpy(),
            raw_dtype=GGMLQuantizationType.BF16 if as_bfloat16 else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".part").rename(file)


def interleaved(tensor: Tensor, head_dim: int) -> Tensor:
    """Interleave each head's two halves, because llama.cpp rotates neighbours in this architecture."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
