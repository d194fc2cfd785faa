"""Grades a class from the command line: reads it, grades it in workers, and writes the report."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import track

from labs.kit.grader import arguments, grading, intake, pool, regrade, similarity, store, workers
from labs.kit.grader.late import Deadlines
from labs.kit.grader.late import read as read_deadlines
from labs.kit.grader.report import write_reports
from labs.kit.grader.results import Case
from labs.kit.grader.sandbox import WeakIsolation, is_root
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.learner.screen import complain, say
from mini_engine.commands.common import check_folder

NOT_GRADED = "not-graded.txt"
WEAK = "--allow-weak-isolation grades without them, and the report says so in its first line"
ROOT = (
    "root should not run what others wrote: grade as another user, or, on a machine that holds nothing else "
    "and is thrown away, with --as-root"
)


def grade(
    submissions: Path,
    out: Path,
    settings: Settings,
    jobs: int,
    late: Path | None,
    cluster: str,
    with_similarity: bool,
    earlier: Path | None,
) -> int:
    """Write a report, and return the exit code: 1 if a submission was not graded, 130 if interrupted."""
    if out.resolve().is_relative_to(submissions.resolve()):
        raise LabError("--out should lie outside of the folder of submissions")
    if earlier and not (earlier / "grades").is_dir():
        raise LabError(f"{earlier} is not a report: it has no folder grades")
    if cluster:
        workers.check_address(cluster)
    check_folder(out)
    entries, others = intake.entries(submissions)
    deadlines = read_deadlines(late, [one.student for one in entries]) if late else Deadlines()
    if not cluster and not settings.weak and grading.isolation() != "namespaces":
        raise LabError(f"this machine offers no namespaces, or has no bwrap, to run submissions in; {WEAK}")
    if not cluster and is_root() and not settings.as_root:
        raise LabError(ROOT)
    for name, why in others.items():
        say(f"not a submission, so it was not read: {name}: {why}")
    arguments.record(out, submissions, late, settings)

    def read() -> Iterator[Submission]:
        for entry in entries:
            yield intake.read(entry, settings.labs, deadlines.written(entry.student))

    folder, jobs = out / "grades", min(jobs or workers.cores(), len(entries))
    crew: workers.Pool = workers.Cluster(cluster) if cluster else workers.Local(jobs)
    console = Console(stderr=True)
    try:
        coming = pool.grade_class(read(), settings, folder, crew, deadlines.applied)
        quiet = not console.is_terminal
        outcomes = [*track(coming, "grading", len(entries), console=console, transient=True, disable=quiet)]
    except (KeyboardInterrupt, SystemExit) as ended:  # SIGTERM
        complain("interrupted; the same command goes on where this one was")
        return 130 if isinstance(ended, KeyboardInterrupt) else 143
    except WeakIsolation as error:
        raise LabError(f"{error}; {WEAK}") from None
    finally:
        crew.stop()
    grades = store.Grades(folder, (one.student for one in outcomes if one.state != pool.FAILED))
    write_reports(out, grades, settings, others)
    if with_similarity:
        for line in similarity.compare(read(), settings.labs, out):
            say(line)
    if earlier:
        for line in regrade.changes(earlier, grades):
            typer.echo(line)
    return summary(outcomes, grades, settings, out)


def summary(outcomes: Sequence[pool.Outcome], grades: store.Grades, settings: Settings, out: Path) -> int:
    """Print the last line, and write down the submissions that were not graded; return the exit code."""
    failed = sorted((one for one in outcomes if one.state == pool.FAILED), key=lambda one: one.student)
    kept = sum(one.state == pool.KEPT for one in outcomes)
    lines = [f"{one.student}: NOT GRADED, and in no table: {one.why}" for one in failed]
    for line in lines:
        complain(line)
    (out / NOT_GRADED).unlink(missing_ok=True)
    if failed:
        (out / NOT_GRADED).write_text("\n".join([*lines, ""]), "utf-8")
    points = earned = 0.0
    isolation = set()
    for one in grades:
        points, earned = sum(lab.points for lab in one.labs), earned + one.earned
        isolation.add(one.isolation)
    parts = [f"{len(grades)} graded" + (f" ({kept} of them before)" if kept else "")]
    parts += [f"{len(failed)} NOT GRADED"] if failed else []
    parts += [f"mean {earned / len(grades):.1f} of {points:g} points"] if len(grades) else []
    parts += [f"isolation: {', '.join(sorted(isolation)) or 'none'}", f"seed {settings.seed}"]
    say(f"{'; '.join(parts)}; the report is in {out}")
    return 1 if failed else 0


def replay(report: Path, student: str, lab: str, case: str) -> Case:
    """Play one case of a graded submission again, print its run, and return its result."""
    settings, submissions, late = arguments.recorded(report)
    if is_root() and not settings.as_root:
        raise LabError(ROOT)
    lab_id, (entries, _) = find_lab(lab).id, intake.entries(submissions)
    entry = next((one for one in entries if one.student == student), None)
    if entry is None:
        raise LabError(f"{submissions} has no submission of {student}")
    deadlines = read_deadlines(late, [one.student for one in entries]) if late else Deadlines()
    submission = intake.read(entry, settings.labs, deadlines.written(student))
    stored = store.load(report / "grades", student)
    if stored and stored.digest != grading.digest(submission, settings):
        complain("the submission or the course has changed since it was graded; this is its run now")
    try:
        found = grading.replayed(lab_id, case, settings, submission)
    except (ValueError, WeakIsolation) as error:
        raise LabError(str(error)) from None
    departs = found.said.startswith(f"{found.name} departs:")
    verdict = "passes" if found.passed else "departs" if departs else "was not played to its end"
    typer.echo(f"{student}, {lab_id}, {found.name}: {verdict}")
    if found.said:
        typer.echo(found.said)
    return found
