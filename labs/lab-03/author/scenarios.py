"""lab-03's scenarios, and how one is run: a whole Scheduler, on KV memory of slots that runs short."""

from functools import partial

from labs.kit import FakeKV, drive
from labs.kit.toys.workloads import draw_workloads, workload

SETTINGS = ("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
PRIORITY = {"policy": "priority"}

_ESSAY_AND_CHAT = [("essay", 30, 3, 0, 2), ("chat", 6, 3, 0, 0)]
_TIGHT = [("r0", 10, 10, 0, 2), ("r1", 10, 5, 0, 0)]
_IMPORTANT = [("a", 4, 8, 0, 3), ("b", 4, 12, 0, 3), ("c", 4, 4, 1, 2), ("vip", 4, 4, 2, 0)]
_SMALL = [*_TIGHT, ("small", 2, 2, 2, 1)]

SCENARIOS = [
    workload("three equals", [(name, 9, 10, 0, 0) for name in ("r0", "r1", "r2")], policy="fcfs"),
    workload("essay and chat, fcfs", _ESSAY_AND_CHAT, blocks=256, policy="fcfs"),
    workload("essay and chat, priority", _ESSAY_AND_CHAT, blocks=256, **PRIORITY),
    workload("two in a tight pool", _TIGHT, blocks=22, **PRIORITY),
    workload("the second a step later", [_TIGHT[0], ("r1", 10, 5, 1, 0)], blocks=22, **PRIORITY),
    workload("two in a tight pool, fcfs", _TIGHT, blocks=22, policy="fcfs"),
    workload("a latecomer that matters", _IMPORTANT, slots=2, **PRIORITY),
    workload("thrashing", [(f"r{i}", 3, 8, 0, 0) for i in range(5)], budget=8, blocks=12, policy="fcfs"),
    workload("a small one waits while room is made", _SMALL, blocks=22, **PRIORITY),
    workload("one that leaves while preempted", _TIGHT, blocks=22, aborts=[(5, "r0")], **PRIORITY),
]

# Pools so small that most of them preempt.
draw = partial(
    draw_workloads,
    requests=(2, 7),
    prompt=(1, 12),
    max_tokens=(1, 9),
    threshold=(0, 0, 3, 6),
    priorities=3,
    policy=("fcfs", "priority"),
    watermark=(0, 0, 2),
)


def make(lab, kv, **settings):
    """A scheduler of the lab's on this memory, with room for 16 tokens and 4 requests a step."""
    return lab.Scheduler(kv, **{"max_num_batched_tokens": 16, "max_num_seqs": 4} | settings)


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario under `lab.Scheduler`."""
    config = scenario["config"]
    kv = FakeKV(config["num_blocks"], watermark=config.get("watermark", 0))
    scheduler = make(lab, kv, **{name: config[name] for name in SETTINGS if name in config})
    return drive(scheduler, scenario, raise_errors=raise_errors, parts={"Scheduler": "lab-03"})
