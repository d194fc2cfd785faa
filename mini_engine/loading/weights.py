"""What a checkpoint offers, whatever its format: a config, and tensors by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
        if shape != target.shape:
            raise ValueError(
                f"{self.files[name]}: tensor {name!r} has shape {shape}, but "
                f"{self.source} asks for {tuple(target.shape)}"
            )
        flat, start = target.view(-1), 0
        for piece in pieces:
            if not piece.is_floating_point():
                raise ValueError(
                    f"{self.files[name]}: tensor {name!r} holds {piece.dtype}; quantized weights are read "
                    "from GGUF files only"
                )
            flat[start : start + len(piece)].copy_(piece)
            start += len(piece)
