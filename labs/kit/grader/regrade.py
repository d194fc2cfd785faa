"""Compares grades with those of an earlier report, in lines for a terminal: the labs that both have."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from labs.kit.grader.results import Grade, TaskGrade
from labs.kit.grader.store import load


def changes(old_report: Path, grades: Iterable[Grade]) -> Iterator[str]:
    """Yield lines for each student whose points or states changed, and a line with numbers of students."""
    folder = old_report / "grades"
    gone = {file.stem for file in folder.glob("*.json") if not file.name.startswith(".")}
    changed = same = new = 0
    seeds, left, added = set[str](), set[str](), set[str]()
    for grade in grades:
        gone.discard(grade.student)
        old = load(folder, grade.student)
        if old is None:
            new += 1
            yield f"{grade.student}: new, {grade.earned:g} points"
            continue
        if old.seed != grade.seed:
            seeds.add(old.seed)
        before, after = ({lab.lab for lab in one.labs} for one in (old, grade))
        left, added = left | (before - after), added | (after - before)
        if lines := list(differences(old, grade)):
            changed += 1
            then, now = (points(one, before & after) for one in (old, grade))
            yield f"{grade.student}: {then:g} -> {now:g} points"
            yield from (f"    {line}" for line in lines)
        else:
            same += 1
    for student in sorted(gone):
        yield f"{student}: was graded before, but not now"
    if seeds:
        yield f"the hidden cases were different: seed {', '.join(sorted(seeds))}"
    for labs, when in ((left, "then"), (added, "now")):
        if labs:
            yield f"{', '.join(sorted(labs))}: graded only {when}, so not compared, and in no points above"
    yield f"against {old_report}: {changed} changed, {same} the same, {new} new, {len(gone)} gone"


def points(grade: Grade, labs: Collection[str]) -> float:
    parts = [{lab.lab: lab.earned for lab in grade.labs}, grade.manual]
    earned = sum(part.get(lab, 0) for part in parts for lab in labs)
    return max(0.0, earned - sum(grade.costs.get(lab, 0) for lab in labs))


def differences(old: Grade, new: Grade) -> Iterator[str]:
    """Yield what differs in the labs that both have."""
    before, after = ({(lab.lab, t.task): t for lab in one.labs for t in lab.tasks} for one in (old, new))
    both = {lab.lab for lab in old.labs} & {lab.lab for lab in new.labs}
    for (lab, task), now in after.items():
        then = before.pop((lab, task), None)
        if lab not in both:
            continue
        if then is None:
            yield f"{lab} {task}: new, {shown(now)}"
        elif (then.earned, then.points, then.state) != (now.earned, now.points, now.state):
            yield f"{lab} {task}: {shown(then)} -> {shown(now)}"
    for lab, task in before:
        if lab in both:
            yield f"{lab} {task}: was graded before, but not now"
    for what, kept in (("withheld for lateness", "costs"), ("manual points", "manual")):
        was, now = (sum(getattr(one, kept).get(lab, 0) for lab in both) for one in (old, new))
        if was != now:
            yield f"{what}: {was:g} -> {now:g}"


def shown(task: TaskGrade) -> str:
    return f"{task.state}, {task.earned:g} of {task.points:g}"
