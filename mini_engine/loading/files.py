"""Opening the files that a model consists of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_engine.loading.gguf_file import GGUFFile


def opened(path: str | Path | GGUFFile) -> Path | GGUFFile:
    """A .gguf file read in, so that model and tokenizer can share it; any other path as it is."""
    if not isinstance(path, str | Path):
        return path
    if Path(path).suffix != ".gguf":
        return Path(path)
    from mini_engine.loading.gguf_file import GGUFFile  # brings in a package that folders do without

    return GGUFFile(path)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError or ValueError naming the file."""
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
