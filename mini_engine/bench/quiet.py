"""Is the machine ours alone? What others compute meanwhile is read from /proc, in cores.

A turn waits until they are idle. Patience is limited over a whole run: when it is used up, turns go
on, and say that the machine was not quiet.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

IDLE = 0.08  # cores: what a machine does when nobody asks anything of it. An eighth of a core already tells
PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """CPU seconds since the machine started: of all, of ours, and taken by the host's other guests."""

    time: float
    busy: float
    ours: float
    stolen: float


def usage(groups: set[int]) -> Usage | None:
    """What was used until now, `groups` being our process groups. None where there is no /proc."""
    try:
        fields = [int(n) for n in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq, stolen = fields[:8]
    ours = sum(map(_ticks, _processes(groups)))
    return Usage(
        time.perf_counter(), (user + nice + system + irq + softirq) / tick, ours / tick, stolen / tick
    )


def _processes(groups: set[int]) -> list[list[str]]:
    """The fields of /proc/*/stat, from the state on, of our processes."""
    found = []
    for file in PROC.glob("[0-9]*/stat"):
        try:
            after_name = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(after_name[2]) in groups:
            found.append(after_name)
    return found


def _ticks(after_name: list[str]) -> int:
    return int(after_name[11]) + int(after_name[12])  # utime, stime


@dataclass(frozen=True)
class Meanwhile:
    """What others took while something ran, in cores, and how long it had waited for them before."""

    waited: float
    others: float | None  # None: this system does not say
    stolen: float | None

    @property
    def is_quiet(self) -> bool:
        return self.others is None or self.others + (self.stolen or 0) <= IDLE


def between(start: Usage | None, end: Usage | None, waited: float = 0) -> Meanwhile:
    """The difference of two readings."""
    if start is None or end is None:
        return Meanwhile(waited, None, None)
    seconds = max(end.time - start.time, 1e-9)
    # A process's ticks and the machine's are counted apart: the difference may be a tick below 0.
    others = max(0.0, (end.busy - start.busy) - (end.ours - start.ours)) / seconds
    return Meanwhile(round(waited, 1), round(others, 3), round((end.stolen - start.stolen) / seconds, 3))


@dataclass
class Watch:
    """Waits for quiet before a turn, and says what others took during it."""

    patience: float  # seconds left to wait, over the whole run
    groups: set[int] = field(default_factory=set)
    window: float = 0.5

    def wait(self) -> float:
        """Seconds waited until a window of time was idle, or patience had an end."""
        begin = time.perf_counter()
        while self.patience > 0:
            start = usage(self.groups)
            time.sleep(self.window)
            if between(start, usage(self.groups)).is_quiet:
                break
            self.patience -= self.window
        return time.perf_counter() - begin
