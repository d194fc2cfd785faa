"""lab-05's scenarios: operations on a pool whose books are checked, whole runs, and steps of attention."""

from labs.kit import ToyModel
from labs.kit.toys.driver import serve as serve_on
from labs.kit.toys.ledger import Ledger
from labs.kit.toys.workloads import draw_workloads, operations


class Pool:
    """A BlockManager under watch: the same methods, and `check` compares its books with the requests.

    It looks at public things only: which request holds which blocks, and how many are free.
    """

    enable_prefix_caching = False  # there is no prefix cache before lab-06
    num_cached_blocks = 0

    def __init__(self, lab, num_blocks, block_size, watermark=0):
        self.kv = lab.BlockManager(num_blocks, block_size, watermark=watermark)
        self.held = {}  # request_id: request, of those that hold blocks

    def __getattr__(self, name):
        return getattr(self.kv, name)

    def admit(self, request):
        if admitted := self.kv.admit(request):
            self.held[request.request_id] = request
        return admitted

    def free(self, request):
        self.held.pop(request.request_id, None)
        self.kv.free(request)

    def cache_blocks(self, request):
        """Nothing is cached: the engine's manager would share blocks, as lab-06 does."""

    def check(self):
        """Every block is free or has one owner, and no request holds a block too many or too few."""
        kv, owner = self.kv, {}
        for name, request in self.held.items():
            table = kv.block_table(request)
            for block in table:
                if not 0 <= block < kv.num_blocks:
                    raise AssertionError(f"{name} holds block {block}, which the pool does not have")
                if owner.setdefault(block, name) != name:
                    raise AssertionError(f"block {block} belongs to {owner[block]} and to {name}")
            room = len({*table}) * kv.block_size
            if not request.num_computed_tokens <= room < request.num_tokens + kv.block_size:
                raise AssertionError(f"{name} has {request.num_tokens} tokens and room for {room}")
        held, free, blocks = len(owner), kv.num_free_blocks, kv.num_blocks
        if held + free != blocks:
            raise AssertionError(f"{held} blocks are held and {free} free, of {blocks} in all")


def admits(*sizes):
    return [("admit", name, size) for name, size in zip("abcdef", sizes, strict=False)]


SCENARIOS = [
    operations(
        "the edges of a block", 12, *admits(3, 4, 5, 7, 8, 9),
        *(("slot_mapping", name, 0, n) for _, name, n in admits(3, 4, 5, 7, 8, 9)), watermark=0,
    ),
    operations(
        "growing through three blocks", 4, *admits(3), *[("decode", "a")] * 9, ("slot_mapping", "a", 0, 12),
        watermark=0,
    ),
    operations(
        "blocks of one token", 6, *admits(3), *[("decode", "a")] * 4, ("free", "a"), block_size=1, watermark=0
    ),
    operations("no room is no harm", 4, *admits(9, 5, 4), ("free", "a"), ("admit", "b", 5), watermark=0),
    operations(
        "the watermark", 10, *admits(20, 16, 12), *[("decode", "a")] * 9, ("free", "a"), ("free", "c"),
        ("admit", "d", 40), watermark=2,
    ),
]  # fmt: skip


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The log of one scenario's operations on `lab.BlockManager`."""
    return Ledger(lab, Pool(lab, **scenario["config"])).log(scenario, raise_errors)


# --------------------------------------------------------------------------------- whole runs


def workload(seed: int, block_size: int) -> dict:
    """Requests that outgrow a pool of 60 slots together, though none of them alone."""
    limits = {"num_blocks": 60 // block_size, "block_size": block_size, "max_num_batched_tokens": 16}
    (drawn,) = draw_workloads(
        seed, 1, requests=(6, 6), prompt=(1, 20), max_tokens=(4, 14), at=4, slots=(5, 5), threshold=(6,)
    )
    return drawn | {"config": drawn["config"] | limits}


def serve(lab, scenario: dict, model=ToyModel):
    """The trace of a whole run on `lab.BlockManager`; `model(kv)` makes the model."""
    config = scenario["config"]
    kv = Pool(lab, config["num_blocks"], config["block_size"])
    return serve_on(kv, scenario, model=model(kv), parts={"BlockManager": "lab-05"})


# (tokens in the cache, new tokens, block table) of each request in one step; blocks of 4 tokens.
STEPS = {
    "decodes": [(6, 1, [5, 0]), (3, 1, [7]), (4, 1, [1, 9])],
    "one chunk": [(0, 7, [8, 3])],
    "a later chunk": [(6, 5, [9, 1, 4])],
    "a mixture": [(0, 3, [6]), (10, 1, [2, 8, 5]), (5, 6, [1, 0, 3]), (11, 1, [4, 10, 7])],
    "full last blocks": [(7, 1, [3, 1]), (4, 4, [9, 6]), (0, 8, [2, 5])],
}


def step_tensors(step, **sizes):
    """(q, k_cache, v_cache, batch, expected) of a step of such requests."""
    from labs.kit.tensor_toys import paged

    return paged.step_tensors(step, **sizes)
