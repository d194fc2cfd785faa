"""How fast a class is graded, and how much memory that takes: `python -m labs.kit.grader.measure`.

The class is made up: in each submission seven labs, every third one the reference, the others a known
mistake each. What is measured is the whole of `python -m labs grade`, reports too.
"""

import resource
import sys
import tempfile
import threading
from multiprocessing import active_children
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from labs.kit.grader import commands, grading
from labs.kit.judge.manifest import find_lab, lab_ids


def measure(
    students: Annotated[int, typer.Option("--students", min=1, help="submissions")] = 20,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="workers")] = 2,
    allow_weak_isolation: Annotated[bool, typer.Option("--allow-weak-isolation")] = False,
) -> None:
    """Grade a made-up class, and say how long that took and what the trusted side held at most."""
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        submissions, report = Path(folder, "submissions"), Path(folder, "report")
        for number in range(students):
            hand_in(submissions / f"student-{number + 1:03}", number)
        settings = grading.Settings(tuple(lab_ids()), "measure", weak=allow_weak_isolation)
        begin, watch = monotonic(), Watch()
        code = commands.run(submissions, report, settings, jobs, None, "", False, None)
        seconds = monotonic() - begin
        typer.echo(
            f"{students} submissions of {len(settings.labs)} labs in {seconds:.0f} s with {jobs} workers: "
            f"{60 * students / seconds:.1f} a minute"
        )
        typer.echo(watch.told())
    raise typer.Exit(code)


def hand_in(folder: Path, number: int) -> None:
    """The reference of each lab; of two in three with a known mistake, every time another one."""
    for at, lab in enumerate(map(find_lab, lab_ids())):
        source = lab.file("solution.py").read_text("utf-8")
        if (number + at) % 3:
            source = lab.mistakes[(7 * number + at) % len(lab.mistakes)].apply(source)
        (folder / lab.id).mkdir(parents=True)
        (folder / lab.id / "starter.py").write_text(source, "utf-8")


class Watch:
    """The most memory that this process and its workers held; sandboxes do not count."""

    def __init__(self) -> None:
        self.workers: dict[int, int] = {}
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(0.5):
            for child in active_children():
                if child.pid and (peak := peak_of(child.pid)):
                    self.workers[child.pid] = peak

    def told(self) -> str:
        kib = 1 if sys.platform == "linux" else 1024  # ru_maxrss is in KiB, in bytes on a Mac
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // kib
        each = ", ".join(f"{peak >> 10} MB" for peak in self.workers.values()) or "not known here"
        return f"the trusted side's peak memory: {own >> 10} MB in the grader, {each} in its workers"


def peak_of(pid: int) -> int:
    """KiB; 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    typer.run(measure)
