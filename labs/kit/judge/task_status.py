"""How a starter stands: which tasks are right, which are wrong by themselves, which wait for others.

A task is judged alone, the other tasks filled in from the reference, wherever that can be done. So a
task that fails only because another is wrong, or not written yet, is told apart from one that is wrong.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from labs.kit.judge.manifest import Lab, Task
from labs.kit.judge.pristine import NOT_WRITTEN
from labs.kit.judge.result import Result

NO_ANSWER = ("TimeUp", "NotBegun", "PrintFlood", "LoadProblem", "SystemExit", "MemoryError")


@dataclass(frozen=True)
class Name:
    """A known mistake: what its behaviour is called, the hint, and the test that tells most of it."""

    title: str
    hint: str
    test: str


@dataclass
class TaskStatus:
    """A lab's results on one file, whole (`results`) and task by task (`alone`, where it was needed)."""

    lab: Lab
    results: list[Result]
    alone: dict[str, list[Result]] = field(default_factory=dict)
    unwritten: Sequence[str] = ()

    def of(self, task: Task, results: Sequence[Result]) -> list[Result]:
        """The results of a task's tests, in the order in which the task lists them."""
        return [result for test in task.tests for result in results if result.function == test]

    def judged(self, task: Task) -> list[Result]:
        """A task's results: alone where it was run so and that says something, else in the whole file."""
        whole, alone = self.of(task, self.results), self.of(task, self.alone.get(task.name, ()))
        if self.wrong_only_together:
            return whole
        passed = {result.test for result in whole if result.passed}
        # What passes in your file and fails among the reference's parts keeps its books in another way.
        fits = bool(alone) and not any(result.test in passed for result in alone if not result.passed)
        found = {result.test: result for result in alone}  # without what passed before, where all is right
        return [found.get(result.test, result) for result in whole] if fits else whole

    @property
    def wrong_only_together(self) -> bool:
        """Whether each task is right among the reference's, and the file is not: they do not fit together."""
        alone = [result for results in self.alone.values() for result in results]
        return bool(alone) and not self.unwritten and all(r.passed for r in alone) and not self.is_done

    def failures(self, task: Task) -> list[Result]:
        return [result for result in self.judged(task) if not result.passed]

    def passed(self, task: Task) -> int:
        """How many of the task's tests pass, in all their cases."""
        judged = self.judged(task)
        return len({r.function for r in judged} - {r.function for r in judged if not r.passed})

    def done(self, task: Task) -> bool:
        """Whether all its tests pass in the whole file."""
        results = self.of(task, self.results)
        return {r.function for r in results} == {*task.tests} and all(r.passed for r in results)

    @property
    def is_done(self) -> bool:
        return all(self.done(task) for task in self.lab.tasks)

    @property
    def points(self) -> int:
        return sum(task.points for task in self.lab.tasks if self.done(task))

    def waits_for(self, task: Task) -> Task | None:
        """The task that is wrong, or not written yet, and the only reason why this one's tests fail."""
        if self.done(task) or task.name in self.unwritten:
            return None
        failures = self.failures(task)
        if not failures:  # alone it is right
            found = [self._needed(task, result) for result in self.of(task, self.results)]
            others = [t for t in self.lab.tasks if t is not task and not self.done(t)]
            wrong = [t for t in others if t.name not in self.unwritten and self.failures(t)]
            return next((t for t in [*found, *wrong, *others] if t), None)
        needed = [self._needed(task, result) for result in failures]
        return needed[0] if all(needed) else self._told_better(task, failures)

    def _told_better(self, task: Task, failures: Sequence[Result]) -> Task | None:
        """The task that fails all of these tests in the same words, and others of its own besides."""
        mine = {(result.test, result.said) for result in failures}
        others = (t for t in self.lab.tasks if t is not task and t.name not in self.unwritten)
        return next((t for t in others if mine < {(r.test, r.said) for r in self.failures(t)}), None)

    @cached_property
    def wrong(self) -> list[Task]:
        """The tasks that are written, and wrong by themselves."""
        return [
            task
            for task in self.lab.tasks
            if task.name not in self.unwritten and self.failures(task) and not self.waits_for(task)
        ]

    @property
    def next_task(self) -> Task | None:
        """What to do next: the first that is wrong, else the first that is not written, or waits."""
        if self.wrong:
            return self.wrong[0]
        left = [task for task in self.lab.tasks if not self.done(task)]
        # At one that is right by itself there is nothing to do.
        task = next((t for t in left if t.name in self.unwritten or self.failures(t)), next(iter(left), None))
        seen: list[Task] = []
        while task and task not in seen and (needed := self.waits_for(task)):
            seen.append(task)
            task = needed
        return task

    def stands(self, task: Task) -> str:
        """How a task stands, in a few words."""
        if task.name in self.unwritten:
            return "not written yet"
        passed = f"{self.passed(task)} of {len(task.tests)} tests pass"
        if self.done(task):
            return passed
        if not_begun := sum(result.said.startswith("NotBegun") for result in self.failures(task)):
            passed += f", {not_begun} are not begun"
        by_itself = "" if self.failures(task) else " by itself"
        if needed := self.waits_for(task):
            return f"{passed}{by_itself}; waits for {needed.name}"
        return passed

    @property
    def most_informative(self) -> Result | None:
        """Of the next task's failures the one that says most: of a known mistake its own test."""
        if not (task := self.next_task):
            return None
        failures, name = self.failures(task), self.name(task)
        own = [result for result in failures if name and result.function == name.test]
        return next(iter([*own, *(r for r in failures if not self._needed(task, r)), *failures]), None)

    def name(self, task: Task) -> Name | None:
        """The known mistake whose fingerprint this task's failures have."""
        digest = fingerprint(task, self.judged(task))
        return known(self.lab).get(task.name, {}).get(digest) if digest else None

    def _needed(self, task: Task, result: Result) -> Task | None:
        """The other task of this lab that a test ran into, unwritten."""
        found = NOT_WRITTEN.search(result.said)
        if not found or found[1] != self.lab.id:
            return None
        owners = (t for t in self.lab.tasks if f"{found[2]}.".startswith(f"{t.name}."))
        return next((owner for owner in owners if owner is not task), None)


def fingerprint(task: Task, results: Sequence[Result]) -> str:
    """What all tests of a task did, as one digest; "" if all pass, or if one came to no end.

    Traces, what a random_scripts let be seen, and the types of exceptions; never a message, which differs by
    Python, torch and platform.
    """
    rows = sorted((r.test, r.said.partition(":")[0], r.runs) for r in results if r.function in task.tests)
    ended = not any(said.startswith(NO_ANSWER) for _, said, _ in rows)
    whole = {*task.tests} <= {r.function for r in results}
    if not (ended and whole) or all(r.passed for r in results if r.function in task.tests):
        return ""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def scripts_fingerprint(runs: str) -> str:
    """Of what a random_scripts alone let be seen; for a grader, which runs no tests."""
    return "random_scripts " + hashlib.sha256(runs.encode()).hexdigest()[:16]


def known(lab: Lab) -> dict[str, dict[str, Name]]:
    """The known mistakes by task and fingerprint, from fingerprints.json (`labs check --write`).

    The file has the ids of mistakes.toml. The student edition, which has no mistakes.toml, is exported with
    title, hint and test in place of an id.
    """
    path = lab.file("fingerprints.json")
    if not path.exists():
        return {}
    names = {one.id: Name(one.title, one.hint.strip(), one.caught_by) for one in lab.mistakes}
    found: dict[str, dict[str, Name]] = {}
    for task, mistakes in json.loads(path.read_text(encoding="utf-8")).items():
        listed = {
            key: Name(*said) if isinstance(said, list) else names.get(said) for key, said in mistakes.items()
        }
        found[task] = {key: name for key, name in listed.items() if name}
    return found
