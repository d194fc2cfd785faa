"""Grades a class from the command line: reads it, grades it in workers, and writes the report."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import track

from labs.kit.grader import arguments, grading, intake, pool, regrade, rules, similarity, store, workers
from labs.kit.grader.report import Around, write_reports
from labs.kit.grader.results import Case
from labs.kit.grader.sandbox import WeakIsolation, is_root
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.learner.screen import complain, say
from mini_engine.commands.common import check_folder

NOT_GRADED = "not-graded.txt"
WEAK = "--allow-weak-isolation grades without them, and the report says so in its first line"


def grade(
    submissions: Path,
    out: Path,
    settings: Settings,
    jobs: int,
    files: rules.Files,
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
    entries, others = intake.entries(submissions, bool(files.attempts))
    ruled = rules.read(files, entries)
    entries, beyond = rules.within(entries, files.max_attempts)
    if not cluster and not settings.weak and grading.isolation() != "namespaces":
        raise LabError(f"this machine offers no namespaces, or has no bwrap, to run submissions in; {WEAK}")
    if not cluster and is_root() and not settings.as_root:
        raise LabError(workers.ROOT)
    for name, why in others.items():
        say(f"not a submission, so it was not read: {name}: {why}")
    others |= beyond
    arguments.record(out, submissions, files, settings)

    def read() -> Iterator[Submission]:
        for entry in entries:
            written = ruled.deadlines.written(entry.student, entry.attempt)
            yield intake.read(entry, settings.labs, written)

    folder, jobs = out / "grades", min(jobs or workers.cores(), len(entries))
    crew: workers.Pool = workers.Cluster(cluster, settings) if cluster else workers.Local(jobs)
    console = Console(stderr=True)
    try:
        coming = pool.grade_class(read(), settings, folder, crew, ruled.applied)
        quiet = not console.is_terminal
        outcomes = [*track(coming, "grading", len(entries), console=console, transient=True, disable=quiet)]
    except (KeyboardInterrupt, SystemExit) as ended:  # SIGTERM
        complain("interrupted; the same command resumes it")
        return 130 if isinstance(ended, KeyboardInterrupt) else 143
    except WeakIsolation as error:
        raise LabError(f"{error}; {WEAK}") from None
    finally:
        crew.stop()
    failed = {one.student for one in outcomes if one.state == pool.FAILED}
    grades = store.Grades(folder, {entry.student for entry in entries} - failed)
    for student in grades.students:
        each = [store.load(folder, student, one.attempt) for one in entries if one.student == student]
        store.save(folder, ruled.counted([one for one in each if one]))
    alike = None
    if with_similarity:
        lines, alike = similarity.compare(read(), settings.labs, out)
        for line in lines:
            say(line)
    write_reports(out, grades, settings, Around(others, ruled.absent, ruled.has_roster, alike))
    if earlier:
        for line in regrade.changes(earlier, grades):
            typer.echo(line)
    return summary(outcomes, grades, settings, out)


def summary(outcomes: Sequence[pool.Outcome], grades: store.Grades, settings: Settings, out: Path) -> int:
    """Print the last line, and write down the submissions that were not graded; return the exit code."""
    in_order = sorted(outcomes, key=lambda one: (one.student, one.attempt))
    failed = [one for one in in_order if one.state == pool.FAILED]
    anew = {one.student for one in outcomes if one.state != pool.KEPT}
    kept = len({one.student for one in outcomes} - anew)
    lines = [f"{one.name}: NOT GRADED, and in no table: {one.why}" for one in failed]
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


def replay(report: Path, student: str, lab: str, case: str, attempt: int = 0) -> Case:
    """Play one case of a graded submission again, print its run, and return its result.

    Of several attempts it is the last one, unless `attempt` says which.
    """
    settings, submissions, files = arguments.recorded(report)
    if is_root() and not settings.as_root:
        raise LabError(workers.ROOT)
    lab_id, (entries, _) = find_lab(lab).id, intake.entries(submissions, bool(files.attempts))
    if lab_id not in settings.labs:
        raise LabError(f"{report} has no {lab_id}; it has {', '.join(settings.labs)}")
    tries = [one for one in entries if one.student == student and attempt in (0, one.attempt)]
    if not tries:
        which = f"attempt {attempt}" if attempt else "submission"
        raise LabError(f"{submissions} has no {which} of {student}")
    entry, deadlines = tries[-1], rules.read(files, entries).deadlines
    submission = intake.read(entry, settings.labs, deadlines.written(student, entry.attempt))
    stored = store.load(report / "grades", student, entry.attempt)
    if stored and stored.digest != grading.digest(submission, settings):
        complain("the submission or the course has changed since it was graded; this is its run now")
    try:
        found = grading.replayed(lab_id, case, settings, submission)
    except (ValueError, WeakIsolation) as error:
        raise LabError(str(error)) from None
    departs = found.said.startswith(f"{found.name} departs:")
    verdict = "passes" if found.passed else "departs" if departs else "was not played to its end"
    typer.echo(f"{submission.name}, {lab_id}, {found.name}: {verdict}")
    if found.said:
        typer.echo(found.said)
    return found
