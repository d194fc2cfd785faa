"""Deadlines where Python starts no thread, in a browser: each call and each backward jump looks at the clock.

A block that stays inside C is ended from outside: the page ends a worker that reports nothing for a while.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic  # the code under test may replace time.monotonic
from timeit import repeat
from types import CodeType
from typing import Any

Errors = tuple[type[BaseException], type[BaseException]]
PAUSE = 0.001  # seconds between two looks at the clock; once a longer time, and it was not spent computing
BEAT = 1.0  # seconds from one call of `alive` to the next
LAPTOP = 0.008  # seconds that a laptop's browser takes for what `pace` measures

GUARDS = (__file__, str(Path(__file__).with_name("guard.py")), contextlib.__file__)

scale = 1.0  # factor of all deadlines
beat: Callable[[], object] | None = None  # is called as long as code runs that can be interrupted

_monitoring: Any = vars(sys).get("monitoring")
# Of each open deadline: its end in computing time, its end on the clock, and the errors for both.
_ends: list[tuple[float, float, Errors]] = []
_ticks, _over, _look_again, _beats = 0, False, 0.0, 0.0
# The last look at the clock, the time since the one before, and the computing time until then.
_looked, _passed, _worked = 0.0, 0.0, 0.0


def pace() -> float:
    """Return how many times longer than a laptop this machine computes, at least 1: a phone does."""
    return max(1.0, min(repeat("sorted([3, 1, 2])", number=20_000, repeat=3)) / LAPTOP)


def begin(factor: float, alive: Callable[[], object]) -> None:
    """Fit the deadlines of a run to this machine's pace, and to a factor. `alive` is called each second in
    which code runs that can be interrupted."""
    global scale, beat
    scale, beat = factor * pace(), alive


@contextlib.contextmanager
def deadline(computing: float, passing: float, errors: Errors) -> Iterator[None]:
    """Raise the first error in a block that computes for too long, the second if too much time passes."""
    global _looked
    _looked = now = monotonic()
    events, tool = _monitoring.events, _monitoring.DEBUGGER_ID
    if not _ends:
        _monitoring.use_tool_id(tool, "deadline")
        for event in (events.JUMP, events.PY_START):
            _monitoring.register_callback(tool, event, _look)
        _monitoring.set_events(tool, events.JUMP | events.PY_START)
    _ends.append(end := (_worked + scale * computing, now + scale * passing, errors))
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
    that must end in good order (pytest's hooks, the guards) is not interrupted.
    """
    global _ticks, _over, _look_again, _beats, _looked, _passed, _worked
    _ticks += 1
    if not _over and _ticks & 63:  # reading the clock costs more than a loop's iteration
        return
    now, path = monotonic(), code.co_filename
    # One long time between two looks was another process's: it counts on the clock only. Where each is long,
    # a loop computes in C.
    before, _passed, _looked = max(_passed, PAUSE), now - _looked, now
    _worked += min(_passed, before)
    if beat and now >= _beats:
        _beats = now + BEAT
        beat()
    over = [errors[_worked < worked] for worked, end, errors in _ends if _worked >= worked or now >= end]
    _over = bool(over)
    if not over or "/pluggy/" in path or "/_pytest/" in path:
        return
    learner_s = path.endswith("starter.py") or path.startswith("<lab-")
    if learner_s or (now >= _look_again and path not in GUARDS):
        _look_again = now + 0.5
        raise over[0]
