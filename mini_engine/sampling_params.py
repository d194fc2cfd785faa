"""Settings of a request: how tokens are chosen, when they end, and what is reported with them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from mini_engine.checks import LARGEST, SMALLEST, is_number, is_unicode, is_whole, plain, shown

# vLLM's two signatures: (output_token_ids, logits), and (prompt_token_ids, output_token_ids, logits). The
# logits are a row (vocab_size,), which may be changed in place, and so is what is returned.
LogitsProcessor = Callable[..., Any]
MOST_SAMPLES = 16_384  # vLLM's limit: each sample is a request of its own
LONGEST_STOPS = 2**16  # characters of all stop strings together
MOST = 2**31


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(s and isinstance(s, str) and is_unicode(s) for s in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(is_whole(i, 0, MOST) for i in value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(is_whole(i, 0, MOST) and is_number(b) for i, b in value.items())


def num_parameters(processor: LogitsProcessor) -> int:
    """Return how many parameters a logits processor takes; 0 if it does not tell."""
    try:
        return len(inspect.signature(processor).parameters)
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return 0


def _between(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value, least, most)


def _whole(least: float, none: bool = False, most: float = MOST) -> Callable[[Any], bool]:
    return lambda value: none and value is None or is_whole(value, least, most)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The shape that the text must have, one of three; the names are vLLM's.

    json                    a JSON schema, as a dict or as text; needs llguidance
    regex                   a regular expression that matches the whole text
    choice                  texts, of which it is one
    disable_any_whitespace  json: no blanks between its parts

    With llguidance the classes of a regular expression are Unicode's, such as the digits of all scripts;
    without it they are ASCII.

    Raises ValueError for anything but one shape. A shape that no text meets is refused with the request.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            said = f"has {', '.join(given)}" if given else "has none"
            raise ValueError(f"structured_outputs must have one of json, regex and choice, but {said}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(
                f"disable_any_whitespace must be True or False, but is {shown(self.disable_any_whitespace)}"
            )
        value: Any = _as_schema(self.json) if self.json is not None else self.regex
        if self.choice is not None:
            value = _as_tuple(self.choice, none=None)
            if not (isinstance(value, tuple) and value and all(isinstance(t, str) and t for t in value)):
                raise ValueError(f"choice must be a list of texts, but is {shown(self.choice)}")
        if not all(isinstance(t, str) and is_unicode(t) for t in (value if given == ["choice"] else [value])):
            raise ValueError(f"{given[0]} must be text, without lone surrogates, but is {shown(value)}")
        object.__setattr__(self, given[0], value)

    @property
    def given(self) -> str:
        """The name of the shape: json, regex or choice."""
        return next(name for name in ("json", "regex", "choice") if getattr(self, name) is not None)

    @property
    def kind_and_spec(self) -> tuple[str, str]:
        """The source of its grammar: "regex", "json" or "compact json", and the expression or schema."""
        if self.json is not None:
            return "compact json" if self.disable_any_whitespace else "json", str(self.json)
        return "regex", self.regex or "|".join(map(_literally, self.choice or ()))


def _as_schema(value: Any) -> str:
    """Return a JSON schema as text. Raises ValueError unless it is a dict or such text."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ValueError
        return json.dumps(schema)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"json must be a JSON schema, a dict or its text, but is {shown(value)}") from None


def _literally(text: str) -> str:
    """Return a regular expression that matches this text alone."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def _as_structured(value: Any) -> Any:
    """Return a dict, as vLLM's server takes it, as StructuredOutputsParams."""
    if not isinstance(value, Mapping):
        return value
    names = [field.name for field in fields(StructuredOutputsParams)]
    if unknown := value.keys() - set(names):
        name = shown(min(unknown, key=str))
        raise ValueError(f"structured_outputs has no {name}; it has {', '.join(names)}")
    return StructuredOutputsParams(**value)


_FLAG = (_is_bool, "True or False")
_TEXTS = "a string or a list of strings, without empty ones and lone surrogates"
_PENALTY = (_between(-2, 2), "between -2 and 2 (0 is off)")
_LOGPROBS = (_whole(-1, True), "a whole number, 0 or more, -1 for the whole vocabulary, or None")
# Of each field of SamplingParams: whether a value is right, and the rule in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_whole(1, most=MOST_SAMPLES), f"a whole number from 1 to {MOST_SAMPLES:,}"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (
        _between(SMALLEST, LARGEST),
        f"above 0, from {SMALLEST:g} to {LARGEST:g} (1 is off)",
    ),
    "temperature": (_between(0, LARGEST), f"0 (greedy) or more, up to {LARGEST:g}"),
    "top_p": (_between(SMALLEST, 1), f"above 0 (from {SMALLEST:g} on) and at most 1"),
    "top_k": (_whole(-1, most=MOST - 1), "a whole number, 0 or -1 (off) or more, below 2**31"),
    "min_p": (_between(0, 1), "between 0 and 1"),
    "seed": (_whole(0, True, float("inf")), "a whole number, 0 or more, or None"),
    "stop": (_is_texts, _TEXTS),
    "stop_token_ids": (_is_ids, "a list of token ids, 0 or more"),
    "ignore_eos": _FLAG,
    "max_tokens": (_whole(1, True, float("inf")), "a whole number, at least 1, or None for no limit"),
    "min_tokens": (_whole(0, most=float("inf")), "a whole number, 0 or more"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "detokenize": _FLAG,
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "truncate_prompt_tokens": (
        lambda v: _whole(-1, True)(v) and v != 0,
        "a whole number, at least 1, or -1 for what fits, or None",
    ),
    "logit_bias": (lambda v: v is None or _is_bias(v), "{token id: number to add}, or None"),
    "allowed_token_ids": (
        lambda v: v is None or bool(v) and _is_ids(v),
        "a list of at least one token id, 0 or more, or None",
    ),
    "bad_words": (_is_texts, _TEXTS),
    "logits_processors": (
        lambda v: isinstance(v, tuple) and all(num_parameters(p) in (2, 3) for p in v),
        "a list of functions of (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits)",
    ),
}
_RULES["structured_outputs"] = (
    lambda v: v is None or isinstance(v, StructuredOutputsParams),
    "a StructuredOutputsParams, a dict with its fields, or None",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "logits_processors", "allowed_token_ids")


@dataclass(frozen=True)
class SamplingParams:
    """The choice of tokens, when to stop, and what is reported. Fields and defaults are vLLM's.

    n                           answers to the prompt; answer i has the tokens of a request with seed + i
    presence_penalty            subtracted from the logits of tokens in the output; 0 is off
    frequency_penalty           the same, once for each time that the token is there
    repetition_penalty          divides positive logits of known tokens, multiplies negative ones; 1 is off
    temperature                 divides the logits; 0 is greedy
    top_p, top_k, min_p         keep the likeliest tokens; 1, 0 (or -1) and 0 are off
    seed                        makes a request reproducible whatever it is batched with
    stop, stop_token_ids        strings and tokens that end the text and are no part of it
    include_stop_str_in_output  they are a part of it
    ignore_eos                  suppresses the end-of-sequence token only, no other stop
    max_tokens, min_tokens      tokens of the output; max_tokens None runs to the model's or the pool's limit
    logprobs, prompt_logprobs   so many best alternatives of each token are reported; -1: all; None: off
    detokenize                  False gives token ids only, without text
    skip_special_tokens         leaves special tokens out of the text
    truncate_prompt_tokens      keeps so many tokens, the last, of a longer prompt; -1: as many as fit
    logit_bias                  {token id: what is added to its logit}
    allowed_token_ids           no others are chosen
    bad_words                   texts that are not written
    logits_processors           functions of the logits; see LogitsProcessor
    structured_outputs          the text's shape: StructuredOutputsParams, or a dict with its fields

    Numbers and arrays of numpy's or torch's kinds become Python's own. Raises ValueError naming the field
    whose value makes no sense.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            self._set(name, _as_tuple(getattr(self, name), none=None if name == "allowed_token_ids" else ()))
        self._set("structured_outputs", _as_structured(self.structured_outputs))
        for name, (holds, rule) in _RULES.items():
            if not holds(value := getattr(self, name)):
                raise ValueError(f"{name} must be {rule}, but is {shown(value)}")
            self._set(name, plain(value))
        self._set("top_k", max(self.top_k, 0))
        if (length := sum(map(len, self.stop))) > LONGEST_STOPS:
            raise ValueError(f"stop must have at most {LONGEST_STOPS:,} characters, but has {length:,}")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs the text; leave detokenize at True, or use stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = f"at most max_tokens {shown(self.max_tokens)}"
            raise ValueError(f"min_tokens must be {most}, but is {shown(self.min_tokens)}")
        if self.structured_outputs and self.ignore_eos:
            raise ValueError("ignore_eos must be False with structured_outputs: the text ends with its shape")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 with temperature 0, where all answers are equal, but is {self.n}")

    def of_sample(self, index: int) -> SamplingParams:
        """Return the parameters of one of the n answers as a request of its own; its seed is seed + index."""
        return replace(self, n=1, seed=None if self.seed is None else self.seed + index)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen

    @cached_property
    def changes_logits(self) -> bool:
        """Whether anything is done to the logits before the best is taken."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.logits_processors
        )


def _as_tuple(value: Any, none: Any) -> Any:
    """Return a list, an array or a lone string as a tuple, `none` for None, and another value as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return (value,)
    if value is None:
        return none
    is_listed = isinstance(value, Iterable) and not isinstance(value, Mapping | bytes | bytearray)
    return tuple(value) if is_listed else value
