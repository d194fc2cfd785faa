"""An answer on its way to the client, in one piece or as server-sent events; ended when the client goes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mini_engine.engine import Engine
from mini_engine.input_processor import Prompt
from mini_engine.llm import state_of
from mini_engine.outputs import Delta
from mini_engine.request import SamplingParams
from mini_engine.serve.answers import Answer, encoded
from mini_engine.serve.metrics import State
from mini_engine.serve.protocol import APIError
from mini_engine.text.tokenizer import Tokenizer

T = TypeVar("T")
Choices = AsyncGenerator[tuple[int, Delta], None]  # the number of a choice, and its next Delta

LAST_WORDS = 5.0  # seconds for what follows the last token, or a request's time
TOO_LATE = APIError("the time for one request is over before its answer", code="timeout", status=504)


class Front(Protocol):
    """An AsyncEngine as the server sees it; `num_requests` are open."""

    @property
    def num_requests(self) -> int: ...

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[Delta, None]: ...

    async def call(self, look: Callable[[Engine], T]) -> T: ...

    def close(self) -> None: ...


MakeFront = Callable[..., Front]  # of an engine, and max_num_requests


@dataclass(frozen=True)
class Served:
    """The state of the engine behind a server, or of several."""

    front: Front
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    state: State

    @classmethod
    def by(cls, engine: Engine, front: MakeFront, max_num_requests: int) -> "Served":
        """Return it for one engine in this process. Raises ValueError without a tokenizer."""
        if engine.tokenizer is None:
            raise ValueError("a server needs a model with a tokenizer")
        length = engine.config.max_model_len
        assert length is not None  # the engine has fitted it
        made = front(engine, max_num_requests=max_num_requests)
        state = partial(state_of, engine.scheduler)
        return cls(made, engine.tokenizer, length, engine.model.config.vocab_size, state)


class ClientGoneError(Exception):
    """The client has closed its connection, and no one reads the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns. If the client goes first, cancel it and raise ClientGoneError."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[Choices]) -> Choices:
    """Yield what all streams yield, as it comes. Raises what one of them raises, and closes all."""
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def read(stream: Choices) -> None:
        try:
            async for item in stream:
                await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
        finally:
            await stream.aclose()

    tasks, left = [asyncio.create_task(read(stream)) for stream in streams], len(streams)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class Answering(Response):
    """Sends an answer whose first Delta is there. `done` is called in the end, also when the client leaves.

    `ends` is the time, of the event loop's clock, by which all must be sent; `refuse` makes a response of an
    error. The header X-Request-Id has the name of the (first) request in the engine, its trace and /state.
    """

    answer: Answer
    first: tuple[int, Delta]
    others: Choices
    ends: float
    refuse: Callable[[APIError], Response]
    done: Callable[[Answer], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; the ASGI server calls this."""
        work = self._send_events(send) if self.answer.asked.stream else self._send_whole(scope, receive, send)
        try:
            with suppress(ClientGoneError, OSError):  # OSError: it went while something was sent
                await unless_gone(receive, work)
        except TimeoutError:  # the last words were not read either
            scope.get("state", {}).get("cut_off", lambda: None)()
            await asyncio.sleep(0)  # the server learns of it
        finally:
            await self.others.aclose()
            self.done(self.answer)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.ends):
                self.answer.take(*self.first)
                async for number, delta in self.others:
                    self.answer.take(number, delta)
            headers = {"x-request-id": self.first[1].request_id}
            response: Response = JSONResponse(self.answer.whole(), headers=headers)
        except (TimeoutError, RuntimeError, APIError) as error:
            response = self.refuse(self._as_api_error(error))
        async with asyncio.timeout(LAST_WORDS):
            await response(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
            (b"x-request-id", self.first[1].request_id.encode()),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = None
        try:
            async with asyncio.timeout_at(self.ends):
                await send(_part(self.answer.event(*self.first)))
                async for number, delta in self.others:
                    await send(_part(self.answer.event(number, delta)))
            if self.answer.asked.include_usage:
                last = self.answer.usage_chunk()
        except (TimeoutError, RuntimeError, APIError) as error:  # the status was sent: it is an event
            last = self._as_api_error(error).to_json()
        async with asyncio.timeout(LAST_WORDS):
            if last is not None:
                await send(_part(f"data: {encoded(last)}\n\n".encode()))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    @staticmethod
    def _as_api_error(error: Exception) -> APIError:
        if isinstance(error, APIError):
            return error
        if isinstance(error, TimeoutError):
            return TOO_LATE
        return APIError(str(error), code="engine_error", status=500)


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
