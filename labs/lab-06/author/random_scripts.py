"""Random scripts: requests come, compute, go and come back on small pools, with and without salts.

`Play` notes which text it writes to each slot, and so it sees a request that would read another's text. It
looks at what the contract fixes and at no more: blocks are renamed by first appearance, and an admission
that could choose between two copies of a block is left out.
"""

from labs.kit import Skip, builtin, load, make_request

SCRIPTS = 40
wrong_books = load("lab-06", "scenarios").wrong_books
NAMES = ["a", "b", "c", "d"]
# Tokens and salts of a script: few, so that texts are equal, and such that one could pass for the other.
WORLDS = [
    ([0, 1], ["", "", "red"]),
    ([0, 1], ["red", "Red", "red "]),
    ([1, 11, 111], ["1", "11", ""]),
    ([1, 2], ["\x01\0\0\0\0\0\0\0", "\x01", ""]),
    ([7, 7 + 2**16], ["é", "e\u0301", "ä"]),
]
HASHES = {
    "all alike": lambda parent, token_ids: b"all alike",
    "tokens only": lambda parent, token_ids: repr(token_ids).encode(),
    "parent only": lambda parent, token_ids: parent[:1] + b"x",
    "digits joined": lambda parent, token_ids: parent + "".join(map(str, token_ids)).encode(),
}
# Parents and tokens that a careless name takes for one another.
ALMOST_ALIKE = [
    [["", [1, 23]], ["", [12, 3]]],
    [["", [1, 2]], ["", [2, 1]]],
    [["", [1, 1, 2]], ["", [1, 2, 2]]],
    [["", [0, 1]], ["", [1]]],
    [["", [5, 7]], ["", [5, 7 + 2**8]]],
    [["", [5, 7]], ["", [5, 7 + 2**16]]],
    [["", [5, 7]], ["", [5, 7 + 2**32]]],
    [["", [1, 2]], ["a", [1, 2]]],
    [["a", [1, 2]], ["b", [1, 2]]],
    [["x" * 63 + "a", [1, 2]], ["x" * 63 + "b", [1, 2]]],
    [["a" + "x" * 63, [1, 2]], ["b" + "x" * 63, [1, 2]]],
    [["ab", [1, 2]], ["ba", [1, 2]]],
    [["", [1, 2]], ["1", [2]]],
    [["", [1, 2]], ["\x01\0\0\0\0\0\0\0", [2]]],
    [["", [1, 2]], ["\0\0\0\x01", [2]]],
    [["red", [1, 2]], ["red,1", [2]]],
    [["a", [1, 2]], ["a\0", [1, 2]]],
    [["a", [1, 2]], ["\0a", [1, 2]]],
    [["a", [1, 2]], ["a ", [1, 2]]],
    [["", [1, 2]], ["", [1, 2]]],
]
IN_WORDS = "its text in words"  # a hash_block whose names can be read, and which notes what it is asked
SENSELESS = [[0, 4, 0], [-1, 4, None], [4, 0, None], [4, 4, 4], [4, 4, -1], [1, 1, 1]]


def draw(rng):
    tokens, salts = rng.choice(WORLDS)
    size = rng.choice((1, 2, 2, 3, 4))
    texts = [[rng.choice(tokens) for _ in range(3 * size + 1)] for _ in range(2)]
    config = {
        "num_blocks": rng.randint(4, 10),
        "block_size": size,
        "watermark": rng.choice((0, 1, 2, 3, None)),
        "enable_prefix_caching": rng.random() < 0.9,
        "hash_block": rng.choice(("its own", "its own", *HASHES)),
        "texts": [[text, salt] for text in texts for salt in dict.fromkeys(salts[:2])],
    }

    def prompt():
        head = rng.choice(texts)[: rng.choice((rng.randint(1, 3 * size), 3 * size + 1))]
        return head + [rng.choice(tokens) for _ in range(rng.choice((0, 0, 1, size, 2 * size, 4 * size)))]

    held = []  # names that may hold blocks, more often than not

    def one_that(holds):
        names = held if holds else [name for name in NAMES if name not in held]
        return rng.choice(names or NAMES)

    def comes():
        name = one_that(holds=rng.random() < 0.05)
        calls = [["admit", name, prompt(), rng.choice(salts)], ["compute", name, 4 * size]]
        held.append(name)
        if rng.random() < 0.15:  # two with one text at the same time: each computes a copy
            other = one_that(holds=False)
            held.append(other)
            calls[1:1] = [["admit", other, *calls[0][2:]], ["compute", other, 4 * size]]
        elif rng.random() < 0.3:  # computed in chunks, or later
            calls[1][2] = rng.randint(0, size)
        return calls

    def goes():
        name = one_that(holds=True)
        held[:] = [other for other in held if other != name]
        if rng.random() < 0.6:
            return [["free", name]]
        meanwhile = rng.choice(([], another_text(), comes()))
        return [["preempt", name], *meanwhile, ["admit_again", name]]

    def runs():
        name = one_that(holds=True)
        return [["compute", name, rng.randint(1, 2 * size)]] + [
            ["decode", name, rng.choice(tokens)] for _ in range(rng.randint(0, size + 1))
        ]

    def comes_back():
        name = rng.choice(NAMES)
        held.append(name)
        return [["admit_again", name], ["compute", name, 4 * size]]

    def another_text():
        """Takes blocks away from the cache, and leaves nothing in it, or its own."""
        fresh = [900 + rng.randint(0, 1) + i for i in range(size * rng.randint(1, config["num_blocks"] - 1))]
        return [["admit", "z", fresh, ""], ["compute", "z", rng.choice((0, len(fresh)))], ["free", "z"]]

    def everyone_goes():
        names = rng.sample(held, len(held))
        held.clear()
        return [["free", name] for name in names] + [["reset_prefix_cache"]][: rng.randint(0, 1)]

    def seldom():
        name, start = rng.choice(NAMES), rng.randint(-1, 2 * size)
        return [
            rng.choice(
                (
                    ["allocate", name, rng.choice((0, 0, 1, size, 4 * size))],
                    ["slot_mapping", name, start, start + rng.randint(0, size)],
                    ["preempt", name],
                    ["free", name],
                    ["reset_prefix_cache"],
                )
            )
        ]

    moves = [comes] * 6 + [goes] * 4 + [runs] * 4 + [comes_back, another_text, seldom, seldom]
    moves.append(everyone_goes)
    calls = [call for _ in range(30) for call in rng.choice(moves)()]
    if rng.random() < 0.8:
        calls[:0] = [["hash_block", *block] for pair in rng.sample(ALMOST_ALIKE, 3) for block in pair]
    if rng.random() < 0.1:
        calls.insert(0, ["BlockManager", *rng.choice(SENSELESS)])
    if rng.random() < 0.15:
        calls.insert(0, ["hash_block_in_two_runs_of_python", *rng.choice(ALMOST_ALIKE)[0]])
    if config["hash_block"] == "its own" and rng.random() < 0.4:
        config["hash_block"] = IN_WORDS
    # At the end one newcomer after the other takes a block: which texts are lost, and in which order?
    return {"config": config, "calls": calls + [["admit", f"z{i}", [900 + i], ""] for i in range(4)]}


class Play:
    """A BlockManager, the requests that asked it for blocks, and what lies in each slot."""

    def __init__(self, part, config):
        self.part, self.size, self.caching = part, config["block_size"], config["enable_prefix_caching"]
        settings = {name: config[name] for name in ("enable_prefix_caching", "watermark")}
        if config["hash_block"] in HASHES:
            settings["hash_block"] = HASHES[config["hash_block"]]
        self.is_noting = config["hash_block"] == IN_WORDS
        self.asked, self.to_ask = set(), set()  # what hash_block was called with, and what it should be
        self.came = []  # all requests, whose blocks say so
        if self.is_noting:
            settings["hash_block"] = self._in_words
        self.kv = part.BlockManager(config["num_blocks"], self.size, **settings)
        self.probes = {f"text {i}": self._request("probe", *text) for i, text in enumerate(config["texts"])}
        self.requests = {}  # all that hold blocks or wait for them, by name
        self.held = set()  # the names of those that hold blocks
        self.written = {}  # slot: the text up to the token that was computed into it
        self.published = {}  # block id: its text, as long as it has not been given away
        self.names_seen = []

    # ------------------------------------------------------------------------------------- calls

    def admit(self, name, prompt, salt):
        """A new request; its id may have been another's before, or be held at the moment."""
        request = self._request(name, prompt, salt)
        if name not in self.held:
            self.requests[name] = request
        return self._enter(name, request)

    def admit_again(self, name):
        """A request that was preempted or refused; its two counts may still be those of the last time."""
        if name not in self.requests:
            raise Skip
        return self._enter(name, self.requests[name])

    def compute(self, name, num_tokens):
        request = self._holder(name)
        room = len(self.kv.block_table(request)) * self.size
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens, room)
        if end == request.num_computed_tokens:
            raise Skip
        self._compute(request, end)
        return end

    def decode(self, name, token):
        """A new output token, which is computed at once; False if there is no block for it."""
        request = self._holder(name)
        if request.num_new_tokens:
            raise Skip
        request.output_token_ids.append(token)
        if not self._allocate(request, 1):
            request.output_token_ids.pop()
            return False
        self._compute(request, request.num_tokens)
        return True

    def allocate(self, name, num_new_tokens):
        request = self.requests.setdefault(name, self._request(name, [1, 1], ""))
        if name not in self.held:
            request.num_computed_tokens = 0
        allocated = self._allocate(request, num_new_tokens)
        if self.kv.block_table(request):
            self.held.add(name)
        return allocated

    def free(self, name):
        self.kv.free(self.requests.pop(name, None) or self._request(name, [1], ""))
        self.held.discard(name)

    def preempt(self, name):
        request = self._holder(name)
        self.kv.free(request)
        self.held.discard(name)
        request.num_preemptions += 1

    def reset_prefix_cache(self):
        done = self.kv.reset_prefix_cache()
        if done:
            self.published.clear()
        return done

    def slot_mapping(self, name, start, end):
        """Each slot as the place of its block in the table, and the place in the block."""
        request = self.requests.get(name) or self._request(name, [1], "")
        slots, table = self.kv.slot_mapping(request, start, end), list(self.kv.block_table(request))
        return [[table.index(slot // self.size), slot % self.size] for slot in slots]

    def hash_block(self, parent, token_ids):
        """Which of the names that were given in this script it is, counted from 0."""
        name = self.part.hash_block(parent.encode(), tuple(token_ids))
        if name not in self.names_seen:
            self.names_seen.append(name)
        return [type(name).__name__, self.names_seen.index(name)]

    def hash_block_in_two_runs_of_python(self, parent, token_ids):
        """hash() of bytes and strings begins with another number in each."""

        def name_in_run(number):
            def hashed(value):
                return real(value) + number * differs(value)

            with builtin(hash=hashed):
                return self.part.hash_block(parent.encode(), tuple(token_ids))

        def differs(value):
            return any(map(differs, value)) if isinstance(value, tuple) else isinstance(value, bytes | str)

        real = hash
        return "the same name" if name_in_run(1) == name_in_run(2) else "another name"

    def BlockManager(self, num_blocks, block_size, watermark):  # noqa: N802
        self.part.BlockManager(num_blocks, block_size, watermark=watermark)

    # -------------------------------------------------------------------------------------- seen

    def seen(self):
        kv, numbers = self.kv, {}
        seen = {"num_free_blocks": kv.num_free_blocks, "num_cached_blocks": kv.num_cached_blocks}
        for name, request in sorted(self.requests.items()):
            table = [numbers.setdefault(block, len(numbers)) for block in kv.block_table(request)]
            seen[f"block table of {name}, renamed"] = table
            seen[f"num_computed_tokens of {name}"] = request.num_computed_tokens
            seen[f"num_cached_tokens of {name}"] = request.num_cached_tokens
            seen[f"status of {name}"] = [request.status.name, request.num_preemptions]
            seen[f"tokens of {name}"] = [request.num_prompt_tokens, len(request.output_token_ids)]
            if name in self.held:
                seen[f"positions of {name} that hold another text"] = self._not_its_own(request)
        seen["wrong in the books"] = wrong_books(kv)
        for name, request in [*sorted(self.requests.items()), *self.probes.items()]:
            seen[f"blocks found for {name}"] = len(list(kv.get_computed_blocks(request)))
        return seen | (self._misnamed() if self.is_noting else {})

    # ----------------------------------------------------------------------------------- helpers

    def _request(self, name, prompt, salt):
        request = make_request(name, prompt)
        request.cache_salt = salt
        self.came.append(request)
        return request

    def _holder(self, name):
        if name not in self.held:
            raise Skip
        return self.requests[name]

    def _in_words(self, parent, token_ids):
        call = bytes(parent), tuple(token_ids)
        self.asked.add(call)
        return words(*call)

    def _misnamed(self):
        """Calls with another parent than the block before (or the salt), and blocks of another name."""
        blocks = getattr(self.kv, "blocks", None)  # of a class that keeps them as the starter's does
        blocks = blocks if isinstance(blocks, list) else []
        names = {getattr(block, "hash", None) for block in blocks} - {None}
        if not self.asked <= self.to_ask or not names <= {words(*call) for call in self.to_ask}:
            self.to_ask |= {call for request in self.came for call in chain(request, self.size)}
        wrong = sorted(map(repr, self.asked - self.to_ask))
        others = names - {words(*call) for call in self.to_ask}
        return {"hash_block was called with": wrong, "blocks of a name that it did not give": len(others)}

    def _text(self, request, end):
        return (request.cache_salt, *request.token_ids(0, end))

    def _enter(self, name, request):
        if name not in self.held:
            self._skip_if_it_could_choose(request)
        admitted = self.kv.admit(request)
        if admitted:
            self.held.add(name)
            self._given_away(self.kv.block_table(request)[request.num_cached_tokens // self.size :])
        return admitted

    def _skip_if_it_could_choose(self, request):
        """Of two copies of a block the contract does not say which one is the hit."""
        texts = list(self.published.values())
        for end in range(self.size, request.num_tokens, self.size):
            if texts.count(self._text(request, end)) > 1:
                raise Skip

    def _allocate(self, request, num_new_tokens):
        before = len(self.kv.block_table(request))
        allocated = self.kv.allocate(request, num_new_tokens)
        self._given_away(self.kv.block_table(request)[before:])
        return allocated

    def _given_away(self, blocks):
        for block in blocks:
            self.published.pop(block, None)

    def _compute(self, request, end):
        start = request.num_computed_tokens
        for position, slot in enumerate(self.kv.slot_mapping(request, start, end), start):
            self.written[slot] = self._text(request, position + 1)
        request.num_computed_tokens = end
        self.kv.cache_blocks(request)
        if self.caching:
            for index, block in enumerate(self.kv.block_table(request)[: end // self.size]):
                self.published[block] = self._text(request, (index + 1) * self.size)

    def _not_its_own(self, request):
        slots = enumerate(self.kv.slot_mapping(request, 0, request.num_computed_tokens))
        return [p for p, slot in slots if self.written.get(slot) != self._text(request, p + 1)]


def words(parent, token_ids):
    return repr((parent, token_ids)).encode()


def chain(request, size):
    """What hash_block should be called with for each full block of a request."""
    parent = request.cache_salt.encode()
    for end in range(size, request.num_tokens + 1, size):
        call = parent, tuple(request.token_ids(end - size, end))
        yield call
        parent = words(*call)
