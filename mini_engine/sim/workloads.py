"""When requests come, and how long they are: workloads made up from a seed, or read from a file."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from mini_engine.request import Request, SamplingParams

HASH_ID_TOKENS = 512  # what one of Mooncake's hash_ids stands for


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload: lengths instead of text.

    `timestamp` is in milliseconds. Prompts of one `prefix_group` begin with the same
    `prefix_length` tokens (None: as far as both go); `hash_ids` instead name the prompt's content
    block by block, as Mooncake's traces do.
    """

    timestamp: float
    input_length: int
    output_length: int
    priority: int = 0
    prefix_group: str | int | None = None
    prefix_length: int | None = None
    hash_ids: tuple[int, ...] = ()

    def request(self, number: int) -> Request:
        """The request, r<number>, with made-up tokens that are equal where content is."""
        length = self.input_length
        own = range(number << 32, (number << 32) + length)
        if self.hash_ids:
            blocks = (range(-(h + 1) << 32, (-(h + 1) << 32) + HASH_ID_TOKENS) for h in self.hash_ids)
            tokens = [token for block in blocks for token in block]
            tokens = tokens[:length] + list(own[len(tokens) :])
        elif self.prefix_group is not None:
            shared = length if self.prefix_length is None else min(self.prefix_length, length)
            start = -(zlib.crc32(str(self.prefix_group).encode()) + 1) << 24
            tokens = [*range(start, start + shared), *own[shared:]]
        else:
            tokens = list(own)
        return Request(f"r{number}", tokens, _greedy(self.output_length), self.priority)


@lru_cache(4096)  # requests of one length share them: they never change
def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


# Changes to the defaults of `arrivals`.
WORKLOADS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "bursty": {"burstiness": 0.1},
    "long-tail": {"spread": 1.2},
    "shared-prefix": {"num_prefix_groups": 8, "prefix_length": 512},
}


def workload(
    name: str = "poisson", num_requests: int = 1000, *, seed: int = 0, **changes: Any
) -> Iterator[Arrival]:
    """Arrivals of a named workload, with any option of `arrivals` changed.

    Raises ValueError for an unknown name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, but is {name!r}")
    return arrivals(num_requests, seed=seed, **{**WORKLOADS[name], **changes})


def arrivals(
    num_requests: int,
    *,
    rate: float = 14.0,
    burstiness: float = 1.0,
    input_length: int = 256,
    output_length: int = 96,
    spread: float = 0.6,
    longest: int = 1024,
    num_prefix_groups: int = 0,
    prefix_length: int = 0,
    priorities: tuple[int, ...] = (0,),
    seed: int = 0,
) -> Iterator[Arrival]:
    """`num_requests` arrivals, `rate` a second on average.

    The gaps are gamma-distributed of shape `burstiness`: 1 is a Poisson process, less comes in
    bursts. Lengths are log-normal: medians as given, sigma `spread` (0: all equal), from 1 to
    `longest`. With prefix groups, each prompt is preceded by one of that many shared prefixes.
    """
    for option, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < float("inf"):  # NaN too: time would stand still
            raise ValueError(f"{option} must be above 0 and finite, but is {value}")
    rng = random.Random(seed)

    def length(median: int) -> int:
        return max(1, min(round(median * rng.lognormvariate(0, spread)), longest))

    time = 0.0
    for _ in range(num_requests):
        time += 1000 * rng.gammavariate(burstiness, 1 / (rate * burstiness))
        group = rng.randrange(num_prefix_groups) if num_prefix_groups else None
        yield Arrival(
            time,
            length(input_length) + (prefix_length if num_prefix_groups else 0),
            length(output_length),
            rng.choice(priorities),
            group,
            prefix_length,
        )


def read_arrivals(path: str | os.PathLike[str]) -> Iterator[Arrival]:
    """Arrivals from JSON Lines: the fields of Arrival, the first three required, in order of time.

    The names are those of the public Mooncake traces, which can be read as they are. Raises
    ValueError naming file and line.
    """
    last = float("-inf")
    with Path(path).open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
                arrival = Arrival(**{**fields, "hash_ids": tuple(fields.get("hash_ids", ()))})
                if type(arrival.timestamp) not in (int, float) or not isfinite(arrival.timestamp):
                    raise ValueError("timestamp must be a number of milliseconds")
                lengths = (arrival.input_length, arrival.output_length)
                if not all(type(n) is int and n >= 1 for n in lengths):
                    raise ValueError("lengths must be whole numbers, at least 1")
                if not all(type(n) is int for n in arrival.hash_ids):
                    raise ValueError("hash_ids must be whole numbers")
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not an arrival ({error})") from None
            if arrival.timestamp < last:
                raise ValueError(f"{path}, line {number}: earlier than the line before; sort by timestamp")
            last = arrival.timestamp
            yield arrival
