"""A distribution in a few numbers. numpy is imported when there is something to count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True)
class Stats:
    """A latency over those that have one: mean, percentiles by linear interpolation, maximum."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stats | None:
        """None when there is no value: the average of nothing is not 0."""
        import numpy as np

        return cls.of_arrays([np.array([value for value in values if value is not None], dtype=float)])

    @classmethod
    def of_arrays(cls, arrays: list[ndarray[Any, Any]]) -> Stats | None:
        """The same over numpy arrays that hold values only."""
        import numpy as np

        values = np.concatenate(arrays) if arrays else np.array([])
        if not values.size:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(values.size, values.mean().item(), p50, p90, p99, values.max().item())
