"""What a checkpoint offers, whatever its format (a config, and tensors by name), and reading it from a
folder in Hugging Face layout: config.json, and model.safetensors or its shards.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.loading.config import read_config
from mini_engine.loading.files import read_json
from mini_engine.model import ModelConfig


@dataclass
class Weights:
    """Tensor names are Hugging Face's without the prefix "model.".

    `read(name)` gives a tensor's shape, and its values, flat and in order, in as many pieces as suit
    the format: a large tensor need not exist twice.
    """

    source: Path  # the file that the config comes from
    config: ModelConfig
    files: dict[str, Path]  # which file each tensor is in
    read: Callable[[str], tuple[tuple[int, ...], Iterable[Tensor]]]
    dtype: torch.dtype
    rope_factors: Tensor | None = None

    def fill(self, target: Tensor, name: str) -> None:
        """Copy a tensor into the contiguous `target`, in the type and on the device of that.

        Raises ValueError naming the file when the tensor is missing, has another shape, or is
        quantized in a way that only GGUF knows.
        """
        if name not in self.files:
            files = " and ".join(str(f) for f in sorted(set(self.files.values()))[:3])
            raise ValueError(f"{files or self.source}: tensor {name!r} is missing")
        shape, pieces = self.read(name)
        what, flat, start = f"{self.files[name]}: tensor {name!r}", target.view(-1), 0
        if shape != target.shape:
            raise ValueError(f"{what} has shape {shape}, but {self.source} asks for {tuple(target.shape)}")
        for piece in pieces:
            if not piece.is_floating_point():
                only = "quantized weights are read from GGUF files only"
                raise ValueError(f"{what} holds {piece.dtype}; {only}")
            flat[start : start + len(piece)].copy_(piece)
            start += len(piece)


def open_folder(path: Path) -> Weights:
    """Raises FileNotFoundError or ValueError naming the file and the key or tensor at fault."""
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
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: the key 'weight_map' is missing")
        shards = sorted({path / file for file in weight_map.values()})
    else:
        shards = [path / "model.safetensors"]
    for shard in shards:
        if not shard.is_file():
            named = f", though {index.name} names it" if index.is_file() else ""
            raise FileNotFoundError(f"{shard}: there is no such file{named}")
    return shards


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or cut short ({error}); copy it again") from None
