"""Scenarios of requests: written down, or drawn from a seed."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from labs.kit.toys.driver import Scenario

KEYS = ("id", "prompt", "max_tokens", "at", "priority")
Range = tuple[int, int]


def workload(
    name: str,
    requests: Iterable[Sequence[Any]],
    *,
    budget: int = 16,
    slots: int = 4,
    blocks: int = 64,
    threshold: int = 0,
    aborts: Iterable[tuple[int, str]] = (),
    **config: Any,
) -> Scenario:
    """Return a scenario of requests given as (id, prompt, max_tokens, at, priority).

    The last two may be left out, and a dict at the end adds other keys. `aborts` are (step, id); `config` may
    name what has a default in the driver's.
    """
    entries = []
    for request in requests:
        *values, last = request
        more = last if isinstance(last, dict) else {KEYS[len(values)]: last}
        entries.append(dict(zip(KEYS, values, strict=False)) | more)
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": slots}
    limits |= {"long_prefill_token_threshold": threshold, "num_blocks": blocks}
    leave = [{"step": step, "id": name} for step, name in aborts]
    return {"name": name, "config": limits | config, "requests": entries, "aborts": leave}


def operations(
    name: str, num_blocks: int, *ops: Sequence[Any], block_size: int = 4, **config: Any
) -> Scenario:
    """Return a scenario of operations on a pool."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return {"name": name, "config": sizes | config, "ops": [list(op) for op in ops]}


def draw_workloads(
    seed: int,
    count: int,
    *,
    requests: Range = (1, 7),
    prompt: Range = (1, 30),
    max_tokens: Range = (1, 6),
    at: int = 8,
    slots: Range = (1, 5),
    budget: int = 20,
    spare: int = 12,
    threshold: Sequence[int] = (0,),
    priorities: int = 1,
    roomy: bool = False,
    **choices: Sequence[Any],
) -> list[Scenario]:
    """Return scenarios drawn from a seed; `choices` are values of the config to choose from.

    The largest request fits into the pool, with up to `spare` tokens to spare. If `roomy`, so much is held
    back at admission that no decode runs short.
    """
    rng, drawn = random.Random(seed), []
    for number in range(count):
        ranges = (prompt, max_tokens, (0, at), (0, priorities - 1))
        rows: list[Any] = [
            (f"r{i}", *(rng.randint(*one) for one in ranges)) for i in range(rng.randint(*requests))
        ]
        seqs, config = rng.randint(*slots), {key: rng.choice(values) for key, values in choices.items()}
        most = max(row[1] if roomy else row[1] + row[2] - 1 for row in rows) + rng.randint(0, spare)
        if roomy:
            config["watermark"] = max_tokens[1] * seqs
            most += config["watermark"]
        limits: dict[str, Any] = {"budget": rng.randint(seqs, budget), "threshold": rng.choice(threshold)}
        drawn.append(workload(f"drawn {seed}.{number}", rows, blocks=most, slots=seqs, **limits, **config))
    return drawn
