"""lab-09 in another shape: a request is the tokens that it has written, and every question reads them.

Live states come from rounds over all states until nothing changes; a rollback cuts the list of tokens.
"""

from typing import NamedTuple

from mini_engine.structured.nodes import Either, Empty, Nothing, OneOf, Repeat, Sequence
from mini_engine.structured.patterns import parse

START, END = 0, -1


class Dfa(NamedTuple):
    transitions: list
    accepting: set


def nullable(node):
    if isinstance(node, (Nothing, OneOf)):
        return False
    if isinstance(node, Sequence):
        return all(map(nullable, (node.first, node.second)))
    return not isinstance(node, Either) or True in map(nullable, node.options)


def derivative(node, byte):
    if isinstance(node, OneOf) and byte in node.allowed:
        return Empty()
    if isinstance(node, Repeat):
        return derivative(node.body, byte) + node
    left = Nothing()
    if isinstance(node, Sequence):
        left |= derivative(node.first, byte) + node.second
        if nullable(node.first):
            left |= derivative(node.second, byte)
    if isinstance(node, Either):
        for option in node.options:
            left |= derivative(option, byte)
    return left


def build_dfa(node, max_states=5000):
    numbers, rows = {}, {}

    def number(expression):
        if expression not in numbers:
            if len(numbers) >= max_states:
                raise ValueError("too many states")
            numbers[expression] = len(numbers)
            unread.append(expression)
        return numbers[expression]

    unread = []
    number(node)
    while unread:
        expression = unread.pop()
        behind = {byte: derivative(expression, byte) for byte in range(256)}
        row = {byte: number(other) for byte, other in behind.items() if not isinstance(other, Nothing)}
        rows[numbers[expression]] = row
    return Dfa([rows[i] for i in range(len(rows))], {n for other, n in numbers.items() if nullable(other)})


class TokenIndex:
    def __init__(self, pattern, vocabulary, eos_token_id=None):
        self.vocabulary, self.eos_token_id = list(vocabulary), eos_token_id
        self.dfa, self.masks = build_dfa(parse(pattern)), {}
        self.live = self.find_live()
        if START not in self.live:
            raise ValueError("no text of this vocabulary")

    def walk(self, state, token_id):
        if token_id == self.eos_token_id or self.vocabulary[token_id] == b"":
            return None
        for byte in self.vocabulary[token_id]:
            state = self.dfa.transitions[state].get(byte) if state is not None else None
        return state

    def find_live(self):
        live, size = set(self.dfa.accepting), -1
        while size < len(live):
            size = len(live)
            for state in range(len(self.dfa.transitions)):
                if any(self.walk(state, token) in live for token in range(len(self.vocabulary))):
                    live.add(state)
        return live

    def mask(self, state):
        if state in self.masks or state == END:
            return self.masks.get(state, 0)
        tokens = [token for token in range(len(self.vocabulary)) if self.walk(state, token) in self.live]
        if state in self.dfa.accepting and self.eos_token_id is not None:
            tokens.append(self.eos_token_id)
        self.masks[state] = sum(2**token for token in set(tokens))
        return self.masks[state]


class RegexGrammar:
    def __init__(self, index):
        self.index, self.tokens = index, []

    def state(self):
        if self.index.eos_token_id is not None and self.index.eos_token_id in self.tokens:
            return END
        state = START
        for token in self.tokens:
            state = self.index.walk(state, token)
        return state

    def is_terminated(self):
        return not self.index.mask(self.state())

    def fill_bitmask(self, bitmask, batch_index):
        bitmask[batch_index] = self.index.mask(self.state())

    def accept_tokens(self, token_ids):
        before = list(self.tokens)
        for token in token_ids:
            if not self.index.mask(self.state()) & (1 << token):
                self.tokens = before
                return False
            self.tokens.append(token)
        return True

    def rollback(self, num_tokens):
        if num_tokens < 0 or num_tokens > len(self.tokens):
            raise ValueError("not so many tokens")
        self.tokens = self.tokens[: len(self.tokens) - num_tokens]

    def validate_tokens(self, token_ids):
        for count in range(len(token_ids), -1, -1):
            if self.accept_tokens(token_ids[:count]):
                self.rollback(count)
                return list(token_ids[:count])
        return []
