"""lab-03's scenarios, and how one is run: a whole Scheduler, on KV memory of slots that runs short."""

import random

from labs.kit import FakeKV, drive

SETTINGS = ("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")


def _requests(*entries):
    return [
        dict(zip(("id", "prompt", "max_tokens", "priority", "at"), entry, strict=False)) for entry in entries
    ]


def _config(budget, slots, blocks, policy="fcfs", threshold=0, watermark=0):
    return {
        "policy": policy,
        "max_num_batched_tokens": budget,
        "max_num_seqs": slots,
        "long_prefill_token_threshold": threshold,
        "num_blocks": blocks,
        "watermark": watermark,
    }


_ESSAY_AND_CHAT = _requests(("essay", 30, 3, 2, 0), ("chat", 6, 3, 0, 0))
_TIGHT = _requests(("r0", 10, 10, 2, 0), ("r1", 10, 5, 0, 0))

SCENARIOS = [
    {
        "name": "three equals",
        "config": _config(16, 4, 64),
        "requests": _requests(("r0", 9, 10, 0, 0), ("r1", 9, 10, 0, 0), ("r2", 9, 10, 0, 0)),
    },
    {
        "name": "essay and chat, fcfs",
        "config": _config(16, 4, 256),
        "requests": _ESSAY_AND_CHAT,
    },
    {
        "name": "essay and chat, priority",
        "config": _config(16, 4, 256, "priority"),
        "requests": _ESSAY_AND_CHAT,
    },
    {
        "name": "two in a tight pool",
        "config": _config(16, 4, 22, "priority"),
        "requests": _TIGHT,
    },
    {
        "name": "the second a step later",
        "config": _config(16, 4, 22, "priority"),
        "requests": [_TIGHT[0], _TIGHT[1] | {"at": 1}],
    },
    {
        "name": "two in a tight pool, fcfs",
        "config": _config(16, 4, 22),
        "requests": _TIGHT,
    },
    {
        "name": "a latecomer that matters",
        "config": _config(16, 2, 64, "priority"),
        "requests": _requests(("a", 4, 8, 3, 0), ("b", 4, 12, 3, 0), ("c", 4, 4, 2, 1), ("vip", 4, 4, 0, 2)),
    },
    {
        "name": "thrashing",
        "config": _config(8, 4, 12),
        "requests": _requests(*((f"r{i}", 3, 8, 0, 0) for i in range(5))),
    },
    {
        "name": "a small one waits while room is made",
        "config": _config(16, 4, 22, "priority"),
        "requests": _requests(("r0", 10, 10, 2, 0), ("r1", 10, 5, 0, 0), ("small", 2, 2, 1, 2)),
    },
    {
        "name": "one that leaves while preempted",
        "config": _config(16, 4, 22, "priority"),
        "requests": _TIGHT,
        "aborts": [{"step": 5, "id": "r0"}],
    },
]


def draw(seed: int, count: int) -> list[dict]:
    """Scenarios drawn from a seed: pools so small that most of them preempt."""
    rng = random.Random(seed)
    drawn = []
    for number in range(count):
        slots = rng.randint(1, 5)
        requests = _requests(
            *(
                (f"r{i}", rng.randint(1, 12), rng.randint(1, 9), rng.randint(0, 2), rng.randint(0, 8))
                for i in range(rng.randint(2, 7))
            )
        )
        longest = max(r["prompt"] + r["max_tokens"] - 1 for r in requests)
        config = _config(
            rng.randint(slots, 20),
            slots,
            longest + rng.randint(0, 12),
            rng.choice(("fcfs", "priority")),
            threshold=rng.choice((0, 0, 3, 6)),
            watermark=rng.choice((0, 0, 2)),
        )
        drawn.append({"name": f"drawn {seed}.{number}", "config": config, "requests": requests})
    return drawn


def make(lab, kv, **settings):
    """A scheduler of the lab's on this memory, with room for 16 tokens and 4 requests a step."""
    return lab.Scheduler(kv, **{"max_num_batched_tokens": 16, "max_num_seqs": 4} | settings)


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario under `lab.Scheduler`."""
    config = scenario["config"]
    kv = FakeKV(config["num_blocks"], watermark=config.get("watermark", 0))
    scheduler = make(lab, kv, **{name: config[name] for name in SETTINGS if name in config})
    return drive(scheduler, scenario, raise_errors=raise_errors, parts={"Scheduler": "lab-03"})
