"""Grades a class in workers, and stores each grade as it comes.

A stored grade with the same digest is not made again, so an interrupted run goes on where it was. Submissions
are read when a worker is about to be free, so memory does not grow with the class.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from labs.kit.grader import store
from labs.kit.grader.grading import digest, grade
from labs.kit.grader.results import Grade
from labs.kit.grader.sandbox import WeakIsolation
from labs.kit.grader.submission import Settings, Submission, named
from labs.kit.grader.workers import OTHER, Grading, Pool, graded
from labs.kit.judge.manifest import LabError
from labs.kit.toys.words import describe

GRADED, KEPT, FAILED = "graded", "kept", "failed"
TRIES = 3  # of a submission whose worker is lost or may be at fault; after the first it runs alone


@dataclass(frozen=True)
class Outcome:
    """The end of one submission's grading. FAILED is a fault of the grader, and leaves no grade."""

    student: str
    state: str
    why: str = ""
    attempt: int = 0

    @property
    def name(self) -> str:
        return named(self.student, self.attempt)


@dataclass
class Work:
    """A submission on its way to a stored grade."""

    submission: Submission
    digest: str
    folder: Path
    finish: Callable[[Grade], Grade]
    tries: int = 0

    def is_stored(self) -> bool:
        """Whether this submission's grade is there already. What lateness costs is counted anew."""
        found = store.load(self.folder, self.submission.student, self.submission.attempt)
        if found is None or (found.student, found.digest) != (self.submission.student, self.digest):
            return False
        if (finished := self.finish(found)) != found:
            store.save(self.folder, finished)
        return True

    def stored(self, text: str) -> Outcome:
        """Store a worker's answer. Raise LabError if it is not one to this submission in this course."""
        grade = Grade.from_json(text)
        if (grade.student, grade.digest) != (self.submission.student, self.digest):
            raise LabError(OTHER)
        store.save(self.folder, self.finish(grade))
        return Outcome(grade.student, GRADED, attempt=grade.attempt)

    def failed(self, why: str) -> Outcome:
        student, attempt = self.submission.student, self.submission.attempt
        for one in {attempt, 0}:  # an older grade is of another submission
            store.path(self.folder, student, one).unlink(missing_ok=True)
        return Outcome(student, FAILED, why, attempt)


def grade_class(
    submissions: Iterable[Submission],
    settings: Settings,
    folder: Path,
    pool: Pool,
    finish: Callable[[Grade], Grade] = lambda grade: grade,
    grading: Grading = grade,
) -> Iterator[Outcome]:
    """Grade each submission and store `finish` of its grade; yield outcomes as they come."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.part"):
        left.unlink()
    coming = iter(submissions)
    running: dict[Future[str], Work] = {}
    suspects: list[Work] = []  # were running when a worker was lost
    is_shared = False
    while True:
        alone = bool(suspects)
        while len(running) < (1 if alone else pool.width()):
            if alone:
                work = suspects.pop()
            elif (submission := next(coming, None)) is None:
                break
            else:
                work = Work(submission, digest(submission, settings), folder, finish)
                if work.is_stored():
                    yield Outcome(submission.student, KEPT, attempt=submission.attempt)
                    continue
            if not is_shared:
                pool.share(settings)
                is_shared = True
            running[pool.submit(graded, grading, work.submission, settings)] = work
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            work = running.pop(future)
            try:
                outcome = work.stored(future.result())
            except WeakIsolation:
                raise
            except pool.lost as error:
                work.tries += 1
                if work.tries < TRIES:
                    suspects.append(work)
                    continue
                outcome = work.failed(f"{TRIES} times, the last time: {describe(error)}")
            except Exception as error:
                outcome = work.failed(describe(error))
            yield outcome
