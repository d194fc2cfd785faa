"""Ends what a learner's code would not end by itself: an endless loop, a flood of prints.

The timer raises inside the thread (PyThreadState_SetAsyncExc), because SIGALRM does not exist on
Windows. Both exceptions derive from BaseException, so that a broad `except` does not swallow them.
"""

import contextlib
import ctypes
import io
import sys
import threading
import time

FLOOD = 20_000  # characters printed in one test


class TimeUp(BaseException):
    """The code did not come back in time."""


class PrintFlood(BaseException):
    """The code printed more than anybody will read."""


@contextlib.contextmanager
def deadline(seconds: float):
    """Raise TimeUp in this thread if the block computes for longer than `seconds`.

    Processor time counts, so that a busy machine fails nobody; of wall time it may take ten times that.
    """
    thread_id = ctypes.c_ulong(threading.get_ident())
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
    done, lock = threading.Event(), threading.Lock()

    computed_by, over_by = time.process_time() + seconds, time.monotonic() + 10 * seconds

    def watch():
        wait = seconds
        while not done.wait(wait):
            wait = max(0.1, min(computed_by - time.process_time(), over_by - time.monotonic()))
            if wait > 0.1:
                continue
            with lock:
                if not done.is_set():
                    raise_in_thread(thread_id, ctypes.py_object(TimeUp))
            wait = 0.5  # a bare `except:` in the learner's loop caught it: again

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        while not done.is_set():  # TimeUp may strike in these very lines
            with contextlib.suppress(TimeUp), lock:
                done.set()
        raise_in_thread(thread_id, None)  # call back one that has not struck yet


class _Limited(io.TextIOBase):
    def __init__(self, stream):
        self.stream, self.left = stream, FLOOD

    def write(self, text):
        self.left -= len(text)
        if self.left < 0:
            raise PrintFlood(f"more than {FLOOD} characters were printed")
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()


@contextlib.contextmanager
def limited_prints():
    """Raise PrintFlood in a block that prints more than FLOOD characters."""
    with contextlib.redirect_stdout(_Limited(sys.stdout)):
        yield


@contextlib.contextmanager
def silence():
    """Throw away what the block prints, and still end a flood."""
    with contextlib.redirect_stdout(_Limited(io.StringIO())):
        yield
