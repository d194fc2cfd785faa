"""The one request type, shared by labs and engine.

Two counters drive everything: `num_tokens` (prompt plus output so far) and `num_computed_tokens`
(those whose keys and values are in the cache). Their difference is the work that is left; there
is no prefill mode and no decode mode.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from operator import index
from typing import Any


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def whole_number(name: str, value: Any) -> int:
    """The value as a plain int, whatever kind of integer it is. Raises ValueError, naming it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, but is {value!r}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. `seed`
    makes a request reproducible whatever it is batched with. `max_tokens` None runs to the
    limit of the model or of the KV pool. `logprobs` n asks for the n best alternatives of each
    token. `ignore_eos` suppresses the end-of-sequence token only, no other stop.

    Numbers of numpy's or torch's kinds become Python's own. Raises ValueError naming the field whose
    value makes no sense.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        # A frozen dataclass that accepts the spellings people type: a lone string, a list, None.
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if value is None or isinstance(value, Iterable):
                object.__setattr__(self, name, tuple(value or ()))
        rules = {
            "temperature": (
                _is_number(self.temperature) and 0 <= self.temperature < float("inf"),
                "0 (greedy) or more",
            ),
            "top_k": (_is_whole(self.top_k) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            "top_p": (_is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (_is_number(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (
                _is_number(self.repetition_penalty) and 0 < self.repetition_penalty < float("inf"),
                "above 0 (1 is off)",
            ),
            "max_tokens": (
                self.max_tokens is None or _is_whole(self.max_tokens) and self.max_tokens >= 1,
                "a whole number, at least 1, or None for no limit",
            ),
            "logprobs": (
                self.logprobs is None or _is_whole(self.logprobs) and self.logprobs >= 0,
                "a whole number, 0 or more, or None",
            ),
            "seed": (
                self.seed is None or _is_whole(self.seed) and self.seed >= 0,
                "a whole number, 0 or more, or None",
            ),
            "stop": (
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "a string or a list of strings, without empty ones",
            ),
            "stop_token_ids": (
                isinstance(self.stop_token_ids, tuple) and all(map(_is_whole, self.stop_token_ids)),
                "a list of token ids",
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, but is {getattr(self, name)!r}")
            object.__setattr__(self, name, _plain(getattr(self, name)))


def _plain(value: Any) -> Any:
    """A number as Python's own, so that it can be hashed, compared and written as JSON."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if _is_whole(value):
        return int(value)
    return float(value) if _is_number(value) else value


def _token_id(value: Any, owner: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{owner}: {value!r} is not a token id") from None


def _token_ids(values: Iterable[Any], owner: str) -> list[int]:
    values = list(values)
    try:
        return list(map(index, values))  # a prompt may be long
    except TypeError:
        return [_token_id(value, owner) for value in values]  # names the value


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine. Compared by identity.

    `arrival` is a sequence number that the scheduler sets when the request is added and never
    changes, so two requests never tie. `priority` 0 is the most important.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""  # requests with different salts never share cached blocks
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None  # sampling.max_tokens, resolved against the limits when added

    arrival: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at the latest admission
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None  # stop, length, abort or error
    block_hashes: list[bytes] = field(default_factory=list, repr=False)  # the block manager's notes

    def __post_init__(self) -> None:
        # The one door for what users give: from here on ids are strings and numbers Python's own.
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id must be a string, but is {self.request_id!r}")
        name = f"request {self.request_id!r}"
        self.prompt_token_ids = _token_ids(self.prompt_token_ids, name)
        if not self.prompt_token_ids:
            raise ValueError(f"{name} has an empty prompt; give it a token")
        self.priority = whole_number(f"{name}: priority", self.priority)
        if self.max_tokens is None:
            self.max_tokens = self.sampling.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are known but not computed: the work that is left."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """The next step computes one token, the last one sampled."""
        return bool(self.output_token_ids) and self.num_new_tokens == 1

    def token_ids(self, start: int = 0, end: int | None = None) -> list[int]:
        """Prompt and output tokens of the positions [start, end), without copying the rest."""
        n = len(self.prompt_token_ids)
        end = self.num_tokens if end is None else end
        if start >= n:
            return self.output_token_ids[start - n : end - n]
        if end <= n:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - n]

    def check_stop(self) -> str | None:
        """Why the request ends after the output token it has just got, or None: it goes on.

        Stop strings are not looked at here: they are found in the text, which the engine keeps.
        """
        token_ids, sampling = self.output_token_ids, self.sampling
        if token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        if token_ids[-1] in self.eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if self.max_tokens is not None and len(token_ids) >= self.max_tokens:
            return "length"
        return None
