"""lab-09, structured output: the reference, written to be read."""

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
    match node:
        case Empty() | Repeat():
            return True
        case Sequence(first, second):
            return nullable(first) and nullable(second)
        case Either(options):
            return any(nullable(option) for option in options)
    return False


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
    match node:
        case OneOf(allowed):
            return Empty() if byte in allowed else Nothing()
        case Sequence(first, second):
            after = derivative(first, byte) + second
            return after | derivative(second, byte) if nullable(first) else after
        case Either(options):
            after = Nothing()
            for option in options:
                after = after | derivative(option, byte)
            return after
        case Repeat(body):
            return derivative(body, byte) + node
    return Nothing()


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
    numbers, states = {node: START}, [node]
    transitions: list[dict[int, int]] = []
    for state in states:  # grows while we go through it
        row = {}
        for byte in sorted(state.alphabet):
            after = derivative(state, byte)
            if after == Nothing():
                continue
            if after not in numbers:
                if len(states) == max_states:
                    raise ValueError(f"the expression needs more than {max_states} states; simplify it")
                numbers[after] = len(states)
                states.append(after)
            row[byte] = numbers[after]
        transitions.append(row)
    return Dfa(transitions, {number for state, number in numbers.items() if nullable(state)})


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
        data = self.vocabulary[token_id]
        if not data or token_id == self.eos_token_id:
            return None
        for byte in data:
            if byte not in self.dfa.transitions[state]:
                return None
            state = self.dfa.transitions[state][byte]
        return state

    def find_live(self) -> set[int]:
        """Return the states from which whole tokens of the vocabulary can reach an accepting state.

        Accepting states are live. A state is live if some token leads from it to a live state. Go on until
        nothing new is found: one round is not enough. A state that is not live is a trap. The pattern could
        still be met, but not with these tokens, and a model in it could neither go on nor stop.
        """
        live = set(self.dfa.accepting)
        before: dict[int, set[int]] = {}  # state: those from which one token leads to it
        for state in range(len(self.dfa.transitions)):
            for token_id in range(len(self.vocabulary)):
                after = self.walk(state, token_id)
                if after is not None:
                    before.setdefault(after, set()).add(state)
        todo = list(live)
        while todo:
            new = before.get(todo.pop(), set()) - live
            live |= new
            todo += new
        return live

    def mask(self, state: int) -> int:
        """Return the tokens that may be sampled in a state, as bits: bit t (1 << t) is set if token t may.

        1. After END nothing is allowed: 0.
        2. A token is allowed if it leads to a live state.
        3. end-of-text, if there is one, is allowed in accepting states only.
        4. Compute each mask once, and keep it in self.masks: a vocabulary has 100,000 tokens, and thousands
           of requests come to the same state.
        """
        if state == END:
            return 0
        if state not in self.masks:
            mask = 0
            for token_id in range(len(self.vocabulary)):
                if self.walk(state, token_id) in self.live:
                    mask |= 1 << token_id
            if self.eos_token_id is not None and state in self.dfa.accepting:
                mask |= 1 << self.eos_token_id
            self.masks[state] = mask
        return self.masks[state]


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
        states = [self.states[-1]]
        for token_id in token_ids:
            if not self.index.mask(states[-1]) >> token_id & 1:
                return False
            is_end = token_id == self.index.eos_token_id
            states.append(END if is_end else self.index.walk(states[-1], token_id))
        self.states += states[1:]
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take back the last num_tokens tokens, end-of-text included; 0 takes back none.

        Raise ValueError, with nothing changed, if it is below 0 or more than were accepted.
        """
        accepted = len(self.states) - 1
        if not 0 <= num_tokens <= accepted:
            raise ValueError(f"{num_tokens} tokens cannot be taken back: {accepted} were accepted")
        del self.states[len(self.states) - num_tokens :]

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """Return the longest beginning of a proposal that would be accepted, as a new list. Changes nothing.

        Speculative decoding (lab-10) asks this before it spends a forward pass on a draft.
        """
        valid: list[int] = []
        for token_id in token_ids:
            if not self.accept_tokens([token_id]):
                break
            valid.append(token_id)
        self.rollback(len(valid))
        return valid
