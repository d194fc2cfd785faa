"""Opening a model's files: JSON, and GGUF, which has metadata, vocabulary and weights in one file.

The package `gguf` reads GGUF; GGUFFile makes it quick for large vocabularies, and reports a damaged file in
one sentence that names it.
"""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from mini_engine.checks import shown


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises FileNotFoundError or ValueError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = "a model folder has it beside its model.safetensors"
        raise FileNotFoundError(f"{file}: there is no such file; {beside}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{file}: nested deeper than any config") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


class GGUFFile(GGUFReader):
    """A gguf.GGUFReader (`tensors`: name, tensor_type, shape, data), with `get(key)` for metadata.

    Raises FileNotFoundError for a missing file, ValueError for another kind of file or one that is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: there is no such file")
        try:
            super().__init__(self.path)
        except EOFError as error:
            raise ValueError(f"{self.path}: cut short, {error}; fetch it again") from None
        except (ValueError, IndexError, KeyError, struct.error, OverflowError, MemoryError) as error:
            raise ValueError(f"{self.path}: not a whole GGUF file ({error}); fetch it again") from None

    def get(self, key: str, default: Any = None, kind: type | None = None) -> Any:
        """Return the metadata under `key` as plain Python values, or `default`.

        Raises ValueError naming file and key for invalid text, or a value of another `kind`.
        """
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise ValueError(f"{self.path}: the metadata key {key!r} cannot be read ({error})") from None
        if kind and type(value) is not kind:
            raise ValueError(f"{self.path}: {key} must be {kind.__name__}, but is {shown(value)}")
        return value

    def need(self, key: str, kind: type | None = None) -> Any:
        """Return the metadata under `key` (see `get`). Raises ValueError when the key is missing."""
        if key not in self.fields:
            raise ValueError(f"{self.path}: the metadata key {key!r} is missing")
        return self.get(key, None, kind)

    def listed(self, key: str, kind: type, length: int | None = None) -> Any:
        """Return a list of items of this kind, and of this `length` if it is given. Raises ValueError."""
        values = self.need(key, list)
        wrong = next((i for i, value in enumerate(values) if type(value) is not kind), None)
        if wrong is not None:
            what = f"{key}[{wrong}] must be {kind.__name__}, but is {shown(values[wrong])}"
            raise ValueError(f"{self.path}: {what}")
        if length is not None and len(values) != length:
            raise ValueError(f"{self.path}: {key} has {len(values)} entries for {length} tokens")
        return values

    # The two methods below override private ones. If the package renames its own, these are never called:
    # reading is then slower, and errors are less clear, but results are right.

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Read an array at once; the package makes several numpy calls an element."""
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data.data, orig_offs)
        scalar = self.gguf_scalar_to_np.get(kind)
        if scalar is None and kind != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        types, offset = [GGUFValueType.ARRAY, GGUFValueType(kind)], orig_offs + 12
        if scalar is not None:
            values = np.frombuffer(self.data, scalar, count, offset)
            return 12 + values.nbytes, [values], [0], types
        # Arrays, not memoryviews: the garbage collector would visit those, 100,000 of them several times.
        data, raw, unpack = self.data.view(np.ndarray), self.data.data, struct.Struct("<Q").unpack_from
        parts = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(raw, offset)[0]
            parts.append(data[start:offset])
        return offset - orig_offs, parts, list(range(count)), types

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Check that the file is as long as its own table says, before any array is made."""
        for field in fields:
            dims, raw_type, offset = field.parts[3:6]
            block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
            end = start_offs + int(offset[0]) + prod(map(int, dims)) * type_size // block_size
            if end > len(self.data):
                raise EOFError(f"tensor {field.name!r} ends at byte {end} of {len(self.data)}")
        super()._build_tensors(start_offs, fields)


ModelPath = str | Path | GGUFFile  # a folder, a .gguf file, or one that is open already


def opened(path: ModelPath) -> Path | GGUFFile:
    """Return a .gguf file read in, so that model and tokenizer can share it; any other path as it is."""
    if isinstance(path, GGUFFile):
        return path
    return GGUFFile(path) if Path(path).suffix == ".gguf" else Path(path)
