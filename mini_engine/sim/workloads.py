"""Workloads: when requests arrive and how long they are, generated from a seed or read from a file."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mini_engine.checks import check_text, shown
from mini_engine.request import Request, SamplingParams

HASH_ID_TOKENS = 512  # tokens per hash_id in Mooncake's traces
LONGEST = 2**22  # tokens of a prompt or an output
LONGEST_TIME = 1e15  # milliseconds: 30,000 years


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload: lengths instead of text.

    `timestamp` is in milliseconds. Prompts of one `prefix_group` begin with the same `prefix_length` tokens
    (None: as many as the shorter one has). `hash_ids` instead give the prompt's content block by block, as
    in Mooncake's traces.
    """

    timestamp: float
    input_length: int
    output_length: int
    priority: int = 0
    prefix_group: str | int | None = None
    prefix_length: int | None = None
    hash_ids: tuple[int, ...] = ()

    def request(self, number: int) -> Request:
        """Return the request r<number>; its made-up tokens are equal where the content is."""
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


@lru_cache(4096)  # requests of one length share them
def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


# Options of `arrivals` that differ from its defaults.
WORKLOADS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "bursty": {"burstiness": 0.1},
    "long-tail": {"spread": 1.2},
    "shared-prefix": {"num_prefix_groups": 8, "prefix_length": 512},
}


def workload(
    name: str = "poisson", num_requests: int = 1000, *, seed: int = 0, **changes: Any
) -> Iterator[Arrival]:
    """Yield the arrivals of a named workload; `changes` are options of `arrivals`.

    Raise ValueError for an unknown name.
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
    """Yield `num_requests` arrivals, on average `rate` per second.

    The gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less gives bursts.
    Lengths are log-normal with the given medians and sigma `spread` (0: all equal), from 1 to `longest`.
    With prefix groups, each prompt begins with one of that many shared prefixes.
    """
    for option, value in (("rate", rate), ("burstiness", burstiness)):
        if not 1e-12 < value < 1e12:  # NaN too: time would stand still
            raise ValueError(f"{option} must be above 0 and finite, but is {value}")
    rng = random.Random(seed)

    def length(median: int) -> int:
        return max(1, min(round(median * rng.lognormvariate(0, spread)), longest))

    time = 0.0
    for _ in range(num_requests):
        time += 1000 * rng.gammavariate(burstiness, 1 / (rate * burstiness))
        group = rng.randrange(num_prefix_groups) if num_prefix_groups else None
        prompt = length(input_length) + (prefix_length if num_prefix_groups else 0)
        output, priority = length(output_length), rng.choice(priorities)
        yield Arrival(time, prompt, output, priority, group, prefix_length)


def read_arrivals(path: str | os.PathLike[str]) -> Iterator[Arrival]:
    """Yield arrivals from JSON Lines: the fields of Arrival, the first three required, in order of time.

    The names are those of the public Mooncake traces, which can be read unchanged. Raise ValueError naming
    file, line and field.
    """
    last = float("-inf")
    with Path(path).open(encoding="utf-8", errors="surrogateescape") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                check_text("the line", text)
                arrival = _arrival(json.loads(text))
            except RecursionError:
                raise ValueError(f"{path}, line {number}: not an arrival (nested too deep)") from None
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not an arrival ({error})") from None
            if arrival.timestamp < last:
                raise ValueError(f"{path}, line {number}: earlier than the line before; sort by timestamp")
            last = arrival.timestamp
            yield arrival


def _arrival(line: Any) -> Arrival:
    """Return a line's Arrival. Raise ValueError naming the field, TypeError for an unknown or missing one."""
    if not isinstance(line, dict):
        raise ValueError(f"a JSON object is needed, not {shown(line)}")
    hash_ids = line.get("hash_ids", [])
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids must be a list, but is {shown(hash_ids)}")
    arrival = Arrival(**{**line, "hash_ids": tuple(hash_ids)})
    time = arrival.timestamp
    if type(time) not in (int, float) or not abs(time) < LONGEST_TIME:  # NaN, too
        raise ValueError(f"timestamp must be a number of milliseconds, but is {shown(time)}")
    for name in ("input_length", "output_length"):
        _whole(name, getattr(arrival, name), 1, LONGEST)
    _whole("priority", arrival.priority, -(2**53), 2**53)
    if arrival.prefix_length is not None:
        _whole("prefix_length", arrival.prefix_length, 0, LONGEST)
    group = arrival.prefix_group
    if group is not None and type(group) not in (str, int):
        raise ValueError(f"prefix_group must be a name or a number, but is {shown(group)}")
    if len(hash_ids) * HASH_ID_TOKENS > LONGEST + HASH_ID_TOKENS:
        raise ValueError(f"hash_ids has {len(hash_ids)} entries, for more than {LONGEST:,} tokens")
    for hash_id in hash_ids:
        _whole("hash_ids", hash_id, 0, 2**53)
    return arrival


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, but is {shown(value)}")
