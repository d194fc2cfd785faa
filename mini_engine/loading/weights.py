"""A checkpoint's config, and its tensors by name.

It is a folder in Hugging Face layout (config.json, and model.safetensors or its shards), or a GGUF file,
with the names, keys and layout of llama.cpp. The package `gguf` dequantizes quantized tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import ReaderTensor
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.checks import shown
from mini_engine.loading.config import read_config
from mini_engine.loading.files import GGUFFile, read_json
from mini_engine.loading.quantized import values_of
from mini_engine.model import ModelConfig

# Values that are dequantized at a time: so few stay in the processor's cache, and torch copies them in one
# thread.
PIECE = 2**15

NAMES = {  # llama.cpp's names, and Hugging Face's
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


@dataclass
class Weights:
    """A checkpoint's tensors, under Hugging Face's names without the prefix "model.".

    `read(name)` returns a tensor's shape, and its values, flat and in order, in as many pieces as suit
    the format, so that a large tensor need not be in memory twice.
    """

    source: Path  # the file that the config comes from
    config: ModelConfig
    files: dict[str, Path]  # which file each tensor is in
    read: Callable[[str], tuple[tuple[int, ...], Iterable[Tensor]]]
    dtype: torch.dtype
    rope_factors: Tensor | None = None

    def fill(self, target: Tensor, name: str) -> None:
        """Copy a tensor into the contiguous `target`, in the target's type and on its device.

        Raises ValueError naming the file when the tensor is missing, has another shape, or is
        quantized in a folder.
        """
        pieces = self.checked(name, tuple(target.shape))
        what, flat, start = f"{self.files[name]}: tensor {name!r}", target.view(-1), 0
        for piece in pieces:
            if not piece.is_floating_point():
                only = "quantized weights are read from GGUF files only"
                raise ValueError(f"{what} holds {piece.dtype}; {only}")
            flat[start : start + len(piece)].copy_(piece)
            start += len(piece)

    def checked(self, name: str, shape: tuple[int, ...]) -> Iterable[Tensor]:
        """Return the tensor's values. Raises ValueError when it is missing or has another shape."""
        if name not in self.files:
            files = " and ".join(str(f) for f in sorted(set(self.files.values()))[:3])
            raise ValueError(f"{files or self.source}: tensor {name!r} is missing")
        found, pieces = self.read(name)
        if found != shape:
            what = f"{self.files[name]}: tensor {name!r}"
            raise ValueError(f"{what} has shape {found}, but {self.source} asks for {shape}")
        return pieces

    def check_sizes(self) -> None:
        """Raise ValueError when the config asks for more than the tensors have; takes no memory."""
        config = self.config
        layers = {name.split(".")[1] for name in self.files if name.startswith("layers.")}
        if layers and config.num_hidden_layers > len(layers):
            has = f"the weights have {len(layers)} layers"
            raise ValueError(f"{self.source}: num_hidden_layers is {config.num_hidden_layers}, but {has}")
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        for name, rows in {
            "embed_tokens": config.vocab_size,
            "layers.0.self_attn.q_proj": q,
            "layers.0.self_attn.k_proj": kv,
            "layers.0.mlp.gate_proj": config.intermediate_size,
        }.items():
            self.checked(f"{name}.weight", (rows, config.hidden_size))


def open_folder(path: Path) -> Weights:
    """Return a folder's weights. Raises FileNotFoundError or ValueError naming the file and what is wrong."""
    source = path / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such folder or file")
    if not path.is_dir():
        raise ValueError(f"{path}: neither a folder nor a .gguf file")
    config = read_config(read_json(source), str(source))
    found: dict[str, tuple[Path, Any, str]] = {}  # where each tensor is, and its name there
    for shard in _shards(path):
        with _damage(shard):
            handle: Any = safe_open(shard, framework="pt")
            # A checkpoint of the bare decoder has no prefix; lm_head never has one.
            found |= {name.removeprefix("model."): (shard, handle, name) for name in handle.keys()}

    def tensor(name: str) -> Tensor:
        shard, handle, full_name = found[name]
        with _damage(shard):
            values: Tensor = handle.get_tensor(full_name)
            return values

    def read(name: str) -> tuple[tuple[int, ...], list[Tensor]]:
        whole = tensor(name)  # mapped from the file, not copied
        return tuple(whole.shape), [whole.view(-1)]

    embedding = "embed_tokens.weight"
    dtype = tensor(embedding).dtype if embedding in found else torch.float32
    return Weights(source, config, {name: shard for name, (shard, *_) in found.items()}, read, dtype)


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: the key 'weight_map' is missing")
        for file in weight_map.values():
            if not isinstance(file, str) or file != Path(file).name:
                raise ValueError(
                    f"{index}: weight_map names {shown(file)}, which is not a file of this folder"
                )
        shards = sorted({path / file for file in weight_map.values()})
    else:
        shards = [path / "model.safetensors"]
        if not shards[0].is_file():
            _explain_missing(path)
    for shard in shards:
        if not shard.is_file():
            named = f", though {index.name} names it" if index.is_file() else ""
            raise FileNotFoundError(f"{shard}: there is no such file{named}")
    return shards


def _explain_missing(path: Path) -> None:
    """Raise FileNotFoundError that says what to do, where there are weights in another format."""
    if parts := sorted(path.glob("model-*-of-*.safetensors")):
        missing = path / "model.safetensors.index.json"
        raise FileNotFoundError(f"{missing}: there is no such file; {parts[0].name} needs it, copy it too")
    if pickled := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        how = "save the model as safetensors: transformers' save_pretrained(folder) does"
        raise FileNotFoundError(f"{pickled[0]}: a pickle can run code and is not read; {how}")


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{file}: damaged or cut short ({error}); copy it again") from None


def open_gguf(gguf: GGUFFile) -> Weights:
    """Return a GGUF file's weights. Raises ValueError naming the file and the key or tensor at fault."""
    if gguf.get("split.count", 1, int) > 1:
        raise ValueError(f"{gguf.path}: one part of several; join them with llama.cpp's gguf-split first")
    tensors: dict[str, ReaderTensor] = {}
    for tensor in gguf.tensors:
        if "." not in tensor.name:
            raise ValueError(f"{gguf.path}: a tensor is called {tensor.name!r}, which no model has")
        *layer, stem, kind = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        stem = NAMES.get(stem, stem)
        tensors[".".join(["layers", *layer[1:], stem, kind] if layer else [stem, kind])] = tensor
    config = _config(gguf, tensors)
    # llama.cpp rotates neighbouring pairs in this architecture, so its converter interleaves the
    # two halves of each query and key head, which is undone here.
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    interleaved = heads if config.model_type == "llama" else {}

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
    """Yield a tensor's values, flat, some rows at a time; the rows of interleaved heads are put in order."""
    what = f"{path}: tensor {tensor.name!r}"

    def floats(raw: np.ndarray) -> np.ndarray:
        try:
            return raw if raw.dtype.kind == "f" else values_of(raw, tensor.tensor_type)
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
    """Return the config of llama.cpp's metadata, and of the tensors where the metadata has nothing."""
    arch = gguf.need("general.architecture", str)
    config = {"model_type": arch, "tie_word_embeddings": "lm_head.weight" not in tensors}
    said = {name: gguf.get(f"{arch}.{key}") for name, key in KEYS.items()}
    config |= {name: value for name, value in said.items() if value is not None}
    if arch in ("llama", "qwen2", "qwen3"):  # read_config refuses any other by name
        for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
            gguf.need(f"{arch}.{key}")
        for key in ("expert_count", "attention.sliding_window"):
            if gguf.get(f"{arch}.{key}"):
                raise ValueError(f"{gguf.path}: {arch}.{key} is not supported; only plain dense decoders are")
    if "embed_tokens.weight" in tensors and len(tensors["embed_tokens.weight"].shape) == 2:
        config["vocab_size"] = int(tensors["embed_tokens.weight"].shape[1])
    scaling = gguf.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": gguf.get(f"{arch}.rope.scaling.factor")}
    read = read_config(config, str(gguf.path))
    turned = gguf.get(f"{arch}.rope.dimension_count", read.head_dim)
    if turned != read.head_dim:
        what = f"{arch}.rope.dimension_count is {shown(turned)}, but head_dim is {read.head_dim}"
        raise ValueError(f"{gguf.path}: {what}; RoPE must rotate whole heads")
    return replace(
        read,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        o_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
    )
