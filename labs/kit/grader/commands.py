"""The instructor's commands of `python -m labs`: grade a class, replay a case, build for Gradescope."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from labs.kit.learner.screen import say

Labs = Annotated[str, typer.Option(help="lab-01,lab-02, or 1,2; default: all labs")]
Hidden = Annotated[Path | None, typer.Option(help="folder with your own cases: lab-NN/NAME.json")]
Reveal = Annotated[bool, typer.Option("--reveal", help="show hidden cases to students")]


def grade(
    submissions: Annotated[Path, typer.Argument(help="folder with a folder or zip for each student")],
    out: Annotated[Path, typer.Option(help="folder for the report")],
    labs: Labs = "",
    seed: Annotated[str, typer.Option(help="seed of hidden cases; default: the report's, or new")] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="workers; 0: one for each core")] = 0,
    time_limit: Annotated[
        float, typer.Option(min=1, max=3600, help="seconds that a lab's cases may compute")
    ] = 20.0,
    hidden: Hidden = None,
    late: Annotated[Path | None, typer.Option(help="deadlines and times of submission, TOML")] = None,
    cluster: Annotated[str, typer.Option(help="address of a Dask scheduler that has workers")] = "",
    similarity: Annotated[bool, typer.Option("--similarity", help="report files that are alike")] = False,
    reveal: Reveal = False,
    regrade: Annotated[Path | None, typer.Option(help="earlier report to compare with")] = None,
    weak: Annotated[
        bool, typer.Option("--allow-weak-isolation", help="grade even where there are no namespaces")
    ] = False,
    as_root: Annotated[bool, typer.Option("--as-root", help="grade even as the superuser")] = False,
) -> None:
    """For instructors: grade a class. After an interruption the same command goes on where it was."""
    from labs.kit.grader import arguments, run
    from labs.kit.grader.submission import Settings

    ids = arguments.chosen(labs)
    own, seed = arguments.own_cases(hidden, ids), arguments.seed(seed, out)
    settings = Settings(ids, seed, seconds=time_limit, own=own, weak=weak, reveal=reveal, as_root=as_root)
    raise typer.Exit(run.grade(submissions, out, settings, jobs, late, cluster, similarity, regrade))


def replay(
    report: Annotated[Path, typer.Argument(help="folder of a report")],
    student: Annotated[str, typer.Argument(help="name in the report")],
    lab: Annotated[str, typer.Argument(help="lab-01, or just 1")],
    case: Annotated[list[str], typer.Argument(help="name in the report: public 3, hidden 17")],
) -> None:
    """For instructors: play one case of a graded submission again, and print its run."""
    from labs.kit.grader import run

    found = run.replay(report, student, lab, " ".join(case))
    raise typer.Exit(0 if found.passed else 1)


def gradescope(
    out: Annotated[Path, typer.Option(help="the zip to write")] = Path("autograder.zip"),
    labs: Labs = "",
    seed: Annotated[str, typer.Option(help="seed of hidden cases; default: a new one")] = "",
    hidden: Hidden = None,
    late: Annotated[
        Path | None, typer.Option(help='deadlines, TOML, with times = "submission_metadata.json"')
    ] = None,
    reveal: Reveal = False,
) -> None:
    """For instructors: build the zip for Gradescope. It contains the solutions."""
    from labs.kit.grader import arguments
    from labs.kit.grader.gradescope import build
    from mini_engine.commands.common import writable

    chosen, seed = arguments.chosen(labs), arguments.seed(seed)
    writable(out)
    build(out, chosen, seed, late, arguments.own_cases(hidden, chosen), reveal)
    size = out.stat().st_size / (1 << 20)
    say(
        f"{out}, {size:.1f} MB, grades {', '.join(chosen)}; seed {seed}; upload it under Configure Autograder"
    )


COMMANDS: list[Callable[..., None]] = [grade, replay, gradescope]
