"""What grading a submission gives: plain data, which goes to JSON and back. All reports are made from it."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar, get_type_hints

from labs.kit.judge.manifest import fits

Made = TypeVar("Made")
RIGHT, WRONG, NOT_WRITTEN, WAITS, MISSING = "right", "wrong", "not written", "waits", "missing"


@dataclass
class Case:
    """One script, played on a submission. `said` tells where it departed; "" if it did not."""

    name: str  # "public 3", "hidden 17", "own deadline.json": the seed follows from it
    hidden: bool
    passed: bool
    said: str = ""


@dataclass
class TaskGrade:
    """A task: its state, its points, and what a student should read of it."""

    task: str
    points: float  # that it is worth
    earned: float
    state: str  # WAITS: right by itself, while `waits_for` is wrong
    passed: int = 0  # cases that judge it and pass, with the other tasks filled in
    total: int = 0
    waits_for: str = ""
    name: str = ""  # of the known mistake that behaves just so
    hint: str = ""


@dataclass
class LabGrade:
    """A lab: its tasks, the cases played on the whole file, and the first run that departs."""

    lab: str
    tasks: list[TaskGrade]
    problem: str = ""  # why nothing could be judged: no file, it does not load, it ended its sandbox
    cases: list[Case] = field(default_factory=list)
    yours: dict[str, Any] | None = (
        None  # {"config", "steps": [{"call", "seen"}]} of the first departing case,
    )
    expected: dict[str, Any] | None = None  # and what should have been seen; a hidden case only with --reveal
    departs: int | None = None  # the step of it in which the two part

    @property
    def earned(self) -> float:
        return sum(task.earned for task in self.tasks)

    @property
    def points(self) -> float:
        return sum(task.points for task in self.tasks)


@dataclass
class Grade:
    """One student's whole submission."""

    student: str
    labs: list[LabGrade]
    seed: str
    isolation: str  # "namespaces" or "limits"
    digest: str  # of what was handed in, the course and the settings: what was graded so is not graded again
    ignored: list[str] = field(default_factory=list)  # what was handed in and not looked at
    submitted: str = ""  # ISO 8601, where known
    late: dict[str, str] = field(default_factory=dict)  # by lab: in words
    withheld: float = 0.0  # points that lateness costs

    @property
    def earned(self) -> float:
        return max(0.0, sum(lab.earned for lab in self.labs) - self.withheld)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, KeyError or TypeError for what is no grade."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("nested deeper than any grade") from None
        for lab in data["labs"]:
            lab["tasks"] = [typed(TaskGrade(**task)) for task in lab["tasks"]]
            lab["cases"] = [typed(Case(**case)) for case in lab["cases"]]
        data["labs"] = [typed(LabGrade(**lab)) for lab in data["labs"]]
        return typed(cls(**data))


def typed(made: Made) -> Made:
    """The same. Raises TypeError where a field is not of its type: the file was edited, or is another's."""
    for name, wanted in get_type_hints(type(made)).items():
        if not fits(getattr(made, name), wanted):
            raise TypeError(f"{name} is {getattr(made, name)!r}")
    return made
