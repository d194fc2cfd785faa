"""lab-01's scenarios, and how one is run: the loop around `schedule_step`, on KV memory of slots."""

from functools import partial

from labs.kit import FakeKV, StepLoop, drive
from labs.kit.toys.workloads import draw_workloads, workload

_BESIDE_A_DECODE = [("chat", 4, 12, 0), ("essay", 60, 3, 2)]
_CROWD = [(f"r{i}", 3 + i, 2 + i % 3, i // 4) for i in range(10)]
_LARGE = [("A", 16, 8, 0), ("large", 20, 3, 1), ("small", 2, 2, 1)]
_LEAVES = [("r0", 6, 30, 0), ("r1", 6, 4, 0), ("r2", 6, 4, 0)]

SCENARIOS = [
    workload("three prompts, ten tokens", [(name, 8, 3, 0) for name in ("r0", "r1", "r2")], budget=10),
    workload("a slot for B when A is done", [("A", 10, 4, 0), ("B", 8, 3, 0)], blocks=14),
    workload("a long prompt beside a decode", _BESIDE_A_DECODE, blocks=128),
    workload("the same with a threshold", _BESIDE_A_DECODE, blocks=128, threshold=8),
    workload("a crowd for four slots", _CROWD, budget=32, blocks=200),
    workload("the large one at the front", _LARGE, blocks=30),
    workload("one that leaves", _LEAVES, budget=12, slots=2, blocks=40, aborts=[(3, "r0")]),
]

# Decodes never run short: that is lab-03's subject.
draw = partial(draw_workloads, requests=(1, 8), budget=24, spare=30, threshold=(0, 0, 4, 9), roomy=True)


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario under `lab.schedule_step`."""
    config = scenario["config"]
    kv = FakeKV(config["num_blocks"], watermark=config.get("watermark", 0))
    names = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
    loop = StepLoop(kv, lab.schedule_step, **{name: config[name] for name in names})
    return drive(loop, scenario, raise_errors=raise_errors, parts={"schedule_step": "lab-01"})
