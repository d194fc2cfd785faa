"""Finds the tasks of a submission that are at fault, and names known mistakes.

A mistake costs the points of its own task only. Where a file departs in some case, its tasks are also played
by themselves: in a sandbox with the reference's code for the other tasks. Such a run is compared, never
shown.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from labs.kit.grader.answers import Answer
from labs.kit.grader.cases import CaseScript, digest, expected, num_passed, play
from labs.kit.grader.results import NOT_WRITTEN, RIGHT, WAITS, WRONG, Case, TaskGrade
from labs.kit.grader.sandbox import Sandbox, without
from labs.kit.judge import isolate, loading, random_scripts, suspects
from labs.kit.judge.manifest import Lab, Task
from labs.kit.judge.task_status import Name, known, scripts_fingerprint
from labs.kit.toys.scripts import Script

FEW = 5  # failing cases on which each task is played by itself first


class Blame:
    """Grades the tasks of a file from its run in all cases.

    If the run is that of one known mistake, two runs prove it: its task departs among the reference's others,
    and the others are right among the reference's one. Else each task is played by itself on a few failing
    cases, and those that are right there are played together on all failing cases.
    """

    def __init__(
        self,
        lab: Lab,
        source: str,
        scripts: Sequence[CaseScript],
        results: Sequence[Case],
        answer: Answer,
        sandbox: Sandbox,
    ):
        self.lab, self.source, self.scripts, self.answer, self.sandbox = lab, source, scripts, answer, sandbox
        self.failing = [script for script, case in zip(scripts, results, strict=True) if not case.passed]
        self.unwritten = isolate.unwritten(lab, source)
        self.written = [task for task in lab.tasks if task.name not in self.unwritten]
        self.two_sets = False  # whether the reference's code calls helpers of its own

    def grades(self) -> list[TaskGrade]:
        """Return a grade for each task of the lab."""
        if self.answer.broken or len(self.lab.tasks) == 1 or not self.failing:
            found = [self.whole_file(task) for task in self.written]
        else:
            found = self.known_mistake() or self.one_by_one()
        grades = {grade.task: grade for grade in found}
        every = len(self.failing)
        return [
            self.grade(task, NOT_WRITTEN, 0, len(self.scripts))
            if task.name in self.unwritten
            else grades.get(task.name) or self.grade(task, WAITS, every, every)
            for task in self.lab.tasks
        ]

    def whole_file(self, task: Task) -> TaskGrade:
        """Return the grade of a lab's only task, or of a file that is right or does not load."""
        passed = len(self.scripts) - len(self.failing)
        if not self.failing:
            return self.grade(task, RIGHT, passed, passed)
        return self.grade(task, WRONG, passed, len(self.scripts), self.names.get(task.name))

    def known_mistake(self) -> list[TaskGrade]:
        """Return the grade of the one task at fault, if the file's run is that of a known mistake of it."""
        few = self.failing[:FEW]
        for task in self.written:
            if name := self.names.get(task.name):
                others = [other for other in self.written if other is not task]
                isolated = self.play([task], few)
                if num_passed(self.lab, few, isolated) < len(few) and self.right(others):
                    return [self.wrong(task, name)]
        return []

    def one_by_one(self) -> list[TaskGrade]:
        few, every = self.failing[:FEW], self.failing
        answers = {task.name: self.play([task], few) for task in self.written}
        right = [t for t in self.written if num_passed(self.lab, few, answers[t.name]) == len(few)]
        entangled: list[TaskGrade] = []
        if not self.right(right):
            answers |= {task.name: self.play([task], every) for task in right}
            right = [t for t in right if num_passed(self.lab, every, answers[t.name]) == len(every)]
            entangled = self.entangled(right)
        if not right and not self.two_sets and self.passed([]) < len(every):
            self.two_sets = True  # a given helper is wrong: it costs the tasks of the file that call it
            return self.one_by_one()
        wrong = self.at_fault([task for task in self.written if task not in right], answers)
        return entangled + [self.wrong(task, self.isolated_name(task, answers[task.name])) for task in wrong]

    def at_fault(self, wrong: Sequence[Task], answers: Mapping[str, Answer]) -> list[Task]:
        """Return the wrong tasks without those that share an object of the file's own, and explain nothing.

        A class that is left whole runs alike, whichever of its methods is played by itself.
        """
        found: list[Task] = []
        for task in wrong:
            logs = answers[task.name].logs
            own = [t for t in wrong if isolate.class_of(t) == isolate.class_of(task)]
            alike = [t.name for t in own if answers[t.name].logs == logs]
            if alike[0] == task.name and len(alike) > 1:
                scripts = [json.loads(case.script) for case in self.failing[: 2 * suspects.FEW]]
                guilty = suspects.explaining(self.lab.id, alike, scripts, partial(self.departing, task))
                found += [self.lab.task(name) for name in guilty or alike]
            elif alike[0] == task.name:
                found.append(task)
        return [task for task in wrong if task in found]

    def departing(self, task: Task, scripts: Sequence[Script]) -> list[str]:
        """Return the call at which each script departs, with this task played by itself; "" for none."""
        played = [CaseScript("", True, json.dumps(script)) for script in scripts]
        logs = self.play([task], played).logs
        calls = [
            suspects.departing_call(log, expected(self.lab.id, case.script).steps)
            for case, log in zip(played, logs, strict=False)
        ]
        return calls + ["not begun"] * (len(played) - len(calls))

    def entangled(self, tasks: list[Task]) -> list[TaskGrade]:
        """Return the grades of those tasks, each right by itself, that make a mistake together.

        A task is one of them if more cases pass with the reference in its place; if none is, all of them are.
        """
        every = len(self.failing)
        together = self.passed(tasks) if tasks else every
        if together == every:
            return []
        mending = [t for t in tasks if self.passed([other for other in tasks if other is not t]) > together]
        return [self.wrong(task, None) for task in mending or tasks]

    def right(self, tasks: Sequence[Task]) -> bool:
        """Whether these tasks, played together, pass all failing cases."""
        return not tasks or self.passed(tasks) == len(self.failing)

    def passed(self, tasks: Sequence[Task]) -> int:
        return num_passed(self.lab, self.failing, self.play(tasks, self.failing))

    def play(self, tasks: Sequence[Task], scripts: Sequence[CaseScript]) -> Answer:
        names = tuple(task.name for task in tasks)
        others = without(self.lab.file("solution.py").read_text("utf-8"), names)
        made = isolate.made(self.lab, loading.load(self.lab.id, "solution"))
        isolated = {"tasks": names, "others": others, "unwritten": list(self.unwritten), "made": made}
        return play(self.sandbox, self.source, scripts, two_sets=self.two_sets, **isolated)

    def wrong(self, task: Task, name: Name | None) -> TaskGrade:
        # How many cases pass beside the reference's code is not said: it could carry that code's text.
        return self.grade(task, WRONG, 0, 0, name)

    def grade(self, task: Task, state: str, passed: int, total: int, name: Name | None = None) -> TaskGrade:
        earned = task.points if state in (RIGHT, WAITS) else 0
        title, hint = (name.title, name.hint) if name else ("", "")
        return TaskGrade(task.name, task.points, earned, state, passed, total, name=title, hint=hint)

    # ------------------------------------------------------------------------------ names of known mistakes

    @cached_property
    def names(self) -> dict[str, Name]:
        return self.names_of(logs(self.scripts, self.answer)) if self.played_as_drawn else {}

    @cached_property
    def played_as_drawn(self) -> bool:
        """Whether the public cases are the scripts that fingerprints.json was made from."""
        return not hasattr(loading.load(self.lab.id, "random_scripts"), "graded")

    def isolated_name(self, task: Task, answer: Answer) -> Name | None:
        """Return the known mistake of a task that was played by itself, from its run in the public cases."""
        if answer.ended or answer.broken or not self.played_as_drawn:
            return None
        public = [script for script in self.scripts if not script.hidden]  # alone: the name is shown
        return self.names_of(logs(public, self.play([task], public))).get(task.name)

    def names_of(self, logs: Mapping[str, list[random_scripts.Step]]) -> dict[str, Name]:
        """Return, by task, the known mistake with the same run in all public cases. `logs` are by case."""
        public = [script for script in self.scripts if not script.hidden]
        if not all(script.name in logs for script in public):
            return {}
        digests = [digest(self.lab.id, script, logs[script.name]) for script in public]
        key = scripts_fingerprint(json.dumps(digests))
        return {task: mistakes[key] for task, mistakes in known(self.lab).items() if key in mistakes}


def logs(scripts: Sequence[CaseScript], answer: Answer) -> dict[str, list[random_scripts.Step]]:
    return dict(zip((script.name for script in scripts), answer.logs, strict=False))
