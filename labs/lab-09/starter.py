"""lab-09, structured output: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-09     Stuck? python -m labs hint lab-09
"""

from typing import NamedTuple

from mini_engine.structured.nodes import Either, Empty, Nothing, OneOf, Repeat, Sequence
from mini_engine.structured.patterns import parse

Node = Nothing | Empty | OneOf | Sequence | Either | Repeat  # an expression; README.md has what each means
START, END = 0, -1  # states: before the first byte, and after end-of-text
MAX_STATES = 5000


class Dfa(NamedTuple):
    """A deterministic automaton. Its states are the numbers 0, 1, 2, ...; START is 0."""

    transitions: list[dict[int, int]]  # of each state: the bytes that may follow, and the state after each
    accepting: set[int]  # the states in which the text may be over


def nullable(node: Node) -> bool:
    """Return whether the empty text matches.

    Nothing: no text matches. Empty: only the empty text. OneOf: exactly one byte. Sequence: a text of
    `first`, then one of `second`. Either: a text of one of the `options`. Repeat: texts of the `body`, any
    number of them, or none.
    """
    raise NotImplementedError("lab-09: nullable is not written yet")


def derivative(node: Node, byte: int) -> Node:
    """Return the node of what must follow when a text of `node` has begun with this byte, or Nothing().

    Build the answer with `a + b` (a sequence) and `a | b` (a choice), never with Sequence(...) or
    Either(...): the operators simplify. `Nothing() + b` is Nothing(), `Empty() + b` is b, `Nothing() | b`
    is b. Without that, expressions grow with every byte, and an automaton would never be finished.

    OneOf: if the byte is one of the `allowed`, nothing more must follow: Empty().
    Sequence: the byte belongs to `first`, and `second` follows. If `first` may be empty, the byte may
    belong to `second` instead: a choice.
    Either: all options at once; any that can go on may be the right one.
    Repeat: the byte begins a text of the body, and after that the whole repetition may follow.
    """
    raise NotImplementedError("lab-09: derivative is not written yet")


def build_dfa(node: Node, max_states: int = MAX_STATES) -> Dfa:
    """Return the automaton of an expression. Each of its states is an expression of what may still follow.

    1. Each expression that is left after some bytes is a state, `node` itself is START. Equal
       expressions are one state (nodes can be keys of a dict).
    2. From each state follow every byte of node.alphabet (no other can occur) to its derivative. A new
       expression gets the next number, and is followed later too.
    3. There is no transition to Nothing(): that byte is not allowed.
    4. A state is accepting if its expression is nullable.
    5. ValueError if there are more than max_states states; some short expressions need millions.
    """
    raise NotImplementedError("lab-09: build_dfa is not written yet")


class TokenIndex:
    """A pattern on a vocabulary: in which state which tokens are allowed. All requests with both share it."""

    def __init__(self, pattern: str, vocabulary: list[bytes], eos_token_id: int | None = None):
        """Given. vocabulary: the bytes of each token id; b"" for a special token, which is no text.

        eos_token_id: the token that means end-of-text; None if the model has none. Raises ValueError if the
        pattern is wrong, or if no text of this vocabulary matches it.
        """
        self.vocabulary = vocabulary
        self.eos_token_id = eos_token_id
        self.dfa = build_dfa(parse(pattern))
        self.masks: dict[int, int] = {}  # state: its mask, once it was asked for
        self.live = self.find_live()
        if START not in self.live:
            raise ValueError(f"no text that this vocabulary can spell matches {pattern!r}")

    def walk(self, state: int, token_id: int) -> int | None:
        """Return the state after the token's bytes, or None if one of them cannot follow.

        A token has one byte or many, and may begin or end in the middle of a character: only bytes count. A
        token without bytes is never allowed: it is no text, and a model could repeat it for ever. Nor is
        end-of-text allowed here, whatever its bytes are.
        """
        raise NotImplementedError("lab-09: TokenIndex.walk is not written yet")

    def find_live(self) -> set[int]:
        """Return the states from which whole tokens of the vocabulary can reach an accepting state.

        Accepting states are live. A state is live if some token leads from it to a live state. Go on until
        nothing new is found: one round is not enough. A state that is not live is a trap. The pattern could
        still be met, but not with these tokens, and a model in it could neither go on nor stop.
        """
        raise NotImplementedError("lab-09: TokenIndex.find_live is not written yet")

    def mask(self, state: int) -> int:
        """Return the tokens that may be sampled in a state, as bits: bit t (1 << t) is set if token t may.

        1. After END nothing is allowed: 0.
        2. A token is allowed if it leads to a live state.
        3. end-of-text, if there is one, is allowed in accepting states only.
        4. Compute each mask once, and keep it in self.masks: a vocabulary has 100,000 tokens, and thousands
           of requests come to the same state.
        """
        raise NotImplementedError("lab-09: TokenIndex.mask is not written yet")


class RegexGrammar:
    """One request's place in a pattern. The engine asks for a mask before each token, then reports it."""

    def __init__(self, index: TokenIndex):
        """Given. The last of `states` is the current one; those before it are for rollback."""
        self.index = index
        self.states = [START]

    def is_terminated(self) -> bool:
        """Given: nothing may follow. end-of-text was accepted, or there is none and the text is whole."""
        return self.index.mask(self.states[-1]) == 0

    def fill_bitmask(self, bitmask: list[int], batch_index: int) -> None:
        """Given: write the mask of the current state into the request's row."""
        bitmask[batch_index] = self.index.mask(self.states[-1])

    def accept_tokens(self, token_ids: list[int]) -> bool:
        """Advance by these tokens, one after the other. True if all of them are allowed.

        Each token adds a state to self.states; end-of-text adds END. If one is not allowed after those before
        it, return False and change nothing.
        """
        raise NotImplementedError("lab-09: RegexGrammar.accept_tokens is not written yet")

    def rollback(self, num_tokens: int) -> None:
        """Take back the last num_tokens tokens, end-of-text included; 0 takes back none.

        Raise ValueError, with nothing changed, if it is below 0 or more than were accepted.
        """
        raise NotImplementedError("lab-09: RegexGrammar.rollback is not written yet")

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """Return the longest beginning of a proposal that would be accepted, as a new list. Changes nothing.

        Speculative decoding (lab-10) asks this before it spends a forward pass on a draft.
        """
        raise NotImplementedError("lab-09: RegexGrammar.validate_tokens is not written yet")
