"""What an instructor runs with `python -m labs`: grade a class, replay a case, build for Gradescope."""

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labs.kit.judge.manifest import LabError, find_lab, lab_ids
from labs.kit.learner.screen import complain, say
from labs.kit.toys.words import brief
from mini_engine.commands.common import check_folder, writable

if TYPE_CHECKING:
    from labs.kit.grader.grading import Settings, Submission
    from labs.kit.grader.intake import Entry
    from labs.kit.grader.late import Deadlines
    from labs.kit.grader.pool import Grades, Outcome
    from labs.kit.toys.scripts import Script

SETTINGS, NOT_GRADED = "settings.json", "not-graded.txt"
WEAK = "--allow-weak-isolation grades without them, and the report says so in its first line"


def grade(
    submissions: Annotated[Path, typer.Argument(help="folder with a folder or zip a student")],
    out: Annotated[Path, typer.Option("--out", help="folder for the report")],
    labs: Annotated[str, typer.Option("--labs", help="lab-01,lab-02, or 1,2; all without it")] = "",
    seed: Annotated[
        str, typer.Option("--seed", help="of the hidden cases; without it, the report's, or a new one")
    ] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="workers; 0: one a core")] = 0,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", min=1, max=3600, help="seconds that a lab's cases may take together"),
    ] = 20.0,
    hidden: Annotated[
        Path | None, typer.Option("--hidden", help="folder with your own cases: lab-NN/NAME.json")
    ] = None,
    late: Annotated[
        Path | None, typer.Option("--late", help="deadlines and times of submission, TOML")
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", help="address of a Dask scheduler that has workers")
    ] = "",
    similarity: Annotated[bool, typer.Option("--similarity", help="report files that are alike")] = False,
    reveal: Annotated[bool, typer.Option("--reveal", help="show hidden cases to students")] = False,
    regrade: Annotated[
        Path | None, typer.Option("--regrade", help="an earlier report: say what changed against it")
    ] = None,
    allow_weak_isolation: Annotated[
        bool, typer.Option("--allow-weak-isolation", help="grade even where there are no namespaces")
    ] = False,
) -> None:
    """For instructors: grade a class. Interrupted, the same command goes on where it was."""
    from labs.kit.grader import grading

    if out.resolve().is_relative_to(submissions.resolve()):
        raise LabError("--out should lie outside of the folder of submissions")
    settings = grading.Settings(
        labs=chosen(labs),
        seed=sound(seed) or earlier(out).get("seed") or secrets.token_hex(8),
        seconds=time_limit,
        own=own_cases(hidden, chosen(labs)),
        weak=allow_weak_isolation,
        reveal=reveal,
    )
    raise typer.Exit(run(submissions, out, settings, jobs, late, cluster, similarity, regrade))


def run(
    submissions: Path,
    out: Path,
    settings: "Settings",
    jobs: int,
    late: Path | None,
    cluster: str,
    similarity: bool,
    regrade: Path | None,
) -> int:
    """The exit code: 1 if the grader failed on a submission, 130 if it was interrupted."""
    from labs.kit.grader import grading, intake, pool
    from labs.kit.grader.report import write_reports
    from labs.kit.grader.sandbox import WeakIsolation

    if regrade and not (regrade / "grades").is_dir():
        raise LabError(f"{regrade} is no report: it has no folder grades")
    if cluster:
        pool.check_address(cluster)
    check_folder(out)
    entries, others = intake.entries(submissions)
    if not cluster and not settings.weak and grading.isolation() != "namespaces":
        raise LabError(f"this machine offers no namespaces, or has no bwrap, to run submissions in; {WEAK}")
    for other in others:
        say(f"not a submission, so not looked at: {other}")
    deadlines = read_deadlines(late, len(entries))
    record(out, submissions, late, settings)
    workers: pool.Pool
    workers = pool.Cluster(cluster) if cluster else pool.Local(min(jobs or cores(), len(entries)))
    read = reader(entries, settings, deadlines)
    finish = deadlines.applied if deadlines else lambda grade: grade
    try:
        outcomes = shown(pool.grade_class(read(), settings, out, workers, finish), len(entries))
    except (KeyboardInterrupt, SystemExit) as ended:  # SIGTERM
        complain("interrupted; the same command goes on where this one was")
        return 130 if isinstance(ended, KeyboardInterrupt) else 143
    except WeakIsolation as error:
        raise LabError(f"{error}; {WEAK}") from None
    finally:
        workers.stop()
    grades = pool.Grades(out, (one.student for one in outcomes if one.state != pool.FAILED))
    write_reports(out, lambda: iter(grades), settings)
    if similarity:
        from labs.kit.grader.similarity import compare

        for line in compare(read(), settings.labs, out):
            say(line)
    if regrade:
        from labs.kit.grader.regrade import changes

        for line in changes(regrade, grades):
            typer.echo(line)
    return summary(outcomes, grades, settings, out)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def reader(
    entries: "list[Entry]", settings: "Settings", deadlines: "Deadlines | None"
) -> "Callable[[], Iterator[Submission]]":
    """All submissions, one at a time, each time that it is called."""
    from labs.kit.grader import intake

    def read() -> "Iterator[Submission]":
        for entry in entries:
            yield intake.read(entry, settings.labs, deadlines.written(entry.student) if deadlines else "")

    return read


def shown(outcomes: "Iterator[Outcome]", total: int) -> "list[Outcome]":
    """Go through the outcomes, with progress on the terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console, done = Console(stderr=True), []
    columns: list[ProgressColumn] = [
        TextColumn("grading"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    ]
    columns.append(TextColumn("{task.fields[student]}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, student="")
        for outcome in outcomes:
            done.append(outcome)
            bar.update(task, advance=1, student=outcome.student)
    return done


def summary(outcomes: "list[Outcome]", grades: "Grades", settings: "Settings", out: Path) -> int:
    from labs.kit.grader.pool import FAILED, KEPT

    failed = sorted((one for one in outcomes if one.state == FAILED), key=lambda one: one.student)
    kept = sum(one.state == KEPT for one in outcomes)
    lines = [f"{one.student}: NOT GRADED, and in no table: {one.why}" for one in failed]
    for line in lines:
        complain(line)
    (out / NOT_GRADED).unlink(missing_ok=True)
    if failed:
        (out / NOT_GRADED).write_text("\n".join([*lines, ""]), "utf-8")
    points = earned = 0.0
    isolation = set()
    for grade in grades:
        points, earned = sum(lab.points for lab in grade.labs), earned + grade.earned
        isolation.add(grade.isolation)
    parts = [f"{len(grades)} graded" + (f" ({kept} of them before)" if kept else "")]
    parts += [f"{len(failed)} NOT GRADED"] if failed else []
    parts += [f"mean {earned / len(grades):.1f} of {points:g} points"] if len(grades) else []
    parts += [f"isolation: {', '.join(sorted(isolation)) or 'none'}", f"seed {settings.seed}"]
    say(f"{'; '.join(parts)}; the report is in {out}")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------- what was asked


def chosen(labs: str) -> tuple[str, ...]:
    names = labs.replace(",", " ").split()
    if labs and not names:
        raise LabError(f"--labs {labs} names no lab; there are {', '.join(lab_ids())}")
    return tuple(sorted({find_lab(name).id for name in names})) if names else tuple(lab_ids())


def sound(seed: str) -> str:
    """The seed. Raises LabError for one that cannot be printed, to be given again."""
    if not seed.isprintable() or len(seed) > 100:
        raise LabError(f"--seed should be at most 100 letters that print, but is {brief(seed)}")
    return seed


def own_cases(folder: Path | None, labs: tuple[str, ...]) -> Path | None:
    """The folder, as long as every case in it can be played. Raises LabError for the first that cannot."""
    if folder is None:
        return None
    files = [file for lab_id in labs for file in sorted((folder / lab_id).glob("*.json"))]
    if not files:
        raise LabError(f"{folder} has no cases for {', '.join(labs)}; they are called lab-NN/NAME.json")
    for file in files:
        try:
            case = json.loads(file.read_text("utf-8"))
            fits = isinstance(case["config"], dict) and all(
                isinstance(call[0], str) for call in case["calls"]
            )
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            fits = False
        if not fits:
            raise LabError(f'{file} is no case: {{"config": {{...}}, "calls": [[name, arguments ...], ...]}}')
        if why := unplayable(file.parent.name, case):
            raise LabError(
                f"{file} cannot be played: {why}; `random_scripts.py` of the lab says what its scripts hold"
            )
    return folder.resolve()


def unplayable(lab_id: str, case: "Script") -> str:
    """Why nobody could pass a case: the model cannot play it, or the reference departs from the model."""
    from labs.kit.judge import loading, random_scripts

    try:
        model = random_scripts.run(lab_id, None, case)
        if (
            random_scripts.departure(
                random_scripts.run(lab_id, loading.load(lab_id, "solution"), case), model
            )
            is not None
        ):
            return "the reference departs from the model in it"
    except Exception as error:  # whatever a script of another form leads to
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def read_deadlines(file: Path | None, students: int) -> "Deadlines | None":
    if file is None:
        return None
    from labs.kit.grader import late

    return late.read(file, students)


def earlier(report: Path) -> dict[str, Any]:
    """What an earlier run wrote down of itself; nothing if there was none."""
    try:
        found = json.loads((report / SETTINGS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("seed"), str) else {}


def record(report: Path, submissions: Path, late: Path | None, settings: "Settings") -> None:
    """Write down, before anything is graded, what a later run needs to go on, or to replay a case."""
    report.mkdir(parents=True, exist_ok=True)
    own = str(settings.own) if settings.own else None
    known = asdict(settings) | {"own": own, "submissions": str(submissions.resolve())}
    known["late"] = str(late.resolve()) if late else None
    written = report / f".{SETTINGS}.part"
    written.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
    written.replace(report / SETTINGS)


# ---------------------------------------------------------------------------------------------------- replay


def replay(
    report: Annotated[Path, typer.Argument(help="folder of a report")],
    student: Annotated[str, typer.Argument(help="as the report names them")],
    lab: Annotated[str, typer.Argument(help="lab-01, or just 1")],
    case: Annotated[list[str], typer.Argument(help="as the report names it: public 3, hidden 17")],
) -> None:
    """For instructors: replay one case of a graded submission from its seed, and print how it went."""
    from labs.kit.grader import grading, intake, late, pool
    from labs.kit.grader.results import typed
    from labs.kit.grader.sandbox import WeakIsolation

    known = earlier(report)
    if not known:
        raise LabError(f"{report} is no report: it has no {SETTINGS}")
    lab_id, name = find_lab(lab).id, " ".join(case)
    try:
        submissions, deadlines = Path(known.pop("submissions")), known.pop("late")
        known |= {"labs": tuple(known["labs"]), "own": Path(known["own"]) if known["own"] else None}
        settings = typed(grading.Settings(**known))
    except (KeyError, TypeError) as error:
        raise LabError(f"{report} is no report: its {SETTINGS} was edited ({error})") from None
    entries, _ = intake.entries(submissions)
    entry = next((one for one in entries if one.student == student), None)
    if entry is None:
        raise LabError(f"{submissions} has no submission of {student}")
    times = late.read(Path(deadlines), len(entries)) if deadlines else None
    submission = intake.read(entry, settings.labs, times.written(student) if times else "")
    stored = pool.stored(report / "grades", student)
    if stored and stored.digest != grading.digest(submission, settings):
        complain("the submission or the course has changed since it was graded; this is how it goes now")
    try:
        found = grading.replayed(lab_id, name, settings, submission)
    except ValueError as error:
        raise LabError(str(error)) from None
    except WeakIsolation as error:
        raise LabError(str(error)) from None
    typer.echo(f"{student}, {lab_id}, {found.name}: {'passes' if found.passed else 'departs'}")
    if found.said:
        typer.echo(found.said)
    raise typer.Exit(0 if found.passed else 1)


# ------------------------------------------------------------------------------------------------ Gradescope


def gradescope(
    out: Annotated[Path, typer.Option("--out", help="the zip to write")] = Path("autograder.zip"),
    labs: Annotated[str, typer.Option("--labs", help="lab-01,lab-02, or 1,2; all without it")] = "",
    seed: Annotated[str, typer.Option("--seed", help="of the hidden cases; without it, a new one")] = "",
    hidden: Annotated[
        Path | None, typer.Option("--hidden", help="folder with your own cases: lab-NN/NAME.json")
    ] = None,
    late: Annotated[
        Path | None, typer.Option("--late", help='deadlines, TOML, with times = "submission_metadata.json"')
    ] = None,
    reveal: Annotated[bool, typer.Option("--reveal", help="show hidden cases to students")] = False,
) -> None:
    """For instructors: build the zip that Gradescope grades with. It has the solutions in it."""
    from labs.kit.grader.gradescope import build

    which, seed = chosen(labs), sound(seed) or secrets.token_hex(8)
    writable(out)
    build(out, which, seed, late, own_cases(hidden, which), reveal)
    size = out.stat().st_size / (1 << 20)
    say(f"{out}, {size:.1f} MB, grades {', '.join(which)}; seed {seed}; upload it under Configure Autograder")


COMMANDS: list[Callable[..., None]] = [grade, replay, gradescope]
