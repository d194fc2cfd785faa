"""Writes files that are complete or not there, also when the grader is ended in the middle."""

from collections.abc import Iterable
from pathlib import Path


def write(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file beside its place, then move it there; an old one stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        for piece in [content] if isinstance(content, str | bytes) else content:
            file.write(piece if isinstance(piece, bytes) else piece.encode("utf-8"))
    part.replace(path)
