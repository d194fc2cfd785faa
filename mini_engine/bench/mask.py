"""The cost of structured output: what a mask takes for each token, and a grammar before the first."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from rich.table import Table

from mini_engine.sampling_params import StructuredOutputsParams
from mini_engine.structured.choose import structured_grammar
from mini_engine.structured.grammar import StructuredOutputGrammar, regex_grammar
from mini_engine.structured.logits import GrammarProcessor
from mini_engine.text.tokenizer import Tokenizer

_TEXT = {"type": "string", "maxLength": 40}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": _TEXT,
        "pages": {"type": "integer", "minimum": 1, "maximum": 5000},
        "authors": {"type": "array", "items": _TEXT, "maxItems": 4},
        "printed": {"type": "boolean"},
    },
    "required": ["title", "pages", "authors", "printed"],
    "additionalProperties": False,
}
BOOK = '{"title": "A Map of Harbours", "pages": 312, "authors": ["Ida Brook", "Tom Vane"], "printed": true}'
LINE, LETTER = (
    r"[A-Z][a-z]+( [a-z]+)*\.",
    "Tomorrow the harbour is closed until the storm has passed over the hills.",
)


def rows(tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Yield, for each shape: its name, milliseconds to compile it, tokens, microseconds a token.

    On one thread: a second gains nothing on a row of logits, and waits for a busy core.
    """
    torch.set_num_threads(1)
    by_schema = StructuredOutputsParams(json=SCHEMA)
    if find_spec("llguidance"):
        yield _row("JSON schema, llguidance", tokenizer, by_schema, BOOK)
        yield _row("regex, llguidance", tokenizer, StructuredOutputsParams(regex=LINE), LETTER)
    yield _row("regex, mini_engine.structured", tokenizer, StructuredOutputsParams(regex=LINE), LETTER, own)


def own(pattern: str, vocabulary: tuple[bytes, ...], eos_token_id: int | None) -> StructuredOutputGrammar:
    """Return a grammar of our automata: for `structured_grammar` one of another's."""
    return regex_grammar(pattern, vocabulary, eos_token_id)


def _row(
    name: str, tokenizer: Tokenizer, shape: StructuredOutputsParams, text: str, make: Any = regex_grammar
) -> list[str]:
    logits, seconds = torch.zeros(tokenizer.vocab_size), []
    first = structured_grammar(StructuredOutputsParams(regex="a"), tokenizer, make)  # reads the vocabulary
    GrammarProcessor(first)([], logits)
    start = time.perf_counter()
    processor = GrammarProcessor(structured_grammar(shape, tokenizer, make))
    compiling = time.perf_counter() - start
    ids = tokenizer.encode(text, add_special_tokens=False)
    for i in range(len(ids) + 1):
        start = time.perf_counter()
        masked = processor(ids[:i], logits)
        seconds.append(time.perf_counter() - start)
        if i < len(ids) and masked[ids[i]] != 0:
            raise RuntimeError(f"{name}: the mask forbids token {i} of {text!r}")
    micros = [1e6 * s for s in seconds]
    return [name, f"{1e3 * compiling:.1f}", str(len(ids)), f"{median(micros):,.0f}", f"{max(micros):,.0f}"]


def table(tokenizer: Tokenizer) -> Table:
    """Return the costs as a table."""
    shown = Table("", "ms to compile", "tokens", "µs a token, median", "µs, most", header_style="bold")
    for row in rows(tokenizer):
        shown.add_row(*row)
    return shown
