"""lab-09's scenarios: requests that write texts of a pattern, token by token, on toy vocabularies.

After every operation the log has what each request may write next. A vocabulary has a text for each token, or
a list of numbers for bytes that are no whole character.
"""

from functools import reduce

from labs.kit import Skip
from labs.kit.toys.plays import Play
from mini_engine.structured.patterns import parse

TOYS = {  # vocabularies; the last token is end-of-text
    "letters": ["a", "b", "c", "<end>"],
    "pieces": ["a", "b", "ab", "ba", "abc", "c", "", "<end>"],
    "digits": ["1", "19", "9", "2", "20", "-", "0-", "-0", "1-1", "<end>"],
    "bytes": ["a", [0xC3], [0xA9], "é", [0xE2], [0x82, 0xAC], "€", "a€", "<end>"],
    "json": ['{"', '"}', '": ', "name", "n", "ame", '"', "yes", "no", "{", "}", ": ", "true", "<end>"],
    "no digits": ["a", "b", "or", " ", "one", "<end>"],
    "play": ["ROM", "EO", "JULIET", ":", "\n", " ", "O", "o", "love", "ve", ".", "!", "<end>"],
}


def as_bytes(token):
    return bytes(token) if isinstance(token, list) else token.encode()


def scenario(name, toy, *ops, eos=True):
    """Operations on a toy vocabulary, with its end-of-text or without one."""
    vocabulary = (TOYS[toy] if isinstance(toy, str) else toy)[: None if eos else -1]
    config = {"vocabulary": vocabulary, "eos_token_id": len(vocabulary) - 1 if eos else None}
    return {"name": name, "config": config, "ops": [list(op) for op in ops]}


def writes(toy, pattern, *texts):
    """Open a request on a pattern and let it write tokens, each given as its text."""
    ids = [TOYS[toy].index(text) for text in texts]
    return [("compile", pattern), ("start", "a"), *(("accept_tokens", "a", [token]) for token in ids)]


SCENARIOS = [
    scenario("whole texts", "letters", *(("matches", "a(b|c)*", text) for text in ("a", "abcb", "", "ba"))),
    scenario("an automaton", "letters", *(("dfa_matches", "(ab|a)*c", text) for text in ("c", "aabc", "ab"))),
    scenario(
        "tokens of several characters", "pieces", *writes("pieces", "(ab)+c?", "ab", "ab"),
        ("accept_tokens", "a", [4, 7]), ("rollback", "a", 1), ("validate_tokens", "a", [7, 0]),
        ("accept_tokens", "a", [0, 0]), ("accept_tokens", "a", [7]), ("rollback", "a", 3),
    ),
    scenario("a date", "digits", *writes("digits", r"(19|20)\d-[012]\d", "19", "9", "-", "1", "9", "<end>")),
    scenario(
        "bytes of half a character", "bytes", *writes("bytes", "(é|€)+", "é"), ("accept_tokens", "a", [4]),
        ("accept_tokens", "a", [5, 1]), ("accept_tokens", "a", [2, 8]), ("rollback", "a", 2),
    ),
    scenario("an object", "json", *writes("json", r'\{"name": (true|"(yes|no)")\}', '{"', "n", "ame", '": ')),
    scenario("a branch that cannot be spelled", "no digits", *writes("no digits", r"(a|b|a \d|one)( or)?")),
    scenario("no end-of-text", "letters", *writes("letters", "a(b|c)", "a", "b"), eos=False),
    scenario(
        "two requests share an index", "play", *writes("play", r"(ROMEO|JULIET):\n(O|love| )+[.!]", "ROM"),
        ("start", "b"), ("accept_tokens", "b", [2, 3]), ("accept_tokens", "a", [1]), ("rollback", "b", 1),
    ),
]  # fmt: skip
NAMED = {one["name"]: one for one in SCENARIOS}


class Reads(list):
    """A vocabulary that counts how often a token is read from it."""

    count = 0

    def __getitem__(self, key):
        self.count += 1
        return super().__getitem__(key)

    def __iter__(self):
        self.count += len(self)
        return super().__iter__()


class Writers(Play):
    """An index, and requests that write its pattern, on `part`: what scenarios and random scripts call."""

    def __init__(self, part, config):
        super().__init__(part)
        self.eos = config["eos_token_id"]
        self.vocabulary = Reads(map(as_bytes, config["vocabulary"]))
        self.words = [data.decode("utf-8", "backslashreplace") for data in list(self.vocabulary)]
        self.index, self.writers, self.written, self.dfas = None, {}, {}, {}

    def nullable(self, pattern):
        return bool(self.part.nullable(parse(pattern)))

    def matches(self, pattern, text):
        """Whether the whole text matches, by one derivative a byte."""
        return bool(self.part.nullable(self.left(pattern, text)))

    def left_after(self, pattern, text):
        """Return whether the expression left after a long text is still short."""
        node = self.left(pattern, text)
        return "short" if self.is_oracle or node.size < 60 else f"{node.size} nodes"

    def left(self, pattern, text):
        return reduce(self.part.derivative, as_bytes(text), parse(pattern))

    def dfa_matches(self, pattern, text, max_states=1000):
        """Whether the automaton accepts the whole text."""
        if (pattern, max_states) not in self.dfas:
            self.dfas[pattern, max_states] = self.part.build_dfa(parse(pattern), max_states)
        dfa, state = self.dfas[pattern, max_states], 0
        for byte in as_bytes(text):
            if byte not in dfa.transitions[state]:
                return False
            state = dfa.transitions[state][byte]
        return state in dfa.accepting

    def compile(self, pattern):
        """An index of this pattern; requests on an earlier one are gone."""
        self.index, self.writers, self.written = None, {}, {}
        self.index = self.part.TokenIndex(pattern, self.vocabulary, self.eos)

    def start(self, name):
        if self.index is None:
            raise Skip
        self.writers[name], self.written[name] = self.part.RegexGrammar(self.index), []

    def accept_tokens(self, name, token_ids):
        accepted = self.writer(name).accept_tokens(list(token_ids))
        self.written[name] += token_ids if accepted is True else []
        return accepted

    def accept_allowed(self, name, number):
        """Accept one of the tokens that are allowed now, and return it."""
        allowed = self.allowed(self.writer(name))
        if not allowed:
            raise Skip
        token_id = allowed[number % len(allowed)]
        return [self.word(token_id), self.accept_tokens(name, [token_id])]

    def rollback(self, name, num_tokens):
        self.writer(name).rollback(num_tokens)
        self.written[name] = self.written[name][: len(self.written[name]) - num_tokens]

    def validate_tokens(self, name, token_ids):
        return self.writer(name).validate_tokens(list(token_ids))

    def propose(self, name, numbers):
        """Validate a proposal that follows the masks and then repeats its first token."""
        token_ids, writer = [], self.writer(name)
        for number in numbers:
            if allowed := self.allowed(writer):
                token_ids.append(allowed[number % len(allowed)])
                writer.accept_tokens(token_ids[-1:])
        writer.rollback(len(token_ids))
        return writer.validate_tokens(token_ids + token_ids[:1])

    def reads_for_the_same_mask(self, name):
        """How often the vocabulary is read for a mask that was asked for before."""
        self.allowed(self.writer(name))
        before = self.vocabulary.count
        self.allowed(self.writer(name))
        return 0 if self.is_oracle else self.vocabulary.count - before

    def writer(self, name):
        if name not in self.writers:
            raise Skip
        return self.writers[name]

    def allowed(self, writer):
        row = [-1, -1, -1]
        writer.fill_bitmask(row, 1)
        return [token for token in range(row[1].bit_length()) if row[1] >> token & 1]

    def word(self, token_id):
        if token_id == self.eos:
            return "end-of-text"
        return self.words[token_id] if token_id < len(self.words) else f"token {token_id}"

    def seen(self):
        """Return each request's text, the tokens that are allowed next, and whether it is at its end."""
        return {
            "written": {n: "".join(map(self.word, ids)) for n, ids in self.written.items()},
            "allowed next": {n: list(map(self.word, self.allowed(w))) for n, w in self.writers.items()},
            "is_terminated": {n: bool(w.is_terminated()) for n, w in self.writers.items()},
        }


def run(lab, scenario, *, raise_errors=True):
    """The log of the operations of one scenario."""
    return Writers(lab, scenario["config"]).log(scenario, raise_errors)
