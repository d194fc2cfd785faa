"""A pattern on a vocabulary, and one request's place in it; the names are those of vLLM's grammars.

An index is made once for a pattern and a vocabulary, and shared. Each state's mask is worked out when it is
first asked for.
"""

from collections.abc import Iterator, MutableSequence, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

from mini_engine.structured.automaton import START, build_dfa
from mini_engine.structured.patterns import parse

END = -1  # the state behind end-of-text


class StructuredOutputGrammar(Protocol):
    """The grammar of one request, as the engine uses it, whichever library is behind it."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens; False, and nothing has changed, if one of them is not allowed."""

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the longest beginning that would be accepted; nothing changes."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""

    def fill_bitmask(self, bitmask: MutableSequence[int], batch_index: int) -> None:
        """Write the allowed tokens into a row of the bitmask: bit t of the number stands for token t."""

    def is_terminated(self) -> bool:
        """Return whether nothing may follow."""


class TokenTrie:
    """A vocabulary by its bytes, so that tokens with a common beginning are walked together.

    Special tokens are b"": they are no text. `eos_token_id` is no text either.
    """

    def __init__(self, vocabulary: Sequence[bytes], eos_token_id: int | None = None):
        self.size, self.eos_token_id = len(vocabulary), eos_token_id
        self.root: dict[Any, Any] = {}  # byte: the node behind it; None: the tokens that end here
        for token_id, data in enumerate(vocabulary):
            if data and token_id != eos_token_id:
                node = self.root
                for byte in data:
                    node = node.setdefault(byte, {})
                node.setdefault(None, []).append(token_id)


class TokenIndex:
    """In which state of a pattern which tokens are allowed: those behind which the pattern can still be met.

    `vocabulary` has the bytes of each token id, b"" for special tokens. Raise ValueError for a pattern that
    is wrong or too large, or that no text of this vocabulary matches.
    """

    def __init__(
        self,
        pattern: str,
        vocabulary: Sequence[bytes],
        eos_token_id: int | None = None,
        trie: TokenTrie | None = None,
    ):
        self.vocabulary, self.eos_token_id = vocabulary, eos_token_id
        self.dfa = build_dfa(parse(pattern))
        self.trie = trie or TokenTrie(vocabulary, eos_token_id)
        self.masks: dict[int, int] = {END: 0}
        if START not in self.find_live():
            raise ValueError(f"no text that this vocabulary can spell matches {pattern!r}")

    def walk(self, state: int, token_id: int) -> int | None:
        """Return the state behind a token's bytes; None if one cannot follow, or if the token is no text."""
        found: int | None = state if token_id != self.eos_token_id and self.vocabulary[token_id] else None
        for byte in self.vocabulary[token_id]:
            found = None if found is None else self.dfa.transitions[found].get(byte)
        return found

    def find_live(self) -> set[int]:
        """Return the states from which whole tokens lead to the end of a text."""
        return self._live

    def mask(self, state: int) -> int:
        """Return the allowed tokens as bits: bit t of the number stands for token t."""
        if state not in self.masks:
            bits = bytearray(self.trie.size // 8 + 1)
            for after, token_ids in self._after(state):
                if after in self._live:
                    for token_id in token_ids:
                        bits[token_id >> 3] |= 1 << (token_id & 7)
            mask = int.from_bytes(bits, "little")
            if self.eos_token_id is not None and state in self.dfa.accepting:
                mask |= 1 << self.eos_token_id
            self.masks[state] = mask
        return self.masks[state]

    def _after(self, state: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each state that tokens lead to, with the tokens; a state may come more than once."""
        todo = [(state, self.trie.root)]
        while todo:
            state, node = todo.pop()
            if None in node:
                yield state, node[None]
            row = self.dfa.transitions[state]
            fewer, more = (row, node) if len(row) < len(node) else (node, row)
            todo += [(row[byte], node[byte]) for byte in fewer if byte is not None and byte in more]

    @cached_property
    def _live(self) -> set[int]:
        before: dict[int, set[int]] = {START: set()}
        todo = [START]
        for state in todo:  # only states that tokens reach
            for after in {after for after, _ in self._after(state)}:
                if after not in before:
                    before[after] = set()
                    todo.append(after)
                before[after].add(state)
        live: set[int] = set()
        todo = [*self.dfa.accepting]
        while todo:
            state = todo.pop()
            if state not in live:
                live.add(state)
                todo += before.get(state, ())
        return live


class RegexGrammar:
    """One request's place in a pattern (a StructuredOutputGrammar)."""

    def __init__(self, index: TokenIndex):
        self.index = index
        self.states = [START]  # behind each accepted token

    def is_terminated(self) -> bool:
        """Return whether nothing may follow: end-of-text came, or there is none and the text is whole."""
        return self.index.mask(self.states[-1]) == 0

    def fill_bitmask(self, bitmask: MutableSequence[int], batch_index: int) -> None:
        """Write the mask of the current state."""
        bitmask[batch_index] = self.index.mask(self.states[-1])

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance; False, and nothing has changed, if a token is not allowed where its turn comes."""
        if len(self.validate_tokens(token_ids)) < len(token_ids):
            return False
        for token_id in token_ids:
            self.states.append(self._behind(self.states[-1], token_id))
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the longest beginning that would be accepted; nothing changes."""
        state = self.states[-1]
        for number, token_id in enumerate(token_ids):
            if not self.index.mask(state) >> token_id & 1:
                return list(token_ids[:number])
            state = self._behind(state, token_id)
        return list(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens. Raise ValueError if there are not so many."""
        left = len(self.states) - num_tokens
        if num_tokens < 0 or left < 1:
            raise ValueError(
                f"num_tokens must be 0 to {len(self.states) - 1}, the accepted tokens, but is {num_tokens}"
            )
        self.states = self.states[:left]

    def _behind(self, state: int, token_id: int) -> int:
        """Return the state behind a token that is allowed."""
        after = self.index.walk(state, token_id)
        return END if after is None else after


def regex_grammar(pattern: str, vocabulary: tuple[bytes, ...], eos_token_id: int | None) -> RegexGrammar:
    """Return a new request's grammar, with an index that is kept. Raise ValueError as TokenIndex does."""
    return RegexGrammar(_index(pattern, vocabulary, eos_token_id))


@lru_cache(64)
def _index(pattern: str, vocabulary: tuple[bytes, ...], eos_token_id: int | None) -> TokenIndex:
    return TokenIndex(pattern, vocabulary, eos_token_id, _trie(vocabulary, eos_token_id))


@lru_cache(4)
def _trie(vocabulary: tuple[bytes, ...], eos_token_id: int | None) -> TokenTrie:
    return TokenTrie(vocabulary, eos_token_id)
