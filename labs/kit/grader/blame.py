"""Which tasks of a submission are at fault, and which only wait for others; known mistakes by name.

A task's points are its own. Where the whole file departs, tasks are played in a sandbox that has the
reference's code of the others. What such a run says is compared, and shown to nobody.
"""

import json
from collections.abc import Mapping, Sequence

from labs.kit.grader.cases import Scripted, digest, passed, play
from labs.kit.grader.results import NOT_WRITTEN, RIGHT, WAITS, WRONG, Case, TaskGrade
from labs.kit.grader.sandbox import Answer, Sandbox, without
from labs.kit.judge import isolate, loading, random_scripts
from labs.kit.judge.manifest import Lab, Task
from labs.kit.judge.task_status import Name, known, scripts_fingerprint

FEW = 5  # failing cases of the whole file, on which each task is played by itself first
Logs = Mapping[str, list[random_scripts.Step]]  # by the name of the case


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
    return named(grade, names(lab, played, logs(played, answer)).get(task.name))


class Apart:
    """Tells the tasks of a file that departs apart: which are at fault?

    Where the file lets the same be seen as one known mistake, it is soon proven: that task departs among the
    reference's others, and the others among the reference's one do not. Else each task is played by itself
    on a few of the cases that depart, and those that are right there are played together on all of them.
    """

    def __init__(
        self,
        lab: Lab,
        source: str,
        left: Sequence[str],
        whole: Sequence[Case],
        played: Sequence[Scripted],
        answer: Answer,
        sandbox: Sandbox,
    ):
        self.lab, self.source, self.left, self.played, self.sandbox = lab, source, left, played, sandbox
        self.names = names(lab, played, logs(played, answer))
        self.failing = [case for case, result in zip(played, whole, strict=True) if not result.passed]
        self.written = [task for task in lab.tasks if task.name not in left]
        self.made = isolate.made(lab, loading.load(lab.id, "solution"))
        self.reference = lab.file("solution.py").read_text("utf-8")
        self.two_sets = False  # whether the reference's code has helpers of its own

    def grades(self) -> list[TaskGrade]:
        wrong = {grade.task: grade for grade in self.known_mistake() or self.one_by_one()}
        return [
            TaskGrade(task.name, task.points, 0, NOT_WRITTEN, 0, len(self.played))
            if task.name in self.left
            else wrong.get(task.name) or self.waits(task)
            for task in self.lab.tasks
        ]

    def known_mistake(self) -> list[TaskGrade]:
        """The one task that is at fault, if a known mistake of its lets the same be seen as the file."""
        for task in self.written:
            if found := self.names.get(task.name):
                others = [other for other in self.written if other is not task]
                alone = self.play([task], self.failing[:FEW])
                departs = passed(self.lab, self.failing[:FEW], alone) < len(self.failing[:FEW])
                if departs and self.right(others):
                    return [named(self.wrong(task, alone), found)]
        return []

    def one_by_one(self) -> list[TaskGrade]:
        few, every = self.failing[:FEW], self.failing
        answers = {task.name: self.play([task], few) for task in self.written}
        right = [t for t in self.written if passed(self.lab, few, answers[t.name]) == len(few)]
        entangled: list[TaskGrade] = []
        if not self.right(right):
            answers |= {task.name: self.play([task], every) for task in right}
            right = [t for t in right if passed(self.lab, every, answers[t.name]) == len(every)]
            entangled = self.entangled(right)
        if not right and not self.two_sets and passed(self.lab, every, self.play([], every)) < len(every):
            self.two_sets = True  # a given helper is wrong: it costs those of the file's tasks that call it
            return self.one_by_one()
        return entangled + [
            named(self.wrong(task, answers[task.name]), self.name_alone(task, answers[task.name]))
            for task in self.written
            if task not in right
        ]

    def entangled(self, tasks: list[Task]) -> list[TaskGrade]:
        """Of tasks that are right alone: those with a mistake that they make together. Each of them mends a
        case when the reference stands in its place; if none does, it is a mistake of all."""
        every = len(self.failing)
        together = passed(self.lab, self.failing, self.play(tasks, self.failing)) if tasks else every
        if together == every:
            return []
        without = {t.name: self.play([o for o in tasks if o is not t], self.failing) for t in tasks}
        mending = [t for t in tasks if passed(self.lab, self.failing, without[t.name]) > together]
        return [TaskGrade(t.name, t.points, 0, WRONG, together, every) for t in mending or tasks]

    def right(self, tasks: Sequence[Task]) -> bool:
        """Whether these, played together, depart in none of the cases in which the file departs."""
        return not tasks or passed(self.lab, self.failing, self.play(tasks, self.failing)) == len(
            self.failing
        )

    def play(self, tasks: Sequence[Task], cases: Sequence[Scripted]) -> Answer:
        names = tuple(task.name for task in tasks)
        others = without(self.reference, names)
        alone = {"tasks": names, "others": others, "left": list(self.left), "made": self.made}
        return play(self.sandbox, self.source, cases, two_sets=self.two_sets, **alone)

    def waits(self, task: Task) -> TaskGrade:
        return TaskGrade(task.name, task.points, task.points, WAITS, len(self.failing), len(self.failing))

    def wrong(self, task: Task, answer: Answer) -> TaskGrade:
        cases = self.failing[: max(len(answer.logs), FEW)]
        return TaskGrade(task.name, task.points, 0, WRONG, passed(self.lab, cases, answer), len(cases))

    def name_alone(self, task: Task, answer: Answer) -> Name | None:
        """Where a task's run comes to an end, the public cases may give its mistake a name."""
        if answer.ended or answer.broken:
            return None
        cases = self.failing[: len(answer.logs)]
        rest = [case for case in self.played if not (case.hidden or case in cases)]
        all_logs = logs(cases, answer) | logs(rest, self.play([task], rest))
        return names(self.lab, self.played, all_logs).get(task.name)


def logs(cases: Sequence[Scripted], answer: Answer) -> dict[str, list[random_scripts.Step]]:
    return dict(zip((case.name for case in cases), answer.logs, strict=False))


def names(lab: Lab, played: Sequence[Scripted], logs: Logs) -> dict[str, Name]:
    """By task, its known mistake that lets all the same be seen in the public cases, if one does."""
    public = [case for case in played if not case.hidden]
    if not all(case.name in logs for case in public):
        return {}
    digests = [digest(lab.id, case, logs[case.name]) for case in public]
    fingerprint = scripts_fingerprint(json.dumps(digests))
    return {task: mistakes[fingerprint] for task, mistakes in known(lab).items() if fingerprint in mistakes}


def named(grade: TaskGrade, name: Name | None) -> TaskGrade:
    if name:
        grade.name, grade.hint = name.title, name.hint
    return grade
