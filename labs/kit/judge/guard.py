"""Guards against code that does not end by itself: an endless loop, a flood of prints.

The timer raises inside the thread (PyThreadState_SetAsyncExc), because SIGALRM does not exist on
Windows. Both exceptions derive from BaseException, so that a broad `except` does not swallow them.
A call inside C that never returns to Python is ended with its process, by faulthandler.
"""

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from time import monotonic, process_time  # the code under test may replace time.monotonic
from types import CodeType
from typing import Any, NoReturn, TextIO

from labs.kit.toys.driver import PULSE

FLOOD = 20_000  # characters printed in one step of a test
BUSY = 4  # times its seconds that a block may take on a busy machine
PAUSE = 0.005  # seconds between two looks at the clock; a longer time was not spent computing

last_words = 2  # the file descriptor for the traceback of a process that is ended; pytest redirects 2
_no_limit = _armed = False
_monitoring: Any = vars(sys).get("monitoring")
# Where no thread can watch: the end of each open deadline, on the clock and in computing time.
_ends: list[tuple[float, float]] = []
_ticks, _over, _look_again = 0, False, 0.0
scale = 1.0  # factor of all deadlines where no thread can watch; tests make them short
_looked, _worked = 0.0, 0.0  # the last look at the clock, and the computing time until then


class TimeUp(BaseException):
    """The code did not end in time."""


class PrintFlood(BaseException):
    """The code printed too much."""


def deadline(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raise TimeUp in this thread if the block computes, or sleeps, for longer than `seconds`.

    Processor time counts, so that nothing fails because the machine is busy. A block that not even TimeUp
    ends (a call inside C that holds the interpreter) ends the process, and a traceback shows where it was.
    """
    if sys.platform == "emscripten":  # a browser's Python starts no thread
        return _looking_at_the_clock(seconds)
    block: list[Any] = []
    manager = _deadline(seconds, block)
    block.append(vars(manager)["gen"])
    return manager


@contextlib.contextmanager
def _deadline(seconds: float, block: list[Any]) -> Iterator[None]:
    thread_id = threading.get_ident()
    done, lock = threading.Event(), threading.Lock()
    began, computed, can_wake = monotonic(), process_time(), _can_wake()

    def in_time() -> bool:
        passed, worked = monotonic() - began, process_time() - computed
        return _no_limit or (worked < seconds and worked > passed / 20 and passed < BUSY * seconds)

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            if in_time():
                wait = 0.1
                continue
            with lock:
                if block[0].gi_frame is None:  # TimeUp came while the block began or ended: it is over
                    return
                if not done.is_set():
                    _raise_in(thread_id, TimeUp)
                    if can_wake:  # to interrupt a sleep or a lock
                        signal.pthread_kill(thread_id, signal.SIGURG)
            wait = 0.5  # a bare `except:` in the learner's loop caught it: again

    threading.Thread(target=watch, daemon=True).start()
    with _last_resort(BUSY * seconds + 5):
        try:
            yield
        finally:
            while True:  # TimeUp may come in these very lines
                with contextlib.suppress(TimeUp):
                    with lock:
                        done.set()
                    # A TimeUp that was sent arrives here. Cancelling it would make Python 3.11 hang under a
                    # tracer or a profiler, and so in a debugger.
                    for _ in range(3):
                        pass
                    break


@contextlib.contextmanager
def _looking_at_the_clock(seconds: float) -> Iterator[None]:
    """deadline() without a thread: each call and each backward jump looks at the clock.

    A block that stays inside C is ended from outside: the page ends its worker.
    """
    global _looked
    _looked = now = monotonic()
    seconds *= scale
    events, tool, end = _monitoring.events, _monitoring.DEBUGGER_ID, (now + BUSY * seconds, _worked + seconds)
    if not _ends:
        _monitoring.use_tool_id(tool, "deadline")
        for event in (events.JUMP, events.PY_START):
            _monitoring.register_callback(tool, event, _look)
        _monitoring.set_events(tool, events.JUMP | events.PY_START)
    _ends.append(end)
    try:
        yield
    finally:
        _ends.remove(end)
        if not _ends:
            _monitoring.set_events(tool, 0)
            _monitoring.free_tool_id(tool)


def _look(code: CodeType, *_: object) -> None:
    """Raise TimeUp in the running code, if a deadline is over.

    A learner's `except:` that catches it gets another at its next jump; other code has time to unwind. Code
    that must end in good order (pytest's hooks, the guards here) is not interrupted.
    """
    global _ticks, _over, _look_again, _looked, _worked
    _ticks += 1
    if not _over and _ticks & 63:  # reading the clock costs more than a loop's iteration
        return
    now, path = monotonic(), code.co_filename
    # A long time between two looks was another process's, or C's: it counts on the clock only.
    _worked += min(now - _looked, PAUSE)
    _looked = now
    _over = any(now >= end or _worked >= worked for end, worked in _ends)
    if not _over or "/pluggy/" in path or "/_pytest/" in path:
        return
    learner_s = path.endswith("starter.py") or path.startswith("<lab-")
    if learner_s or (now >= _look_again and path not in (__file__, contextlib.__file__)):
        _look_again = now + 0.5
        raise TimeUp


def no_limit() -> None:
    """Switch all deadlines off from here on, for a debugger."""
    global _no_limit
    _no_limit = True
    faulthandler.cancel_dump_traceback_later()


def _raise_in(thread_id: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))


def _can_wake() -> bool:
    """Return whether a signal can reach this thread in a sleep: SIGURG, which by default does nothing."""
    if not hasattr(signal, "pthread_kill") or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
        signal.signal(signal.SIGURG, lambda *_: None)
    return True


@contextlib.contextmanager
def _last_resort(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer. An outer block's limit stays; a debugger has none."""
    global _armed
    if _armed or _no_limit:
        yield
        return
    _armed = True
    faulthandler.dump_traceback_later(seconds, exit=True, file=last_words)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        _armed = False


@contextlib.contextmanager
def kept_alive() -> Iterator[None]:
    """Make os._exit in the block raise SystemExit, as sys.exit does, instead of ending the process."""
    leave, process = os._exit, os.getpid()

    def refuse(code: int) -> NoReturn:
        if os.getpid() != process:  # a fork may leave that way
            leave(code)
        raise SystemExit(f"os._exit({code}), which would end the whole run")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


class _Limited(io.TextIOBase):
    def __init__(self, stream: TextIO, room: list[int]):
        self.stream, self.room = stream, room

    def write(self, text: str) -> int:
        if self.room[1] != PULSE[0]:
            self.room[:] = [FLOOD, PULSE[0]]
        self.room[0] -= len(text)
        if self.room[0] < 0:
            raise PrintFlood(f"more than {FLOOD} characters were printed")
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def limited_prints(silent: bool = False) -> Iterator[None]:
    """Raise PrintFlood in a block that prints more than FLOOD characters, on any stream."""
    room, names = [FLOOD, PULSE[0]], ("stdout", "stderr", "__stdout__", "__stderr__")
    streams = {name: getattr(sys, name) for name in names}
    for name, stream in streams.items():
        setattr(sys, name, _Limited(io.StringIO() if silent else stream, room))
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


silence = partial(limited_prints, silent=True)  # discards the block's output, and still ends a flood
