"""A virtual clock for asyncio: an event loop that jumps to the next time at which something is due.

Nothing sleeps, and no thread is started, so a run is the same on every machine, in a browser's page and in a
sandbox too. What can never go on is noticed at once: nothing is due, and somebody waits.
"""

import asyncio
import sys
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from math import inf, nextafter
from typing import Any, NoReturn

RESTLESS = 300  # turns of the event loop in which no time passes
TOGETHER = 1e-8  # seconds; what falls so close together is due at one time


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on a virtual clock, and one thread beside it, `run`, whose seconds pass there.

    It uses what asyncio's own loops use of BaseEventLoop (`_ready`, `_scheduled`, `_run_once`), which its
    type stubs leave out, and overrides with plainer types: hence what mypy is to ignore.
    """

    def __init__(self) -> None:
        super().__init__()
        self._selector, self.now, self.planned, self.until = self, 0.0, 0.0, 0.0
        self.thread: float | None = None  # the thread's clock, while a function runs there
        self.free_at = 0.0  # when the thread has done all that it was given
        self.faults: list[BaseException | str] = []  # errors that no call raised, and rules that are broken
        self.set_exception_handler(self._note)

    # What asyncio's loop asks of its selector, and of a loop of a system.

    def time(self) -> float:
        return self.now if self.thread is None else self.thread

    def select(self, timeout: float | None) -> list[Any]:
        """Jump to the next time that is due, if that is not after `until`."""
        if timeout:
            self.now = min(self.until, self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def __del__(self) -> None:
        """Nothing of the system is held."""

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        if self.thread is not None:
            self.fault("the engine's thread wakes a task of the event loop without call_soon_threadsafe")
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        if self.thread is None:
            return super().call_soon(callback, *args, context=context)
        self._last = nextafter(max(self.thread, self._last), inf)  # in this order
        return self.call_at(self._last, callback, *args, context=context)

    _last = 0.0

    def run_in_executor(self, *_: Any) -> NoReturn:  # type: ignore[override]
        self.fault("another thread is asked for, beside the engine's own, which `run` calls")
        raise RuntimeError("the engine has a thread already: await self.run(function)")

    def _note(self, loop: Any, context: dict[str, Any]) -> None:
        if "handle" in context:  # an error of a callback; that of a future without a reader is no fault
            self.fault(context["exception"])

    # ------------------------------------------------------------------------------ for a play

    def fault(self, what: BaseException | str) -> None:
        if str(what) not in map(str, self.faults):
            self.faults.append(what)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the thread. What it takes of `spend` passes while the event loop goes on."""
        answer, error = None, None
        self.thread = max(self.now, self.free_at)
        try:
            answer = function(*args)
        except Exception as raised:
            error = raised
        finally:
            self.free_at, self.thread = self.thread, None
        done = self.create_future()
        self._last = nextafter(max(self.free_at, self._last), inf)
        self.call_at(self._last, over, done)
        await done
        if error is not None:
            raise error
        return answer

    def spend(self, seconds: float) -> None:
        """Let seconds pass: of the thread, or of the event loop, which then stands still."""
        if self.thread is not None:
            self.thread += seconds
        else:
            self.now += seconds

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        with self.running():
            return self.create_task(coroutine)

    def advance(self, seconds: float) -> None:
        """Do all that is due in the next seconds; with 0 what is due now.

        Raises RestlessError where no end is in sight.
        """
        self.planned += seconds  # the loop is late if it has stood still
        self.until = max(self.now, self.planned) + TOGETHER
        turns, before = 0, self.now
        with self.running():
            while self._ready or self._scheduled and self._scheduled[0].when() <= self.until:  # type: ignore
                self._run_once()  # type: ignore[attr-defined]
                turns, before = (turns + 1, before) if self.now < before + TOGETHER else (0, self.now)
                if turns > RESTLESS:
                    raise RestlessError("the event loop does not come to rest: a task asks again and again")
        self.now = max(self.now, self.planned)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, this is the running loop, also where another one runs: in a notebook, in a page.

        A generator that is left open when its run is over is dropped as it stands.
        """
        others, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(None, lambda generator: None)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(others)


def over(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class RestlessError(Exception):
    """The event loop does not come to rest: a task asks again and again, and does not wait."""
