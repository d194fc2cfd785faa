"""Weights and config from a Hugging Face folder or a GGUF file into a CausalLM.

Each parameter is allocated once, in its final dtype and on its device, and filled from the file:
query, key and value (and gate and up) are read straight into their place in the fused matrix.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mini_engine.model import CausalLM, ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclasses.dataclass
class Checkpoint:
    """What a folder or file holds. Tensor names are Hugging Face's without the prefix "model."."""

    source: Path  # the file that the config comes from
    config: ModelConfig
    files: dict[str, Path]  # which file each tensor is in
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    rope_factors: Tensor | None = None


def load_model(path, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto") -> CausalLM:
    """The model in `path`, ready for inference: eval mode, no gradients.

    `path` is a folder in Hugging Face layout (config.json, and model.safetensors or its shards) or
    a .gguf file. `dtype` "auto" is float32 on the CPU and the checkpoint's own on CUDA (bfloat16
    for a quantized GGUF file, whose weights are dequantized here). `device` "auto" is CUDA when
    there is one.

    Raises FileNotFoundError or ValueError naming the file and the key or tensor at fault.
    """
    path = Path(path)
    device = choose_device(device)
    checkpoint = _open_gguf(path) if path.suffix == ".gguf" else _open_folder(path)
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else checkpoint.dtype
    elif isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be auto, {', '.join(DTYPES)} or a torch dtype, but is {dtype!r}")
        dtype = DTYPES[dtype]
    return _build(checkpoint, dtype, device)


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """ "auto" is CUDA when there is one. Raises ValueError for a device that is not known or not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, but is {device!r}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here for {str(device)!r}; use auto or cpu")
    return chosen


def _build(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> CausalLM:
    with torch.device("meta"), _SkipInit():
        model = CausalLM(checkpoint.config).requires_grad_(False)
    config = checkpoint.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    state, used = {}, set()
    for name, parameter in model.named_parameters():  # a tied lm_head does not appear
        module = name.split(".")[-2]
        parts = [name.replace(module, part) for part in FUSED.get(module, (module,))]
        if module == "qkv_proj":
            rows = [n * config.head_dim for n in heads]
        else:
            rows = [len(parameter) // len(parts)] * len(parts)
        state[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        for part, target in zip(parts, state[name].split(rows), strict=True):
            target.copy_(_read(checkpoint, part, target.shape))
        used.update(parts)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    ignored = {name for name in checkpoint.files if name.endswith("rotary_emb.inv_freq")} | {"lm_head.weight"}
    if unknown := sorted(checkpoint.files.keys() - used - ignored):
        raise ValueError(
            f"{checkpoint.files[unknown[0]]}: tensor {unknown[0]!r} has no place in the model that "
            f"{checkpoint.source} describes"
        )
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight  # one Parameter again
    if checkpoint.rope_factors is not None:
        model.inv_freq = model.inv_freq / checkpoint.rope_factors
    return model.eval()


class _SkipInit(TorchFunctionMode):
    """Leave out torch.nn.init: on meta tensors it does nothing but import torch's compiler (2 s)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _read(checkpoint: Checkpoint, name: str, shape: torch.Size) -> Tensor:
    if name not in checkpoint.files:
        files = " and ".join(str(f) for f in sorted(set(checkpoint.files.values()))[:3])
        raise ValueError(f"{files or checkpoint.source}: tensor {name!r} is missing")
    tensor = checkpoint.read(name)
    if tensor.shape != shape:
        raise ValueError(
            f"{checkpoint.files[name]}: tensor {name!r} has shape {tuple(tensor.shape)}, but "
            f"{checkpoint.source} asks for {tuple(shape)}"
        )
    if not tensor.is_floating_point():
        raise ValueError(
            f"{checkpoint.files[name]}: tensor {name!r} holds {tensor.dtype}; quantized weights are read "
            "from GGUF files only"
        )
    return tensor


# Hugging Face folders


def _open_folder(path: Path) -> Checkpoint:
    source = path / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such folder or file")
    if not path.is_dir():
        raise ValueError(f"{path}: neither a folder nor a .gguf file")
    config = ModelConfig.from_dict(_read_json(source), str(source))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: the key 'weight_map' is missing")
        shards = sorted({path / file for file in weight_map.values()})
    else:
        shards = [path / "model.safetensors"]
    files, handles = {}, {}
    for shard in shards:
        if not shard.is_file():
            raise FileNotFoundError(
                f"{shard}: there is no such file"
                + (f", though {index.name} names it" if index.is_file() else "")
            )
        with _damage(shard):
            handles[shard] = safe_open(shard, framework="pt")
            files |= dict.fromkeys(handles[shard].keys(), shard)
    # A checkpoint of the bare decoder has no prefix; lm_head never has one.
    full_names = {name.removeprefix("model."): name for name in files}

    def read(name):
        shard = files[full_names[name]]
        with _damage(shard):
            return handles[shard].get_tensor(full_names[name])

    files_by_name = {name: files[full] for name, full in full_names.items()}
    embedding = "embed_tokens.weight"
    dtype = read(embedding).dtype if embedding in full_names else torch.float32
    return Checkpoint(source, config, files_by_name, read, dtype)


@contextmanager
def _damage(file: Path):
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or cut short ({error}); copy it again") from None


def _read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file}: there is no such file; a model folder has it beside its model.safetensors"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


# GGUF files

GGUF_NAMES = {
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

GGUF_KEYS = {  # config.json's names, and the metadata keys after the architecture's name
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


def _open_gguf(path: Path) -> Checkpoint:
    from gguf.quants import dequantize

    from mini_engine.loading.gguf_file import GGUFFile

    gguf = GGUFFile(path)
    if gguf.get("split.count", 1) > 1:
        raise ValueError(f"{path}: one part of several; join them with llama.cpp's gguf-split first")
    tensors = {}
    for tensor in gguf.tensors:
        *layer, stem, kind = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        stem = GGUF_NAMES.get(stem, stem)
        tensors[".".join(["layers", *layer[1:], stem, kind] if layer else [stem, kind])] = tensor
    config = _gguf_config(gguf, tensors)
    # llama.cpp rotates neighbouring pairs in this architecture, so its converter interleaves the
    # two halves of each query and key head; here they are put back.
    interleaved = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type != "llama":
        interleaved = {}

    def read(name):
        tensor = tensors[name]
        # As a plain array: slices of a memmap, which dequantize takes by the thousand, are slow.
        data, kind = np.asarray(tensor.data), tensor.tensor_type
        try:
            data = data if data.dtype.kind == "f" else dequantize(data, kind)
        except NotImplementedError:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} is {kind.name}, which is not supported"
            ) from None
        if heads := interleaved.get(name.split(".")[-2]):
            if len(data) % (2 * heads):
                raise ValueError(
                    f"{path}: tensor {tensor.name!r} has {len(data)} rows, which {heads} heads cannot share"
                )
            data = data.reshape(heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        # torch wants to own writable memory, and the file is mapped read-only.
        return torch.from_numpy(data if data.flags.writeable else data.copy())

    factors = read("rope_freqs.weight") if "rope_freqs.weight" in tensors else None
    files = dict.fromkeys((name for name in tensors if name != "rope_freqs.weight"), path)
    embedding = tensors.get("embed_tokens.weight")
    kind = embedding.tensor_type.name if embedding is not None else "F32"
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    return Checkpoint(path, config, files, read, dtype, factors)


def _gguf_config(gguf, tensors: dict) -> ModelConfig:
    """llama.cpp's metadata in the words of a config.json; what it leaves out, the tensors tell."""
    arch = gguf.need("general.architecture")
    config = {"model_type": arch, "tie_word_embeddings": "lm_head.weight" not in tensors}
    for name, key in GGUF_KEYS.items():
        if (value := gguf.get(f"{arch}.{key}")) is not None:
            config[name] = value
    if arch in ("llama", "qwen2", "qwen3"):  # from_dict refuses any other by name
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
    return dataclasses.replace(
        ModelConfig.from_dict(config, str(gguf.path)),
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        o_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
    )
