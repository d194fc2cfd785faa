"""The request type of labs and engine, and its sampling parameters.

Two counters drive everything: `num_tokens` (prompt plus output so far) and `num_computed_tokens`
(those whose keys and values are in the cache). Their difference is the work that is left; there
is no prefill mode and no decode mode.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from numbers import Integral, Real
from operator import index
from reprlib import Repr
from typing import Any

from mini_engine.renamed import alias

# Sampling computes in float32: beyond these a number would become 0 or infinite there.
SMALLEST, LARGEST = 1e-30, 1e30


class RequestStatus(Enum):
    """The state of a request; prefill and decode follow from the two counters."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """Return a value as error messages show it: on one line, and short however large it is."""
    try:
        return " ".join(_short.repr(value).split())
    except ValueError:  # Python prints no number of more than 4,300 digits
        return f"a very large {type(value).__name__}"


def whole_number(name: str, value: Any) -> int:
    """Return the value as a plain int, whatever kind of integer it is. Raises ValueError, naming it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, but is {shown(value)}") from None


def check_text(name: str, value: Any) -> None:
    """Raise ValueError, naming the value, unless it is a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, but is {shown(value)}")
    if not is_unicode(value):
        raise ValueError(f"{name} has a lone surrogate (bytes that were no UTF-8?) in {shown(value)}")


def is_unicode(value: str) -> bool:
    """Return whether the string has whole characters only; a lone surrogate is half of one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any, least: float = -LARGEST, most: float = LARGEST) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and least <= float(value) <= most
    except OverflowError:
        return False


def _is_whole(value: Any, least: float, none: bool = False) -> bool:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return none and value is None or whole and value >= least


# Of each field of SamplingParams: whether a value is right, and the rule in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _is_number(v, 0), f"0 (greedy) or more, up to {LARGEST:g}"),
    "top_k": (lambda v: _is_whole(v, -1) and v < 2**31, "a whole number, 0 or -1 (off) or more, below 2**31"),
    "top_p": (lambda v: _is_number(v, SMALLEST, 1), f"above 0 (from {SMALLEST:g} on) and at most 1"),
    "min_p": (lambda v: _is_number(v, 0, 1), "between 0 and 1"),
    "repetition_penalty": (
        lambda v: _is_number(v, SMALLEST),
        f"above 0, from {SMALLEST:g} to {LARGEST:g} (1 is off)",
    ),
    "presence_penalty": (lambda v: _is_number(v, -2, 2), "between -2 and 2 (0 is off)"),
    "frequency_penalty": (lambda v: _is_number(v, -2, 2), "between -2 and 2 (0 is off)"),
    "max_tokens": (lambda v: _is_whole(v, 1, True), "a whole number, at least 1, or None for no limit"),
    "logprobs": (lambda v: _is_whole(v, 0, True), "a whole number, 0 or more, or None"),
    "seed": (lambda v: _is_whole(v, 0, True), "a whole number, 0 or more, or None"),
    "stop": (
        lambda v: isinstance(v, tuple) and all(s and isinstance(s, str) and is_unicode(s) for s in v),
        "a string or a list of strings, without empty ones and lone surrogates",
    ),
    "stop_token_ids": (
        lambda v: isinstance(v, tuple) and all(_is_whole(i, -math.inf) for i in v),
        "a list of token ids",
    ),
    "ignore_eos": (lambda v: isinstance(v, bool), "True or False"),
}


@dataclass(frozen=True)
class SamplingParams:
    """The choice of tokens, and when to stop. The fields are named as in vLLM.

    temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0 and
    frequency_penalty 0 are off. `seed`
    makes a request reproducible whatever it is batched with. `max_tokens` None runs to the
    limit of the model or of the KV pool. `logprobs` n asks for the n best alternatives of each
    token. `stop` are strings that end the text and are not part of it, `stop_token_ids` tokens that end
    it. `ignore_eos` suppresses the end-of-sequence token only, no other stop.

    Numbers and arrays of numpy's or torch's kinds become Python's own. Raises ValueError naming the field
    whose value makes no sense.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        # A lone string, a list and None are accepted, too; object.__setattr__ because the class is frozen.
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if hasattr(value, "tolist"):
                value = value.tolist()
            if isinstance(value, str):
                value = (value,)
            if value is None or isinstance(value, Iterable):
                object.__setattr__(self, name, () if value is None else tuple(value))
        for name, (holds, rule) in _RULES.items():
            if not holds(value := getattr(self, name)):
                raise ValueError(f"{name} must be {rule}, but is {shown(value)}")
            object.__setattr__(self, name, _plain(value))
        object.__setattr__(self, "top_k", max(self.top_k, 0))

    @cached_property
    def changes_logits(self) -> bool:
        """Whether anything is done to the logits before the best is taken."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


def _plain(value: Any) -> Any:
    """Return a number as Python's own, so that it can be hashed, compared and written as JSON."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if _is_whole(value, -math.inf):
        return int(value)
    return float(value) if _is_number(value) else value


def _token_id(value: Any, owner: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{owner}: {shown(value)} is not a token id") from None


def _token_ids(values: Iterable[Any], owner: str) -> list[int]:
    values = list(values)
    try:
        return list(map(index, values))  # a prompt may be long
    except TypeError:
        return [_token_id(value, owner) for value in values]  # names the value


@dataclass(eq=False, repr=False)
class Request:
    """One prompt on its way through the engine. Compared by identity.

    `arrival` is a sequence number that the scheduler sets when the request is added and never
    changes, so two requests never tie. A smaller priority is more important.

    Raises ValueError, naming the request, for an invalid id, prompt, priority or SamplingParams.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""  # requests with different salts never share cached blocks
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None  # of sampling_params, resolved against the limits when added

    arrival: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at the latest admission
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None  # stop, length, abort or error
    error: str | None = None  # the message, if it could not go on
    block_hashes: list[bytes] = field(default_factory=list)  # kept by the prefix cache

    def __post_init__(self) -> None:
        # All user input passes here: from here on ids are strings, and numbers are Python's own.
        check_text("request_id", self.request_id)
        name = f"request {self.request_id!r}"
        check_text(f"{name}: cache_salt", self.cache_salt)
        if not isinstance(self.sampling_params, SamplingParams):
            raise ValueError(
                f"{name}: sampling_params must be a SamplingParams, but is {shown(self.sampling_params)}"
            )
        self.prompt_token_ids = _token_ids(self.prompt_token_ids, name)
        if not self.prompt_token_ids:
            raise ValueError(f"{name} has an empty prompt; give it a token")
        self.priority = whole_number(f"{name}: priority", self.priority)
        if self.max_tokens is None:
            self.max_tokens = self.sampling_params.max_tokens

    def __repr__(self) -> str:
        """Return the id, the status and the counters: error messages show requests."""
        counters = f"{self.num_prompt_tokens} + {len(self.output_token_ids)} tokens"
        computed = f"{self.num_computed_tokens} computed"
        return f"<request {shown(self.request_id)}: {self.status.value}, {counters}, {computed}>"

    sampling = alias("sampling_params")

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens: the prompt and the outputs so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens that are known but not computed: the work that is left."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """Whether the next step computes one token, the last one sampled."""
        return bool(self.output_token_ids) and self.num_new_tokens == 1

    def token_ids(self, start: int = 0, end: int | None = None) -> list[int]:
        """Return the prompt and output tokens of the positions [start, end), without copying the rest."""
        n = len(self.prompt_token_ids)
        end = self.num_tokens if end is None else end
        if start >= n:
            return self.output_token_ids[start - n : end - n]
        if end <= n:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - n]

    def check_stop(self, more: Sequence[int] = ()) -> str | None:
        """Return why the request ends with its latest output token, or None if it goes on. `more` are tokens
        that it is about to get: then with the last of these.

        Stop strings are not checked here: the output processor finds them in the text.
        """
        outputs, params = self.output_token_ids, self.sampling_params
        token_id = more[-1] if more else outputs[-1]
        if token_id in params.stop_token_ids:
            return "stop"
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return "stop"
        if self.max_tokens is not None and len(outputs) + len(more) >= self.max_tokens:
            return "length"
        return None
