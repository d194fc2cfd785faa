"""Opening the files that a model consists of."""

import json
from pathlib import Path
from typing import Any

from mini_engine.loading.gguf_file import GGUFFile

ModelPath = str | Path | GGUFFile  # a folder, a .gguf file, or one that is open already


def opened(path: ModelPath) -> Path | GGUFFile:
    """A .gguf file read in, so that model and tokenizer can share it; any other path as it is."""
    if isinstance(path, GGUFFile):
        return path
    return GGUFFile(path) if Path(path).suffix == ".gguf" else Path(path)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError or ValueError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = "a model folder has it beside its model.safetensors"
        raise FileNotFoundError(f"{file}: there is no such file; {beside}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
