"""The instructor's commands of `python -m labs`: grade a class, replay a case, build for Gradescope."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from labs.kit.arena import commands
from labs.kit.judge.manifest import LabError
from labs.kit.learner.screen import say

Labs = Annotated[str, typer.Option(help="lab-01,lab-02, or 1,2; default: all labs")]
Hidden = Annotated[Path | None, typer.Option(help="folder with your own cases: lab-NN/NAME.json")]
OwnSeeds = Annotated[
    bool, typer.Option("--own-seeds", help="other hidden cases for each student and attempt")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="workers; 0: one for each core")]
Weak = Annotated[
    bool, typer.Option("--allow-weak-isolation", help="go on even where there are no namespaces")
]
AsRoot = Annotated[bool, typer.Option("--as-root", help="go on even as the superuser")]
Reveal = Annotated[bool, typer.Option("--reveal", help="show hidden cases to students")]


def grade(
    submissions: Annotated[Path, typer.Argument(help="folder with a folder or zip for each student")],
    out: Annotated[Path, typer.Option(help="folder for the report")],
    labs: Labs = "",
    seed: Annotated[str, typer.Option(help="seed of hidden cases; default: the report's, or new")] = "",
    jobs: Jobs = 0,
    time_limit: Annotated[
        float, typer.Option(min=1, max=3600, help="seconds that a lab's cases may compute")
    ] = 20.0,
    hidden: Hidden = None,
    late: Annotated[Path | None, typer.Option(help="deadlines and times of submission, TOML")] = None,
    roster: Annotated[Path | None, typer.Option(help="CSV with ids and sections of the class")] = None,
    manual: Annotated[Path | None, typer.Option(help="CSV with points and comments of your own")] = None,
    attempts: Annotated[
        str, typer.Option(help="the attempt at a lab that counts, of STUDENT/attempt-N: best, last or first")
    ] = "",
    max_attempts: Annotated[int, typer.Option(min=0, help="attempts that may count; 0: all")] = 0,
    own_seeds: OwnSeeds = False,
    cluster: Annotated[str, typer.Option(help="address of a Dask scheduler that has workers")] = "",
    similarity: Annotated[bool, typer.Option("--similarity", help="report files that are alike")] = False,
    reveal: Reveal = False,
    regrade: Annotated[Path | None, typer.Option(help="earlier report to compare with")] = None,
    weak: Weak = False,
    as_root: AsRoot = False,
) -> None:
    """For instructors: grade a class. After an interruption the same command resumes."""
    from labs.kit.grader import arguments, rules, run
    from labs.kit.grader.submission import Settings

    if attempts not in ("", rules.BEST, rules.LAST, rules.FIRST):
        raise LabError(f"--attempts should be best, last or first, but is {attempts!r}")
    if max_attempts and not attempts:
        raise LabError("--max-attempts needs --attempts, which says the attempt that counts")
    ids = arguments.chosen(labs)
    own, seed = arguments.own_cases(hidden, ids), arguments.seed(seed, out)
    settings = Settings(ids, seed, 60, time_limit, own, weak, reveal, as_root, own_seeds)
    files = rules.Files(late, roster, manual, attempts, max_attempts)
    raise typer.Exit(run.grade(submissions, out, settings, jobs, files, cluster, similarity, regrade))


def replay(
    report: Annotated[Path, typer.Argument(help="folder of a report")],
    student: Annotated[str, typer.Argument(help="name in the report")],
    lab: Annotated[str, typer.Argument(help="lab-01, or just 1")],
    case: Annotated[list[str], typer.Argument(help="name in the report: public 3, hidden 17")],
    attempt: Annotated[int, typer.Option(min=0, help="number of the attempt; 0: the last one")] = 0,
) -> None:
    """For instructors: play one case of a graded submission again, and print its run."""
    from labs.kit.grader import run

    found = run.replay(report, student, lab, " ".join(case), attempt)
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
    own_seeds: OwnSeeds = False,
) -> None:
    """For instructors: build the zip for Gradescope. It contains the solutions."""
    from labs.kit.grader import arguments
    from labs.kit.grader.gradescope import build
    from mini_engine.commands.common import writable

    chosen, seed = arguments.chosen(labs), arguments.seed(seed)
    writable(out)
    build(out, chosen, seed, late, arguments.own_cases(hidden, chosen), reveal, own_seeds)
    built = f"{out}, {out.stat().st_size / (1 << 20):.1f} MB, grades {', '.join(chosen)}"
    say(f"{built}; seed {seed}; upload it under Configure Autograder")


def arena(
    policy: commands.PolicyFile = None,
    folder: Annotated[
        Path | None,
        typer.Option("--class", metavar="FOLDER", help="for instructors: a policy for each student"),
    ] = None,
    seed: commands.Seed = 0,
    out: commands.Out = commands.CHART,
    jobs: Jobs = 0,
    weak: Weak = False,
    as_root: AsRoot = False,
) -> None:
    """Play your scheduling policy, or a class's, against the course's on eight workloads.

    A policy defines any of schedule_step, policy_key and pick_victim, as in lab-01 and lab-03. Those of a
    class are played in sandboxes, as they are graded.
    """
    if folder is None:
        return commands.arena(policy, seed, out)
    from labs.kit.grader.arena import play_class
    from mini_engine.commands.common import working, writable

    if policy:
        raise LabError(f"{policy} or --class {folder}: name one of them")
    writable(out)
    with working(f"the policies in {folder} play"):
        rows = play_class(folder, seed, jobs, weak, as_root)
    commands.show(rows, seed, out)


COMMANDS: list[Callable[..., None]] = [grade, replay, gradescope, arena]
