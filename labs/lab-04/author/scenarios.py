"""lab-04's scenarios, its tiny model, and how one is run: the engine's Scheduler around `fused_step`."""

from labs.kit import FakeKV
from labs.kit.tensor_toys.dense import FusedModel, fleet, row
from labs.kit.toys.driver import serve
from labs.kit.toys.workloads import workload

# What one step may look like: (tokens in the cache, new tokens) of each row.
SHAPES = {
    "the worked example": [(21, 1), (14, 1), (8, 1), (0, 8)],
    "decodes only": [(21, 1), (14, 1), (8, 1)],
    "one prefill only": [(0, 8)],
    "several first chunks": [(0, 8), (0, 3), (0, 1)],
    "later chunks and decodes, in any order": [(5, 6), (21, 1), (0, 9), (14, 1), (30, 2)],
    "no past beside a long one": [(40, 1), (0, 1)],
    "a long chunk, a long past and many decodes": [(260, 1), (3, 60), *((past, 1) for past in range(5, 45))],
}


def worked_example():
    """Rows and caches of the README's step: three decodes, and the first 8 tokens of a prompt of 13."""
    rows, caches = fleet([*SHAPES["the worked example"][:3], (0, 13)])
    return [*rows[:3], row(rows[3].request, 8)], caches


_MIXED = [("A", 5, 6, 0), ("B", 4, 6, 0), ("C", 3, 6, 0), ("D", 30, 3, 1)]
_PROMPTS = [("A", 5, 3, 0), ("B", 9, 3, 0), ("C", 2, 3, 0)]
SCENARIOS = [
    workload("one alone", [("A", 5, 6, 0)]),
    workload("a prompt beside three decodes", _MIXED),
    workload("several prompts at once", _PROMPTS, budget=12),
    workload("two long prompts in chunks", [("A", 25, 3, 0), ("B", 18, 3, 0)], budget=10, threshold=6),
    workload("preempted and computed again", [("A", 6, 9, 0), ("B", 6, 9, 0)], blocks=20),
]


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario: mixed steps, each computed by one `lab.fused_step`."""
    kv, parts = FakeKV(scenario["config"]["num_blocks"]), {"attend_backend": "lab-04"}
    return serve(kv, scenario, model=FusedModel(lab), raise_errors=raise_errors, parts=parts)
