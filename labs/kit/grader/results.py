"""The result of grading: plain data, which goes to JSON and back. All reports are made from it."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar, get_type_hints

from labs.kit.judge.manifest import fits

Made = TypeVar("Made")
NO_TIME = "no time of submission is known, so it is not late"
ALL_PUBLIC = "all public cases, in the hidden ones"  # where in them would tell of them
RUN = 400_000  # characters of a run that is kept with its expected one, as JSON
STORY = 200_000  # of what is said on a case
RIGHT, WRONG, NOT_WRITTEN, WAITS, MISSING = "right", "wrong", "not written", "waits", "missing"


@dataclass
class Case:
    """The result of one script on a submission. `said` shows where it departed; "" if it did not."""

    name: str  # "public 3", "hidden 17", "own deadline.json": the seed follows from it
    hidden: bool
    passed: bool
    said: str = ""


@dataclass
class TaskGrade:
    """A task's state and points, and the known mistake if it was recognised."""

    task: str
    points: float  # the most that it can earn
    earned: float
    state: str  # WAITS: right by itself, while `waits_for` is wrong
    passed: int = 0  # of the cases that judge it
    total: int = 0
    waits_for: str = ""
    name: str = ""  # of the known mistake with the same run
    hint: str = ""


@dataclass
class LabGrade:
    """A lab's tasks, the cases played on the whole file, and the first run that departs.

    A run is {"config", "steps": [{"call", "seen"}]}. That of a hidden case is kept with --reveal only.
    """

    lab: str
    tasks: list[TaskGrade]
    problem: str = ""  # why cases could not be judged: no file, it does not load, it ended its sandbox
    cases: list[Case] = field(default_factory=list)
    yours: dict[str, Any] | None = None
    expected: dict[str, Any] | None = None
    departs: int | None = None  # the first step that differs

    @property
    def earned(self) -> float:
        return sum(task.earned for task in self.tasks)

    @property
    def points(self) -> float:
        return sum(task.points for task in self.tasks)


@dataclass
class Grade:
    """The grade of one student's submission."""

    student: str
    labs: list[LabGrade]
    seed: str
    isolation: str  # "namespaces" or "limits"
    digest: str  # of the submission, the course and the settings; with the same one a grade is kept
    ignored: list[str] = field(default_factory=list)  # names of files that were not read
    submitted: str = ""  # ISO 8601, where known
    attempt: int = 0  # 0: the only one, or what counts of several
    late: dict[str, str] = field(default_factory=dict)  # by lab, in words
    costs: dict[str, float] = field(default_factory=dict)  # by lab: points that lateness costs
    manual: dict[str, float] = field(default_factory=dict)  # by lab: an instructor's own points
    comments: dict[str, str] = field(default_factory=dict)  # by lab
    attempts: dict[str, str] = field(default_factory=dict)  # by lab: which counts, and what all earned
    member: dict[str, str] = field(default_factory=dict)  # of the roster: its columns

    @property
    def withheld(self) -> float:
        """The points that lateness costs."""
        return round(sum(self.costs.values()), 2)

    @property
    def earned(self) -> float:
        labs = sum(lab.earned for lab in self.labs)
        return max(0.0, labs - self.withheld + sum(self.manual.values()))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a stored grade. Raise ValueError, KeyError or TypeError if the text is not one."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("nested more deeply than a grade") from None
        for lab in data["labs"]:
            lab["tasks"] = [typed(TaskGrade(**task)) for task in lab["tasks"]]
            lab["cases"] = [typed(Case(**case)) for case in lab["cases"]]
        data["labs"] = [typed(LabGrade(**lab)) for lab in data["labs"]]
        return typed(cls(**data))


def typed(made: Made) -> Made:
    """Return the same object. Raise TypeError if a field is not of its type: its file was edited."""
    for name, wanted in get_type_hints(type(made)).items():
        if not fits(getattr(made, name), wanted):
            raise TypeError(f"{name} is {getattr(made, name)!r}")
    return made
