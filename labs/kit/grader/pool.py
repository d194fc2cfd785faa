"""Grades a class in worker processes, on this machine or on a Dask cluster, and keeps each grade as it comes.

A grade lies in REPORT/grades/STUDENT.json, written in one move. One that is there with the same digest is
not made again, so a run that was interrupted goes on where it was. Submissions are read when a worker is
about to be free: what is held in memory does not grow with the class.
"""

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

from labs.kit.grader.grading import Settings, Submission, digest, grade
from labs.kit.grader.results import Grade
from labs.kit.grader.sandbox import WeakIsolation
from labs.kit.judge.manifest import LabError

Grading = Callable[[Submission, Settings], Grade]
GRADED, KEPT, FAILED = "graded", "kept", "failed"
TRIES = 3  # of a submission whose worker is lost; all but the first with no other beside it
JOINING = 60.0  # seconds that a cluster's first worker may take


@dataclass(frozen=True)
class Outcome:
    """What became of one submission: FAILED where the grader did, and then there is no grade."""

    student: str
    state: str
    why: str = ""


@dataclass
class Work:
    submission: Submission
    digest: str
    tries: int = 0


class Pool(Protocol):
    """Workers, wherever they are."""

    lost: tuple[type[Exception], ...]  # what a future raises whose worker has gone

    def submit(self, *call: Any) -> Future[str]: ...
    def width(self) -> int: ...  # submissions that may be out at once
    def renew(self) -> None: ...
    def stop(self) -> None: ...


def grade_class(
    submissions: Iterable[Submission],
    settings: Settings,
    report: Path,
    pool: Pool,
    finish: Callable[[Grade], Grade] = lambda grade: grade,
    grading: Grading = grade,
) -> Iterator[Outcome]:
    """Grade each and store it, finished by `finish`; outcomes in the order in which they come."""
    folder = report / "grades"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.part"):
        left.unlink()
    coming = iter(submissions)
    out: dict[Future[str], Work] = {}
    suspects: list[Work] = []  # were out when a worker was lost
    while True:
        alone = bool(suspects)
        while len(out) < (1 if alone else pool.width()):
            if alone:
                work = suspects.pop()
            elif (submission := next(coming, None)) is None:
                break
            else:
                work = Work(submission, digest(submission, settings))
                if keep(stored(folder, submission.student), work, folder, finish):
                    yield Outcome(submission.student, KEPT)
                    continue
            out[submitted(pool, work, settings, grading)] = work
        if not out:
            return
        done, _ = wait(out, return_when=FIRST_COMPLETED)
        for future in done:
            work = out.pop(future)
            try:
                outcome = result(future, work, folder, finish, pool.lost)
            except pool.lost as error:
                work.tries += 1
                if work.tries < TRIES:
                    suspects.append(work)
                    continue
                outcome = failed(work, folder, f"its worker was lost {TRIES} times: {said(error)}")
            yield outcome


def submitted(pool: Pool, work: Work, settings: Settings, grading: Grading) -> Future[str]:
    try:
        return pool.submit(graded, grading, work.submission, settings)
    except pool.lost:
        pool.renew()
        return pool.submit(graded, grading, work.submission, settings)


def result(
    future: Future[str],
    work: Work,
    folder: Path,
    finish: Callable[[Grade], Grade],
    lost: tuple[type[Exception], ...],
) -> Outcome:
    """Store what a worker answered. Raises what says that the worker is lost, or that none can work."""
    try:
        text = future.result()
    except WeakIsolation:
        raise
    except lost:
        raise
    except Exception as error:
        return failed(work, folder, said(error))
    grade = Grade.from_json(text)
    if (grade.student, grade.digest) != (work.submission.student, work.digest):
        return failed(
            work, folder, "its worker has another version of the course, or other files to --hidden"
        )
    store(folder, finish(grade))
    return Outcome(grade.student, GRADED)


def failed(work: Work, folder: Path, why: str) -> Outcome:
    path(folder, work.submission.student).unlink(missing_ok=True)  # an older one is no grade of this
    return Outcome(work.submission.student, FAILED, why)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ").splitlines()[0][:300]


# ---------------------------------------------------------------------------------------------- what is kept


def path(folder: Path, student: str) -> Path:
    return folder / f"{student}.json"


def store(folder: Path, grade: Grade) -> None:
    """In one move, so that a grade is there as a whole or not at all."""
    written = folder / f".{grade.student}.part"
    with written.open("w", encoding="utf-8", newline="\n") as file:
        file.write(grade.to_json())
        file.flush()
        os.fsync(file.fileno())
    written.replace(path(folder, grade.student))


def stored(folder: Path, student: str) -> Grade | None:
    """None for what is not there, or is no grade."""
    try:
        return Grade.from_json(path(folder, student).read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(found: Grade | None, work: Work, folder: Path, finish: Callable[[Grade], Grade]) -> bool:
    """Whether that is this submission's grade; what lateness costs is counted anew."""
    if found is None or (found.student, found.digest) != (work.submission.student, work.digest):
        return False
    if (finished := finish(found)) != found:
        store(folder, finished)
    return True


class Grades:
    """The stored grades of these students, read one by one each time they are gone through."""

    def __init__(self, report: Path, students: Iterable[str]):
        self.folder, self.students = report / "grades", sorted(students)

    def __iter__(self) -> Iterator[Grade]:
        for student in self.students:
            yield Grade.from_json(path(self.folder, student).read_text("utf-8"))

    def __len__(self) -> int:
        return len(self.students)


# --------------------------------------------------------------------------------------------------- workers

_one = threading.Lock()  # a process has one sandbox a lab; a Dask worker may run threads


def graded(grading: Grading, submission: Submission, settings: Settings) -> str:
    """In a worker."""
    with _one:
        return grading(submission, settings).to_json()


class Local:
    """Processes of this machine."""

    lost: tuple[type[Exception], ...] = (BrokenExecutor, CancelledError)

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.scratch = tempfile.mkdtemp(prefix="grade-")
        self.executor = self._executor()

    def _executor(self) -> Executor:
        # Spawned, not forked: a worker inherits nothing of this process but what it is sent.
        return ProcessPoolExecutor(self.jobs, get_context("spawn"), begin, (self.scratch,))

    def submit(self, *call: Any) -> Future[str]:
        return self.executor.submit(*call)

    def width(self) -> int:
        return 2 * self.jobs

    def renew(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.executor = self._executor()

    def stop(self) -> None:
        """At once; the sandboxes end with their workers."""
        for child in active_children():
            if child.name.startswith("SpawnProcess"):
                child.kill()
        self.executor.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.scratch, ignore_errors=True)


def begin(scratch: str) -> None:
    """A worker leaves interrupts to the grader, and ends when that has gone, however it went."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        tempfile.tempdir = tempfile.mkdtemp(dir=scratch)
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()


def _end_with_parent(scratch: str) -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def check_address(address: str) -> None:
    """Raises LabError for what is no address; Dask would wait for it, and never end."""
    if not re.fullmatch(r"([a-z]+://)?[^\s/:]+:\d{1,5}/?", address):
        raise LabError(f"--cluster should be an address such as tcp://10.0.0.1:8786, but is {address!r}")


class Cluster:
    """A Dask cluster's workers, each with this course installed and the same folder for --hidden.

    A process grades one submission at a time: dask worker ADDRESS --nworkers auto --nthreads 1
    """

    def __init__(self, address: str):
        try:
            from distributed import Client, KilledWorker
        except ImportError:
            raise LabError("--cluster needs the package distributed: pip install '.[grade]'") from None
        self.lost: tuple[type[Exception], ...] = (KilledWorker, CancelledError)
        try:
            self.client = Client(address, set_as_default=False)
            self.client.wait_for_workers(1, timeout=JOINING)
        except (OSError, ValueError) as error:  # a timeout is an OSError
            raise LabError(
                f"the cluster {address} cannot be reached, or has no workers: {said(error)}"
            ) from None
        self.executor: Executor = self.client.get_executor(pure=False)

    def submit(self, *call: Any) -> Future[str]:
        if self.client.status != "running":
            raise LabError("the cluster has gone; the same command goes on where this one was")
        return self.executor.submit(*call)

    def width(self) -> int:
        threads: dict[str, int] = self.client.nthreads()
        return 2 * max(1, sum(threads.values()))

    def renew(self) -> None:
        """The scheduler does."""

    def stop(self) -> None:
        self.executor.shutdown(wait=False)  # which cancels, too
        self.client.close()
