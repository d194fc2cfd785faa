"""The results of a step, a Delta for each request that got tokens; streams of them; a finished request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mini_engine.request import Request


@dataclass
class Logprob:
    """A token's log probability, its rank (1 is the likeliest), and its text where there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# For each token, the log probabilities that SamplingParams asked for, by token id.
Logprobs = list[dict[int, Logprob]]


@dataclass
class Delta:
    """The tokens and the text that one step added to a request; the last has a `finish_reason`.

    `logprobs` has, for each token, the log probabilities that SamplingParams asked for. The first Delta has
    the same for the prompt, `prompt_logprobs`, with None for its first token.
    `stop_reason` is the stop string, or the id of the stop token, that ended the request. `error` is
    the message of a request that could not go on, whose finish_reason is "error". The last one says whether
    the text has the whole shape that structured_outputs asked for, `is_complete`; None without a shape. An
    AsyncEngine adds the number of the answer, if n is more than 1, and how much of the prompt was found
    computed.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    index: int = 0
    num_cached_tokens: int = 0
    is_complete: bool | None = None


@dataclass
class CompletionOutput:
    """One answer of a request. `cumulative_logprob` is the sum of the chosen tokens'; it and `logprobs` are
    None unless SamplingParams asked for logprobs. `is_complete` says whether the text has the whole shape
    that structured_outputs asked for; False where max_tokens or a stop cut it short, None without a shape.
    """

    index: int  # from 0 to n - 1
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    error: str | None = None  # the message, when finish_reason is "error"
    is_complete: bool | None = None


@dataclass
class RequestOutput:
    """A finished request, with vLLM's fields. `outputs` are its n answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


class Steps(Protocol):
    """An engine as a Stream sees it."""

    inboxes: dict[str, deque[Delta]]

    def step(self) -> list[Delta]:
        """Serve one step. Deltas of requests with an inbox are put into it; the others' are kept for the
        caller of the engine's own `step`."""

    def abort(self, request_id: str) -> bool: ...


class Reader:
    """The engine as the reader of an inbox sees it: it is the same, but `step` keeps what is for others."""

    def __init__(self, engine: Steps, serve: Callable[[], None]):
        self._engine, self._serve = engine, serve

    def step(self) -> list[Delta]:
        """Serve one step. Its Deltas are in the inboxes, or wait for `Engine.step`."""
        self._serve()
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Stream(Iterator[Delta]):
    """The Deltas of one request, each as soon as it is there. Made by `Engine.stream`.

    Not a generator: a generator that was never started does not notice that it is dropped.
    """

    _closed = True  # until it is made

    def __init__(self, engine: Steps, request: Request):
        self._engine, self._request = engine, request
        self._inbox = engine.inboxes[request.request_id] = deque()
        self._closed = False

    def __next__(self) -> Delta:
        if self._closed:
            raise StopIteration
        while not self._inbox:
            self._engine.step()
        delta = self._inbox.popleft()
        self._closed = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Abort the request if it is not finished."""
        if self._closed:
            return
        self._closed = True
        inboxes, request_id = self._engine.inboxes, self._request.request_id
        # By now the id may be another request's.
        if inboxes.get(request_id) is self._inbox:
            del inboxes[request_id]
        if self._request.finish_reason is None:
            self._engine.abort(request_id)

    __del__ = close
