"""From what a request wants to its grammar: by llguidance where that can be, else by the automata here."""

from collections.abc import Callable
from typing import Protocol

from mini_engine.checks import shown
from mini_engine.sampling_params import StructuredOutputsParams
from mini_engine.structured.grammar import StructuredOutputGrammar, regex_grammar
from mini_engine.structured.guidance import guidance_grammar

MakeRegex = Callable[[str, tuple[bytes, ...], int], StructuredOutputGrammar]


class Vocabulary(Protocol):
    """A tokenizer as grammars see it."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def token_bytes(self) -> tuple[bytes, ...]: ...

    @property
    def json(self) -> str: ...


def structured_grammar(
    wanted: StructuredOutputsParams, tokenizer: Vocabulary, make_regex: MakeRegex = regex_grammar
) -> StructuredOutputGrammar:
    """Return a new request's grammar. A `make_regex` other than the engine's own serves regex and choice.

    Raises ValueError for a shape that is wrong, that no text meets, or that needs llguidance where that is
    not installed or cannot read the tokenizer.
    """
    if not tokenizer.eos_token_ids:
        raise ValueError("structured_outputs needs a tokenizer with an end-of-text token")
    eos, (kind, spec) = tokenizer.eos_token_ids[0], wanted.kind_and_spec
    try:
        if kind != "regex" or make_regex is regex_grammar:
            vocab_size = tokenizer.vocab_size
            if found := guidance_grammar(kind, spec, tokenizer.json, vocab_size, eos):
                return found
        if kind == "regex":
            return make_regex(spec, tokenizer.token_bytes, eos)
    except ValueError as error:
        raise ValueError(f"structured_outputs {wanted.given} {shown(spec)}: {error}") from None
    raise ValueError(
        "structured_outputs json needs llguidance (pip install 'mini-engine[structured]') and a tokenizer of "
        "bytes; regex and choice need neither"
    )
