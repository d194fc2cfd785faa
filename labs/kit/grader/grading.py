"""From a submission to a grade: which scripts depart, which tasks are at fault, what that costs.

Expected runs come from the lab's model, outside of any sandbox. A task's points are its own: where the
whole file departs, each task is played alone, in a sandbox that has the other tasks' reference code and
nothing of its own. What such a run says is compared, and shown to nobody.
"""

import atexit
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from labs.kit.grader.results import (
    MISSING,
    NOT_WRITTEN,
    RIGHT,
    WAITS,
    WRONG,
    Case,
    Grade,
    LabGrade,
    TaskGrade,
)
from labs.kit.grader.sandbox import Answer, Sandbox, WeakIsolation, bubblewrap, probe, without
from labs.kit.judge import isolate, loading, storm
from labs.kit.judge.manifest import Lab, Task, find_lab
from labs.kit.judge.standing import known, storm_fingerprint
from labs.kit.toys.driver import OpLog
from labs.kit.toys.storms import Script

# Of the whole file's failing cases so many are played on each task by itself; then, on those that were right
# there, so many more.
FEW, ENOUGH = 5, 20


@dataclass(frozen=True)
class Settings:
    """What a grade depends on beside the submission."""

    labs: tuple[str, ...]
    seed: str
    hidden: int = 60  # scripts a lab, drawn from the seed
    seconds: float = 20.0  # for a batch of scripts
    own: Path | None = None  # a folder of an instructor's scripts: lab-NN/NAME.json
    weak: bool = False  # grade without namespaces, too
    reveal: bool = False  # hidden cases may be shown


@dataclass
class Submission:
    """What a student handed in, as far as it is looked at."""

    student: str
    files: dict[str, bytes]  # by lab
    ignored: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # by lab: why there is no file
    submitted: str = ""


@dataclass(frozen=True)
class Scripted:
    """A case before it is played."""

    name: str
    hidden: bool
    script: str  # JSON


def grade(submission: Submission, settings: Settings) -> Grade:
    """Raises WeakIsolation where the machine offers no namespaces and the settings want them."""
    found = isolation()
    if found != "namespaces" and not settings.weak:
        raise WeakIsolation("submissions are graded in namespaces of their own, and this machine offers none")
    return Grade(
        submission.student,
        [grade_lab(find_lab(lab_id), submission, settings) for lab_id in settings.labs],
        settings.seed,
        found,
        digest(submission, settings),
        submission.ignored,
        submission.submitted,
    )


@cache
def isolation() -> str:
    """ "namespaces", or "limits" where the kernel, or its settings, refuses them."""
    try:
        bubblewrap()
    except WeakIsolation:
        return "limits"
    return "namespaces" if probe() else "limits"


def digest(submission: Submission, settings: Settings) -> str:
    """Changes with everything that the grade depends on."""
    total = hashlib.blake2b(digest_size=16)
    facts = [submission.student, submission.submitted, settings.seed, *submission.ignored, *settings.labs]
    more = [settings.hidden, settings.seconds, settings.weak, settings.reveal]
    total.update(json.dumps([facts, sorted(submission.problems.items()), more]).encode())
    for lab_id in settings.labs:
        total.update(submission.files.get(lab_id, b"\0none"))
        total.update(course(lab_id).encode())
        total.update(json.dumps([case.script for case in own_cases(lab_id, settings.own)]).encode())
    return total.hexdigest()


@cache
def course(lab_id: str) -> str:
    """Changes with what judges a lab."""
    lab, total = find_lab(lab_id), hashlib.blake2b(digest_size=16)
    names = ("solution.py", "model.py", "storm.py", "elsewhere.py", "lab.toml", "fingerprints.json")
    kit = lab.path.parent / "kit"
    files = [lab.file(name) for name in names]
    files += [
        kit / "grader" / f"{name}.py"
        for name in ("grading", "sandbox", "inside", "player", "frames", "results")
    ]
    for room in (kit / "toys", kit / "judge", lab.path.parents[1] / "mini_engine"):
        files += sorted(path for path in room.rglob("*.py") if "tests" not in path.parts)
    for path in files:
        total.update(path.read_bytes() if path.exists() else b"")
    return total.hexdigest()


def cases(lab: Lab, settings: Settings) -> list[Scripted]:
    """The public ones, which are those of `labs test`, and the hidden ones, which follow from the seed."""
    graded = getattr(loading.load(lab.id, "storm"), "graded", lambda script: script)

    def drawn(name: str, seed: object, hidden: bool) -> Scripted:
        return Scripted(name, hidden, said(graded(storm.drawn(lab.id, seed))))

    public = [drawn(f"public {n + 1}", n, False) for n in range(storm.count(lab.id))]
    hidden = [drawn(f"hidden {n + 1}", f"{settings.seed} {n}", True) for n in range(settings.hidden)]
    return [*public, *hidden, *own_cases(lab.id, settings.own)]


def own_cases(lab_id: str, folder: Path | None) -> list[Scripted]:
    """An instructor's own scripts: {"config": ..., "calls": [...]} in FOLDER/lab-NN/*.json."""
    if folder is None:
        return []
    files = sorted((folder / lab_id).glob("*.json"))
    return [Scripted(f"own {file.name}", True, said(json.loads(file.read_text("utf-8")))) for file in files]


def said(script: Script) -> str:
    return json.dumps(script, sort_keys=True)


@cache
def expected(lab_id: str, script: str) -> list[storm.Step]:
    return storm.run(lab_id, None, json.loads(script))


_boxes: dict[tuple[str, float], Sandbox] = {}


def box(lab: Lab, settings: Settings) -> Sandbox:
    """This process's sandbox for a lab, which is kept: starting torch takes seconds."""
    key = lab.id, settings.seconds
    if key not in _boxes:
        folder = tempfile.TemporaryDirectory(prefix="grade-")
        _boxes[key] = Sandbox(lab, Path(folder.name), settings.seconds, isolation() != "namespaces")
        atexit.register(folder.cleanup)
        atexit.register(_boxes[key].stop)
    return _boxes[key]


def grade_lab(lab: Lab, submission: Submission, settings: Settings) -> LabGrade:
    source, problem = text_of(lab, submission)
    if problem:
        return LabGrade(lab.id, [TaskGrade(t.name, t.points, 0, MISSING) for t in lab.tasks], problem)
    left = isolate.unwritten(lab, source)
    played, sandbox = cases(lab, settings), box(lab, settings)
    scripts = [json.loads(case.script) for case in played]
    answer = sandbox.run(source, scripts)
    found = LabGrade(lab.id, [], cases=[judged(lab, case, n, answer) for n, case in enumerate(played)])
    if answer.broken:
        found.problem = f"starter.py does not load: {answer.broken}"
    elif answer.ended:
        found.problem = f"after {len(answer.logs)} of {len(played)} cases: {answer.ended}"
    if answer.broken or len(lab.tasks) == 1 or all(case.passed for case in found.cases):
        found.tasks += [graded_whole(lab, task, left, found.cases, played, answer) for task in lab.tasks]
    else:
        found.tasks += Apart(lab, source, left, found.cases, played, sandbox).grades()
    wrong = [task.task for task in found.tasks if task.state in (WRONG, NOT_WRITTEN)]
    for one in found.tasks:
        if one.state == WAITS and wrong:
            one.waits_for = wrong[0]
    show(lab, found, played, answer, settings.reveal)
    return found


def text_of(lab: Lab, submission: Submission) -> tuple[str, str]:
    """The file's text, or why there is none."""
    if lab.id in submission.problems or lab.id not in submission.files:
        return "", submission.problems.get(lab.id, "no file was handed in for this lab")
    try:
        return submission.files[lab.id].decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        return "", "the file is not UTF-8 text"


def judged(lab: Lab, case: Scripted, number: int, answer: Answer) -> Case:
    """One case: what came back beside what should have been seen."""
    if number >= len(answer.logs):
        why = answer.broken or answer.ended
        return Case(case.name, case.hidden, False, why if number == len(answer.logs) else "not begun")
    yours, model = steps(answer.logs[number]), expected(lab.id, case.script)
    if storm.departure(yours, model) is None:
        return Case(case.name, case.hidden, True)
    text = storm.story(f"{case.name} departs:", json.loads(case.script), yours, model)
    return Case(case.name, case.hidden, False, text)


def steps(log: list[dict[str, Any]]) -> list[storm.Step]:
    return [storm.Step(step["call"], step["seen"]) for step in log]


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
    right there are played together, with the reference in place of the others, on more of them: where nothing
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
        few, enough = self.failing[:FEW], self.failing[:ENOUGH]
        answers = {task.name: self.play([task], few) for task in written}
        right = [task for task in written if self.passed(few, answers[task.name]) == len(few)]
        company = self.play(right, enough) if 0 < len(right) < len(self.lab.tasks) else Answer([])
        if self.passed(enough, company) < len(enough):
            answers |= {task.name: self.play([task], enough) for task in right}
            right = [task for task in right if self.passed(enough, answers[task.name]) == len(enough)]
        names = {task.name for task in right}
        return [
            self.waits(task, len(enough)) if task.name in names else self.wrong(task, answers)
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


def show(lab: Lab, found: LabGrade, played: Sequence[Scripted], answer: Answer, reveal: bool) -> None:
    """The first departing case that a student may see, cut in time to where it departs."""
    for number, case in enumerate(found.cases):
        if not case.passed and number < len(answer.logs) and (reveal or not case.hidden):
            yours, model = steps(answer.logs[number]), expected(lab.id, played[number].script)
            at = storm.departure(yours, model) or 0
            config = json.loads(played[number].script)["config"]
            found.departs = at
            found.yours, found.expected = (
                {"config": config, "steps": [{"call": s.call, "seen": s.seen} for s in run[: at + 1]]}
                for run in (yours, model)
            )
            return


def logs_to_run(run: dict[str, Any]) -> OpLog:
    """A run of a LabGrade as the player shows it."""
    return storm.as_log({"config": run["config"]}, steps(run["steps"]))


def replayed(lab_id: str, name: str, settings: Settings, submission: Submission) -> Case:
    """One case of a submission, played once more."""
    lab = find_lab(lab_id)
    case = next((case for case in cases(lab, settings) if case.name == name), None)
    if case is None:
        raise ValueError(f"{lab_id} has no case {name!r}; cases are named public N, hidden N, own FILE")
    source, problem = text_of(lab, submission)
    if problem:
        return Case(name, case.hidden, False, problem)
    return judged(lab, case, 0, box(lab, settings).run(source, [json.loads(case.script)]))
