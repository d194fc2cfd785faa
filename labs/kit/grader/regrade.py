"""What changed against an earlier report, in lines for a terminal."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from labs.kit.grader.pool import stored
from labs.kit.grader.results import Grade


def changes(old_report: Path, grades: Iterable[Grade]) -> Iterator[str]:
    """A line for each student whose points or states are others than they were, and what the sum of it is."""
    folder = old_report / "grades"
    gone = {file.stem for file in folder.glob("*.json") if not file.name.startswith(".")}
    changed = same = new = 0
    seeds = set()
    for grade in grades:
        gone.discard(grade.student)
        old = stored(folder, grade.student)
        if old is None:
            new += 1
            yield f"{grade.student}: new, {grade.earned:g} points"
            continue
        if old.seed != grade.seed:
            seeds.add(old.seed)
        lines = list(differences(old, grade))
        if lines:
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
    before = {(lab.lab, task.task): task for lab in old.labs for task in lab.tasks}
    for lab in new.labs:
        for task in lab.tasks:
            was = before.pop((lab.lab, task.task), None)
            if was is None:
                yield f"{lab.lab} {task.task}: new, {task.state}, {task.earned:g} of {task.points:g}"
            elif (was.earned, was.points, was.state) != (task.earned, task.points, task.state):
                then = f"{was.state}, {was.earned:g} of {was.points:g}"
                yield f"{lab.lab} {task.task}: {then} -> {task.state}, {task.earned:g} of {task.points:g}"
    for lab_id, task_name in before:
        yield f"{lab_id} {task_name}: was graded then, and is not now"
    if old.withheld != new.withheld:
        yield f"withheld for lateness: {old.withheld:g} -> {new.withheld:g}"
