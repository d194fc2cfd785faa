"""lab-06's scenarios: operations on a BlockManager, and whole runs of a scheduler on top of it.

After every operation `Texts` compares, position by position, what each request would read with what it must
read. A wrong hit, a stale hash or a block given away twice shows there.
"""

from labs.kit.toys.driver import serve
from labs.kit.toys.texts import Texts
from labs.kit.toys.workloads import operations, workload

BASE = list(range(100, 109))  # nine tokens: two full blocks of four, and one over
LONGER, FIVE = [*BASE, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5]


def life(name, prompt, computed=None):
    """Return the operations of a request that comes, computes all or so many tokens, and goes."""
    count = len(prompt) if computed is None else computed
    return [["admit", name, prompt], *([["compute", name, count]] if count else []), ["free", name]]


SHARED = [("a", BASE, 8, 0), ("b", [*BASE, 1, 2], 8, 2), ("c", BASE[:6], 6, 2), ("d", BASE, 4, 20)]
TIGHT = [("a", BASE, 12, 0), ("b", list(range(9)), 12, 0)]
SCENARIOS = [
    operations("the second finds the first", 8, *life("a", BASE)[:2], *life("b", BASE, 0), ["free", "a"]),
    operations(
        "kept after the end, evicted when needed", 4, *life("a", BASE), *life("b", FIVE),
        *life("c", BASE, 1), *life("d", list(range(16))), *life("e", BASE, 0),
    ),
    operations(
        "a pool too small for both", 4, *life("a", BASE)[:2], ["admit", "b", LONGER], ["admit", "c", [7] * 9],
        ["free", "a"], *life("b", LONGER, 0),
    ),
    operations("its hits are the oldest", 4, *life("a", BASE), *life("b", FIVE), *life("c", LONGER, 8)),
    operations(
        "every hash is the same", 12, *life("a", FIVE)[:2], *life("b", [6, 7, 3, 4, 5])[:2],
        ["admit", "c", [1, 2, 3, 4, 9]], *(["free", name] for name in "abc"), block_size=2,
        colliding_hashes=True,
    ),
    operations("caching is off", 8, *life("a", BASE)[:2], *life("b", BASE, 0), prefix_caching=False),
    workload("shared beginnings under a scheduler", SHARED, blocks=14, block_size=4, prefix_caching=True),
    workload(
        "preempted, and back through its own blocks", TIGHT, blocks=9, block_size=4, prefix_caching=True
    ),
]  # fmt: skip
NAMED = {scenario["name"]: scenario for scenario in SCENARIOS}


def make(lab, num_blocks, block_size, **settings):
    """A manager of the lab's; without a watermark unless one is asked for."""
    return lab.BlockManager(num_blocks, block_size, **{"watermark": 0} | settings)


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The log of the operations, or the trace of the run under the engine's own Scheduler."""
    config = scenario["config"]
    settings = {"enable_prefix_caching": config.get("prefix_caching", True)}
    if config.get("colliding_hashes"):
        settings["hash_block"] = lambda parent, token_ids: b"all alike"
    kv = make(lab, config["num_blocks"], config["block_size"], **settings)
    if "ops" in scenario:
        return Texts(lab, kv, settings["enable_prefix_caching"]).log(scenario, raise_errors)
    return serve(kv, scenario, raise_errors=raise_errors, parts={"BlockManager": "lab-06"})
