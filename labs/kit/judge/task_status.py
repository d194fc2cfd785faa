"""The status of each task of a starter: right, wrong by itself, or waiting for another task.

Wherever possible a task is judged alone, with the reference's code for the other tasks. This separates a
task that is wrong from one that fails only because another is wrong, or not written yet.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from labs.kit.judge.manifest import Lab, Task
from labs.kit.judge.pristine import NOT_WRITTEN

NO_ANSWER = ("TimeUp", "NotBegun", "PrintFlood", "LoadProblem", "SystemExit", "MemoryError")


@dataclass
class Result:
    """The result of one test on one variant: `said` is the error in one line, `runs` the traces' digest."""

    test: str  # the node's name, with its parameters
    passed: bool
    said: str = ""
    runs: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]


@dataclass(frozen=True)
class Name:
    """A known mistake: its title, its hint, and the test that shows it best."""

    title: str
    hint: str
    test: str


@dataclass
class TaskStatus:
    """A lab's results on one file: as a whole (`results`), and of single tasks where needed (`alone`)."""

    lab: Lab
    results: list[Result]
    alone: dict[str, list[Result]] = field(default_factory=dict)
    unwritten: Sequence[str] = ()
    blamed: str = ""  # of the wrong tasks the one to correct first, where they cannot be told apart

    def of(self, task: Task, results: Sequence[Result]) -> list[Result]:
        """Return the results of a task's tests, in the task's order."""
        return [result for test in task.tests for result in results if result.function == test]

    def judged(self, task: Task) -> list[Result]:
        """Return the results that judge a task: alone where that is meaningful, else in the whole file."""
        whole, alone = self.of(task, self.results), self.of(task, self.alone.get(task.name, ()))
        if self.wrong_only_together or not self.fits(task):
            return whole
        found = {result.test: result for result in alone}  # tests that had passed may be missing
        return [found.get(result.test, result) for result in whole]

    def fits(self, task: Task) -> bool:
        """Return whether the task can be judged alone: it passes beside the reference's parts what it did.

        A task that passes in the file and fails beside the reference's parts has attributes of its own.
        """
        passed = {result.test for result in self.of(task, self.results) if result.passed}
        alone = self.of(task, self.alone.get(task.name, ()))
        return bool(alone) and not any(result.test in passed for result in alone if not result.passed)

    @property
    def wrong_only_together(self) -> bool:
        """Whether the file fails although each task alone passes: the tasks do not fit together."""
        alone = [result for results in self.alone.values() for result in results]
        return bool(alone) and not self.unwritten and all(r.passed for r in alone) and not self.is_done

    def failures(self, task: Task) -> list[Result]:
        return [result for result in self.judged(task) if not result.passed]

    def passed(self, task: Task) -> int:
        """Return how many of the task's tests pass; as in pytest, each case of a test is one."""
        return sum(result.passed for result in self.judged(task))

    def done(self, task: Task) -> bool:
        """Return whether all tests of the task pass in the whole file."""
        results = self.of(task, self.results)
        return {r.function for r in results} == {*task.tests} and all(r.passed for r in results)

    @property
    def endless(self) -> Result | None:
        """The test that did not end in the whole file; those after it were not run."""
        return next((result for result in self.results if result.said.startswith("TimeUp")), None)

    @property
    def is_done(self) -> bool:
        return all(self.done(task) for task in self.lab.tasks)

    @property
    def points(self) -> int:
        return sum(task.points for task in self.lab.tasks if self.done(task))

    def waits_for(self, task: Task) -> Task | None:
        """Return the task, wrong or not written yet, that is the only reason why this one's tests fail."""
        if self.done(task) or task.name in self.unwritten:
            return None
        failures = self.failures(task)
        if self.endless and self.blamed:
            return None if task.name == self.blamed else self.lab.task(self.blamed)
        if not failures:  # alone it is right
            found = [self._needed(task, result) for result in self.of(task, self.results)]
            others = [t for t in self.lab.tasks if t is not task and not self.done(t)]
            wrong = [t for t in others if t.name not in self.unwritten and self.failures(t)]
            return next((t for t in [*found, *wrong, *others] if t), None)
        needed = [self._needed(task, result) for result in failures]
        return needed[0] if all(needed) else self._alike_but_worse(task, failures)

    def _alike_but_worse(self, task: Task, failures: Sequence[Result]) -> Task | None:
        """Return the task that fails these tests with the same errors, and more tests of its own."""
        mine = {(result.test, result.said) for result in failures}
        others = (t for t in self.lab.tasks if t is not task and t.name not in self.unwritten)
        return next((t for t in others if mine < {(r.test, r.said) for r in self.failures(t)}), None)

    @cached_property
    def wrong(self) -> list[Task]:
        """The tasks that are written and wrong by themselves; the one that is blamed comes first."""
        found = [
            task
            for task in self.lab.tasks
            if task.name not in self.unwritten and self.failures(task) and not self.waits_for(task)
        ]
        return sorted(found, key=lambda task: task.name != self.blamed)

    @property
    def next_task(self) -> Task | None:
        """The task to do next: the first that is wrong, else the first that is not written, or waits."""
        if self.wrong:
            return self.wrong[0]
        left = [task for task in self.lab.tasks if not self.done(task)]
        # A task that is right by itself needs no work.
        task = next((t for t in left if t.name in self.unwritten or self.failures(t)), next(iter(left), None))
        seen: list[Task] = []
        while task and task not in seen and (needed := self.waits_for(task)):
            seen.append(task)
            task = needed
        return task

    def describe(self, task: Task) -> str:
        """Return the status of a task in a few words."""
        if task.name in self.unwritten:
            return "not written yet"
        passed = f"{self.passed(task)} of {len(self.judged(task))} tests pass"
        if self.done(task):
            return passed
        if not_run := sum(result.said.startswith("NotBegun") for result in self.failures(task)):
            passed += f", {not_run} not run"
        by_itself = "" if self.failures(task) else " by itself"
        if needed := self.waits_for(task):
            return f"{passed}{by_itself}; waits for {needed.name}"
        return passed

    @property
    def most_informative(self) -> Result | None:
        """The most informative failure of the next task: for a known mistake, the test that shows it best."""
        if not (task := self.next_task):
            return None
        if self.endless and task.name == self.blamed:
            return self.endless
        failures, name = self.failures(task), self.name(task)
        own = [result for result in failures if name and result.function == name.test]
        return next(iter([*own, *(r for r in failures if not self._needed(task, r)), *failures]), None)

    def name(self, task: Task) -> Name | None:
        """Return the known mistake that has the fingerprint of this task's failures."""
        digest = fingerprint(task, self.judged(task))
        return known(self.lab).get(task.name, {}).get(digest) if digest else None

    def _needed(self, task: Task, result: Result) -> Task | None:
        """Return the other task of this lab that a test called and that is not written yet."""
        found = NOT_WRITTEN.search(result.said)
        if not found or found[1] != self.lab.id:
            return None
        owners = (t for t in self.lab.tasks if f"{found[2]}.".startswith(f"{t.name}."))
        return next((owner for owner in owners if owner is not task), None)


def load_problem(results: Sequence[Result]) -> str:
    """Return why the file could not be loaded, where every test failed for that; else ""."""
    errors = {result.said for result in results}
    problem = errors.pop() if len(errors) == 1 else ""
    return problem.removeprefix("LoadProblem: ") if problem.startswith("LoadProblem: ") else ""


def fingerprint(task: Task, results: Sequence[Result]) -> str:
    """Return a digest of the behaviour in all tests of a task; "" if all pass, or if one did not end.

    It covers traces, the observations of the random scripts, and the types of exceptions; no messages, which
    differ by Python, torch and platform.
    """
    rows = sorted((r.test, r.said.partition(":")[0], r.runs) for r in results if r.function in task.tests)
    ended = not any(one.startswith(NO_ANSWER) for _, *two in rows for one in two)
    whole = {*task.tests} <= {r.function for r in results}
    if not (ended and whole) or all(r.passed for r in results if r.function in task.tests):
        return ""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def scripts_fingerprint(runs: str) -> str:
    """Return a digest of the random scripts' observations alone; for the grader, which runs no tests."""
    return "random_scripts " + hashlib.sha256(runs.encode()).hexdigest()[:16]


def known(lab: Lab) -> dict[str, dict[str, Name]]:
    """Return the known mistakes by task and fingerprint, from fingerprints.json (`labs check --write`).

    The file has the ids of mistakes.toml. The student edition has no mistakes.toml: its file is exported with
    title, hint and test in place of an id.
    """
    path = lab.file("fingerprints.json")
    if not path.exists():
        return {}
    names = {one.id: Name(one.title, one.hint.strip(), one.caught_by) for one in lab.mistakes}
    found: dict[str, dict[str, Name]] = {}
    for task, mistakes in json.loads(path.read_text(encoding="utf-8")).items():
        listed = (
            (key, Name(*one) if isinstance(one, list) else names.get(one)) for key, one in mistakes.items()
        )
        found[task] = {key: name for key, name in listed if name}
    return found
