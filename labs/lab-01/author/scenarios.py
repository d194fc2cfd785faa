"""lab-01's scenarios, and how one is run: the loop around `schedule_step`, on KV memory of slots."""

import random

from labs.kit import FakeKV, StepLoop, drive


def _requests(*entries):
    return [dict(zip(("id", "prompt", "max_tokens", "at"), entry, strict=False)) for entry in entries]


def _config(budget, slots, blocks, threshold=0, watermark=0):
    return {
        "max_num_batched_tokens": budget,
        "max_num_seqs": slots,
        "long_prefill_token_threshold": threshold,
        "num_blocks": blocks,
        "watermark": watermark,
    }


SCENARIOS = [
    {
        "name": "three prompts, ten tokens",
        "config": _config(10, 4, 64),
        "requests": _requests(("r0", 8, 3, 0), ("r1", 8, 3, 0), ("r2", 8, 3, 0)),
    },
    {
        "name": "a slot for B when A is done",
        "config": _config(16, 4, 14),
        "requests": _requests(("A", 10, 4, 0), ("B", 8, 3, 0)),
    },
    {
        "name": "a long prompt beside a decode",
        "config": _config(16, 4, 128),
        "requests": _requests(("chat", 4, 12, 0), ("essay", 60, 3, 2)),
    },
    {
        "name": "the same with a threshold",
        "config": _config(16, 4, 128, threshold=8),
        "requests": _requests(("chat", 4, 12, 0), ("essay", 60, 3, 2)),
    },
    {
        "name": "a crowd for four slots",
        "config": _config(32, 4, 200),
        "requests": _requests(*((f"r{i}", 3 + i, 2 + i % 3, i // 4) for i in range(10))),
    },
    {
        "name": "the large one at the front",
        "config": _config(16, 4, 30),
        "requests": _requests(("A", 16, 8, 0), ("large", 20, 3, 1), ("small", 2, 2, 1)),
    },
    {
        "name": "one that leaves",
        "config": _config(12, 2, 40),
        "requests": _requests(("r0", 6, 30, 0), ("r1", 6, 4, 0), ("r2", 6, 4, 0)),
        "aborts": [{"step": 3, "id": "r0"}],
    },
]


def draw(seed: int, count: int) -> list[dict]:
    """Scenarios drawn from a seed. Decodes never run short: that is lab-03's subject."""
    rng = random.Random(seed)
    drawn = []
    for number in range(count):
        slots = rng.randint(1, 5)
        requests = _requests(
            *(
                (f"r{i}", rng.randint(1, 30), rng.randint(1, 6), rng.randint(0, 8))
                for i in range(rng.randint(1, 8))
            )
        )
        growth = 6 * slots  # held back at admission, so that no decode runs short
        blocks = max(r["prompt"] for r in requests) + growth + rng.randint(0, 30)
        threshold = rng.choice((0, 0, 4, 9))
        config = _config(rng.randint(slots, 24), slots, blocks, threshold, watermark=growth)
        drawn.append({"name": f"drawn {seed}.{number}", "config": config, "requests": requests})
    return drawn


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario under `lab.schedule_step`."""
    config = scenario["config"]
    kv = FakeKV(config["num_blocks"], watermark=config.get("watermark", 0))
    names = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
    loop = StepLoop(kv, lab.schedule_step, **{name: config[name] for name in names})
    return drive(loop, scenario, raise_errors=raise_errors, parts={"schedule_step": "lab-01"})
