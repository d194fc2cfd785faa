"""From a submission to a grade: play all cases, grade the tasks, keep the first run that departs."""

import atexit
import hashlib
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from labs.kit.grader import results
from labs.kit.grader.answers import Answer
from labs.kit.grader.blame import Blame
from labs.kit.grader.cases import CaseScript, cases, expected, judged, own_cases, play, play_apart
from labs.kit.grader.results import Case, Grade, LabGrade, TaskGrade
from labs.kit.grader.sandbox import Sandbox, WeakIsolation, allowance, probe
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge import random_scripts
from labs.kit.judge.manifest import Lab, find_lab
from labs.kit.judge.pristine import with_given
from labs.kit.toys.driver import OpLog
from mini_engine.renamed import modernized


def grade(submission: Submission, settings: Settings) -> Grade:
    """Return a submission's grade. Raise WeakIsolation without namespaces, unless the settings allow that."""
    found = isolation()
    if found != "namespaces" and not settings.weak:
        raise WeakIsolation("this machine offers no namespaces to run submissions in")
    drawn = settings.of(submission.student, submission.attempt)
    left, labs = allowance(len(settings.labs), settings.seconds), []
    for at, lab_id in enumerate(settings.labs, 1):
        kept = (len(settings.labs) - at) * settings.seconds  # of each time, for the labs that follow
        graded, rest = grade_lab(find_lab(lab_id), submission, drawn, [one - kept for one in left])
        left = [max(0.0, one) + kept for one in rest]
        labs.append(graded)
    about = submission.ignored, submission.submitted, submission.attempt
    return Grade(submission.student, labs, settings.seed, found, digest(submission, settings), *about)


def isolation() -> str:
    """Return "namespaces", or "limits" where the kernel, its settings or a missing bwrap refuses them."""
    return "namespaces" if probe() else "limits"


def digest(submission: Submission, settings: Settings) -> str:
    """Return a digest of everything that the grade depends on."""
    total = hashlib.blake2b(digest_size=16)
    facts = [submission.student, submission.submitted, settings.seed, *submission.ignored, *settings.labs]
    more = [settings.hidden, settings.seconds, settings.weak, settings.reveal]
    more += [settings.own_seeds, submission.attempt]
    total.update(json.dumps([facts, sorted(submission.problems.items()), more]).encode())
    for lab_id in settings.labs:
        total.update(submission.files.get(lab_id, b"\0none"))
        total.update(course(lab_id).encode())
        total.update(json.dumps([case.script for case in own_cases(lab_id, settings.own)]).encode())
    return total.hexdigest()


@cache
def course(lab_id: str) -> str:
    """Return a digest of the code and data that judge a lab."""
    lab = find_lab(lab_id)
    kit = lab.path.parent / "kit"
    paths = [lab.file("solution.py"), *(lab.path / "author").glob("[a-z]*.*"), *(kit / "grader").glob("*.py")]
    for folder in (kit / "toys", kit / "tensor_toys", kit / "judge", lab.path.parents[1] / "mini_engine"):
        paths += [path for path in folder.rglob("*.py") if "tests" not in path.parts]
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        total.update(path.read_bytes())
    return total.hexdigest()


_boxes: dict[str, Sandbox] = {}


def box(lab: Lab, settings: Settings) -> Sandbox:
    """Return this process's sandbox for a lab. It is kept, for starting torch takes seconds."""
    if lab.id not in _boxes:
        folder = tempfile.TemporaryDirectory(prefix="grade-")
        _boxes[lab.id] = Sandbox(lab, Path(folder.name), settings.seconds, isolation() != "namespaces")
        atexit.register(folder.cleanup)
        atexit.register(_boxes[lab.id].stop)
    _boxes[lab.id].seconds = settings.seconds
    return _boxes[lab.id]


def grade_lab(
    lab: Lab, submission: Submission, settings: Settings, left: list[float]
) -> tuple[LabGrade, list[float]]:
    """Return a lab's grade, and what is left of the seconds that it may compute, wait and take."""
    source, problem = text_of(lab, submission)
    if problem:
        missing = [TaskGrade(task.name, task.points, 0, results.MISSING) for task in lab.tasks]
        return LabGrade(lab.id, missing, problem), left
    scripts, sandbox = cases(lab, settings), box(lab, settings)
    sandbox.begin(left)
    answer = play_apart(sandbox, source, scripts)
    found = LabGrade(lab.id, [], cases=[judged(lab, one, n, answer) for n, one in enumerate(scripts)])
    if answer.broken:
        found.problem = f"starter.py does not load: {answer.broken}"
    elif answer.ended:
        played = f"{len(answer.logs)} of {len(scripts)} cases"
        found.problem = f"after {results.ALL_PUBLIC if answer.in_hidden else played}: {answer.ended}"
    found.tasks = Blame(lab, source, scripts, found.cases, answer, sandbox).grades()
    wrong = [task.task for task in found.tasks if task.state in (results.WRONG, results.NOT_WRITTEN)]
    for task in found.tasks:
        if task.state == results.WAITS:
            task.waits_for = wrong[0] if wrong else ""
    keep_first_departure(lab, found, scripts, answer, settings.reveal)
    return found, sandbox.left


def text_of(lab: Lab, submission: Submission) -> tuple[str, str]:
    """Return the file's text, and why there is none."""
    if lab.id in submission.problems or lab.id not in submission.files:
        return "", submission.problems.get(lab.id, "no file was handed in for this lab")
    return with_given(lab, modernized(submission.files[lab.id].decode("utf-8-sig"))), ""


def keep_first_departure(
    lab: Lab, found: LabGrade, scripts: Sequence[CaseScript], answer: Answer, reveal: bool
) -> None:
    """Keep the first departing run that a student may see, up to the step in which it departs.

    One that is larger than a page can show is not kept: reading it would take the reports minutes.
    """
    for case, script, yours in zip(found.cases, scripts, answer.logs, strict=False):
        if not case.passed and (reveal or not case.hidden):
            oracle = expected(lab.id, script.script).steps
            departs = random_scripts.departure(yours, oracle) or 0
            config = json.loads(script.script)["config"]
            runs = [
                {"config": config, "steps": [{"call": s.call, "seen": s.seen} for s in run]}
                for run in (yours[: departs + 1], oracle[: departs + 1])
            ]
            if len(json.dumps(runs)) < results.RUN:
                (found.yours, found.expected), found.departs = runs, departs
            return


def logs_to_run(run: dict[str, Any]) -> OpLog:
    """Return a run of a LabGrade in the player's form."""
    steps = [random_scripts.Step(step["call"], step["seen"]) for step in run["steps"]]
    return random_scripts.as_log({"config": run["config"]}, steps)


def replayed(lab_id: str, name: str, settings: Settings, submission: Submission) -> Case:
    """Return the result of one case, played again. Raise ValueError if there is no such case."""
    lab, settings = find_lab(lab_id), settings.of(submission.student, submission.attempt)
    case = next((case for case in cases(lab, settings) if case.name == name), None)
    if case is None:
        raise ValueError(f"{lab_id} has no case {name!r}; cases are named public N, hidden N, own FILE")
    source, problem = text_of(lab, submission)
    if problem:
        return Case(name, case.hidden, False, problem)
    sandbox = box(lab, settings)
    sandbox.begin(allowance(1, settings.seconds))
    return judged(lab, case, 0, play(sandbox, source, [case]))
