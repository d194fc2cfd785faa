"""Trace files: JSON Lines, written whole or not at all, read with errors that name file and line."""

from __future__ import annotations

import json
import os
import weakref
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

from mini_engine.request import shown
from mini_engine.trace.check import Check
from mini_engine.trace.record import Record
from mini_engine.trace.records import VERSION, End, Header, StepTrace, Trace

_numbers = count()


class LineWriter:
    """Takes a trace's lines one by one; the file is there once it was finished, or not at all.

    Until then they stand in a `.part` beside it, which `discard`, the end of a `with` that failed, and
    the end of the process remove.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self._partial = Path(path), _beside(Path(path))
        self._file = self._partial.open("w", encoding="utf-8")
        self.discard = weakref.finalize(self, _discard, self._file, self._partial)

    def add(self, record: Record) -> None:
        self._file.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")

    def finish(self) -> None:
        self._file.close()
        self._partial.replace(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error is None:
            self.finish()
        self.discard()


def _discard(file: IO[str], partial: Path) -> None:
    file.close()
    partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Where a file is written before it takes its place; its folder is made."""
    check_plain(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this run: another may write the same file.
    return path.with_name(f"{path.name}.{os.getpid()}.{next(_numbers)}.part")


def check_plain(path: Path) -> None:
    """Raises ValueError for a device, a pipe or a folder, whose place a file must not take."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file, and would be replaced by one; name another")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all; its folder is made. Raises ValueError for what is no plain file."""
    path = Path(path)
    partial = _beside(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write the file whole or not at all. Raises ValueError for a path that is no plain file."""
    with LineWriter(path) as file:
        for record in trace.lines():
            file.add(record)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The trace in a file. Raises ValueError naming file, line and field if it is none that can be read, and
    FileNotFoundError if there is no file."""
    if not Path(path).exists():
        made = "`mini-engine demo` writes one to out/trace.jsonl"
        raise FileNotFoundError(f"{path}: there is no such file; {made}")
    trace, check = None, Check()
    # So that a binary file, too, is "not JSON" on a line that can be named.
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                if trace is None:
                    trace = Trace(_header(line))
                    check.header(trace.header)
                elif trace.end:
                    raise ValueError("the trace has ended before; two files in one?")
                elif not isinstance(line, dict) or not ("end" in line or "step" in line):
                    raise ValueError("neither a step nor the end")
                elif "end" in line:
                    trace.end = End.from_json(line)
                    check.end(trace.end)
                else:
                    trace.steps.append(StepTrace.from_json(line))
                    check.step(trace.steps[-1])
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
            except RecursionError:
                raise ValueError(f"{path}, line {number}: nested deeper than any trace") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if trace is None:
        raise ValueError(f"{path}: empty file, not a trace")
    return trace


def _header(line: Any) -> Header:
    if not isinstance(line, dict) or line.get("trace") != Header.trace:
        raise ValueError("not the header of a mini-engine trace")
    if line.get("version") != VERSION:
        raise ValueError(f"trace version {shown(line.get('version'))}; this reads version {VERSION}")
    return Header.from_json(line)
