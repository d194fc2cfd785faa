"""Grammars by llguidance: regular expressions and JSON schemas (pip install 'mini-engine[structured]').

It reads the JSON of a tokenizer of bytes. A grammar is compiled once and kept, and copied for each request.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

SILENT = 0  # its log level: errors are raised here


@lru_cache(4)
def _tokenizer(tokenizer_json: str, vocab_size: int, eos_token_id: int) -> Any:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
    except ValueError:  # its tokens are no bytes
        return None


@lru_cache(64)
def _matcher(tokenizer: Any, kind: str, spec: str) -> Any:
    """Return a compiled grammar. Raises ValueError for one that is wrong, or that nothing meets."""
    from llguidance import LLMatcher

    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(spec)
    else:
        compact = kind == "compact json"
        grammar = LLMatcher.grammar_from_json_schema(
            spec, overrides={"whitespace_flexible": False} if compact else None
        )
    matcher = LLMatcher(tokenizer, grammar, log_level=SILENT)
    if error := matcher.get_error():
        raise ValueError(" ".join(error.split()))
    return matcher


def guidance_grammar(
    kind: str, spec: str, tokenizer_json: str, vocab_size: int, eos_token_id: int
) -> GuidanceGrammar | None:
    """Return a new request's grammar; None without llguidance, and for a tokenizer that it cannot read.

    `kind` is regex, json, or compact json (without blanks between its parts). Raises ValueError for a spec
    that is wrong, or that no text meets.
    """
    if find_spec("llguidance") is None:
        return None
    tokenizer = _tokenizer(tokenizer_json, vocab_size, eos_token_id)
    if tokenizer is None:
        return None
    return GuidanceGrammar(_matcher(tokenizer, kind, spec).deep_copy(), eos_token_id)


class GuidanceGrammar:
    """One request's place in a grammar of llguidance (a StructuredOutputGrammar)."""

    def __init__(self, matcher: Any, eos_token_id: int):
        self.matcher, self.eos_token_id = matcher, eos_token_id
        self.ended = False  # by end-of-text, which the matcher does not see

    def is_terminated(self) -> bool:
        """Return whether end-of-text came."""
        return self.ended

    def fill_bitmask(self, bitmask: MutableSequence[int], batch_index: int) -> None:
        """Write the mask: end-of-text is in it where the text may end."""
        mask, eos = 0, 1 << self.eos_token_id
        if not self.ended and not self.matcher.is_stopped():
            mask = int.from_bytes(self.matcher.compute_bitmask(), "little") & ~eos
        if not self.ended and self.matcher.is_accepting():
            mask |= eos
        bitmask[batch_index] = mask

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance; False, and nothing has changed, if a token is not allowed where its turn comes."""
        if len(self.validate_tokens(token_ids)) < len(token_ids):
            return False
        text = self._text(token_ids)
        self.matcher.consume_tokens(text)
        self.ended = self.ended or len(text) < len(token_ids)
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the longest beginning that would be accepted; nothing changes."""
        if self.ended:
            return []
        text = self._text(token_ids)
        num = self.matcher.try_consume_tokens(text) if not self.matcher.is_stopped() else 0
        may_end = num == len(text) < len(token_ids) and self.matcher.is_accepting()
        if num:
            self.matcher.rollback(num)
        return list(token_ids[: num + may_end])

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens. Raise ValueError if there are not so many."""
        if num_tokens and self.ended:
            self.ended, num_tokens = False, num_tokens - 1
        if num_tokens and not self.matcher.rollback(num_tokens):
            raise ValueError(f"num_tokens must be the accepted tokens at most: {self.matcher.get_error()}")

    def _text(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens before end-of-text."""
        ids = list(token_ids)
        return ids[: ids.index(self.eos_token_id)] if self.eos_token_id in ids else ids
