"""Texts of a given shape, written by the model under lab-09's grammar, for `python -m labs demo`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labs.kit.learner.parts import LearnerParts
from mini_engine.engine import Engine
from mini_engine.model import CausalLM
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.structured.logits import GrammarProcessor
from mini_engine.text.tokenizer import Tokenizer

Wanted = Sequence[tuple[str, str]]  # prompts, and the pattern of what follows each
PLAYS = (
    ("O Romeo, ", r"[A-Z][a-z]+( [a-z]+){3,6}[.!]"),
    ("HAMLET:\n", r"(Ay|Nay|I know not), my (lord|lady)[.!?]"),
    ("Enter a MESSENGER.\n", r"[A-Z]{4,9}:\n([A-Z][a-z ]{10,30},\n){2}[A-Z][a-z ]{10,30}\."),
)
CHATS = (
    ("When did the first person walk on the moon?", r"\d{4}-[01]\d-[0-3]\d"),
    ("Name a fruit.", r'\{"name": "[a-z]{3,12}", "color": "(red|yellow|green)"\}'),
)


@dataclass(frozen=True)
class Shaped:
    """One prompt, the shape that was asked for, and what was written."""

    prompt: str
    pattern: str
    text: str
    finish_reason: str | None


def shaped(
    model: CausalLM, tokenizer: Tokenizer, parts: Parts, wanted: Wanted = (), **engine_args: Any
) -> tuple[list[Shaped], Engine]:
    """Serve prompts together, each with its pattern; return the texts, and the engine.

    `parts.grammar` says which tokens are allowed. Raise ValueError for a pattern that cannot be met.
    """
    chat, eos = tokenizer.chat_template is not None, tokenizer.eos_token_ids[0]
    engine, streams = Engine(model, tokenizer, parts=parts, **engine_args), []
    for number, (prompt, pattern) in enumerate(wanted or (CHATS if chat else PLAYS)):
        grammar = parts.grammar(pattern, tokenizer.token_bytes, eos)
        mask = GrammarProcessor(grammar)
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=160, logits_processors=[mask])
        said = [{"role": "user", "content": f"{prompt} Answer in the form {pattern}"}]
        ids = tokenizer.encode_chat(said) if chat else tokenizer.encode(prompt)
        streams.append((prompt, pattern, engine.stream(ids, params)))
    texts = []
    for prompt, pattern, stream in streams:
        deltas = list(stream)
        texts.append(Shaped(prompt, pattern, "".join(d.text for d in deltas), deltas[-1].finish_reason))
    return texts, engine


def compared(learner: LearnerParts, model: CausalLM, tokenizer: Tokenizer) -> tuple[bool, list[str]]:
    """Return whether the model writes under the learner's grammar what it does under the engine's, and lines.

    Every text that came to its end must match its pattern as well.
    """
    lines, right = ["Texts of a given shape, with lab-09's grammar:"], True
    try:
        yours, _ = shaped(model, tokenizer, learner.parts)
    except Exception as error:
        return False, [*lines, f"  {learner.explain(error)}"]
    for mine, other in zip(yours, shaped(model, tokenizer, Parts())[0], strict=True):
        whole = mine.finish_reason != "stop" or re.fullmatch(mine.pattern, mine.text, re.ASCII)
        verdict = "" if mine == other and whole else "  DIFFERS: the engine's own gives " + repr(other.text)
        right = right and not verdict
        lines += [f"  {mine.pattern}", f"    {mine.prompt!r} {mine.text!r}{verdict}"]
    return right, lines
