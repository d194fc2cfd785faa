"""Trace files in JSON Lines: written completely or not at all, read with errors that name file and line."""

from __future__ import annotations

import json
import os
import weakref
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

from mini_engine.checks import shown
from mini_engine.trace.check import Check
from mini_engine.trace.record import Record
from mini_engine.trace.records import READABLE, VERSION, End, Header, StepTrace, Trace

_numbers = count()


class LineWriter:
    """Writes a trace line by line; the file appears when it is finished.

    Until then the lines are in a `.part` file beside it. `discard`, an exception inside the `with`, and
    the end of the process remove that file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self._partial = Path(path), _beside(Path(path))
        opened: list[IO[str]] = []
        # Before there is a file: a signal may come between any two lines.
        self.discard = weakref.finalize(self, _discard, opened, self._partial)
        try:
            self._file = self._partial.open("w", encoding="utf-8")
        except OSError:
            self.discard.detach()
            raise
        opened.append(self._file)

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


def _discard(opened: list[IO[str]], partial: Path) -> None:
    for file in opened:
        file.close()
    partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Return the temporary path that becomes `path` when it is complete, and create its folder."""
    check_plain(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unique to this writer: another may write the same file.
    return path.with_name(f"{path.name}.{os.getpid()}.{next(_numbers)}.part")


def check_plain(path: Path) -> None:
    """Raise ValueError for a device, a pipe or a folder: a file must not replace it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; name another")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a regular file completely or not at all, and create its folder. Raise ValueError for a device."""
    path = Path(path)
    partial = _beside(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write the file completely or not at all. Raise ValueError unless it is a regular file."""
    with LineWriter(path) as file:
        for record in trace.lines():
            file.add(record)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Return the trace in a file. Raise ValueError naming file, line and field if it cannot be read, and
    FileNotFoundError if the file does not exist."""
    if not Path(path).exists():
        made = "`mini-engine demo` writes one to out/trace.jsonl"
        raise FileNotFoundError(f"{path}: there is no such file; {made}")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name a trace.jsonl in it")
    trace, check = None, Check()
    # errors="replace": a binary file, too, is "not JSON" on a numbered line.
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                if trace is None:
                    trace = Trace(_header(line))
                    check.header(trace.header)
                elif trace.end:
                    raise ValueError("a line after the end of the trace; are these two files in one?")
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
                raise ValueError(f"{path}, line {number}: nested too deeply for a trace") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if trace is None:
        raise ValueError(f"{path}: empty file, not a trace")
    return trace


def _header(line: Any) -> Header:
    if not isinstance(line, dict) or line.get("trace") != Header.trace:
        raise ValueError("not the header of a mini-engine trace")
    if line.get("version") not in READABLE:
        raise ValueError(f"trace version {shown(line.get('version'))}; this reads versions 2 and {VERSION}")
    return Header.from_json(line)
