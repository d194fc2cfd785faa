"""Measures how fast a class is graded, and how much memory that takes: `python -m labs.kit.grader.measure`.

The class is generated: each submission has every lab, one in three the reference, the others a known mistake.
"""

import ast
import resource
import tempfile
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from labs.kit.grader import run
from labs.kit.grader.rules import Files
from labs.kit.grader.submission import Settings
from labs.kit.judge.manifest import find_lab, lab_ids


def measure(
    students: Annotated[int, typer.Option("--students", min=1, help="submissions")] = 20,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="workers")] = 2,
    allow_weak_isolation: Annotated[bool, typer.Option("--allow-weak-isolation")] = False,
) -> None:
    """Grade a generated class with all reports, and print the time and the memory that it took."""
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        submissions = Path(folder, "submissions")
        for number in range(students):
            hand_in(submissions / f"student-{number + 1:03}", number)
        settings = Settings(tuple(lab_ids()), "measure", weak=allow_weak_isolation, as_root=True)
        begin = monotonic()
        code = run.grade(submissions, Path(folder, "report"), settings, jobs, Files(), "", False, None)
        seconds = monotonic() - begin
    graded, rate = f"{students} submissions of {len(settings.labs)} labs", 60 * students / seconds
    typer.echo(f"{graded} in {seconds:.0f} s, {jobs} workers: {rate:.1f} a minute")
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    most = (one.ru_maxrss // 1024 for one in used)
    typer.echo("memory at most: {} MB in the grader, {} MB in a worker or a sandbox".format(*most))
    raise typer.Exit(code)


def hand_in(folder: Path, number: int) -> None:
    """Write one submission."""
    for at, lab in enumerate(map(find_lab, lab_ids())):
        source = lab.file("solution.py").read_text("utf-8")
        if (number + at) % 3 == 0:  # the reference as it is would not be graded
            tree = ast.parse(source)
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                function.body.append(ast.Assert(ast.Constant(True)))
            source = ast.unparse(ast.fix_missing_locations(tree))
        else:
            source = lab.mistakes[(7 * number + at) % len(lab.mistakes)].apply(source)
        (folder / lab.id).mkdir(parents=True)
        (folder / lab.id / "starter.py").write_text(source, "utf-8")


if __name__ == "__main__":
    typer.run(measure)
