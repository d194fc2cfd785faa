"""From a submission to a grade, in a worker: play it, judge the tasks, show the first case that departs."""

import atexit
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from labs.kit.grader.blame import Apart, graded_whole
from labs.kit.grader.cases import Scripted, cases, expected, judged, own_cases, play
from labs.kit.grader.results import (
    MISSING,
    NOT_WRITTEN,
    WAITS,
    WRONG,
    Case,
    Grade,
    LabGrade,
    TaskGrade,
)
from labs.kit.grader.sandbox import Answer, Sandbox, WeakIsolation, bubblewrap, probe
from labs.kit.judge import isolate, random_scripts
from labs.kit.judge.manifest import Lab, find_lab
from labs.kit.toys.driver import OpLog
from mini_engine.renamed import modernized


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
    names = ("solution.py", "oracle.py", "random_scripts.py", "elsewhere.py", "lab.toml", "fingerprints.json")
    kit = lab.path.parent / "kit"
    files = [lab.file(name) for name in names]
    files += [
        kit / "grader" / f"{name}.py"
        for name in ("grading", "cases", "blame", "sandbox", "inside", "player", "frames", "results")
    ]
    for room in (kit / "toys", kit / "judge", lab.path.parents[1] / "mini_engine"):
        files += sorted(path for path in room.rglob("*.py") if "tests" not in path.parts)
    for path in files:
        total.update(path.read_bytes() if path.exists() else b"")
    return total.hexdigest()


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
    answer = play(sandbox, source, played)
    found = LabGrade(lab.id, [], cases=[judged(lab, case, n, answer) for n, case in enumerate(played)])
    if answer.broken:
        found.problem = f"starter.py does not load: {answer.broken}"
    elif answer.ended:
        found.problem = f"after {len(answer.logs)} of {len(played)} cases: {answer.ended}"
    if answer.broken or len(lab.tasks) == 1 or all(case.passed for case in found.cases):
        found.tasks += [graded_whole(lab, task, left, found.cases, played, answer) for task in lab.tasks]
    else:
        found.tasks += Apart(lab, source, left, found.cases, played, answer, sandbox).grades()
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
        return modernized(submission.files[lab.id].decode("utf-8-sig")), ""
    except UnicodeDecodeError:
        return "", "the file is not UTF-8 text"


def show(lab: Lab, found: LabGrade, played: Sequence[Scripted], answer: Answer, reveal: bool) -> None:
    """The first departing case that a student may see, cut in time to where it departs."""
    for number, case in enumerate(found.cases):
        if not case.passed and number < len(answer.logs) and (reveal or not case.hidden):
            yours, model = answer.logs[number], expected(lab.id, played[number].script).steps
            at = random_scripts.departure(yours, model) or 0
            config = json.loads(played[number].script)["config"]
            found.departs = at
            found.yours, found.expected = (
                {"config": config, "steps": [{"call": s.call, "seen": s.seen} for s in run[: at + 1]]}
                for run in (yours, model)
            )
            return


def logs_to_run(run: dict[str, Any]) -> OpLog:
    """A run of a LabGrade as the player shows it."""
    steps = [random_scripts.Step(step["call"], step["seen"]) for step in run["steps"]]
    return random_scripts.as_log({"config": run["config"]}, steps)


def replayed(lab_id: str, name: str, settings: Settings, submission: Submission) -> Case:
    """One case of a submission, played once more."""
    lab = find_lab(lab_id)
    case = next((case for case in cases(lab, settings) if case.name == name), None)
    if case is None:
        raise ValueError(f"{lab_id} has no case {name!r}; cases are named public N, hidden N, own FILE")
    source, problem = text_of(lab, submission)
    if problem:
        return Case(name, case.hidden, False, problem)
    return judged(lab, case, 0, play(box(lab, settings), source, [case]))
