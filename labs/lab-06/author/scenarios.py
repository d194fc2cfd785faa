"""lab-06's scenarios: operations on a BlockManager, and whole runs of a scheduler on top of it.

After every operation `Ledger` compares, position by position, what each request would read with
what it must read. A wrong hit, a stale hash or a block given away twice shows there.
"""

import random

from labs.kit import drive, log_ops, make_request
from mini_engine.scheduler import Scheduler

BASE = list(range(100, 109))  # nine tokens: two full blocks of four, and one over
RUN = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "prefix_caching": True}

SCENARIOS = [
    {
        "name": "the second finds the first",
        "config": {"num_blocks": 8, "block_size": 4},
        "ops": [
            ["admit", "a", BASE],
            ["compute", "a", 9],
            ["admit", "b", BASE],
            ["free", "a"],
            ["free", "b"],
        ],
    },
    {
        "name": "kept after the end, evicted when needed",
        "config": {"num_blocks": 4, "block_size": 4},
        "ops": [
            *(["admit", "a", BASE], ["compute", "a", 9], ["free", "a"]),
            *(["admit", "b", [1, 2, 3, 4, 5]], ["compute", "b", 5], ["free", "b"]),
            *(["admit", "c", BASE], ["compute", "c", 1], ["free", "c"]),
            *(["admit", "d", list(range(16))], ["compute", "d", 16], ["free", "d"]),
            *(["admit", "e", BASE], ["free", "e"]),
        ],
    },
    {
        "name": "a pool too small for both",
        "config": {"num_blocks": 4, "block_size": 4},
        "ops": [
            *(["admit", "a", BASE], ["compute", "a", 9], ["admit", "b", [*BASE, 1, 2, 3, 4, 5, 6]]),
            *(
                ["admit", "c", [7] * 9],
                ["free", "a"],
                ["admit", "b", [*BASE, 1, 2, 3, 4, 5, 6]],
                ["free", "b"],
            ),
        ],
    },
    {
        "name": "its hits are the oldest",
        "config": {"num_blocks": 4, "block_size": 4},
        "ops": [
            *(["admit", "a", BASE], ["compute", "a", 9], ["free", "a"]),
            *(["admit", "b", [1, 2, 3, 4, 5]], ["compute", "b", 5], ["free", "b"]),
            *(["admit", "c", [*BASE, 1, 2, 3, 4, 5, 6, 7]], ["compute", "c", 8], ["free", "c"]),
        ],
    },
    {
        "name": "every hash is the same",
        "config": {"num_blocks": 12, "block_size": 2, "colliding_hashes": True},
        "ops": [
            *(["admit", "a", [1, 2, 3, 4, 5]], ["compute", "a", 5]),
            *(["admit", "b", [6, 7, 3, 4, 5]], ["compute", "b", 5]),
            *(["admit", "c", [1, 2, 3, 4, 9]], ["free", "a"], ["free", "b"], ["free", "c"]),
        ],
    },
    {
        "name": "caching is off",
        "config": {"num_blocks": 8, "block_size": 4, "prefix_caching": False},
        "ops": [
            ["admit", "a", BASE],
            ["compute", "a", 9],
            ["admit", "b", BASE],
            ["free", "a"],
            ["free", "b"],
        ],
    },
    {
        "name": "shared beginnings under a scheduler",
        "config": {"num_blocks": 14, "block_size": 4, **RUN},
        "requests": [
            {"id": "a", "prompt": BASE, "max_tokens": 8, "at": 0},
            {"id": "b", "prompt": [*BASE, 1, 2], "max_tokens": 8, "at": 2},
            {"id": "c", "prompt": BASE[:6], "max_tokens": 6, "at": 2},
            {"id": "d", "prompt": BASE, "max_tokens": 4, "at": 20},
        ],
    },
    {
        "name": "preempted, and back through its own blocks",
        "config": {"num_blocks": 9, "block_size": 4, **RUN},
        "requests": [
            {"id": "a", "prompt": BASE, "max_tokens": 12, "at": 0},
            {"id": "b", "prompt": list(range(9)), "max_tokens": 12, "at": 0},
        ],
    },
]

NAMED = {scenario["name"]: scenario for scenario in SCENARIOS}


def draw(seed: int, count: int) -> list[dict]:
    """Operations drawn from a seed: two texts that begin many prompts, and few blocks, so that hits and
    evictions abound."""
    rng = random.Random(seed)
    drawn = []
    for number in range(count):
        size = rng.choice((1, 2, 3, 4))
        config = {"num_blocks": rng.randint(4, 9), "block_size": size, "watermark": rng.choice((0, 0, 1))}
        config["colliding_hashes"] = rng.random() < 0.3
        texts = [[rng.randint(0, 1) for _ in range(3 * size + 1)] for _ in range(2)]
        ops = []
        for _ in range(100):
            name = rng.choice("abcd")
            prompt = rng.choice(texts)[: rng.randint(1, 3 * size + 1)] + [rng.randint(0, 1)]
            salt = rng.choice(("", "", "", "tenant"))
            ops += rng.choice(
                (
                    [["admit", name, prompt, salt], ["compute", name, rng.choice((size, 4 * size))]],
                    [["compute", name, rng.randint(1, 6)]],
                    [["token", name, rng.randint(0, 1)]],
                    [["free", name]],
                    [["preempt", name]],
                )
            )
        drawn.append({"name": f"drawn {seed}.{number}", "config": config, "ops": ops})
    return drawn


class Ledger:
    """Requests on a BlockManager, and what the keys and values in each slot stand for.

    The keys and values of a position depend on every token up to it (and on the salt), so that is
    what is noted for its slot when it is computed, and compared when it is read.
    """

    def __init__(self, kv, caching=True):
        self.kv, self.caching = kv, caching
        self.requests = {}
        self.live = set()  # the names of the requests that hold blocks
        self.written = {}  # slot: what was computed into it

    def admit(self, name, prompt, salt=""):
        if name in self.live:
            return None
        request = self.requests[name] = make_request(name, prompt)
        request.cache_salt = salt
        return self._enter(request)

    def _enter(self, request):
        admitted = self.kv.admit(request)
        if admitted:
            self.live.add(request.request_id)
        return [admitted, request.num_computed_tokens if admitted else None]

    def compute(self, name, num_tokens):
        request = self._held(name)
        if request is None:
            return None
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        for position, slot in zip(range(start, end), self.kv.slot_mapping(request, start, end), strict=True):
            self.written[slot] = self._meaning(request, position)
        request.num_computed_tokens = end
        self.kv.cache_blocks(request)
        return end

    def token(self, name, token):
        """A decode: a new output token, computed at once."""
        request = self._held(name)
        if request is None or request.num_new_tokens > 0:
            return None
        request.output_token_ids.append(token)
        if not self.kv.allocate(request, 1):
            request.output_token_ids.pop()
            return False
        return self.compute(name, 1)

    def free(self, name):
        request = self._held(name)
        if request is not None:
            self.kv.free(request)
            self.live.discard(name)

    def preempt(self, name):
        """Free, forget the progress, and try to come back at once."""
        request = self._held(name)
        if request is None:
            return None
        self.kv.free(request)
        self.live.discard(name)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        return self._enter(request)

    def reset(self):
        return self.kv.reset_prefix_cache()

    def _can_be_found(self, request):
        """What a request holds and has computed is not evicted: a newcomer with its text must find it."""
        kv, full = self.kv, request.num_computed_tokens // self.kv.block_size
        if not self.caching:
            return
        newcomer = make_request("newcomer", [*request.token_ids(0, full * kv.block_size), 0])
        newcomer.cache_salt = request.cache_salt
        found = len(list(kv.get_computed_blocks(newcomer)))
        if found != full:
            raise AssertionError(
                f"{request.request_id} has computed {full} full blocks, "
                f"and a newcomer with the same text finds {found} of them"
            )

    def _held(self, name):
        return self.requests[name] if name in self.live else None

    def _meaning(self, request, position):
        return (request.cache_salt, tuple(request.token_ids(0, position + 1)))

    def observe(self):
        """The public state; raises AssertionError when a request would read what is not its own."""
        kv, tables = self.kv, {}
        for name in sorted(self.live):
            request = self.requests[name]
            tables[name] = list(kv.block_table(request))
            for position, slot in enumerate(kv.slot_mapping(request, 0, request.num_computed_tokens)):
                if self.written.get(slot) != self._meaning(request, position):
                    raise AssertionError(
                        f"{name} reads at position {position} keys and values of another text "
                        "(or such that were never computed)"
                    )
            self._can_be_found(request)
        held = {block for table in tables.values() for block in table}
        if len(held) + kv.num_free_blocks != kv.num_blocks:
            raise AssertionError(
                f"{len(held)} blocks are held and {kv.num_free_blocks} free, of {kv.num_blocks}"
            )
        return {
            "num_free_blocks": kv.num_free_blocks,
            "num_cached_blocks": kv.num_cached_blocks,
            "lengths": {name: len(table) for name, table in tables.items()},
            "shared": len([b for table in tables.values() for b in table]) - len(held),
        }


def make(lab, num_blocks, block_size, **settings):
    """A manager of the lab's; without a watermark unless one is asked for."""
    return lab.BlockManager(num_blocks, block_size, **{"watermark": 0} | settings)


def wrong_books(kv) -> str:
    """What is wrong in the attributes that the starter's class keeps, or "nothing".

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


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The log of the operations, or the trace of the run under the engine's own Scheduler."""
    config = scenario["config"]
    settings = {"enable_prefix_caching": config.get("prefix_caching", True)}
    if config.get("colliding_hashes"):
        settings["hash_block"] = lambda parent, token_ids: b"all alike"
    kv = make(
        lab, config["num_blocks"], config["block_size"], watermark=config.get("watermark", 0), **settings
    )
    if "ops" in scenario:
        ledger = Ledger(kv, settings["enable_prefix_caching"])
        return log_ops(
            scenario,
            lambda name, arguments: getattr(ledger, name)(*arguments),
            ledger.observe,
            raise_errors=raise_errors,
        )
    limits = {name: config[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    return drive(
        Scheduler(kv, **limits), scenario, raise_errors=raise_errors, parts={"BlockManager": "lab-06"}
    )
