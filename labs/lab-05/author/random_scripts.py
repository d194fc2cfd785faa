"""Random scripts: requests come, grow, go and come again on one pool; tokens are written and read.

A script keeps books or works on tensors, so that each half is judged without the other. torch is imported
by the tensor calls only.
"""

from labs.kit.toys.ledger import Ledger
from labs.kit.toys.plays import Play as Base

SCRIPTS = 60
NAMES = ["r0", "r1", "r2", "r3"]
SENSELESS = [[0, 4, 0], [-1, 4, None], [4, 0, None], [4, -2, 0], [4, 4, 4], [4, 4, -1], [1, 1, 1]]
POOLS = [[99, 4, None], [100, 4, None], [250, 1, None], [1, 1, None], [1, 1, 0], [8, 3, 7], [300, 2, 0]]


def draw(rng):
    return draw_tensors(rng) if rng.random() < 0.45 else draw_books(rng)


def draw_books(rng):
    size, num_blocks = rng.choice((1, 2, 3, 4, 4, 5, 16)), rng.choice((1, 4, 6, 8, 10, 12, 15, 120, 400))
    size = 16 if num_blocks == 400 else size  # more than 4,096 tokens
    most, watermark = num_blocks * size, rng.choice((0, 0, 1, 2, 3, None))
    if watermark is not None:
        watermark = min(watermark, num_blocks - 1)
    few = (0, 0, 1, size, size + 1, 2 * size, 3 * size + 1, most, 5000, 2**20 + 1)
    calls = []
    for _ in range(32):
        name, other = rng.sample(NAMES, 2)
        edge = rng.randint(1, 3) * size + rng.choice((-1, 0, 0, 1))
        length = max(1, rng.choice((edge, edge, rng.randint(1, most // 2 + 1), most + 1)))
        comes = [["admit", name, length, rng.choice((0, 0, 0, 1, 2, size))]]
        comes += [["compute", name, rng.randint(1, 2 * size)]] * rng.randint(0, 2)
        fills = ["admit_all", name, rng.choice((0, 0, -1, -2, -3, 1))]
        decodes = [["decode", name], ["decode", other]][: rng.randint(1, 2)] * rng.randint(1, size + 1)
        takes = ["allocate", name, rng.choice(few)]
        again = [["preempt", name], fills, ["admit_again", name]][rng.randint(0, 2) :]
        if rng.random() < 0.2:  # it comes back to a pool that another has all but filled
            again = [["free", one] for one in NAMES] + [["admit", name, 1], ["preempt", name]]
            again += [["admit_all", other, -1], ["admit_again", name]]
        start = rng.choice((-1, 0, 0, 0, 1, size - 1, size))
        asks = [
            ["num_new_blocks", name, rng.choice(few)],
            ["slot_mapping", name, start, max(start, 0) + rng.randint(0, 2 * size + 1)],
            ["last_slots", name, rng.choice((0, 0, 1, 2))],
        ]
        goes = rng.choice(([["free", name]], [["free", name]] * 2, [["preempt", name]]))
        moves = [comes] * 5 + [decodes] * 3 + [goes] * 3 + [again] * 2
        moves += [[takes], [takes, fills], [fills]] + [[ask] for ask in asks]
        calls += rng.choice(moves)
    if rng.random() < 0.4:
        calls.insert(rng.randint(0, 30), ["BlockManager", *rng.choice(SENSELESS + POOLS)])
    # At the end all are gone, and a request that comes alone may have the whole pool.
    calls += [["free", name] for name in rng.sample(NAMES, len(NAMES))]
    calls += [["admit_all", "r0", 0], ["last_slots", "r0", 0]]
    if rng.random() < 0.15:
        calls.insert(0, ["what_costs_more_in_a_pool_of", 2048])
    return {"config": {"num_blocks": num_blocks, "block_size": size, "watermark": watermark}, "calls": calls}


def draw_tensors(rng):
    kv_heads = rng.choice((1, 2, 2, 3))
    config = {
        "num_blocks": rng.randint(4, 14),
        "block_size": rng.choice((1, 2, 3, 4, 5)),
        "num_heads": kv_heads * rng.choice((1, 2, 2, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": rng.choice((1, 2, 4, 6)),
        "dtype": rng.choice(("float64", "float64", "float32")),
    }
    num_slots, calls = config["num_blocks"] * config["block_size"], []
    for _ in range(8):
        slots = rng.sample(range(num_slots), rng.randint(1, min(9, num_slots)))
        write = ["write_kv", slots if rng.random() < 0.7 else sorted(slots)]
        calls.append(rng.choice((write, ["paged_attention", *step(rng, **config)])))
    if rng.random() < 0.2:
        calls.insert(0, ["names_that_need_torch"])
    return {"config": config, "calls": calls}


def step(rng, num_blocks, block_size, **others):
    """Up to five requests, each as [tokens in the cache, new tokens, block table], and the tables' width."""
    free, requests = rng.sample(range(num_blocks), num_blocks), []
    kinds = rng.choice((["decode"], ["chunk"], ["decode", "chunk"]))  # often all of one kind
    for _ in range(rng.randint(1, 5)):
        past = rng.choice((0, 1, block_size - 1, block_size, rng.randint(0, 3 * block_size)))
        new = 1 if rng.choice(kinds) == "decode" else rng.choice((1, 2, block_size, rng.randint(1, 7)))
        needed = -(-(past + new) // block_size)
        if needed <= len(free):
            claimed = min(needed + rng.choice((0, 0, 0, 1)), len(free))  # at times more than it needs now
            requests.append([past, new, [free.pop() for _ in range(claimed)]])
    requests = requests or [[0, 1, [free.pop()]]]
    return [requests, max(len(table) for *_, table in requests) + rng.choice((0, 0, 1))]


def Play(part, config):  # noqa: N802  a script's config says which of the two it is
    return (Books if "watermark" in config else Memory)(part, config)


class Books(Ledger):
    def __init__(self, part, config):
        super().__init__(part, part.BlockManager(**config))


class Memory(Base):
    """Keys and values of one layer, and the tokens that were made up for them."""

    def __init__(self, part, config):
        super().__init__(part)
        self.config, self.pool = config, None

    def write_kv(self, slots):
        """Makes up a token for each slot and stores it. What slot holds which token is to be seen."""
        torch, _ = self.tensors()
        k = self.pool.make_up(len(slots))
        given = {"slot_mapping": torch.tensor(slots), "k": k, "v": -k}
        with self.only_reading(**given):
            self.part.write_kv(*self.pool.caches, *given.values())

    def paged_attention(self, requests, width):
        """One number a head, for each row; of float32, which is rounded, only the form."""
        torch, paged = self.tensors()
        batch, slots = paged.batch_of(requests, self.config["block_size"], width)
        for own in slots:
            keys = self.pool.make_up(len(own))
            for cache, new in zip(self.pool.caches, (keys, -keys), strict=True):
                cache.flatten(0, 1)[own] = new
        shape = (len(batch.positions), self.config["num_heads"], self.config["head_dim"])
        q = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.pool.made.dtype)
        fields = {name: value for name, value in vars(batch).items() if name != "plan"}
        with self.only_reading(q=q, batch=fields):
            out = self.part.paged_attention(q, *self.pool.caches, batch)
        if tuple(out.shape) != shape or "float64" not in str(out.dtype):
            return [str(out.dtype), *out.shape]
        sums = (out * torch.arange(1, shape[-1] + 1, dtype=out.dtype)).sum(dim=-1).tolist()
        rows = [f"r{r} at {p}" for r, (past, new, _) in enumerate(requests) for p in range(past, past + new)]
        return dict(zip(rows, sums, strict=True))

    def seen(self):
        """Which token's key and value each slot holds."""
        held = self.pool.held() if self.pool else {}
        return held | {"changed, and only to be read": self.all_changed()}

    def tensors(self):
        """The modules of the tensor calls, which load torch; the first call makes the pool."""
        import torch

        from labs.kit.tensor_toys import paged

        sizes = {name: value for name, value in self.config.items() if name != "num_heads"}
        self.pool = self.pool or paged.MarkedPool(**sizes)
        return torch, paged
