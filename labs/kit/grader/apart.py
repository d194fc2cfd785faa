"""Which tasks of a submission are at fault, and which only wait for others; known mistakes by name.

A task's points are its own. Where the whole file departs, tasks are played in a sandbox that has the
reference's code of the others. What such a run says is compared, and shown to nobody.
"""

import json
from collections.abc import Sequence
from typing import Any

from labs.kit.grader.cases import Scripted, expected, judged, steps
from labs.kit.grader.results import NOT_WRITTEN, RIGHT, WAITS, WRONG, Case, TaskGrade
from labs.kit.grader.sandbox import Answer, Sandbox, without
from labs.kit.judge import isolate, loading, storm
from labs.kit.judge.manifest import Lab, Task
from labs.kit.judge.standing import known, storm_fingerprint

FEW = 5  # failing cases of the whole file, on which each task is played by itself first


def graded_whole(
    lab: Lab,
    task: Task,
    left: Sequence[str],
    whole: Sequence[Case],
    played: Sequence[Scripted],
    answer: Answer,
) -> TaskGrade:
    """A task of a file that departs nowhere, that does not load, or that has no other task."""
    passed = 0 if answer.broken else sum(case.passed for case in whole)
    if task.name in left:
        return TaskGrade(task.name, task.points, 0, NOT_WRITTEN, 0, len(whole))
    if passed == len(whole):
        return TaskGrade(task.name, task.points, task.points, RIGHT, passed, len(whole))
    grade = TaskGrade(task.name, task.points, 0, WRONG, passed, len(whole))
    return named(lab, grade, played, dict(zip((c.name for c in played), answer.logs, strict=False)))


class Apart:
    """Tells the tasks of a file that departs apart: which are at fault?

    Each is played by itself, among the reference's others, on a few of the cases that depart. Those that are
    right there are played together, with the reference in place of the others, on all of them: where nothing
    departs any more, none of them is at fault. Where something still does, each plays these by itself.
    """

    def __init__(
        self,
        lab: Lab,
        source: str,
        left: Sequence[str],
        whole: Sequence[Case],
        played: Sequence[Scripted],
        sandbox: Sandbox,
    ):
        self.lab, self.source, self.left, self.played, self.sandbox = lab, source, left, played, sandbox
        self.failing = [case for case, result in zip(played, whole, strict=True) if not result.passed]
        self.made = isolate.made(lab, loading.load(lab.id, "solution"))
        self.reference = lab.file("solution.py").read_text("utf-8")

    def grades(self) -> list[TaskGrade]:
        written = [task for task in self.lab.tasks if task.name not in self.left]
        few, every = self.failing[:FEW], self.failing
        answers = {task.name: self.play([task], few) for task in written}
        right = [task for task in written if self.passed(few, answers[task.name]) == len(few)]
        company = self.play(right, every) if 0 < len(right) < len(self.lab.tasks) else Answer([])
        if self.passed(every, company) < len(every):
            answers |= {task.name: self.play([task], every) for task in right}
            right = [task for task in right if self.passed(every, answers[task.name]) == len(every)]
        names = {task.name for task in right}
        return [
            self.waits(task, len(every)) if task.name in names else self.wrong(task, answers)
            for task in self.lab.tasks
        ]

    def play(self, tasks: Sequence[Task], cases: Sequence[Scripted]) -> Answer:
        names = [task.name for task in tasks]
        scripts = [json.loads(case.script) for case in cases]
        others = without(self.reference, names)
        alone = {"tasks": names, "others": others, "left": list(self.left), "made": self.made}
        return self.sandbox.run(self.source, scripts, **alone)

    def passed(self, cases: Sequence[Scripted], answer: Answer) -> int:
        return sum(judged(self.lab, case, n, answer).passed for n, case in enumerate(cases))

    def waits(self, task: Task, cases: int) -> TaskGrade:
        return TaskGrade(task.name, task.points, task.points, WAITS, cases, cases)

    def wrong(self, task: Task, answers: dict[str, Answer]) -> TaskGrade:
        """Or not written. Where its run comes to an end, the public cases may give the mistake its name."""
        if task.name in self.left:
            return TaskGrade(task.name, task.points, 0, NOT_WRITTEN, 0, len(self.played))
        answer = answers[task.name]
        known = self.failing[: max(len(answer.logs), FEW)]
        grade = TaskGrade(task.name, task.points, 0, WRONG, self.passed(known, answer), len(known))
        if answer.ended or answer.broken:
            return grade
        rest = [case for case in self.played if not (case.hidden or case in known)]
        more = self.play([task], rest)
        logs = zip((*known, *rest), (*answer.logs, *more.logs), strict=False)
        return named(self.lab, grade, self.played, {case.name: log for case, log in logs})


def named(
    lab: Lab, grade: TaskGrade, played: Sequence[Scripted], logs: dict[str, list[dict[str, Any]]]
) -> TaskGrade:
    """With the name of the known mistake that lets all the same be seen in the public cases, if one does.

    `logs` are the task's by the names of the cases.
    """
    public = [case for case in played if not case.hidden]
    if all(case.name in logs for case in public):
        digests = [storm.digest(steps(logs[case.name]), expected(lab.id, case.script)) for case in public]
        if name := known(lab).get(grade.task, {}).get(storm_fingerprint(json.dumps(digests))):
            grade.name, grade.hint = name.title, name.hint
    return grade
