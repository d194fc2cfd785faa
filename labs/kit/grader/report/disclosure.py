"""The part of a grade that a report may show, in words. All reports are made from it, none from a Grade.

Hidden cases end here: only their numbers go on, unless they are to be revealed. Text of a submission is cut
to a size, and characters that would move a cursor or turn a line around are escaped.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from labs.kit.grader import results
from labs.kit.grader.grading import logs_to_run
from labs.kit.grader.names import printable, safe
from labs.kit.grader.results import Case, Grade, LabGrade, TaskGrade
from labs.kit.grader.submission import Settings
from labs.kit.judge import compare, sentences
from labs.kit.judge.manifest import LabError, find_lab
from mini_engine.show.player import payload

STATES = {
    results.RIGHT: "right",
    results.WRONG: "departs from what it should do",
    results.NOT_WRITTEN: "not written yet",
    results.WAITS: "right by itself",
    results.MISSING: "not handed in",
}
NOT_JUDGED = "not judged, because the file does not load"
LINES, LETTERS = 120, 400  # of a case's story


@dataclass(frozen=True)
class TaskDisclosed:
    """A task of one student."""

    name: str
    state: str  # a key of STATES
    words: str
    earned: float
    points: float
    passed: int
    total: int
    mistake: str  # the known one with the same run
    hint: str


@dataclass(frozen=True)
class Play:
    """The run that departs, and the expected one: JSON of the player's traces."""

    yours: str
    expected: str
    step: int


@dataclass(frozen=True)
class LabDisclosed:
    """A lab of one student."""

    id: str
    title: str
    earned: float
    points: float
    tasks: tuple[TaskDisclosed, ...]
    problem: str
    public: tuple[int, int]  # cases that depart, and all that were played
    hidden: tuple[int, int]
    unplayed: int  # cases, because the file does not load, or did not run to its end
    case: str  # the first that departs and may be shown: "" if there is none
    story: tuple[str, ...]  # its lines
    play: Play | None
    late: str
    withheld: float
    manual: float
    comment: str
    attempts: str  # which one counts, and what each earned

    @property
    def net(self) -> float:
        """The points that count: without those withheld, and with manual ones."""
        return max(0.0, self.earned - self.withheld + self.manual)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on the points beside the tasks'."""
        manual = f"{self.manual:+g} points" if self.manual else ""
        said = ", ".join(filter(None, [manual, self.comment]))
        said = f"The instructor: {said}" if said else ""
        late = f"Deadline: {self.late}" if self.late else ""
        return tuple(filter(None, [self.attempts and f"Of several, {self.attempts}.", late, said]))

    @property
    def calls(self) -> tuple[str, ...]:
        """The story up to its last call."""
        indented = [number for number, one in enumerate(self.story) if one.startswith("    ")]
        return self.story[: indented[-1] + 1 if indented else 1]

    @property
    def verdict(self) -> tuple[str, ...]:
        """The rest of the story: the state after the last call, and the expected one."""
        return self.story[len(self.calls) :]

    @property
    def counts(self) -> str:
        """The numbers of cases that depart, in words."""
        both = (("Public", self.public), ("hidden", self.hidden))
        texts = [f"{kind} cases: {departed} of {total} depart" for kind, (departed, total) in both if total]
        if texts and self.unplayed:
            texts.append(f"{self.unplayed} cases were not played to their end")
        return "; ".join(texts)


@dataclass(frozen=True)
class Disclosed:
    """A student's grade in a report."""

    name: str
    stem: str  # of the names of the student's files
    labs: tuple[LabDisclosed, ...]
    earned: float
    points: float
    withheld: float
    manual: float
    member: dict[str, str]  # of the roster
    seed: str
    isolation: str
    num_hidden: int  # hidden cases per lab
    ignored: tuple[str, ...]
    submitted: str


def disclose(grade: Grade, settings: Settings) -> Disclosed:
    """Return the part of a grade that a report may show."""
    return Disclosed(
        printable(grade.student),
        safe(grade.student),
        tuple(lab_disclosed(lab, grade, settings.reveal) for lab in grade.labs),
        grade.earned,
        sum(lab.points for lab in grade.labs),
        grade.withheld,
        sum(grade.manual.values()),
        {key: line(value) for key, value in grade.member.items()},
        printable(grade.seed),
        grade.isolation,
        settings.hidden,
        tuple(line(name) for name in grade.ignored),
        line(grade.submitted),
    )


def lab_disclosed(lab: LabGrade, grade: Grade, reveal: bool) -> LabDisclosed:
    ended_in_hidden = lab.problem.startswith(f"after {results.ALL_PUBLIC}") and not reveal
    played = [c for c in lab.cases if is_played(c, lab) and not (c.hidden and ended_in_hidden)]
    departing = [case for case in played if not case.passed]
    shown = next((case for case in departing if reveal or not case.hidden), None)
    public, hidden = ([case.passed for case in played if case.hidden is kind] for kind in (False, True))
    why = "" if departing or len(played) == len(lab.cases) else ended(lab.problem)
    return LabDisclosed(
        lab.lab,
        title_of(lab.lab),
        lab.earned,
        lab.points,
        tuple(task_disclosed(task, why) for task in lab.tasks),
        line(lab.problem),
        (public.count(False), len(public)),
        (hidden.count(False), len(hidden)),
        len(lab.cases) - len(played),
        case_name(shown.name) if shown else "",
        story_of(lab, shown) if shown else (),
        play_of(lab) if shown else None,
        line(grade.late.get(lab.lab, "")),
        grade.costs.get(lab.lab, 0.0),
        grade.manual.get(lab.lab, 0.0),
        line(grade.comments.get(lab.lab, "")),
        line(grade.attempts.get(lab.lab, "")),
    )


def is_played(case: Case, lab: LabGrade) -> bool:
    """Whether a case has a run to compare: the file loads, and did not end or take too long before."""
    return case.passed or not (case.said == "not begun" or (case.said and lab.problem.endswith(case.said)))


def ended(problem: str) -> str:
    """Return in words for a task why no run of its file departs, and cases were not played."""
    if problem.startswith("starter.py does not load"):
        return NOT_JUDGED
    why = problem.partition(": ")[2]
    return line(f"too slow: {why}" if why.startswith("no answer within") else f"stopped: {why}")


@cache
def title_of(lab_id: str) -> str:
    try:
        return find_lab(lab_id).title
    except LabError:  # a grade of another edition of the course
        return ""


def task_disclosed(task: TaskGrade, ended: str) -> TaskDisclosed:
    words = ended if ended and task.state == results.WRONG else STATES.get(task.state, line(task.state))
    if task.state == results.WAITS and task.waits_for:
        words += f"; waits for {line(task.waits_for)}"
    passed, total = (0, 0) if words == NOT_JUDGED else (task.passed, task.total)
    points = (task.earned, task.points, passed, total)
    mistake, hint = line(task.name), printable(" ".join(task.hint.split()))
    return TaskDisclosed(line(task.task), task.state, words, *points, mistake, hint)


def case_name(name: str) -> str:
    match = re.fullmatch(r"public (\d+)", name)
    return f"public case {match[1]}" if match else f"case {line(name)}"  # as `labs test` calls it


def story_of(lab: LabGrade, case: Case) -> tuple[str, ...]:
    """Return the sentence on a departing run, and its lines but for the case's name."""
    said = case.said.removeprefix(f"{case.name} departs:\n")
    lines = "\n".join(filter(None, [sentence_on(lab), said])).splitlines()
    shown = [printable(one[:LETTERS]) + (" ..." if len(one) > LETTERS else "") for one in lines[:LINES]]
    return (*shown, *([f"and {len(lines) - LINES} lines more"] if len(lines) > LINES else []))


def sentence_on(lab: LabGrade) -> str:
    """Return the sentence on the departing run, or "" if there is none, or none that can be read."""
    if lab.yours is None or lab.expected is None:
        return ""
    try:
        yours, expected = logs_to_run(lab.yours), logs_to_run(lab.expected)
        found = compare.departure(yours, expected)
        return sentences.sentence(yours, expected, found).text if found else ""
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return ""


def play_of(lab: LabGrade) -> Play | None:
    """Return the departing run, or None if there is none, or none that a browser can show."""
    if lab.yours is None or lab.expected is None:
        return None
    try:
        runs = [logs_to_run(run) for run in (playable(lab.yours), lab.expected)]
        traces = payload(*runs, names=("yours", "expected"))["traces"]
        form: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False, "sort_keys": True}
        yours, expected = (json.dumps(trace, **form) for trace in traces)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Play(yours, expected, lab.departs or 0) if len(yours) + len(expected) < results.RUN else None


def playable(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run without impossible `lengths`, for each block of which the player draws a mark."""
    steps = [{"call": step["call"], "seen": dict(step["seen"])} for step in run["steps"]]
    for seen in (step["seen"] for step in steps):
        lengths = seen.get("lengths", {})
        values = lengths.values() if isinstance(lengths, dict) else [None]
        if not all(type(value) is int and 0 <= value <= 10_000 for value in values):
            del seen["lengths"]
    return {"config": run["config"], "steps": steps}


def line(text: str) -> str:
    """Return printable text in one line of at most LETTERS characters."""
    one = printable(" ".join(text[: 2 * LETTERS].split()))
    return one if len(one) <= LETTERS else one[: LETTERS - 3] + "..."
