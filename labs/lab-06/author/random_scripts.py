"""Random scripts: requests come, compute, go and come back on small pools, with and without salts.

What the contract does not fix is not looked at: blocks are renamed, and an admission that could choose
between two copies of a block is left out.
"""

from labs.kit import Skip, make_request
from labs.kit.toys.scripts import in_two_runs_of_python
from labs.kit.toys.texts import Texts, wrong_books, wrong_names

SCRIPTS = 40
NAMES = ["a", "b", "c", "d"]
# Tokens and salts of a script: few, so that texts are equal, and such that one could pass for the other.
WORLDS = [
    ([0, 1], ["", "", "red"]), ([0, 1], ["red", "Red", "red "]), ([1, 11, 111], ["1", "11", ""]),
    ([1, 2], ["\x01\0\0\0\0\0\0\0", "\x01", ""]), ([7, 7 + 2**16], ["é", "e\u0301", "ä"]),
]  # fmt: skip
HASHES = {
    "all alike": lambda parent, token_ids: b"all alike",
    "tokens only": lambda parent, token_ids: repr(token_ids).encode(),
    "parent only": lambda parent, token_ids: parent[:1] + b"x",
    "digits joined": lambda parent, token_ids: parent + "".join(map(str, token_ids)).encode(),
}
# Parents and tokens that a careless name takes for one another.
ALMOST_ALIKE = [
    [["", [1, 23]], ["", [12, 3]]], [["", [1, 2]], ["", [2, 1]]], [["", [1, 1, 2]], ["", [1, 2, 2]]],
    [["", [0, 1]], ["", [1]]], [["", [5, 7]], ["", [5, 7 + 2**16]]], [["", [5, 7]], ["", [5, 7 + 2**32]]],
    [["", [5, 2**20]], ["", [5, 2**20 + 1]]], [["", [5, 2**53]], ["", [5, 2**53 + 1]]],
    [["", [*range(300), 1]], ["", [*range(300), 2]]], [["x" * 600 + "a", [1]], ["x" * 600 + "b", [1]]],
    [["\x01\0\0\0\0\0\0\0" * 32, [2]], ["", [*[1] * 32, 2]]], [["", [1, 2]], ["a", [1, 2]]],
    [["x" * 63 + "a", [1, 2]], ["x" * 63 + "b", [1, 2]]],
    [["a" + "x" * 63, [1, 2]], ["b" + "x" * 63, [1, 2]]], [["", [1, 2]], ["1", [2]]],
    [["", [1, 2]], ["\x01\0\0\0\0\0\0\0", [2]]], [["", [1, 2]], ["\0\0\0\x01", [2]]],
    [["red", [1, 2]], ["red,1", [2]]], [["a", [1, 2]], ["a\0", [1, 2]]], [["a", [1, 2]], ["\0a", [1, 2]]],
]  # fmt: skip
KINDS = ["comes"] * 6 + ["goes"] * 4 + ["runs"] * 4 + ["seldom"] * 2
IN_WORDS = "its text in words"  # a hash_block whose names can be read, and which notes what it is asked
SENSELESS = [[0, 4, 0], [-1, 4, None], [4, 0, None], [4, 4, 4], [4, 4, -1], [1, 1, 1]]


def draw(rng):
    tokens, salts = rng.choice(WORLDS)
    size, blocks = rng.choice((1, 2, 2, 3, 4)), rng.randint(4, 10)
    texts = [[rng.choice(tokens) for _ in range(3 * size + 1)] for _ in range(2)]
    is_own = rng.random() < 0.4
    config = {
        "num_blocks": blocks,
        "block_size": size,
        "watermark": rng.choice((0, 1, 2, 3, None)),
        "enable_prefix_caching": rng.random() < 0.9,
        "hash_block": rng.choice((IN_WORDS, IN_WORDS, "its own")) if is_own else rng.choice([*HASHES]),
        "texts": [[text, salt] for text in texts for salt in dict.fromkeys(salts[:2])],
    }
    calls, held = [], []  # names that may hold blocks, more often than not

    def comes(name):
        head = rng.choice(texts)[: rng.choice((rng.randint(1, 3 * size), 3 * size + 1))]
        rest = [rng.choice(tokens) for _ in range(rng.choice((0, 0, 1, size, 2 * size, 4 * size)))]
        held.append(name)
        both = [["admit", name, head + rest, 0, rng.choice(salts)], ["compute", name, 4 * size]]
        if rng.random() < 0.15:  # two with one text at the same time: each computes a copy
            other = rng.choice(NAMES)
            held.append(other)
            both[1:1] = [["admit", other, *both[0][2:]], ["compute", other, 4 * size]]
        elif rng.random() < 0.3:  # computed in chunks, or later
            both[1][2] = rng.randint(0, size)
        return both

    def shares():
        """One that holds full blocks only, and one that begins with them and needs about all that is left.

        Half of the time a stranger came first, and one of the two leaves: the other keeps what they share.
        """
        head = [rng.choice(tokens) for _ in range(size * rng.randint(1, 2))]
        rest = [rng.choice(tokens) for _ in range(size * rng.randint(1, blocks))]
        first = [["free", name] for name in NAMES] + [["admit", "a", head], ["compute", "a", len(head)]]
        held[:] = ["a", "b"]
        both = [*first, ["admit", "b", head + rest], ["compute", "b", 4 * size]]
        if len(rest) // size % 2:
            return both
        both.insert(len(NAMES), ["admit", "c", [700] * size])
        held[:] = ["a", "c"]
        return [*both, ["free", "b"]]

    def siblings():
        """Two texts that begin alike, and end alike; in between, or in the outputs, they differ."""
        head, in_outputs = [rng.choice(tokens) for _ in range(size)], rng.random() < 0.5
        held[:], moves = [], [["free", name] for name in NAMES]
        for name, token in zip("ab", tokens, strict=False):
            prompt = head if in_outputs else head + [token] * size + head
            moves += [["admit", name, prompt], ["compute", name, 4 * size]]
            moves += [["decode", name, token]] * (size + 1) * in_outputs
            moves += [["free", name]]
        return moves

    def another_text():
        """Takes blocks away from the cache, and leaves nothing in it, or its own."""
        fresh = [900 + rng.randint(0, 1) + i for i in range(size * rng.randint(1, blocks - 1))]
        return [["admit", "z", fresh], ["compute", "z", rng.choice((0, len(fresh)))], ["free", "z"]]

    for _ in range(30):
        free = [name for name in NAMES if name not in held]
        new, old = rng.choice(free or NAMES), rng.choice(held or NAMES)
        runs = [["compute", old, rng.randint(1, 2 * size)]]
        runs += [["decode", old, rng.choice(tokens)] for _ in range(rng.randint(0, size + 1))]
        kind = rng.choice([*KINDS, "comes back", "another text", "all go", "shares", "siblings"])
        start = rng.randint(-1, 2 * size)
        if kind == "comes":
            calls += comes(new)
        elif kind in ("shares", "siblings"):
            calls += shares() if kind == "shares" else siblings()
        elif kind == "goes":
            held = [other for other in held if other != old]
            meanwhile = rng.choice(([], another_text(), comes(new)))
            calls += rng.choice(([["free", old]], [["preempt", old], *meanwhile, ["admit_again", old]]))
        elif kind == "all go":
            calls += [["free", name] for name in rng.sample(held, len(held))]
            calls += [["reset_prefix_cache"]][: rng.randint(0, 1)]
            held = []
        elif kind == "seldom":
            asks = [["allocate", old, rng.choice((0, 0, 1, size, 4 * size))], ["preempt", old], ["free", old]]
            asks.append(["slot_mapping", old, start, start + rng.randint(0, size)])
            calls.append(rng.choice([*asks, ["reset_prefix_cache"]]))
        else:
            back = [["admit_again", new], ["compute", new, 4 * size]]
            calls += {"runs": runs, "comes back": back, "another text": another_text()}[kind]
    if rng.random() < 0.8:
        calls[:0] = [["hash_block", *block] for pair in rng.sample(ALMOST_ALIKE, 3) for block in pair]
    if rng.random() < 0.1:
        calls.insert(0, ["BlockManager", *rng.choice(SENSELESS)])
    if rng.random() < 0.15:
        calls.insert(0, ["hash_block_in_two_runs_of_python", *rng.choice(ALMOST_ALIKE)[0]])
    # At the end one newcomer after the other takes a block: which texts are lost, and in which order?
    return {"config": config, "calls": calls + [["admit", f"z{i}", [900 + i]] for i in range(4)]}


class Play(Texts):
    """A BlockManager, the requests that asked it for blocks, and what lies in each slot."""

    def __init__(self, part, config):
        settings = {name: config[name] for name in ("num_blocks", "block_size", "watermark")}
        settings["enable_prefix_caching"] = caching = config["enable_prefix_caching"]
        kinds, kind = HASHES | {IN_WORDS: self.in_words}, config["hash_block"]
        if kind in kinds:
            settings["hash_block"] = kinds[kind]
        self.is_noting = kind == IN_WORDS
        self.asked, self.to_ask = set(), set()  # what hash_block was called with, and what it should be
        self.came = []  # all requests, whose blocks say so
        super().__init__(part, part.BlockManager(**settings), caching)
        self.probes = {f"text {i}": (text, salt) for i, (text, salt) in enumerate(config["texts"])}
        self.hashes = []  # that were given in this script

    def enter(self, request):
        """Skip an admission that could hit either of two copies of a block: the contract leaves that open."""
        texts, ends = list(self.published.values()), range(self.size, request.num_tokens, self.size)
        if not self.table(request.request_id) and any(texts.count(self.text(request, e)) > 1 for e in ends):
            raise Skip
        self.came.append(request)
        return super().enter(request)

    def hash_block(self, parent, token_ids):
        """Return the number of this name among those given in the script, counted from 0."""
        name = self.part.hash_block(parent.encode(), tuple(token_ids))
        if name not in self.hashes:
            self.hashes.append(name)
        return [type(name).__name__, self.hashes.index(name)]

    def hash_block_in_two_runs_of_python(self, parent, token_ids):
        names = in_two_runs_of_python(lambda: self.part.hash_block(parent.encode(), tuple(token_ids)))
        return "the same name" if names[0] == names[1] else "another name"

    def seen(self):
        found = {}
        for name, (text, salt) in self.probes.items():
            self.came.append(make_request(name, text, cache_salt=salt))
            found[name] = len(list(self.kv.get_computed_blocks(self.came[-1])))
        for name, request in sorted(self.requests.items()):
            found[name] = len(list(self.kv.get_computed_blocks(request)))
        held = {name: request for name, request in self.requests.items() if self.table(name)}
        return super().seen() | {
            "num_cached_blocks": self.kv.num_cached_blocks,
            "positions that hold another text": {name: self.not_its_own(held[name]) for name in sorted(held)},
            "blocks found": found,
            "wrong in the books": wrong_books(self.kv),
            "hash_block was misused": self.misnamed() if self.is_noting else [],
        }

    def in_words(self, parent, token_ids):
        call = bytes(parent), tuple(token_ids)
        self.asked.add(call)
        return repr(call).encode()

    def misnamed(self):
        """Calls with another parent than the block before (or the salt), and names that it did not give."""
        for request in [*self.came, *self.requests.values()]:
            parent = request.cache_salt.encode()
            for end in range(self.size, request.num_tokens + 1, self.size):
                call = parent, tuple(request.token_ids(end - self.size, end))
                self.to_ask.add(call)
                parent = repr(call).encode()
        self.came.clear()
        wrong = wrong_names(self.kv, lambda *call: repr(call).encode())
        return [sorted(map(repr, self.asked - self.to_ask)), len(wrong)]
