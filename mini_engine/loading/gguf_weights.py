"""Weights from a GGUF file: llama.cpp's names, keys and layout in Hugging Face's words.

Quantized tensors are dequantized by the package `gguf`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from mini_engine.loading.config import read_config
from mini_engine.loading.files import GGUFFile
from mini_engine.loading.weights import Weights
from mini_engine.model import ModelConfig

# Values that are dequantized at a time: so few stay in the processor's cache, and torch copies
# them without waking its threads.
PIECE = 2**15

NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

KEYS = {  # config.json's names, and the metadata keys after the architecture's name
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def open_gguf(gguf: GGUFFile) -> Weights:
    """Raises ValueError naming the file and the key or tensor at fault."""
    if gguf.get("split.count", 1) > 1:
        raise ValueError(f"{gguf.path}: one part of several; join them with llama.cpp's gguf-split first")
    tensors: dict[str, ReaderTensor] = {}
    for tensor in gguf.tensors:
        *layer, stem, kind = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        stem = NAMES.get(stem, stem)
        tensors[".".join(["layers", *layer[1:], stem, kind] if layer else [stem, kind])] = tensor
    config = _config(gguf, tensors)
    # llama.cpp rotates neighbouring pairs in this architecture, so its converter interleaves the
    # two halves of each query and key head; here they are put back.
    interleaved = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type != "llama":
        interleaved = {}

    def read(name: str) -> tuple[tuple[int, ...], Iterator[Tensor]]:
        tensor, heads = tensors[name], interleaved.get(name.split(".")[-2])
        return tuple(int(n) for n in reversed(tensor.shape)), _values(tensor, gguf.path, heads)

    factors = torch.cat([*read("rope_freqs.weight")[1]]) if "rope_freqs.weight" in tensors else None
    files = dict.fromkeys((name for name in tensors if name != "rope_freqs.weight"), gguf.path)
    embedding = tensors.get("embed_tokens.weight")
    kind = embedding.tensor_type.name if embedding is not None else "F32"
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    return Weights(gguf.path, config, files, read, dtype, factors)


def _values(tensor: ReaderTensor, path: Path, heads: int | None) -> Iterator[Tensor]:
    """A tensor's values, flat, some rows at a time; those of interleaved heads are in order again."""
    what = f"{path}: tensor {tensor.name!r}"

    def floats(raw: np.ndarray) -> np.ndarray:
        try:
            return raw if raw.dtype.kind == "f" else dequantize(raw, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(f"{what} is {tensor.tensor_type.name}, which is not supported") from None

    # As a plain array: slices of a memmap are slow. A vector is small enough to be taken whole.
    data = np.asarray(tensor.data) if tensor.data.ndim > 1 else floats(np.asarray(tensor.data))
    if heads:
        if len(data) % (2 * heads):
            raise ValueError(f"{what} has {len(data)} rows, which {heads} heads cannot share")
        data = data.reshape(heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    rows = max(1, PIECE * len(data) // int(tensor.n_elements))
    for start in range(0, len(data), rows):
        values = floats(data[start : start + rows].reshape(-1))
        yield torch.from_numpy(np.require(values, requirements="W"))  # the file is mapped read-only


def _config(gguf: GGUFFile, tensors: dict[str, ReaderTensor]) -> ModelConfig:
    """llama.cpp's metadata in the words of a config.json; what it leaves out, the tensors show."""
    arch = gguf.need("general.architecture")
    config = {"model_type": arch, "tie_word_embeddings": "lm_head.weight" not in tensors}
    said = {name: gguf.get(f"{arch}.{key}") for name, key in KEYS.items()}
    config |= {name: value for name, value in said.items() if value is not None}
    if arch in ("llama", "qwen2", "qwen3"):  # read_config refuses any other by name
        for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
            gguf.need(f"{arch}.{key}")
        for key in ("expert_count", "attention.sliding_window"):
            if gguf.get(f"{arch}.{key}"):
                raise ValueError(f"{gguf.path}: {arch}.{key} is not supported; only plain dense decoders are")
    if "embed_tokens.weight" in tensors:
        config["vocab_size"] = int(tensors["embed_tokens.weight"].shape[1])
    scaling = gguf.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": gguf.get(f"{arch}.rope.scaling.factor")}
    return replace(
        read_config(config, str(gguf.path)),
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        o_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
    )
