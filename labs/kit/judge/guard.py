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
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, process_time  # the code under test may replace time.monotonic
from typing import Any, NoReturn, TextIO

from labs.kit.judge import clock
from labs.kit.toys.driver import PULSE

FLOOD = 20_000  # characters printed in one step of a test
# Times its seconds that a block may wait without computing. A browser does not tell that from a busy machine.
WAIT = 10 if sys.platform == "emscripten" else 4
HELD = 5.0  # seconds more, after which a call that holds the interpreter ends with its process
LOOK = 1.0  # at most so many seconds between two looks at a block

last_words = 2  # the file descriptor for the traceback of a process that is ended; pytest redirects 2
_no_limit = _armed = False


class TimeUp(BaseException):
    """The code computed for too long."""

    why = "no answer within {:g} s of computing: a loop that never ends?"


class TimeUpWaiting(TimeUp):
    """The code waited for too long."""

    why = "no answer within {:g} s, and it waits without computing: a sleep, a lock, or input?"


class PrintFlood(BaseException):
    """The code printed too much."""


def late(error: TimeUp, seconds: float) -> str:
    """Return why a block with this limit was ended, in one sentence for the learner."""
    return error.why.format(seconds * (WAIT if isinstance(error, TimeUpWaiting) else 1))


def deadline(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raise TimeUp in this thread if the block computes for longer than `seconds`.

    Processor time counts, so that nothing fails because the machine is busy. A block that sleeps, or waits
    for a lock, for WAIT times as long gets a TimeUpWaiting. One that not even this ends (a call inside C that
    holds the interpreter) ends the process, and a traceback shows where it was.
    """
    if sys.platform == "emscripten":  # a browser's Python starts no thread
        return clock.deadline(seconds, WAIT * seconds, (TimeUp, TimeUpWaiting))
    block: list[Any] = []
    manager = _deadline(seconds, block)
    block.append(vars(manager)["gen"])
    return manager


class _Spent:
    """The seconds that a block has computed, and those that its thread has waited without being kept waiting.

    A thread that is ready to run, and does not because the machine is busy, does not wait. Linux counts that
    time. Elsewhere a thread that computes at all is taken to have been ready for the rest of the time.
    """

    def __init__(self) -> None:
        self.file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self.computed = self.waited = self.late = self.slow = 0.0
        self.began, self.used, self.starved = monotonic(), process_time(), self._starved()
        self.looked = self.began

    def look(self, planned: float) -> None:
        """Bring both up to date. What passed beyond the planned seconds, this process was kept waiting."""
        now, computed, starved = monotonic(), process_time() - self.used, self._starved()
        passed = now - self.looked
        self.late += max(0.0, passed - planned)
        if computed - self.computed > passed / 50:
            self.slow += passed - (computed - self.computed)
        kept_waiting = self.slow if self.starved is None or starved is None else starved - self.starved
        self.computed, self.looked = computed, now
        self.waited = now - self.began - computed - kept_waiting - self.late

    def _starved(self) -> float | None:
        try:
            with open(self.file) as file:
                ran, ready, _ = map(int, file.read().split())
        except (OSError, ValueError):
            return None
        return ready / 1e9 if ran else None


@contextlib.contextmanager
def _deadline(seconds: float, block: list[Any]) -> Iterator[None]:
    thread_id = threading.get_ident()
    done, lock = threading.Event(), threading.Lock()
    spent, can_wake = _Spent(), _can_wake()
    last_resort: list[Callable[[], None]] = []

    def watch() -> None:
        wait = min(seconds, LOOK)
        error: type[TimeUp] | None = None
        while not done.wait(wait):
            spent.look(wait)
            in_time = spent.computed < seconds and spent.waited < WAIT * seconds
            if _no_limit or (in_time and not error):
                with lock:
                    if last_resort and not (done.is_set() or _no_limit):
                        last_resort[0]()  # put off: this thread runs, so nothing holds the interpreter
                wait = max(0.02, min(seconds - spent.computed, LOOK))
                continue
            error = error or (TimeUp if spent.computed >= seconds else TimeUpWaiting)
            with lock:
                if block[0].gi_frame is None:  # TimeUp came while the block began or ended: it is over
                    return
                if not done.is_set():
                    raised = ctypes.py_object(error)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)
                    if can_wake:  # to interrupt a sleep or a lock
                        signal.pthread_kill(thread_id, signal.SIGURG)
            wait = 0.5  # a bare `except:` in the learner's loop caught it: again

    threading.Thread(target=watch, daemon=True).start()
    with _last_resort(WAIT * seconds + HELD) as put_off:
        last_resort.append(put_off)
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


def no_limit() -> None:
    """Switch all deadlines off from here on, for a debugger."""
    global _no_limit
    _no_limit = True
    faulthandler.cancel_dump_traceback_later()


def _can_wake() -> bool:
    """Return whether a signal can reach this thread in a sleep: SIGURG, which by default does nothing."""
    if not hasattr(signal, "pthread_kill") or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
        signal.signal(signal.SIGURG, lambda *_: None)
    return True


@contextlib.contextmanager
def _last_resort(seconds: float) -> Iterator[Callable[[], None]]:
    """End the process these seconds after the last call of what this returns.

    An outer block's limit stays; a debugger has none.
    """
    global _armed
    if _armed or _no_limit:
        yield lambda: None  # there is none to put off
        return
    _armed = True
    put_off = partial(faulthandler.dump_traceback_later, seconds, exit=True, file=last_words)
    put_off()
    try:
        yield put_off
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
