"""What keeps a step of the engine whole: one caller at a time, and no signal in its middle.

Ctrl-C and SIGTERM raise wherever the program happens to be. Here they wait until the engine is in order.
"""

from collections.abc import Callable
from signal import SIGINT, SIGTERM, getsignal
from signal import signal as set_handler
from threading import Lock, get_ident, main_thread
from threading import enumerate as all_threads
from types import FrameType
from typing import Any

SIGNALS = (SIGINT, SIGTERM)
Handler = Callable[[int, FrameType | None], Any]


class EngineBusyError(RuntimeError):
    """An engine or LLM was called in the middle of another call: by another thread, or from inside a step."""

    def __init__(self, what: str, owner: int):
        if owner == get_ident():
            where = "was called from inside a step; call it between two steps"
        else:
            name = next((t.name for t in all_threads() if t.ident == owner), "another thread")
            where = (
                f"is in use by thread {name!r}; give it one thread, and let the others hand their work over"
            )
        super().__init__(f"this {what} {where}")


class Signals:
    """Holds Ctrl-C and SIGTERM back, in the main thread, which is where Python delivers them.

    What came between `hold` and `release` is delivered by `release`, to the handlers that were there
    before; the same signal twice counts once. While `interruptible` is set, a second one is delivered at
    once: a user who presses Ctrl-C again does not want to wait. Signals that Python does not handle, as
    SIGTERM in a plain script, are left alone.
    """

    def __init__(self) -> None:
        self.interruptible = False
        self._depth = 0
        self._handlers: dict[int, Handler] = {}
        self._noted: dict[int, FrameType | None] = {}
        self._note = self.note  # one object, so that it can be recognised

    def hold(self) -> None:
        if get_ident() != main_thread().ident:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._noted = {}
        try:
            for signum in SIGNALS:
                handler = getsignal(signum)
                if callable(handler) and handler is not self._note:
                    self._handlers[signum] = handler
                    set_handler(signum, self._note)
        except BaseException:  # one of them, before its handler was replaced
            self._end()
            raise

    def release(self) -> None:
        if get_ident() != main_thread().ident:
            return
        if self._depth > 1:
            self._depth -= 1
        else:
            self._end()

    def note(self, signum: int, frame: FrameType | None) -> None:
        if self._depth == 0:  # two signals at once kept one handler from being put back
            self._handlers[signum](signum, frame)
        elif self.interruptible and self._noted:
            self.interruptible = False
            self._noted.pop(signum, None)
            self._handlers[signum](signum, frame)
        else:
            self._noted[signum] = frame

    def _end(self) -> None:
        try:
            self._restore(SIGNALS)
        finally:
            self._depth = 0
            self._deliver()

    def _restore(self, signums: tuple[int, ...]) -> None:
        try:
            if getsignal(signums[0]) is self._note:  # else somebody has set another since
                set_handler(signums[0], self._handlers[signums[0]])
        finally:
            if signums[1:]:
                self._restore(signums[1:])

    def _deliver(self) -> None:
        while self._noted:
            signum, frame = self._noted.popitem()
            try:
                self._handlers[signum](signum, frame)
            finally:
                self._deliver()


signals = Signals()  # of the process


class Turn:
    """One caller at a time; another one that comes meanwhile gets an EngineBusyError.

    `with turn:` holds signals back, too, as long as it lasts. `claim` does not, and returns what gives the
    turn back: `give_back = None; try: give_back = turn.claim() ... finally: give_back and give_back()`. No
    signal can come between the taking of the turn and the `try` that gives it back.
    """

    def __init__(self, what: str):
        self.what = what
        self._lock = Lock()
        self._owner = 0

    def __enter__(self) -> None:
        signals.hold()
        if not self._lock.acquire(blocking=False):
            try:
                raise EngineBusyError(self.what, self._owner)
            finally:
                signals.release()
        self._owner = get_ident()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        signals.release()

    def claim(self) -> Callable[[], None]:
        self.__enter__()
        try:
            signals.release()
        except BaseException:
            self._lock.release()
            raise
        return self._lock.release


class Computing:
    """`with computing:` around what may take long and changes nothing that cannot be taken back."""

    def __enter__(self) -> None:
        signals.interruptible = get_ident() == main_thread().ident

    def __exit__(self, *error: object) -> None:
        signals.interruptible = False
