"""What may be told of a grade, in words. All reports are made from this, and none looks at a Grade itself.

Hidden cases end here: of them only numbers go on, unless they are to be revealed. What a submission wrote
is cut to a size, and what would move a cursor or turn a line around is spelled out.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from labs.kit.grader.grading import Settings, logs_to_run
from labs.kit.grader.report.files import stem_of
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
from labs.kit.judge.manifest import LabError, find_lab
from mini_engine.show.player import payload

STATES = {
    RIGHT: "right",
    WRONG: "departs from what it should do",
    NOT_WRITTEN: "not written yet",
    WAITS: "right by itself",
    MISSING: "not handed in",
}
LINES, LETTERS = 120, 400  # of what is told of a case
RUN = 400_000  # characters of a run that goes into a player
# Control characters, halves of letters, and marks that turn a line around.
CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
STRANGE = re.compile(rf"[{CONTROLS}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


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
    mistake: str  # the known one that behaves just so
    hint: str


@dataclass(frozen=True)
class Play:
    """The run that departs, beside what should have been seen: JSON of the player's traces."""

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
    public: tuple[int, int]  # cases that depart, and all
    hidden: tuple[int, int]
    case: str  # the first that departs and may be shown: "" if there is none
    story: tuple[str, ...]  # its lines
    play: Play | None
    late: str

    @property
    def calls(self) -> tuple[str, ...]:
        """The story up to its last call."""
        indented = [number for number, one in enumerate(self.story) if one.startswith("    ")]
        return self.story[: indented[-1] + 1 if indented else 1]

    @property
    def verdict(self) -> tuple[str, ...]:
        """What follows: what the last call should have let be seen."""
        return self.story[len(self.calls) :]

    @property
    def only_hidden(self) -> bool:
        """Whether a student's own `labs test` says nothing of what is wrong."""
        return not self.public[0] and self.hidden[0] > 0

    @property
    def counts(self) -> str:
        """How many cases depart, in words."""
        both = (("Public", self.public), ("hidden", self.hidden))
        said = [f"{kind} cases: {departed} of {total} depart" for kind, (departed, total) in both if total]
        return "; ".join(said)

    @property
    def is_missing(self) -> bool:
        """Whether there was nothing to judge."""
        return all(task.state == MISSING for task in self.tasks)


@dataclass(frozen=True)
class Disclosed:
    """A student's grade as it is reported."""

    student: str
    stem: str  # of the names of its files
    labs: tuple[LabDisclosed, ...]
    earned: float
    points: float
    withheld: float
    seed: str
    isolation: str
    num_hidden: int  # cases that are drawn, a lab
    ignored: tuple[str, ...]
    submitted: str


def tell(grade: Grade, settings: Settings) -> Disclosed:
    return Disclosed(
        plain(grade.student),
        stem_of(grade.student),
        tuple(tell_lab(lab, grade.late.get(lab.lab, ""), settings.reveal) for lab in grade.labs),
        grade.earned,
        sum(lab.points for lab in grade.labs),
        grade.withheld,
        plain(grade.seed),
        grade.isolation,
        settings.hidden,
        tuple(line(name) for name in grade.ignored),
        line(grade.submitted),
    )


def tell_lab(lab: LabGrade, late: str, reveal: bool) -> LabDisclosed:
    shown = next((case for case in lab.cases if not case.passed and (reveal or not case.hidden)), None)
    public, hidden = ([case for case in lab.cases if case.hidden is kind] for kind in (False, True))
    return LabDisclosed(
        lab.lab,
        title_of(lab.lab),
        lab.earned,
        lab.points,
        tuple(tell_task(task) for task in lab.tasks),
        line(lab.problem),
        departed(public),
        departed(hidden),
        case_name(shown) if shown else "",
        story_of(shown.said) if shown else (),
        play_of(lab) if shown else None,
        line(late),
    )


@cache
def title_of(lab_id: str) -> str:
    try:
        return find_lab(lab_id).title
    except LabError:  # a grade of another edition of the course
        return ""


def tell_task(task: TaskGrade) -> TaskDisclosed:
    words = STATES.get(task.state, line(task.state))
    if task.state == WAITS and task.waits_for:
        words += f"; waits for {line(task.waits_for)}"
    name, hint = line(task.name), " ".join(plain(task.hint).split())
    return TaskDisclosed(
        line(task.task), task.state, words, task.earned, task.points, task.passed, task.total, name, hint
    )


def departed(cases: list[Case]) -> tuple[int, int]:
    return sum(not case.passed for case in cases), len(cases)


def case_name(case: Case) -> str:
    """As `labs test` counts: from 1."""
    if match := re.fullmatch(r"public (\d+)", case.name):
        return f"public case {match[1]}"
    return f"case {line(case.name)}"


def story_of(said: str) -> tuple[str, ...]:
    lines = said.splitlines()
    told = [plain(one[:LETTERS]) + (" ..." if len(one) > LETTERS else "") for one in lines[:LINES]]
    return (*told, *([f"and {len(lines) - LINES} lines more"] if len(lines) > LINES else []))


def play_of(lab: LabGrade) -> Play | None:
    """None where there is no run to play, and where a submission's is none that a browser could bear."""
    if lab.yours is None or lab.expected is None:
        return None
    try:
        runs = [logs_to_run(run) for run in (bearable(lab.yours), lab.expected)]
        fed = payload(*runs, names=("yours", "expected"))
        said: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False, "sort_keys": True}
        yours, expected = (json.dumps(one, **said) for one in fed["traces"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Play(yours, expected, lab.departs or 0) if len(yours) + len(expected) < RUN else None


def bearable(run: dict[str, Any]) -> dict[str, Any]:
    """The player draws a mark for each block in `lengths`; numbers that no pool has are left out."""
    steps = [{"call": step["call"], "seen": dict(step["seen"])} for step in run["steps"]]
    for step in steps:
        lengths = step["seen"].get("lengths", {})
        if not isinstance(lengths, dict) or not all(
            type(n) is int and 0 <= n <= 10_000 for n in lengths.values()
        ):
            del step["seen"]["lengths"]
    return {"config": run["config"], "steps": steps}


def plain(text: str) -> str:
    """Text that any file and any terminal can take; line breaks stay."""
    text = "\n".join(text.splitlines())
    return STRANGE.sub(lambda letter: letter[0].encode("unicode_escape").decode(), text)


def line(text: str) -> str:
    """The same, in one line of some length."""
    one = " ".join(plain(text[: 2 * LETTERS]).split())
    return one if len(one) <= LETTERS else one[: LETTERS - 3] + "..."
