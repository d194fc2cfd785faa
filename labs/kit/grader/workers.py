"""The workers that grade: processes of this machine, or those of a Dask cluster."""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any

from labs.kit.grader import cases
from labs.kit.grader.grading import digest, isolation
from labs.kit.grader.results import Grade
from labs.kit.grader.sandbox import is_root
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import LabError
from labs.kit.learner.screen import complain
from labs.kit.toys.words import describe

ROOT = (
    "root should not run other people's code: grade as another user, or, on a machine that holds nothing "
    "else and is thrown away, with --as-root"
)
Grading = Callable[[Submission, Settings], Grade]
AGAIN = "the same command resumes it"
GONE = f"the cluster has gone; {AGAIN}"
OTHER = "it has another version of the course, or other files in --hidden"
NONE_LEFT = f"no worker of the cluster is left; {AGAIN}"
JOINING = 60.0  # seconds for a cluster's first worker
_lock = threading.Lock()  # a process has one sandbox for each lab, and a Dask worker may run threads


def graded(grading: Grading, submission: Submission, settings: Settings) -> str:
    """Return a grade as JSON; called in a worker, which root may not be without the flag."""
    if is_root() and not settings.as_root:
        raise LabError(ROOT)
    with _lock:
        return grading(submission, settings).to_json()


def judging(settings: Settings) -> str:
    """Return a digest of everything that a grade from this worker depends on beside the submission."""
    return digest(Submission("", {}), settings)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Local:
    """Processes of this machine."""

    lost: tuple[type[Exception], ...] = (BrokenExecutor, CancelledError)  # raised where a worker has gone

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.scratch = tempfile.mkdtemp(prefix="grade-")
        self.executor = self._executor()

    def _executor(self) -> Executor:
        # Spawned, not forked: a worker inherits nothing of this process but what it is sent.
        return ProcessPoolExecutor(self.jobs, get_context("spawn"), begin, (self.scratch,))

    def share(self, settings: Settings) -> None:
        """Have the expected runs of each lab computed by one worker for all."""
        if self.jobs > 1 and isolation() == "namespaces":  # else a submission could read their folder
            same = replace(settings, hidden=0) if settings.own_seeds else settings
            for lab_id in settings.labs:
                self.submit(cases.share, lab_id, same)

    def submit(self, *call: Any) -> Future[Any]:
        try:
            return self.executor.submit(*call)
        except self.lost:
            self.executor.shutdown(wait=False, cancel_futures=True)
            self.executor = self._executor()
            return self.executor.submit(*call)

    def width(self) -> int:
        """Return the number of submissions that may be running or waiting at once."""
        return 2 * self.jobs

    def stop(self) -> None:
        """End the workers at once; their sandboxes end with them."""
        for child in active_children():
            if child.name.startswith("SpawnProcess"):
                child.kill()
        self.executor.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.scratch, ignore_errors=True)


def begin(scratch: str) -> None:
    """Make a worker ignore interrupts, and end when the grader ends for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cases.shared = Path(scratch)
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
    """Raise LabError if this is not an address; Dask would wait for it without end."""
    if not re.fullmatch(r"([a-z]+://)?[^\s/:]+:\d{1,5}/?", address):
        raise LabError(f"--cluster should be an address such as tcp://10.0.0.1:8786, but is {address!r}")


class Cluster:
    """A Dask cluster's workers, each with this course installed and the same folder for --hidden.

    A process grades one submission at a time: dask worker ADDRESS --nworkers auto --nthreads 1
    A worker that has another version of the course is retired from the cluster, also one that joins later.
    """

    # Any error may be one of a worker that joined a moment ago and lacks what the course needs.
    lost: tuple[type[Exception], ...] = (Exception,)

    def __init__(self, address: str, settings: Settings):
        try:
            from distributed import Client
        except ImportError:
            raise LabError("--cluster needs the package distributed: pip install '.[grade]'") from None
        self.settings, self.known = settings, set[str]()  # addresses of workers that were asked
        try:
            self.client = Client(address, set_as_default=False)
            self.client.wait_for_workers(1, timeout=JOINING)
        except (OSError, ValueError) as error:  # a timeout is an OSError
            why = describe(error)
            raise LabError(f"the cluster {address} cannot be reached, or has no workers: {why}") from None
        self.executor: Executor = self.client.get_executor(pure=False)

    def share(self, settings: Settings) -> None:
        """Do nothing: its workers have no folder in common."""

    def submit(self, *call: Any) -> Future[Any]:
        if self.client.status != "running":
            raise LabError(GONE)
        self.retire_others()
        return self.executor.submit(*call)

    def retire_others(self) -> None:
        """Retire each worker that is new and has another version of the course."""
        try:
            here = set(self.client.nthreads())
            new, self.known = here - self.known, here
            answers = (
                self.client.run(judging, self.settings, workers=[*new], on_error="return") if new else {}
            )
            own = judging(self.settings) if new else ""
            others = {address: said for address, said in answers.items() if said != own}
            for address, said in others.items():
                why = describe(said) if isinstance(said, Exception) else OTHER
                complain(f"the worker {address} is retired from the cluster: {why}")
            if others:
                self.client.retire_workers([*others], close_workers=True)
        except OSError:  # the scheduler has just ended
            raise LabError(GONE) from None
        if others and not here - others.keys():
            raise LabError(NONE_LEFT)

    def width(self) -> int:
        try:
            threads: dict[str, int] = self.client.nthreads()
        except OSError:  # the scheduler has just ended
            raise LabError(GONE) from None
        return 2 * max(1, sum(threads.values()))

    def stop(self) -> None:
        self.executor.shutdown(wait=False)  # cancels, too
        self.client.close()


Pool = Local | Cluster
