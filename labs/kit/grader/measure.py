"""Measures how fast a class is graded, and how much memory that takes: `python -m labs.kit.grader.measure`.

The class is made up: each submission has all labs, one in three of them the reference, the others with a
known mistake. The time is that of the whole of `python -m labs grade`, with its report.
"""

import resource
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from labs.kit.grader import run
from labs.kit.grader.submission import Settings
from labs.kit.judge.manifest import find_lab, lab_ids


def measure(
    students: Annotated[int, typer.Option("--students", min=1, help="submissions")] = 20,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="workers")] = 2,
    allow_weak_isolation: Annotated[bool, typer.Option("--allow-weak-isolation")] = False,
) -> None:
    """Grade a made-up class; print the time, and the peak memory of the grader and of its largest worker."""
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        submissions, report = Path(folder, "submissions"), Path(folder, "report")
        for number in range(students):
            write_submission(submissions / f"student-{number + 1:03}", number)
        settings = Settings(tuple(lab_ids()), "measure", weak=allow_weak_isolation)
        begin = monotonic()
        code = run.grade(submissions, report, settings, run.Options(jobs))
        seconds = monotonic() - begin
    unit = 10 if sys.platform == "linux" else 20  # ru_maxrss is in KiB on Linux, in bytes on a Mac
    grader, worker = (
        resource.getrusage(who).ru_maxrss >> unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    typer.echo(
        f"{students} submissions of {len(settings.labs)} labs in {seconds:.0f} s with {jobs} workers: "
        f"{60 * students / seconds:.1f} a minute; "
        f"peak memory: {grader} MB in the grader, {worker} MB in its largest worker"
    )
    raise typer.Exit(code)


def write_submission(folder: Path, number: int) -> None:
    """Write a submission: the reference of each lab, two in three of them with a known mistake."""
    for at, lab in enumerate(map(find_lab, lab_ids())):
        source = lab.file("solution.py").read_text("utf-8")
        if (number + at) % 3:
            source = lab.mistakes[(7 * number + at) % len(lab.mistakes)].apply(source)
        (folder / lab.id).mkdir(parents=True)
        (folder / lab.id / "starter.py").write_text(source, "utf-8")


if __name__ == "__main__":
    typer.run(measure)
