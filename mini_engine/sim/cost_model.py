"""The cost of a step: a price per forward pass, one per token computed, one per token of KV read.

Three constants explain most of the time: the weights are read once whatever the batch, each token is
multiplied through them, and each request's past is read. `fit` estimates them from a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from mini_engine.trace import Fold, StepTrace, Trace

# The ways to compute a step's rows, as a trace's header names them.
BACKENDS = ("paged", "two-pass", "padded")


class StepLoad(NamedTuple):
    """The work of one step."""

    num_forwards: int
    num_tokens: int  # computed, padding included
    num_kv_tokens: int  # read by attention: each row's past and new tokens, padding included


@dataclass(frozen=True)
class CostModel:
    """Step time in milliseconds: per_forward * forwards + per_token * tokens + per_kv_token * KV.

    The defaults are computed, not measured: a model of 8 billion parameters in 16 bits on a GPU with
    2 TB/s and 200 TFLOP/s. Reading 16 GB takes 8 ms, a token's 16 GFLOP 0.08 ms, and the 128 KiB of
    a token's keys and values 66 ns.

    As a virtual clock: `VirtualClock(CostModel().clock())`, a new one for every run.
    """

    per_forward: float = 8.0
    per_token: float = 0.08
    per_kv_token: float = 66e-6

    def step_time(self, load: StepLoad) -> float:
        """Return the milliseconds that a step of this load takes."""
        return (
            self.per_forward * load.num_forwards
            + self.per_token * load.num_tokens
            + self.per_kv_token * load.num_kv_tokens
        )

    def clock(self, backend: str = "paged", fold: Fold | None = None) -> Callable[[StepTrace], float]:
        """Return the function from a record to its cost that VirtualClock takes; records come in order.

        `fold` is a Fold that already takes the same records, so that they are not folded twice."""
        meter = LoadMeter(backend, fold)
        return lambda record: self.step_time(meter(record))


class LoadMeter:
    """Returns the load of each of a run's records, given in order.

    A record has the new tokens of a row; the past that the row reads follows from the records before.
    Raises ValueError for an unknown backend.
    """

    def __init__(self, backend: str = "paged", fold: Fold | None = None):
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}")
        self.backend = backend
        self.fold = fold or Fold(keep_finished=False)

    def __call__(self, record: StepTrace) -> StepLoad:
        views = self.fold.add(record)
        rows = [views[name] for name in record.scheduled]
        if not rows:
            return StepLoad(1, 0, 0)
        past = [view.num_computed_tokens for view in rows]
        new = [view.num_scheduled for view in rows]
        if self.backend == "padded":
            return StepLoad(1, len(rows) * max(new), len(rows) * (max(past) + max(new)))
        kinds = {view.state for view in rows} if self.backend == "two-pass" else {"fused"}
        return StepLoad(len(kinds), sum(new), sum(past) + sum(new))


def backend_of(trace: Trace) -> str:
    """Return the backend that computed a trace's steps; paged if no model computed them."""
    return trace.header.backend or "paged"


def step_loads(trace: Trace, backend: str | None = None) -> Iterator[StepLoad]:
    """Return the load of every step of a trace."""
    fold = Fold(trace.header, keep_finished=False)
    return map(LoadMeter(backend or backend_of(trace), fold), trace.steps)


def fit(trace: Trace, backend: str | None = None, *, steps: slice = slice(None)) -> CostModel:
    """Return the cost model that fits a recorded wall-clock run best: least squares, no negative price.

    `steps` selects the steps that are fitted, so that the others can test the fit. Raise ValueError for a
    trace in virtual time, whose prices are known, and for a trace without steps.
    """
    if trace.header.clock != "wall":
        raise ValueError("only a trace in wall time can be fitted; this one's clock is virtual")
    if not trace.steps:
        raise ValueError("the trace has no steps to fit")
    milliseconds = [1000 * (record.t_end - record.t) for record in trace.steps]
    loads = list(step_loads(trace, backend))
    return CostModel(*_least_squares(loads[steps], milliseconds[steps]))


def _least_squares(loads: list[StepLoad], times: list[float]) -> list[float]:
    """Return the non-negative least squares. With three unknowns, trying every subset of them is exact."""
    import numpy as np

    matrix, wanted = np.array(loads, dtype=float), np.array(times)
    best, least = [0.0] * 3, float((wanted**2).sum())
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            prices = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(((matrix[:, chosen] @ prices - wanted) ** 2).sum())
            if (prices >= 0).all() and error < least:
                least, best = error, [0.0] * 3
                for i, price in zip(chosen, prices.tolist(), strict=True):
                    best[i] = price
    return best
