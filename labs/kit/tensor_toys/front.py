"""The engine's own AsyncEngine in the shape of lab-11: on its toy engine, and without a thread of its own.

What it does in a turn, and for its readers, is the engine's own code; only the loop of turns is here.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from mini_engine.async_engine import AsyncEngine as Own
from mini_engine.outputs import Delta


class Seat:
    """A toy engine with the names that AsyncEngine calls."""

    tokenizer, input_processor = None, SimpleNamespace(default_params=None)

    def __init__(self, toy: Any):
        self.toy, self.reader = toy, self
        self.requests: dict[str, Any] = {}
        self.inboxes: dict[str, deque[Delta]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.toy.has_work)

    @property
    def might_work(self) -> bool:
        """Whether it has work, or a turn will find out why that is not known."""
        with suppress(Exception):
            return self.has_work
        return True

    def add_request(self, prompt: Any, params: Any, *, request_id: str, **_: Any) -> str:
        self.toy.add_request(params.asked)
        counts = {"num_cached_tokens": 0, "num_prompt_tokens": 1}
        self.requests[request_id] = SimpleNamespace(request_id=request_id, **counts)
        return request_id

    def step(self) -> None:
        for delta in self.toy.step():
            inbox = self.inboxes[delta.request_id]
            if delta.finish_reason is not None:
                del self.inboxes[delta.request_id]
            inbox.append(delta)

    def abort(self, request_id: str) -> None:
        if request_id in self.inboxes:
            self.toy.abort(request_id)
            self.inboxes.pop(request_id).append(Delta(request_id, [], "", "abort"))


class Commands(SimpleQueue[Callable[[], None]]):
    """A SimpleQueue that wakes a task instead of a thread."""

    def __init__(self) -> None:
        self.come = asyncio.Event()

    def put(self, item: Callable[[], None], block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.come.set()


class AsyncEngine(Own):
    """The engine's AsyncEngine, whose turns are given to `run`.

    `stream` and `close` have the labs' signatures, not the engine's; hence the ignored overrides.
    """

    def __init__(self, engine: Any, run: Callable[..., Awaitable[Any]], max_num_requests: int = 4):
        self.engine: Any = Seat(engine)
        self.run, self.max_num_requests, self.num_requests = run, max_num_requests, 0
        self._commands: Any = Commands()
        self._jobs, self._made, self._ended = {}, [], None
        self.task = asyncio.get_running_loop().create_task(self.serve())

    async def serve(self) -> None:
        """Take turns, each in the thread, until the engine is closed."""
        while self._ended is None:
            self._commands.come.clear()
            self.waited = self._commands.empty() and not self.engine.might_work
            if self.waited:
                await self._commands.come.wait()
            await self.run(self._turn)
        await self.run(self._serve)

    def _next_commands(self) -> Iterable[Callable[[], None]]:
        if self.waited:  # as the thread does in the middle of this
            return [self._commands.get() for _ in range(self._commands.qsize())]
        return super()._next_commands()

    def stream(self, request: Any, *_: Any, **__: Any) -> AsyncGenerator[Delta, None]:  # type: ignore[override]
        params: Any = SimpleNamespace(n=1, asked=request)
        return super().stream([0], params, request_id=request.request_id)

    def send(self, function: Callable[[], Any]) -> Awaitable[Any]:
        """Have the thread call a function between two steps."""
        return asyncio.ensure_future(self.call(lambda engine: function()))

    async def close(self) -> None:  # type: ignore[override]
        self._commands.put(lambda: self._end("the engine was closed"))
