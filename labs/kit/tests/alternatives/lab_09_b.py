"""lab-09 another way: dead states stay in the automaton, tokens are looked up in a table of all states.

All masks are made at once, when the index is. A grammar has the current state and a stack of earlier ones.
"""

from functools import reduce
from operator import or_
from typing import NamedTuple

from mini_engine.structured.nodes import Either, Empty, Nothing, OneOf, Repeat, Sequence
from mini_engine.structured.patterns import parse

START, END = 0, -1


class Dfa(NamedTuple):
    transitions: list
    accepting: set


def nullable(node):
    rules = {
        Empty: lambda: True,
        Repeat: lambda: True,
        Sequence: lambda: nullable(node.first) and nullable(node.second),
        Either: lambda: any(nullable(option) for option in node.options),
    }
    return rules.get(type(node), lambda: False)()


def derivative(node, byte):
    match node:
        case OneOf(allowed) if byte in allowed:
            return Empty()
        case Sequence(first, second):
            both = [derivative(first, byte) + second, derivative(second, byte)]
            return reduce(or_, both[: 1 + nullable(first)])
        case Either(options):
            return reduce(or_, [derivative(option, byte) for option in options], Nothing())
        case Repeat(body):
            return derivative(body, byte) + Repeat(body)
    return Nothing()


def build_dfa(node, max_states=5000):
    """A queue of expressions. The dead state has a number too, and leads nowhere."""
    queue, at = [node], 0
    numbers, transitions = {node: 0}, []
    while at < len(queue):
        row = {}
        for byte in queue[at].alphabet:
            after = derivative(queue[at], byte)
            if after not in numbers:
                numbers[after] = len(queue)
                queue.append(after)
            row[byte] = numbers[after]
        transitions.append(row)
        at += 1
        if sum(one != Nothing() for one in queue) > max_states:
            raise ValueError(f"{len(queue)} states")
    return Dfa(transitions, {numbers[one] for one in queue if nullable(one)})


class TokenIndex:
    def __init__(self, pattern, vocabulary, eos_token_id=None):
        self.vocabulary, self.eos_token_id = vocabulary, eos_token_id
        self.dfa, self.masks = build_dfa(parse(pattern)), {}
        self.table = [
            {
                token: after
                for token in range(len(vocabulary))
                if (after := self.walk(state, token)) is not None
            }
            for state in range(len(self.dfa.transitions))
        ]
        self.live = self.find_live()
        if START not in self.live:
            raise ValueError(f"{pattern} cannot be spelled")
        for state, row in enumerate(self.table):
            self.masks[state] = sum(1 << token for token, after in row.items() if after in self.live)
            if eos_token_id is not None and state in self.dfa.accepting:
                self.masks[state] |= 1 << eos_token_id

    def walk(self, state, token_id):
        data = self.vocabulary[token_id]
        if token_id == self.eos_token_id or not data:
            return None
        try:
            return reduce(lambda one, byte: self.dfa.transitions[one][byte], data, state)
        except KeyError:
            return None

    def find_live(self):
        def reaches(state):
            """Whether an end can be reached: a search of its own from each state."""
            seen, todo = {state}, [state]
            while todo:
                one = todo.pop()
                if one in self.dfa.accepting:
                    return True
                new = {self.walk(one, token) for token in range(len(self.vocabulary))} - seen - {None}
                seen |= new
                todo += new
            return False

        return {state for state in range(len(self.dfa.transitions)) if reaches(state)}

    def mask(self, state):
        return 0 if state == END else self.masks[state]


class RegexGrammar:
    def __init__(self, index):
        self.index, self.current, self.earlier = index, START, []

    def is_terminated(self):
        return self.index.mask(self.current) == 0

    def fill_bitmask(self, bitmask, batch_index):
        bitmask[batch_index] = self.index.mask(self.current)

    def accept_tokens(self, token_ids):
        done = 0
        for token in token_ids:
            if not (self.index.mask(self.current) >> token) % 2:
                self.rollback(done)
                return False
            self.earlier.append(self.current)
            is_end = token == self.index.eos_token_id
            self.current = END if is_end else self.index.walk(self.current, token)
            done += 1
        return True

    def rollback(self, num_tokens):
        if not 0 <= num_tokens <= len(self.earlier):
            raise ValueError(f"only {len(self.earlier)} tokens")
        for _ in range(num_tokens):
            self.current = self.earlier.pop()

    def validate_tokens(self, token_ids):
        good = []
        while len(good) < len(token_ids) and self.accept_tokens(token_ids[len(good) : len(good) + 1]):
            good.append(token_ids[len(good)])
        self.rollback(len(good))
        return good
