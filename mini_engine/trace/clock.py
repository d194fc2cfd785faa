"""Clocks for the times of a trace: virtual, the same on every machine, or wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from mini_engine.trace.records import StepTrace


class Clock(Protocol):
    """The source of a trace's times."""

    kind: str  # virtual or wall
    unit: str  # step, ms or s

    def now(self) -> float:
        """Return the time in `unit`."""

    def advance(self, record: StepTrace) -> None:
        """Advance virtual time by the cost of this record's step."""


class VirtualClock:
    """Time that does not depend on the machine: a step takes 1, or `cost(record)`."""

    kind = "virtual"

    def __init__(self, cost: Callable[[StepTrace], float] | None = None, unit: str | None = None):
        self.cost = cost
        self.unit = unit or ("step" if cost is None else "ms")
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, record: StepTrace) -> None:
        self.time += 1.0 if self.cost is None else self.cost(record)


class WallClock:
    """Seconds since the clock was created."""

    kind, unit = "wall", "s"

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def advance(self, record: StepTrace) -> None:
        pass
