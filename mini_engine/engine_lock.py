"""One caller at a time, and no signal in the middle of a call: so a step is done or has not begun.

Ctrl-C, SIGTERM and time-outs raise wherever the program happens to be. Here they wait until the engine is in
order.
"""

import signal
from collections.abc import Callable
from signal import SIGINT, SIGTERM, getsignal
from signal import signal as set_handler
from threading import Lock, get_ident, main_thread
from threading import enumerate as all_threads
from types import FrameType
from typing import Any

# The signals whose handlers raise to end something, as far as the system has them.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_HELD: list[int] = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class EngineBusyError(RuntimeError):
    """An engine or LLM was called in the middle of another call: by another thread, or from inside a step."""

    def __init__(self, what: str, owner: int):
        where = "was called from inside a step; call it between two steps"
        if owner != get_ident():
            name = next((t.name for t in all_threads() if t.ident == owner), "another thread")
            where = f"is in use by thread {name!r}; use it from one thread, and send the others' work to that"
        super().__init__(f"this {what} {where}")


class _Signals:
    """The signals that wait. Python runs handlers in the main thread only; other threads hold nothing.

    `hold` replaces the handlers of the signals in _HELD by `_note`, `release` restores them and runs those
    whose signal has come. A signal that Python does not handle is left alone.
    """

    def __init__(self) -> None:
        self.depth = 0  # of calls inside calls
        self.interruptible = False  # a time-out need not wait, nor a second signal
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.noted: dict[int, FrameType | None] = {}

    def hold(self) -> None:
        if get_ident() != main_thread().ident:
            return
        if self.depth == 0:
            self.noted.clear()
            try:
                for signum in _HELD:
                    handler = getsignal(signum)
                    if callable(handler) and handler != self._note:
                        self.handlers[signum] = handler
                        set_handler(signum, self._note)
            except BaseException:  # a handler that was not replaced yet
                self._restore()
                raise
        self.depth += 1

    def release(self) -> None:
        if get_ident() == main_thread().ident:
            self.depth -= 1
            if self.depth == 0:
                self._restore()

    def deliver(self) -> None:
        """Run the handlers of the signals that wait, all of them even if one raises."""
        if self.noted and get_ident() == main_thread().ident:
            signum, frame = self.noted.popitem()
            try:
                self.handlers[signum](signum, frame)
            finally:
                self.deliver()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        again, self.noted[signum] = bool(self.noted), frame
        if self.depth == 0:  # `hold` or `release` is at work
            self._restore()
        elif self.interruptible and (again or signum not in (SIGINT, SIGTERM)):
            self.interruptible = False
            self.deliver()

    def _restore(self) -> None:
        try:
            for signum, handler in self.handlers.items():
                if getsignal(signum) == self._note:  # else the user has set another handler since
                    set_handler(signum, handler)
        finally:
            self.deliver()

    def __enter__(self) -> None:
        self.interruptible = get_ident() == main_thread().ident

    def __exit__(self, *error: object) -> None:
        self.interruptible = False


_signals = _Signals()  # of the process
interruptible = _signals  # `with interruptible:` around what may take long and can be taken back


class EngineLock:
    """`with lock:` serves one caller and holds signals back; another caller gets an EngineBusyError."""

    def __init__(self, what: str):
        self.what = what
        self._lock = Lock()
        self._owner = 0

    def __enter__(self) -> None:
        _signals.hold()
        if not self._lock.acquire(blocking=False):
            try:
                raise EngineBusyError(self.what, self._owner)
            finally:
                _signals.release()
        self._owner = get_ident()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        _signals.release()

    def deliver_signals(self) -> None:
        """Run the handlers of the signals that came meanwhile: the caller is at a place to be ended."""
        _signals.deliver()
