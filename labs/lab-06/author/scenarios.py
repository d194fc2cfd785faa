"""lab-06's scenarios: operations on a BlockManager, and whole runs of a scheduler on top of it.

After every operation `Texts` compares, position by position, what each request would read with what it must
read. A wrong hit, a stale hash or a block given away twice shows there.
"""

from labs.kit import drive
from labs.kit.toys.texts import Texts
from labs.kit.toys.workloads import workload
from mini_engine.scheduler import Scheduler

BASE = list(range(100, 109))  # nine tokens: two full blocks of four, and one over
LONGER = [*BASE, 1, 2, 3, 4, 5, 6]


def life(name, prompt, computed=None):
    """Return the operations of a request that comes, computes all or so many tokens, and goes."""
    count = len(prompt) if computed is None else computed
    return [["admit", name, prompt], *([["compute", name, count]] if count else []), ["free", name]]


def _ops(name, num_blocks, *ops, block_size=4, **config):
    config = {"num_blocks": num_blocks, "block_size": block_size, **config}
    return {"name": name, "config": config, "ops": [*ops]}


SHARED = [("a", BASE, 8, 0), ("b", [*BASE, 1, 2], 8, 2), ("c", BASE[:6], 6, 2), ("d", BASE, 4, 20)]
TIGHT = [("a", BASE, 12, 0), ("b", list(range(9)), 12, 0)]
SCENARIOS = [
    _ops("the second finds the first", 8, *life("a", BASE)[:2], *life("b", BASE, 0), ["free", "a"]),
    _ops(
        "kept after the end, evicted when needed",
        4,
        *life("a", BASE),
        *life("b", [1, 2, 3, 4, 5]),
        *life("c", BASE, 1),
        *life("d", list(range(16))),
        *life("e", BASE, 0),
    ),
    _ops(
        "a pool too small for both",
        4,
        *life("a", BASE)[:2],
        *(["admit", "b", LONGER], ["admit", "c", [7] * 9], ["free", "a"]),
        *life("b", LONGER, 0),
    ),
    _ops("its hits are the oldest", 4, *life("a", BASE), *life("b", [1, 2, 3, 4, 5]), *life("c", LONGER, 8)),
    _ops(
        "every hash is the same",
        12,
        *life("a", [1, 2, 3, 4, 5])[:2],
        *life("b", [6, 7, 3, 4, 5])[:2],
        *(["admit", "c", [1, 2, 3, 4, 9]], ["free", "a"], ["free", "b"], ["free", "c"]),
        block_size=2,
        colliding_hashes=True,
    ),
    _ops("caching is off", 8, *life("a", BASE)[:2], *life("b", BASE, 0), prefix_caching=False),
    workload("shared beginnings under a scheduler", SHARED, blocks=14, block_size=4, prefix_caching=True),
    workload(
        "preempted, and back through its own blocks", TIGHT, blocks=9, block_size=4, prefix_caching=True
    ),
]
NAMED = {scenario["name"]: scenario for scenario in SCENARIOS}


def make(lab, num_blocks, block_size, **settings):
    """A manager of the lab's; without a watermark unless one is asked for."""
    return lab.BlockManager(num_blocks, block_size, **{"watermark": 0} | settings)


def wrong_books(kv) -> str:
    """Return what is wrong in the attributes that the starter's class keeps, or "nothing".

    A class that keeps others is not looked at: it has books of its own.
    """
    cached, blocks = getattr(kv, "cached", None), getattr(kv, "blocks", None)
    if not isinstance(cached, dict) or not isinstance(blocks, list) or not hasattr(blocks[0], "hash"):
        return "nothing"
    if not all(cached.values()):
        return "self.cached has a hash with an empty list"
    findable = {id(block) for candidates in cached.values() for block in candidates}
    for block in blocks:
        for field in ("hash", "content"):
            if id(block) not in findable and getattr(block, field) is not None:
                return f"block {block.block_id} cannot be found, and its {field} is not None"
    try:
        kv.check()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def wrong_names(kv, hash_block) -> list[str]:
    """The names that `hash_block` does not give for the content of the block, one block after the other.

    A class whose blocks have no hash or no content is not looked at.
    """
    wrong, blocks = [], getattr(kv, "blocks", None)
    for block in blocks if isinstance(blocks, list) else ():
        name, content = getattr(block, "hash", None), getattr(block, "content", None)
        if name is not None and content is not None:
            salt, tokens = content
            right = salt.encode()
            for start in range(0, len(tokens), kv.block_size):
                right = hash_block(right, tuple(tokens[start : start + kv.block_size]))
            if name != right:
                wrong.append(f"the block with {list(tokens)} goes by {name!r}, not by {right!r}")
    return wrong


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The log of the operations, or the trace of the run under the engine's own Scheduler."""
    config = scenario["config"]
    settings = {"enable_prefix_caching": config.get("prefix_caching", True)}
    if config.get("colliding_hashes"):
        settings["hash_block"] = lambda parent, token_ids: b"all alike"
    kv = make(lab, config["num_blocks"], config["block_size"], **settings)
    if "ops" in scenario:
        return Texts(lab, kv, settings["enable_prefix_caching"]).log(scenario, raise_errors)
    limits = {name: config[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    scheduler = Scheduler(kv, **limits)
    return drive(scheduler, scenario, raise_errors=raise_errors, parts={"BlockManager": "lab-06"})
