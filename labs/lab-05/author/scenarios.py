"""lab-05's scenarios: operations on a pool whose books are checked, whole runs, and steps as tensors.

torch is imported by those functions only that build tensors.
"""

import random
from functools import cache

from labs.kit import ToyModel, drive, log_ops, make_request
from mini_engine.scheduler import Scheduler

POISON = 1e4  # what lies in slots that no request may read
SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")

# ---------------------------------------------------------------------------------- bookkeeping


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
        """Nothing is cached."""

    def check(self):
        """Every block is free or has one owner, and no request holds a block too many or too few."""
        owner = {}
        for request_id, request in self.held.items():
            table = self.kv.block_table(request)
            for block in table:
                if not 0 <= block < self.kv.num_blocks:
                    raise AssertionError(f"{request_id} holds block {block}, which the pool does not have")
                if block in owner:
                    raise AssertionError(f"block {block} belongs to {owner[block]} and to {request_id}")
                owner[block] = request_id
            room = len(table) * self.kv.block_size
            if not request.num_computed_tokens <= room < request.num_tokens + self.kv.block_size:
                raise AssertionError(f"{request_id} has {request.num_tokens} tokens and room for {room}")
        if len(owner) + self.kv.num_free_blocks != self.kv.num_blocks:
            raise AssertionError(
                f"{len(owner)} blocks are held and {self.kv.num_free_blocks} free, "
                f"of {self.kv.num_blocks} in all"
            )


class Desk:
    """Carries out a scenario's operations on one pool; an operation that makes no sense returns None."""

    def __init__(self, lab, config):
        self.pool = Pool(lab, config["num_blocks"], config["block_size"], config.get("watermark", 0))
        self.requests = {}

    def perform(self, name, arguments):
        request_id, *rest = arguments
        result = None
        if name == "admit":
            if request_id not in self.pool.held:
                self.requests[request_id] = make_request(request_id, rest[0])
                result = self.pool.admit(self.requests[request_id])
        elif request_id in self.pool.held:
            result = getattr(self, name)(self.requests[request_id], *rest)
        self.pool.check()
        return result

    def grow(self, request):
        """A decode: all is computed but the token that was sampled last."""
        request.output_token_ids.append(len(request.output_token_ids))
        request.num_computed_tokens = request.num_tokens - 1
        grown = self.pool.allocate(request, 1)
        if not grown:
            request.output_token_ids.pop()
            request.num_computed_tokens = request.num_tokens
        return grown

    def needs(self, request, num_tokens):
        return self.pool.num_new_blocks(request, num_tokens)

    def slots(self, request):
        """Offsets in their blocks, not the slots: which blocks they are is the manager's choice."""
        slots = self.pool.slot_mapping(request, 0, request.num_tokens)
        return [slot % self.pool.block_size for slot in slots]

    def free(self, request):
        self.pool.free(request)

    def observe(self):
        lengths = {i: len(self.pool.block_table(request)) for i, request in self.requests.items()}
        return {"num_free_blocks": self.pool.num_free_blocks, "lengths": lengths}


def _ops(name, num_blocks, block_size, *ops, watermark=0):
    config = {"num_blocks": num_blocks, "block_size": block_size, "watermark": watermark}
    return {"name": name, "config": config, "ops": [list(op) for op in ops]}


SCENARIOS = [
    _ops(
        "the edges of a block",
        12,
        4,
        *(("admit", f"r{n}", n) for n in (3, 4, 5, 7, 8, 9)),
        *(("slots", f"r{n}") for n in (3, 4, 5, 7, 8, 9)),
    ),
    _ops("growing through three blocks", 4, 4, ("admit", "a", 3), *[("grow", "a")] * 9, ("slots", "a")),
    _ops("blocks of one token", 6, 1, ("admit", "a", 3), *[("grow", "a")] * 4, ("free", "a")),
    _ops(
        "no room is no harm",
        4,
        4,
        ("admit", "a", 9),
        ("admit", "b", 5),
        ("admit", "c", 4),
        ("free", "a"),
        ("admit", "b", 5),
    ),
    _ops(
        "the watermark",
        10,
        4,
        ("admit", "a", 20),
        ("admit", "b", 16),
        ("admit", "c", 12),
        *[("grow", "a")] * 9,
        ("free", "a"),
        ("free", "c"),
        ("admit", "d", 40),
        watermark=2,
    ),
]


def draw(seed: int, count: int) -> list[dict]:
    """Scenarios drawn from a seed: admissions, growth and departures in pools that run full."""
    rng = random.Random(seed)
    drawn = []
    for number in range(count):
        block_size = rng.choice((1, 2, 3, 4, 7, 16))
        num_blocks = rng.randint(4, 24)
        ops = []
        for _ in range(60):
            name = rng.choice(("admit", "admit", "grow", "grow", "grow", "grow", "free", "slots", "needs"))
            op = [name, f"r{rng.randint(0, 5)}"]
            if name == "admit":
                op.append(rng.randint(1, num_blocks * block_size // 2 + 1))
            elif name == "needs":
                op.append(rng.randint(0, 3 * block_size))
            ops.append(op)
        watermark = rng.choice((0, 0, 2))
        drawn.append(_ops(f"drawn {seed}.{number}", num_blocks, block_size, *ops, watermark=watermark))
    return drawn


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The log of one scenario's operations on `lab.BlockManager`."""
    desk = Desk(lab, scenario["config"])
    return log_ops(scenario, desk.perform, desk.observe, raise_errors=raise_errors)


# --------------------------------------------------------------------------------- whole runs


def workload(seed: int, block_size: int, num_tokens: int = 60) -> dict:
    """Requests that outgrow a pool of `num_tokens` slots together, though none of them alone."""
    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{i}",
            "prompt": rng.randint(1, 20),
            "max_tokens": rng.randint(4, 14),
            "at": rng.randint(0, 4),
        }
        for i in range(6)
    ]
    config = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 5,
        "long_prefill_token_threshold": 6,
        "num_blocks": num_tokens // block_size,
        "block_size": block_size,
    }
    return {"name": f"workload {seed}, blocks of {block_size}", "config": config, "requests": requests}


def serve(lab, scenario: dict, model=None):
    """The trace of a whole run on `lab.BlockManager`; `model(kv)` makes the model, a toy by default."""
    config = scenario["config"]
    kv = Pool(lab, config["num_blocks"], config["block_size"], config.get("watermark", 0))
    scheduler = Scheduler(kv, **{name: config[name] for name in SETTINGS})
    return drive(scheduler, scenario, model=(model or ToyModel)(kv), parts={"BlockManager": "lab-05"})


# ------------------------------------------------------------------------- a step, as tensors

# (tokens in the cache, new tokens, block table) of each request in one step; blocks of 4 tokens.
STEPS = {
    "decodes": [(6, 1, [5, 0]), (3, 1, [7]), (4, 1, [1, 9])],
    "one chunk": [(0, 7, [8, 3])],
    "a later chunk": [(6, 5, [9, 1, 4])],
    "a mixture": [(0, 3, [6]), (10, 1, [2, 8, 5]), (5, 6, [1, 0, 3]), (11, 1, [4, 10, 7])],
    "full last blocks": [(7, 1, [3, 1]), (4, 4, [9, 6]), (0, 8, [2, 5])],
}


def step_tensors(requests, block_size=4, num_blocks=12, num_heads=4, num_kv_heads=2, head_dim=8, seed=0):
    """A step made by hand: (q, k_cache, v_cache, batch, expected), everything float64.

    The caches hold the keys of each request where its table says, and POISON in all other slots.
    `expected` is attention over each request's own keys, computed without any block.
    """
    import torch

    from mini_engine.batch import Batch
    from mini_engine.model import sdpa

    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    caches = torch.full((2, num_blocks * block_size, num_kv_heads, head_dim), POISON, dtype=torch.float64)
    queries, expected, positions, slot_mapping = [], [], [], []
    for past, new, table in requests:
        slots = [table[p // block_size] * block_size + p % block_size for p in range(past + new)]
        kv, q = noise(2, past + new, num_kv_heads, head_dim), noise(new, num_heads, head_dim)
        caches[:, slots] = kv
        mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
        queries.append(q)
        expected.append(sdpa(q[None], *kv[:, None], mask)[0])
        positions += range(past, past + new)
        slot_mapping += slots[past:]
    width = max(len(table) for _, _, table in requests)
    ends = torch.tensor([new for _, new, _ in requests]).cumsum(0)
    batch = Batch(
        token_ids=torch.zeros(len(positions), dtype=torch.long),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slot_mapping),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for _, _, table in requests]),
        query_lens=[new for _, new, _ in requests],
        seq_lens=[past + new for past, new, _ in requests],
        last_rows=(ends - 1).tolist(),
        block_size=block_size,
    )
    k_cache, v_cache = caches.unflatten(1, (num_blocks, block_size))
    return torch.cat(queries), k_cache, v_cache, batch, torch.cat(expected)


# --------------------------------------------------------------------------- with a real model


@cache
def model():
    """A random float64 model of two layers, whose four heads share two pairs of keys and values."""
    import torch

    from labs.kit.toys.requests import VOCAB
    from mini_engine.model import CausalLM, ModelConfig

    generator = torch.Generator().manual_seed(0)
    net = CausalLM(ModelConfig("llama", VOCAB, 32, 48, 2, 4, 2, 8, 256, tie_word_embeddings=True))
    net = net.double().requires_grad_(False)
    for name, parameter in net.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return net


@cache
def text_alone(request_id: str, prompt: int, max_tokens: int) -> list[int]:
    """The greedy text of one request alone, on one contiguous cache."""
    import torch

    from mini_engine.backends.dense import DenseCache, dense_attend

    tokens = make_request(request_id, prompt).prompt_token_ids
    store = DenseCache(model().config, torch.float64)
    text = []
    while len(text) < max_tokens:
        new = torch.tensor(tokens if not text else text[-1:])
        positions = torch.arange(len(store), len(store) + len(new))
        hidden = model()(new, positions, dense_attend(store))
        text.append(int(model().logits(hidden[-1]).argmax()))
    return text


def paged_model(lab):
    """What `serve` runs a real model with: the lab's two tensor functions around the engine's pool.

    Before each step every slot that holds no computed token is poisoned.
    """
    import torch

    from mini_engine.attention import PagedBackend
    from mini_engine.interfaces import Row

    class PagedModel:
        def __init__(self, kv):
            self.kv = kv
            self.backend = PagedBackend(
                model(), kv, write_kv=lab.write_kv, paged_attention=lab.paged_attention
            )

        def forward(self, rows):
            if not rows:
                return {}
            stale = torch.ones(self.kv.num_blocks * self.kv.block_size, dtype=torch.bool)
            for request in self.kv.held.values():
                stale[list(self.kv.slot_mapping(request, 0, request.num_computed_tokens))] = False
            for cache_tensor in (self.backend.pool.k, self.backend.pool.v):
                cache_tensor.flatten(1, 2)[:, stale] = POISON
            logits = self.backend.forward(
                [Row(request, len(tokens), last) for request, tokens, _, last in rows]
            )
            sampled = [request.request_id for request, *_, is_last in rows if is_last]
            return dict(zip(sampled, logits.argmax(dim=-1, keepdim=True).tolist(), strict=True))

    return PagedModel
