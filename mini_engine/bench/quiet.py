"""The CPU time that other programs take, in cores, read from /proc.

A turn waits until they are idle. The time to wait is limited over a whole run: when it is used up, turns
begin at once, and are reported as not quiet.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

IDLE = 0.08  # cores that an idle machine uses; an eighth of a core already changes results
PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """CPU seconds since the machine started: of all, of ours, and used by the host's other guests."""

    time: float
    busy: float
    ours: float
    stolen: float


def usage(groups: set[int]) -> Usage | None:
    """Return the CPU time until now; `groups` are our process groups. None where there is no /proc."""
    try:
        fields = [int(n) for n in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq, stolen = fields[:8]
    ours = sum(ticks for _, ticks in group_of(groups))
    busy = user + nice + system + irq + softirq
    return Usage(time.perf_counter(), busy / tick, ours / tick, stolen / tick)


def group_of(groups: set[int]) -> Iterator[tuple[Path, int]]:
    """Yield each process of these groups: its folder in /proc, and its CPU time in ticks."""
    for file in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            after_name = file.read_text().rpartition(")")[2].split()
            if int(after_name[2]) in groups:
                yield file.parent, int(after_name[11]) + int(after_name[12])  # utime, stime


@dataclass(frozen=True)
class Meanwhile:
    """Cores that other programs took during a turn, and the seconds that the turn had waited for them."""

    waited: float
    others: float | None  # None: not known on this system
    stolen: float | None

    @property
    def is_quiet(self) -> bool:
        return self.others is None or self.others + (self.stolen or 0) <= IDLE


def between(start: Usage | None, end: Usage | None, waited: float = 0) -> Meanwhile:
    """Return the difference of two readings."""
    if start is None or end is None:
        return Meanwhile(waited, None, None)
    seconds = max(end.time - start.time, 1e-9)
    # A process's ticks and the machine's are counted apart: the difference may be a tick below 0.
    others = max(0.0, (end.busy - start.busy) - (end.ours - start.ours)) / seconds
    return Meanwhile(round(waited, 1), round(others, 3), round((end.stolen - start.stolen) / seconds, 3))


@dataclass
class Watch:
    """Waits for a quiet machine before a turn."""

    patience: float  # seconds left to wait, over the whole run
    groups: set[int] = field(default_factory=set)
    window: float = 0.5

    def wait(self) -> float:
        """Wait until a window of time was idle, or patience is used up; return the seconds."""
        begin = time.perf_counter()
        while self.patience > 0:
            start = usage(self.groups)
            time.sleep(self.window)
            if between(start, usage(self.groups)).is_quiet:
                break
            self.patience -= self.window
        return time.perf_counter() - begin
