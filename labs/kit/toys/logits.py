"""Rows of logits and settings of sampling, drawn at random, and a model that makes logits of its memory.

In JSON a token that was dropped is OUT, as there is no infinity.
"""

import math
import random
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from labs.kit.toys.memory import ToyModel
from mini_engine.request import Request

OUT = "out"
NEAR = 1e-4
VOCAB = 26  # of a LogitsModel
VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0.25, 0.5, 0.7, 1.5, 2.0, 4.0, 1e-6, 1e-300),
    "min_p": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0),
    "top_k": (1, 2, 3, 3, 4, 5, 8, 100),
    "top_p": (1e-9, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.99),
    "repetition_penalty": (0.25, 0.5, 2.0, 4.0),  # by these a product is exact, so that equals stay equal
    "frequency_penalty": (-0.5, 0.25, 0.5, 2.0),
    "presence_penalty": (-1.0, 0.25, 0.75, 2.0),
}
LIMITS, PENALTIES = tuple(VALUES)[:4], tuple(VALUES)[4:]
Row = list[Any]


def settled(close: list[float], make: Callable[[], Any], exact: bool = False) -> Any:
    """Call `make` until its result compares no two numbers that are nearly equal, and return that result.

    `close` lists how near the compared numbers were. If sums are exact in every order of adding up (`exact`),
    equal numbers may be compared.
    """
    made: Any = []
    while not made or any(near < NEAR and not (exact and near == 0) for near in close):
        close.clear()
        made = make()
    return made


def row_of(rng: Random, size: int = 0) -> Row:
    """Logits on a grid, so that some are equal; now and then all alike, with one far above, or large."""
    shift = 0 if size else rng.choice((0, 0, 0, 0, 800, -800))  # float32 is too coarse for large ones
    size = size or rng.randint(2, 8)
    row: Row = [shift + rng.randint(-8, 8) / 4 for _ in range(size)]
    if rng.random() < 0.1:
        row = [row[0]] * size
    elif rng.random() < 0.1:
        row[rng.randrange(size)] += 40
    if size > 2 and rng.random() < 0.15:
        row[rng.randrange(size)] = OUT
    return row


def settings_of(rng: Random, names: Sequence[str], share: float) -> dict[str, float]:
    """Draw values for about this share of the named settings."""
    return {name: rng.choice(VALUES[name]) for name in names if rng.random() < share}


def stretches_of(rng: Random) -> tuple[list[float], float]:
    """Stretches in 64ths, whose ends are exact in every order of adding up, and a number to draw."""
    size = rng.randint(1, 7)
    cuts = [0, *sorted(rng.choice(range(65)) for _ in range(size - 1)), 64]
    probs = [(b - a) / 64 for a, b in zip(cuts, cuts[1:], strict=False)]
    if rng.random() < 0.3:  # they do not sum to 1
        scale = rng.choice((0.75, 1.5))
        return [prob * scale for prob in probs], (2 * rng.randrange(64) + 1) / 128
    return probs, rng.choice((rng.choice(cuts[:-1]) / 64 % 1, (2 * rng.randrange(64) + 1) / 128, 1 - 2**-53))


def logits_of(row: Row) -> list[float]:
    return [-math.inf if logit == OUT else logit for logit in row]


def by_token(values: Any) -> Any:
    """A dict from tokens to their numbers, rounded, of lists and tensors alike; an id is an id."""
    if not hasattr(values, "__len__") or getattr(values, "shape", 1) == ():
        return int(values)
    numbers = [float(f"{round(float(value), 9):.9g}") for value in values]
    return {f"token {i}": OUT if number == -math.inf else number for i, number in enumerate(numbers)}


class LogitsModel(ToyModel):
    """Its logits depend on every position and token in a request's memory; `choose` makes tokens of them."""

    def __init__(self, kv: Any, choose: Callable[[list[list[float]], list[Request]], Any]):
        super().__init__(kv)
        self.choose = choose

    def forward(self, rows: Any) -> dict[str, list[int]]:
        hashed = super().forward(rows)
        ending = [request for request, *_ in rows if request.request_id in hashed]
        logits = []
        for request in ending:
            rng = random.Random(hashed[request.request_id][0])
            logits.append([rng.gauss(0, 2) for _ in range(VOCAB)])
        tokens = self.choose(logits, ending) if ending else []
        return {r.request_id: [int(token)] for r, token in zip(ending, tokens, strict=True)}
