"""The request type of labs and engine.

Two counters drive everything: `num_tokens` (prompt plus output so far) and `num_computed_tokens`
(those whose keys and values are in the cache). Their difference is the work that is left; there
is no prefill mode and no decode mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any

from mini_engine.checks import as_token_ids, check_text, shown, whole_number
from mini_engine.renamed import alias
from mini_engine.sampling_params import SamplingParams

__all__ = ["Request", "RequestStatus", "SamplingParams"]


class RequestStatus(Enum):
    """The state of a request; prefill and decode follow from the two counters."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class _OfSome:
    """Attributes that few requests have: class attributes, so that the others need no memory for them."""

    num_forked_tokens: int = 0  # of the cached ones, those that a sibling had, and the prefix cache did not
    num_external_computed_tokens: int = 0  # of the cached ones, those that came from another engine
    spec_probs: Sequence[list[float]] = ()  # what drafts were drawn from, if they were
    grammar: Any = None  # what masks its logits for structured_outputs: a GrammarProcessor
    # The answers to one prompt (SamplingParams.n), itself included: one list, which all of them have.
    siblings: Sequence["Request"] = ()


@dataclass(eq=False, repr=False)
class Request(_OfSome):
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
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # the spellings of sampling_params.bad_words
    max_tokens: int | None = None  # of sampling_params, resolved against the limits when added

    arrival: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    spec_token_ids: list[int] = field(default_factory=list)  # drafts of the next tokens, to be verified
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found computed at the latest admission, in the prefix cache or by a fork
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
        self.prompt_token_ids = as_token_ids(self.prompt_token_ids, name)
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
        """Return the prompt and output tokens of the positions [start, end), without copying the rest. Beyond
        `num_tokens` the drafts follow."""
        if self.spec_token_ids and end is not None and (over := end - self.num_tokens) > 0:
            drafts = self.spec_token_ids[max(0, start - self.num_tokens) : over]
            return self.token_ids(start, max(start, self.num_tokens)) + drafts
        n = len(self.prompt_token_ids)
        end = self.num_tokens if end is None else end
        if start >= n:
            return self.output_token_ids[start - n : end - n]
        if end <= n:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - n]

    @property
    def is_complete(self) -> bool | None:
        """Whether the output has the shape that structured_outputs asked for; None without one."""
        if self.grammar is None:
            return None
        return bool(self.grammar.is_complete(self.output_token_ids, self.eos_token_ids[0]))

    def check_stop(self, more: Sequence[int] = ()) -> str | None:
        """Return why the request ends with its latest output token, or None if it goes on. `more` are tokens
        that it is about to get: then with the last of these.

        Stop strings are not checked here: the output processor finds them in the text.
        """
        outputs, params = self.output_token_ids, self.sampling_params
        token_id, num = more[-1] if more else outputs[-1], len(outputs) + len(more)
        if num >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return "stop"
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return "stop"
        if self.max_tokens is not None and num >= self.max_tokens:
            return "length"
        return None

    def until_stop(self, token_ids: Sequence[int]) -> tuple[Sequence[int], str | None]:
        """Return the tokens up to the one with which the request ends, and why it ends, if it does."""
        for end in range(1, len(token_ids) + 1):
            if reason := self.check_stop(token_ids[:end]):
                return token_ids[:end], reason
        return token_ids, None

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return how many drafts are among the tokens that the request is given. The last of these
        does not count: it is not computed."""
        pairs = zip(self.spec_token_ids, token_ids[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
