"""The steps that a recording keeps: all, none, the latest, or a file of them; never more than that."""

from __future__ import annotations

import os
from dataclasses import replace

from mini_engine.trace.file import LineWriter
from mini_engine.trace.fold import Fold, copy_view
from mini_engine.trace.records import End, Header, StepTrace, Trace

Retention = bool | int | str | os.PathLike[str]


class TraceStore:
    """The header and the steps that are kept: True all, False none, a number the latest so many, a path
    all in that file, which appears once the run is finished.

    A number drops the steps before the latest, but not their fold: it goes into the header, so that the
    latest can be folded. Raises ValueError for a number below 1.
    """

    def __init__(self, header: Header, keep: Retention):
        self.header = header
        self.steps: list[StepTrace] = []
        self._limit: int | None = None
        self._file: LineWriter | None = None
        if isinstance(keep, str | os.PathLike):
            self._limit, self._file = 0, LineWriter(keep)
            self._file.add(header)
        elif isinstance(keep, bool):
            self._limit = None if keep else 0
        elif keep < 1:
            raise ValueError(f"keep must be True, False, a path, or a number from 1, but is {keep}")
        else:
            self._limit = keep
            self._before = Fold(header, keep_finished=False)

    def add(self, record: StepTrace) -> None:
        if self._file:
            self._file.add(record)
        if self._limit != 0:
            self.steps.append(record)
        if self._limit and len(self.steps) > self._limit:
            self._before.add(self.steps.pop(0))
            self._before.settle()

    def trace(self, end: End) -> Trace:
        """Return the steps that are kept; later steps do not change it."""
        header = self.header
        if self._limit:
            there = [copy_view(view) for view in self._before.views.values()]
            header = replace(header, requests=there, cached_blocks=sorted(self._before.cached))
        return Trace(header, list(self.steps), end)

    def finish(self, end: End) -> None:
        if self._file:
            self._file.add(end)
            self._file.finish()
            self._file = None

    def discard(self) -> None:
        """Drop a file that was not finished."""
        if self._file:
            self._file.discard()
            self._file = None
