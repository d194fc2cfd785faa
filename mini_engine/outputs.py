"""What a step gives out: a Delta for each request that got tokens, and streams that wait for theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_engine.request import Request

if TYPE_CHECKING:
    from mini_engine.engine import Engine


@dataclass
class Delta:
    """What one step added to one request. `finish_reason` is set with the last of them.

    `logprobs` has, for each token, the log probabilities that SamplingParams asked for.
    `stop_reason` is the stop string, or the id of the stop token, that ended the request. `error` says
    why a request could not go on, whose finish_reason is "error".
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None


class Stream(Iterator[Delta]):
    """The Deltas of one request, each when it is there. Made by `Engine.stream`.

    Not a generator: one that was never started does not notice that it is dropped.
    """

    def __init__(self, engine: Engine, request: Request):
        self._engine, self._request = engine, request
        self._inbox = engine.inboxes[request.request_id] = deque()
        self._closed = False

    def __next__(self) -> Delta:
        if self._closed:
            raise StopIteration
        while not self._inbox:
            self._engine.step()
        delta = self._inbox.popleft()
        if delta.finish_reason:
            self.close()
        return delta

    def close(self) -> None:
        """Abort the request if it is not finished."""
        self._closed = True
        inboxes, request_id = self._engine.inboxes, self._request.request_id
        # By now the id may be another request's.
        if inboxes.get(request_id) is self._inbox:
            del inboxes[request_id]
        if self._request.finish_reason is None:
            self._engine.abort(request_id)

    __del__ = close
