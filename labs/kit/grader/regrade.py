"""Compares grades with those of an earlier report, in lines for a terminal."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from labs.kit.grader.results import Grade, TaskGrade
from labs.kit.grader.store import load


def changes(old_report: Path, grades: Iterable[Grade]) -> Iterator[str]:
    """Yield lines for each student whose points or states changed, and a line with numbers of students."""
    folder = old_report / "grades"
    gone = {file.stem for file in folder.glob("*.json") if not file.name.startswith(".")}
    changed = same = new = 0
    seeds = set()
    for grade in grades:
        gone.discard(grade.student)
        old = load(folder, grade.student)
        if old is None:
            new += 1
            yield f"{grade.student}: new, {grade.earned:g} points"
            continue
        if old.seed != grade.seed:
            seeds.add(old.seed)
        if lines := list(differences(old, grade)):
            changed += 1
            yield f"{grade.student}: {old.earned:g} -> {grade.earned:g} points"
            yield from (f"    {line}" for line in lines)
        else:
            same += 1
    for student in sorted(gone):
        yield f"{student}: was graded then, and is not now"
    if seeds:
        yield f"the hidden cases were others then: seed {', '.join(sorted(seeds))}"
    yield f"against {old_report}: {changed} changed, {same} the same, {new} new, {len(gone)} gone"


def differences(old: Grade, new: Grade) -> Iterator[str]:
    before, after = ({(lab.lab, t.task): t for lab in one.labs for t in lab.tasks} for one in (old, new))
    for (lab, task), now in after.items():
        then = before.pop((lab, task), None)
        if then is None:
            yield f"{lab} {task}: new, {shown(now)}"
        elif (then.earned, then.points, then.state) != (now.earned, now.points, now.state):
            yield f"{lab} {task}: {shown(then)} -> {shown(now)}"
    for lab, task in before:
        yield f"{lab} {task}: was graded then, and is not now"
    if old.withheld != new.withheld:
        yield f"withheld for lateness: {old.withheld:g} -> {new.withheld:g}"


def shown(task: TaskGrade) -> str:
    return f"{task.state}, {task.earned:g} of {task.points:g}"
