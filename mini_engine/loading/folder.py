"""Weights from a folder in Hugging Face layout: config.json, and model.safetensors or its shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.loading.config import read_config
from mini_engine.loading.files import read_json
from mini_engine.loading.weights import Weights


def open_folder(path: Path) -> Weights:
    """Raises FileNotFoundError or ValueError naming the file and the key or tensor at fault."""
    source = path / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such folder or file")
    if not path.is_dir():
        raise ValueError(f"{path}: neither a folder nor a .gguf file")
    config = read_config(read_json(source), str(source))
    files: dict[str, Path] = {}
    handles: dict[Path, Any] = {}
    for shard in _shards(path):
        with _damage(shard):
            handles[shard] = safe_open(shard, framework="pt")
            files |= dict.fromkeys(handles[shard].keys(), shard)
    # A checkpoint of the bare decoder has no prefix; lm_head never has one.
    full_names = {name.removeprefix("model."): name for name in files}

    def tensor(name: str) -> Tensor:
        shard = files[full_names[name]]
        with _damage(shard):
            found: Tensor = handles[shard].get_tensor(full_names[name])
            return found

    def read(name: str) -> tuple[tuple[int, ...], list[Tensor]]:
        whole = tensor(name)  # mapped from the file, not copied
        return tuple(whole.shape), [whole.view(-1)]

    files_by_name = {name: files[full] for name, full in full_names.items()}
    embedding = "embed_tokens.weight"
    dtype = tensor(embedding).dtype if embedding in full_names else torch.float32
    return Weights(source, config, files_by_name, read, dtype)


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
