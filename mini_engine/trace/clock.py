"""The times of a trace: computed, the same on every machine, or wall time."""

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
        """The time, in `unit`."""

    def advance(self, record: StepTrace) -> None:
        """The step of this record is over: virtual time moves on by its cost."""


class VirtualClock:
    """Time that does not depend on the machine: a step takes 1, or what `cost(record)` says."""

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
    """Seconds since the clock was made."""

    kind, unit = "wall", "s"

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def advance(self, record: StepTrace) -> None:
        pass
