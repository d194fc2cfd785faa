"""Random scripts: requests come, grow, go and come again on one pool; tokens are written and read.

A script keeps books or works on tensors, so that each half is judged without the other. torch is imported
by the tensor calls only. Any free block will do, so blocks are renamed: 0 is the first one that is held.
"""

import builtins
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache

from labs.kit import Skip, builtin, make_request

SCRIPTS = 60
NAMES = ["r0", "r1", "r2", "r3"]
SENSELESS = [[0, 4, 0], [-1, 4, None], [4, 0, None], [4, -2, 0], [4, 4, 4], [4, 4, -1], [1, 1, 1]]
POOLS = [[99, 4, None], [100, 4, None], [250, 1, None], [1, 1, None], [1, 1, 0], [8, 3, 7], [300, 2, 0]]
MADE_UP = 1024  # tokens, more than most scripts need
GARBAGE = 1e4  # lies in all slots that nothing was written to


def draw(rng):
    return draw_tensors(rng) if rng.random() < 0.45 else draw_books(rng)


# ----------------------------------------------------------------------------------------- the books


def draw_books(rng):
    size = rng.choice((1, 2, 3, 4, 4, 5, 16))
    num_blocks = rng.choice((1, 4, 6, 8, 10, 12, 15, 120))
    watermark = rng.choice((0, 0, 1, 2, 3, None))
    if watermark is not None:
        watermark = min(watermark, num_blocks - 1)
    most = num_blocks * size

    def length():
        near_an_edge = rng.randint(1, 3) * size + rng.choice((-1, 0, 0, 1))
        return max(1, rng.choice((near_an_edge, near_an_edge, rng.randint(1, most // 2 + 1), most + 1)))

    def few():
        return rng.choice((0, 0, 1, size, size + 1, 2 * size, 3 * size + 1, most))

    def comes(name):
        calls = [["admit", name, length(), rng.choice((0, 0, 0, 1, 2, size))]]
        return calls + [["compute", name, rng.randint(1, 2 * size)] for _ in range(rng.randint(0, 2))]

    def fills(name):
        return [["admit_all", name, rng.choice((0, 0, -1, -2, -3, 1))]]

    def decodes(name):
        other = rng.choice(NAMES)  # in turn with another, so that their blocks lie in between one another
        return [["decode", one] for _ in range(rng.randint(1, size + 1)) for one in {name: 0, other: 0}]

    def goes(name):
        return rng.choice(([["free", name]], [["free", name]], [["free", name]] * 2, [["preempt", name]]))

    def comes_again(name):
        return [["preempt", name], *fills(rng.choice(NAMES))][: rng.randint(0, 2)] + [["admit_again", name]]

    def asks(name):
        start = rng.choice((-1, 0, 0, 0, 1, size - 1, size))
        return [
            rng.choice(
                (
                    ["num_new_blocks", name, few()],
                    ["slot_mapping", name, start, max(start, 0) + rng.randint(0, 2 * size + 1)],
                    ["last_slots", name, rng.choice((1, size + 1, most)), rng.choice((0, 0, 0, 1, 2))],
                )
            )
        ]

    def takes(name):
        return [["allocate", name, few()], *fills(name)][: rng.randint(1, 2)]

    moves = [comes] * 5 + [fills, takes] + [decodes] * 3 + [goes] * 3 + [comes_again] * 2 + [asks] * 3
    calls = []
    for _ in range(32):
        name = rng.choice(NAMES)
        calls += rng.choice(moves)(name)
        if rng.random() < 0.25:
            calls.append(["last_slots", name, most, 0])
    if rng.random() < 0.4:
        calls.insert(rng.randint(0, 30), ["BlockManager", *rng.choice(SENSELESS + POOLS)])
    # At the end all are gone, and a request that comes alone may have the whole pool.
    calls += [["free", name] for name in rng.sample(NAMES, len(NAMES))]
    calls += [["admit_all", "r0", 0], ["last_slots", "r0", most, 0]]
    if rng.random() < 0.15:
        calls.insert(0, ["what_costs_more_in_a_pool_of", 2048])
    return {"config": {"num_blocks": num_blocks, "block_size": size, "watermark": watermark}, "calls": calls}


# --------------------------------------------------------------------------------------- the tensors


def draw_tensors(rng):
    kv_heads = rng.choice((1, 2, 2, 3))
    config = {
        "num_layers": 2,
        "num_blocks": rng.randint(4, 14),
        "block_size": rng.choice((1, 2, 3, 4, 5)),
        "num_heads": kv_heads * rng.choice((1, 2, 2, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": rng.choice((1, 2, 4, 6)),
        "dtype": rng.choice(("float64", "float64", "float32")),
    }
    calls = []
    for _ in range(8):
        if rng.random() < 0.5:
            num_slots = config["num_blocks"] * config["block_size"]
            slots = rng.sample(range(num_slots), rng.randint(1, min(9, num_slots)))
            calls.append(["write_kv", rng.randint(0, 1), slots if rng.random() < 0.7 else sorted(slots)])
        else:
            calls.append(["paged_attention", rng.randint(0, 1), *step(rng, **config)])
    if rng.random() < 0.2:
        calls.insert(0, ["without_the_torch_of_the_file"])
    return {"config": config, "calls": calls}


def step(rng, num_blocks, block_size, **others):
    """Up to five requests, each as [tokens in the cache, new tokens, block table], and the tables' width."""
    free, requests = rng.sample(range(num_blocks), num_blocks), []
    kinds = rng.choice((["decode"], ["chunk"], ["decode", "chunk"]))  # often all of one kind
    for _ in range(rng.randint(1, 5)):
        past = rng.choice((0, 1, block_size - 1, block_size, rng.randint(0, 3 * block_size)))
        new = 1 if rng.choice(kinds) == "decode" else rng.choice((1, 2, block_size, rng.randint(1, 7)))
        needed = -(-(past + new) // block_size)
        claimed = needed + rng.choice((0, 0, 0, 1))  # more than it needs now
        if needed <= len(free):
            table = [free.pop() for _ in range(min(claimed, len(free)))]
            requests.append([past, new, table])
    requests = requests or [[0, 1, [free.pop()]]]
    return [requests, max(len(table) for *_, table in requests) + rng.choice((0, 0, 1))]


# ------------------------------------------------------------------------------------------ the play


class Unnamed(ValueError):
    """A ValueError that does not say which request it is about."""


class Play:
    """A pool, the requests that asked it for blocks, and a memory of tensors."""

    def __init__(self, part, config):
        self.part, self.config = part, config
        self.size = config["block_size"]
        self.kv = None
        self.requests = {}  # the latest Request of each name
        self.strangers = {name: make_request(name, 3) for name in NAMES}  # other objects with these ids
        self.names = {}  # of the blocks that are held: id in the pool, and how it is called here
        self.caches = None  # keys and values: (2, num_layers, num_slots, num_kv_heads, head_dim)
        self.tokens = 0  # that have been made up for the memory so far
        self.changed = []  # arguments of the latest call that were only to be read
        self.hidden = ()  # global names of the part that are not there for it
        if "watermark" in config:
            self.kv = part.BlockManager(config["num_blocks"], self.size, watermark=config["watermark"])

    # -------------------------------------------------------------------------- calls on the books

    def BlockManager(self, num_blocks, block_size, watermark):  # noqa: N802
        """Another pool; this one's books are not touched by it."""
        kv = self.part.BlockManager(num_blocks, block_size, watermark=watermark)
        return [kv.num_blocks, kv.block_size, kv.watermark, kv.num_free_blocks]

    def what_costs_more_in_a_pool_of(self, num_blocks):
        """The methods that do more work than in a pool of 64: they go through all blocks, or all tables."""
        if self.is_model:
            return []
        small, large = (work_in_a_pool(self.part, size) for size in (64, num_blocks))
        return [name for name in small if large[name] > 5 * small[name]]

    def admit(self, name, num_prompt_tokens, num_output_tokens):
        """A new Request; its id may have been another's before, or hold blocks at the moment."""
        request = make_request(name, num_prompt_tokens)
        request.output_token_ids = list(range(num_output_tokens))
        request.num_computed_tokens = min(3, request.num_tokens)  # of an earlier life
        if not self._table(name):
            self.requests[name] = request
        return self._admit(request)

    def admit_all(self, name, more):
        """A request that needs just what is free, or a block more or less."""
        num_tokens = (self.kv.num_free_blocks + more) * self.size
        if num_tokens < 1:
            raise Skip
        return self.admit(name, num_tokens, 0)

    def admit_again(self, name):
        """The same Request once more: one that was refused, was preempted, or holds blocks."""
        return self._admit(self._known(name))

    def _admit(self, request):
        with named(request):
            return self.kv.admit(request)

    def decode(self, name):
        """All is computed but the token that was sampled last; False takes that token back."""
        request = self._holder(name)
        before = request.num_computed_tokens
        request.output_token_ids.append(len(request.output_token_ids))
        request.num_computed_tokens = request.num_tokens - 1
        if not (allocated := self.kv.allocate(request, 1)):
            request.output_token_ids.pop()
            request.num_computed_tokens = before
        return allocated

    def compute(self, name, num_tokens):
        """A chunk: allocated, and then computed."""
        request = self._holder(name)
        num_tokens = min(num_tokens, request.num_new_tokens)
        allocated = self.kv.allocate(request, num_tokens)
        if allocated:
            request.num_computed_tokens += num_tokens
        return allocated

    def allocate(self, name, num_new_tokens):
        return self.kv.allocate(self._twin(name), num_new_tokens)

    def num_new_blocks(self, name, num_new_tokens):
        return self.kv.num_new_blocks(self._twin(name), num_new_tokens)

    def slot_mapping(self, name, start, end):
        request = self._any(name)
        if start == end > len(self._table(name)) * self.size:
            raise Skip  # no position is asked for, and none is there
        with named(request):
            slots = list(self.kv.slot_mapping(request, start, end))
        self._rename()
        return in_runs([self.names.get(s // self.size, -1) * self.size + s % self.size for s in slots])

    def last_slots(self, name, before, behind):
        """The slots from `before` positions before the end of the room to `behind` behind it."""
        room = len(self._table(name)) * self.size
        return self.slot_mapping(name, max(0, room - before), room + behind)

    def free(self, name):
        """Given as another object with the same id, the request is the same."""
        self.kv.free(self.strangers[name])

    def preempt(self, name):
        request = self._holder(name)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    # ---------------------------------------------------------------------- calls on the tensors

    def without_the_torch_of_the_file(self):
        """From here on what the top of the file imports of torch is not there, as in a program without it."""
        self.hidden = names_of_torch(getattr(self.part, "__source__", ""))

    def write_kv(self, layer, slots):
        """Makes up a token for each slot and stores it. What slot holds which token is to be seen."""
        import torch

        given = {"k": self._made_up(len(slots)), "slot_mapping": torch.tensor(slots)}
        given["v"] = -given["k"]
        self.tokens += len(slots)
        with unchanged(self, given), without(self.part, self.hidden):
            self.part.write_kv(*self._layer(layer), given["slot_mapping"], given["k"], given["v"])

    def paged_attention(self, layer, requests, width):
        """One number a head, for each row; of float32, which is rounded, only the form."""
        import torch

        from mini_engine.batch import Batch

        k_cache, v_cache = self._layer(layer)
        positions, slot_mapping = [], []
        for past, new, table in requests:
            slots = [table[p // self.size] * self.size + p % self.size for p in range(past + new)]
            keys = self._made_up(past + new)
            k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = keys, -keys
            self.tokens += past + new
            positions += range(past, past + new)
            slot_mapping += slots[past:]
        query_lens = [new for _, new, _ in requests]
        batch = Batch(
            token_ids=torch.zeros(len(positions), dtype=torch.long),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slot_mapping),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for *_, table in requests]),
            query_lens=query_lens,
            seq_lens=[past + new for past, new, _ in requests],
            last_rows=[sum(query_lens[: r + 1]) - 1 for r in range(len(query_lens))],
            block_size=self.size,
        )
        shape = (len(positions), self.config["num_heads"], self.config["head_dim"])
        q = self._noise(*shape)
        fields = {name: value for name, value in vars(batch).items() if name != "plan"}
        with unchanged(self, {"q": q, **fields}), without(self.part, self.hidden):
            out = self.part.paged_attention(q, k_cache, v_cache, batch)
        if tuple(out.shape) != shape or "float64" not in str(out.dtype):
            return [str(out.dtype), *out.shape]
        sums = (out * torch.arange(1, shape[-1] + 1, dtype=out.dtype)).sum(dim=-1).tolist()
        rows = [f"r{r} at {p}" for r, (past, new, _) in enumerate(requests) for p in range(past, past + new)]
        return dict(zip(rows, sums, strict=True))

    # --------------------------------------------------------------------------------------- seen

    def seen(self):
        return self._seen_of_the_books() if self.kv else self._seen_of_the_memory()

    def _seen_of_the_books(self):
        self._rename()
        kv = self.kv
        return {
            "num_free_blocks": kv.num_free_blocks,
            "block tables (renamed)": {
                name: [self.names[block] for block in self._table(name)] for name in NAMES
            },
            "the pool": [kv.num_blocks, kv.block_size, kv.watermark],
            "num_computed_tokens": {name: r.num_computed_tokens for name, r in self.requests.items()},
            "requests": {name: in_words(request) for name, request in self.requests.items()},
        }

    def _seen_of_the_memory(self):
        """Which token's key and value each slot holds."""
        if self.caches is None:
            return {}
        _, num_layers, num_slots, *_ = self.caches.shape
        words, held = iter(self._words(self.caches.flatten(0, 2))), {}
        for kind in ("keys", "values"):
            for number in range(num_layers):
                slots = zip(range(num_slots), words, strict=False)
                held[f"{kind} of layer {number}"] = {f"slot {slot}": word for slot, word in slots if word}
        return {**held, "changed, and only to be read": self.changed}

    def _words(self, slots):
        """Of each slot: "k5" if the key of token 5 lies there, "" if nothing was ever written to it."""
        first = slots[:, 0, 0].double()
        tokens = (first.abs() * 1024 - 1).round().clamp(0, max(self.tokens - 1, 0)).long()
        whole = (self._rows(self.tokens)[tokens] * first.sign()[:, None, None] == slots).flatten(1).all(dim=1)
        unwritten = (slots == GARBAGE).flatten(1).all(dim=1)
        return [
            "" if empty else f"{'k' if sign > 0 else 'v'}{token}" if right else "something else"
            for empty, right, sign, token in zip(
                unwritten.tolist(), whole.tolist(), first.tolist(), tokens.tolist(), strict=True
            )
        ]

    # ------------------------------------------------------------------------------------ helpers

    def _any(self, name):
        if name not in self.requests:
            self.requests[name] = make_request(name, 3)
        return self.requests[name]

    def _known(self, name):
        if name not in self.requests:
            raise Skip
        return self.requests[name]

    def _holder(self, name):
        if not self._table(name):
            raise Skip
        return self._known(name)

    def _table(self, name):
        return self.kv.block_table(self.strangers[name])

    def _twin(self, name):
        """Another object that is the same request."""
        return replace(self._any(name))

    def _rename(self):
        """The blocks that are held are called 0, 1, 2 ..., and keep their name while they are held."""
        held = list(dict.fromkeys(block for name in NAMES for block in self._table(name)))
        self.names = {block: name for block, name in self.names.items() if block in held}
        for block in held:
            if block not in self.names:
                self.names[block] = min(set(range(len(held) + 1)) - set(self.names.values()))

    def _layer(self, number):
        import torch

        c = self.config
        if self.caches is None:
            shape = (2, c["num_layers"], c["num_blocks"] * self.size, c["num_kv_heads"], c["head_dim"])
            self.caches = torch.full(shape, GARBAGE, dtype=getattr(torch, c["dtype"]))
        return self.caches[:, number].unflatten(1, (c["num_blocks"], self.size))

    def _made_up(self, count):
        """The keys of the next tokens: (count, num_kv_heads, head_dim)."""
        return self._rows(self.tokens + count)[self.tokens : self.tokens + count].clone()

    def _rows(self, count):
        c = self.config
        return rows(max(MADE_UP, count), c["num_kv_heads"], c["head_dim"], c["dtype"])

    def _noise(self, *shape):
        import torch

        generator = torch.Generator().manual_seed(self.tokens)
        return torch.randn(*shape, generator=generator, dtype=getattr(torch, self.config["dtype"]))


@lru_cache
def rows(count, heads, width, dtype):
    """The keys of all tokens: that of token t begins with (t + 1) / 1024, by which it is known again."""
    import torch

    tokens, place = torch.arange(count), torch.arange(heads * width).view(1, heads, width)
    whole = (tokens[:, None, None] * 37 + place * 101) % 257 - 128
    keys = whole.double() / 61  # which float32 would round
    keys[:, 0, 0] = (tokens + 1) / 1024
    return keys.to(getattr(torch, dtype))


def in_runs(numbers):
    """As "0..3, 8, 4..6"; shorter to read, and to compare."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in runs)


def in_words(request):
    """What no call on the books may change."""
    return (
        f"{len(request.prompt_token_ids)} + {len(request.output_token_ids)} tokens, {request.status.value}, "
        f"{request.num_cached_tokens} cached, {request.num_preemptions} preemptions, at most "
        f"{request.max_tokens}, arrival {request.arrival}, finish_reason {request.finish_reason}"
    )


class named:  # noqa: N801
    """`with named(request):` a ValueError that comes out must have the request's id in its text."""

    def __init__(self, request):
        self.request_id = request.request_id

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is ValueError and self.request_id not in str(error):
            raise Unnamed(f"the message does not name {self.request_id}: {error}") from error


class unchanged:  # noqa: N801
    """Afterwards play.changed has the names of those things given that are not as they were before."""

    def __init__(self, play, given):
        self.play, self.given = play, given
        self.before = {name: copied(value) for name, value in given.items()}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        changed = [name for name, value in self.given.items() if plain(value) != plain(self.before[name])]
        self.play.changed = changed


def copied(value):
    return value.clone() if hasattr(value, "clone") else list(value) if isinstance(value, list) else value


def plain(value):
    return value.tolist() if hasattr(value, "tolist") else value


# ---------------------------------------------------------------------------- the work, without a clock


class Id(int):
    """A block id. Comparing it is a call of a function of Python, as making one is, and so it is counted."""

    def _seen(compare):
        return lambda self, other: compare(self, other)

    __lt__, __le__, __gt__, __ge__ = map(_seen, (int.__lt__, int.__le__, int.__gt__, int.__ge__))
    __eq__, __ne__, __hash__ = _seen(int.__eq__), _seen(int.__ne__), int.__hash__


class Ids:
    """range, but of such numbers."""

    def __init__(self, *limits, range=range, numbers=None):  # noqa: A002, the real one
        self.numbers = range(*limits) if numbers is None else numbers

    def __iter__(self):
        return (Id(number) for number in self.numbers)

    def __reversed__(self):
        return (Id(number) for number in reversed(self.numbers))

    def __getitem__(self, index):
        found = self.numbers[index]
        return Ids(numbers=found) if isinstance(index, slice) else Id(found)

    def __len__(self):
        return len(self.numbers)

    def __contains__(self, number):
        return (int(number) if isinstance(number, int) else number) in self.numbers

    def __getattr__(self, name):
        return getattr(self.numbers, name)


def work_in_a_pool(part, num_blocks):
    """Of each method, the steps of Python that it takes; of some turns the fewest, for what must be tidied.

    A table in sixteen blocks is another's. Beside the lines of Python that are run, each number that range
    makes counts, each comparison of two, and each len.
    """
    request, others = make_request("a", 8), [make_request(f"r{n}", 1) for n in range(num_blocks // 16)]
    size_of = len
    with builtin(range=Ids, len=lambda things: size_of(things)):
        kv = part.BlockManager(num_blocks, 1, watermark=0)
        for other in others:
            kv.admit(other)
        calls = {
            "admit": lambda: kv.admit(request),
            "num_free_blocks": lambda: kv.num_free_blocks,
            "allocate": lambda: kv.allocate(request, 24),
            "free": lambda: kv.free(request),
        }
        turns = [{name: steps_of(call) for name, call in calls.items()} for _ in range(5)]
    return {name: min(turn[name] for turn in turns) for name in calls}


def steps_of(call):
    """How many lines and calls of Python it takes."""
    count, others = 0, sys.gettrace()

    def look(frame, event, argument):
        nonlocal count
        count += 1
        return look

    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(others)
    return count


# ------------------------------------------------------------------------ a file that torch is taken from


class Absent:
    """Stands for torch, and all that is in it, while a file is loaded."""

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **more):
        return self


@lru_cache(4)
def names_of_torch(source):
    """The global names that a file has from torch, or from a module that imports torch, when it is loaded."""
    absent, its_import = Absent(), builtins.__import__

    def without_torch(name, *more):
        found = its_import(name, *more)
        uses_it = "torch" in vars(sys.modules.get(name, found))
        return absent if name.partition(".")[0] == "torch" or uses_it else found

    anew = {"__name__": "anew", "__builtins__": vars(builtins) | {"__import__": without_torch}}
    with suppress(Exception):  # up to where it cannot do without
        exec(source, anew)
    return tuple(name for name, value in anew.items() if value is absent)


@contextmanager
def without(part, names):
    kept = {name: vars(part).pop(name) for name in names if name in vars(part)}
    try:
        yield
    finally:
        vars(part).update(kept)
