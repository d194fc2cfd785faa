"""Files that are whole or not there; names for them; and a spool that keeps packed texts out of memory."""

import hashlib
import os
import re
import tempfile
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

Content = str | bytes | Iterable[str]
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d|index)(\..*)?")  # Windows' own, and a folder's page


def write(path: Path, content: Content) -> None:
    """Write a file beside its place, then move it there; ended in the middle it leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pieces = [content] if isinstance(content, str | bytes) else content
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        for piece in pieces:
            file.write(piece if isinstance(piece, bytes) else piece.encode("utf-8"))
    part.replace(path)


def stem_of(student: str) -> str:
    """A file name for a student. A name that cannot be one gets a digest, so that no two share a file."""
    plain = re.sub(r"[^\w.@+ -]", "_", student).strip(" .")
    if plain and plain == student and len(plain.encode()) <= 100 and not RESERVED.fullmatch(plain):
        return plain
    short = plain.encode()[:80].decode("utf-8", "ignore")
    digest = hashlib.blake2b(student.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{short or 'student'}-{digest}"


def packed(text: str) -> str:
    """As a page can carry it, and unpack with DecompressionStream("deflate")."""
    return b64encode(zlib.compress(text.encode("utf-8"), 9)).decode()


def name_of(text: str) -> str:
    """The id of a packed text: equal texts share one."""
    return "p" + hashlib.blake2b(text.encode("utf-8"), digest_size=10).hexdigest()


class Spool:
    """Packed texts by name, in a file that goes away; of each only its place is kept in memory."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()
        self.places: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, name: str, text: str) -> None:
        if name not in self.places:
            data = packed(text).encode()
            self.places[name] = (self.file.seek(0, os.SEEK_END), len(data))
            self.file.write(data)

    def read(self) -> Iterator[tuple[str, str]]:
        """All, by name."""
        for name, (start, length) in sorted(self.places.items()):
            self.file.seek(start)
            yield name, self.file.read(length).decode()
