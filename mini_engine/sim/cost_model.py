"""What a step costs: a fixed price a forward pass, one a token computed, one a token of KV read.

Three constants say most of what there is to say: the weights are read once whatever the batch, each
token is multiplied through them, and each request's past is read. `fit` takes them from a real run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

# How a step's rows meet the model; the names are those of baselines.BASELINES.
BACKENDS = ("paged", "two-pass", "padded")


class StepLoad(NamedTuple):
    """What one step asks of the machine."""

    num_forwards: int
    num_tokens: int  # computed, padding included
    num_kv_tokens: int  # read by attention: each row's own past and new tokens, padding included


@dataclass(frozen=True)
class CostModel:
    """Step time in milliseconds: per_forward * forwards + per_token * tokens + per_kv_token * KV.

    The defaults are an illustration by arithmetic, not a measurement: a model of 8 billion
    parameters in 16 bits on a GPU with 2 TB/s and 200 TFLOP/s. Reading 16 GB takes 8 ms, a token's
    16 GFLOP 0.08 ms, and the 128 KiB of keys and values that a token leaves behind 66 ns.

    As a virtual clock: `VirtualClock(CostModel().clock())`, a new one for every run.
    """

    per_forward: float = 8.0
    per_token: float = 0.08
    per_kv_token: float = 66e-6

    def step_time(self, load: StepLoad) -> float:
        return (
            self.per_forward * load.num_forwards
            + self.per_token * load.num_tokens
            + self.per_kv_token * load.num_kv_tokens
        )

    def clock(self, backend: str = "paged"):
        """The cost of a trace record, as VirtualClock wants it; takes a run's records in order."""
        meter = LoadMeter(backend)
        return lambda record: self.step_time(meter(record))


class LoadMeter:
    """Folds a run's records, in order, into the load of each step.

    A record says how many tokens a row brings; how much past it reads on takes the records before.
    Raises ValueError for an unknown backend.
    """

    def __init__(self, backend: str = "paged"):
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}")
        self.backend = backend
        self._num_tokens: dict[str, int] = {}  # prompt and output so far
        self._num_prompt: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self._last: dict | None = None

    def __call__(self, record: dict) -> StepLoad:
        # A clock is asked before the step's tokens and ends are written into its record.
        self._settle()
        self._last = record
        for event in record["events"]:
            name, kind = event["id"], event["type"]
            if kind == "QUEUED":
                self._num_tokens[name] = self._num_prompt[name] = event["num_prompt_tokens"]
            elif kind == "SCHEDULED":  # after a preemption too
                self._num_computed[name] = event["num_cached_tokens"]
            elif kind == "FINISHED" and name not in record["scheduled"]:  # aborted between two steps
                self._forget(name)
        rows = list(record["scheduled"].items())
        load = self._load(rows)
        for name, n in rows:
            self._num_computed[name] += n
        return load

    def _load(self, rows: list[tuple[str, int]]) -> StepLoad:
        if not rows:
            return StepLoad(1, 0, 0)
        past = [self._num_computed[name] for name, _ in rows]
        new = [n for _, n in rows]
        if self.backend == "padded":
            return StepLoad(1, len(rows) * max(new), len(rows) * (max(past) + max(new)))
        kinds = {self._is_decode(name) for name, _ in rows} if self.backend == "two-pass" else {True}
        return StepLoad(len(kinds), sum(new), sum(past) + sum(new))

    def _is_decode(self, name: str) -> bool:
        num_tokens = self._num_tokens[name]
        return num_tokens > self._num_prompt[name] and num_tokens - self._num_computed[name] == 1

    def _settle(self) -> None:
        if self._last is None:
            return
        for name in self._last["new_tokens"]:
            self._num_tokens[name] += 1
        for event in self._last["events"]:
            if event["type"] == "FINISHED" and event["id"] in self._last["scheduled"]:
                self._forget(event["id"])

    def _forget(self, name: str) -> None:
        for kept in (self._num_tokens, self._num_prompt, self._num_computed):
            kept.pop(name, None)


def backend_of(trace) -> str:
    """How the steps of a trace were computed, by the parts that its header names."""
    backend = trace.header.get("parts", {}).get("attend_backend", "paged")
    return backend if backend in BACKENDS else "paged"


def step_loads(trace, backend: str | None = None) -> Iterator[StepLoad]:
    """The load of every step of a trace."""
    return map(LoadMeter(backend or backend_of(trace)), trace.steps)


def fit(trace, backend: str | None = None, *, steps: slice = slice(None)) -> CostModel:
    """The cost model that explains a recorded wall-clock run best: least squares, no negative price.

    `steps` picks those that are fitted, so that the others can test the fit. Raises ValueError for
    a trace in virtual time, which would only give back what made it, or one without steps.
    """
    if trace.header.get("clock") != "wall":
        raise ValueError("only a trace in wall time can be fitted; this one's clock is virtual")
    if not trace.steps:
        raise ValueError("the trace has no steps to fit")
    milliseconds = [1000 * (record["t_end"] - record["t"]) for record in trace.steps]
    loads = list(step_loads(trace, backend))
    return CostModel(*_least_squares(loads[steps], milliseconds[steps]))


def _least_squares(loads: list[StepLoad], times: list[float]) -> list[float]:
    """Non-negative least squares. With three unknowns, trying every set of them is exact."""
    import numpy as np

    loads, times = np.array(loads, dtype=float), np.array(times)
    best, least = [0.0] * 3, float((times**2).sum())
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            prices = np.linalg.lstsq(loads[:, chosen], times, rcond=None)[0]
            error = float(((loads[:, chosen] @ prices - times) ** 2).sum())
            if (prices >= 0).all() and error < least:
                least, best = error, [0.0] * 3
                for i, price in zip(chosen, prices.tolist(), strict=True):
                    best[i] = price
    return best
