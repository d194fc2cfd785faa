"""What is kept of a class: a row of numbers a student, and what was counted."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from labs.kit.grader.report.disclosure import Disclosed
from labs.kit.grader.results import MISSING, NOT_WRITTEN

BINS = 10  # of the distribution


@dataclass(frozen=True)
class Row:
    """A student's line in the tables."""

    student: str
    stem: str
    earned: float
    share: float  # of all points
    labs: dict[str, float]
    tasks: dict[tuple[str, str], float]
    late: str
    withheld: float
    problems: str  # at intake
    broken: str  # code that does not load, or came to no end
    ignored: str
    keys: frozenset[str]  # what the row can be filtered by


@dataclass(frozen=True)
class Missed:
    """A task, and how many did not get all of its points."""

    lab: str
    task: str
    students: int
    not_written: int
    key: str


@dataclass(frozen=True)
class Mistake:
    """A known mistake, and how many made it."""

    lab: str
    task: str
    name: str
    hint: str
    students: int
    key: str


@dataclass
class Summary:
    """Grows by a row a student."""

    seed: str
    rows: list[Row] = field(default_factory=list)
    labs: dict[str, tuple[str, dict[str, float]]] = field(default_factory=dict)  # title; points by task
    is_weak: bool = False
    _missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    _unwritten: Counter[tuple[str, str]] = field(default_factory=Counter)
    _mistakes: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)

    def add(self, told: Disclosed) -> None:
        self.is_weak |= told.isolation != "namespaces"
        share = told.earned / told.points if told.points else 0.0
        keys = {f"b{min(BINS - 1, int(share * BINS + 1e-9))}"}
        for lab in told.labs:
            self.labs.setdefault(lab.id, (lab.title, {task.name: task.points for task in lab.tasks}))
            for task in lab.tasks:
                which = (lab.id, task.name)
                if task.earned < task.points:
                    self._missed[which] += 1
                    self._unwritten[which] += task.state in (NOT_WRITTEN, MISSING)
                    keys.add(task_key(*which))
                if task.mistake:
                    self._mistakes[(*which, task.mistake, task.hint)] += 1
                    keys.add(mistake_key(*which, task.mistake))
        late = "; ".join(f"{lab.id}: {lab.late}" for lab in told.labs if lab.late)
        problems, broken = (grouped(told, missing) for missing in (True, False))
        said = (("late", late), ("problem", problems), ("broken", broken))
        keys |= {key for key, is_so in said if is_so}
        labs = {lab.id: lab.earned for lab in told.labs}
        tasks = {(lab.id, task.name): task.earned for lab in told.labs for task in lab.tasks}
        ignored = ", ".join(told.ignored[:3]) + (", ..." if len(told.ignored) > 3 else "")
        counted = (labs, tasks, late, told.withheld, problems, broken, ignored, frozenset(keys))
        self.rows.append(Row(told.student, told.stem, told.earned, share, *counted))

    def close(self) -> None:
        """Put all in an order that does not depend on that of the grades."""
        self.rows.sort(key=lambda row: (row.student.casefold(), row.student, row.stem))
        self.labs = dict(sorted(self.labs.items()))
        stems = Counter(row.stem for row in self.rows)
        if twice := [stem for stem, number in stems.items() if number > 1]:
            raise ValueError(f"there are two grades of {twice[0]!r}; a student has one")

    @cached_property
    def points(self) -> float:
        return sum(sum(tasks.values()) for _, tasks in self.labs.values())

    @cached_property
    def median(self) -> float:
        return median(row.earned for row in self.rows) if self.rows else 0.0

    @cached_property
    def mean(self) -> float:
        return sum(row.earned for row in self.rows) / len(self.rows) if self.rows else 0.0

    @cached_property
    def bins(self) -> list[int]:
        """Students by tenths of all points; who has all is in the last."""
        counts = Counter(key for row in self.rows for key in row.keys if key[0] == "b")
        return [counts[f"b{number}"] for number in range(BINS)]

    @cached_property
    def complete(self) -> int:
        return sum(row.share >= 1 for row in self.rows)

    @cached_property
    def missed(self) -> list[Missed]:
        """Tasks, the most missed first."""
        found = [
            Missed(*which, number, self._unwritten[which], task_key(*which))
            for which, number in self._missed.items()
        ]
        return sorted(found, key=lambda one: (-one.students, one.lab, one.task))

    @cached_property
    def mistakes(self) -> list[Mistake]:
        """Known mistakes, the commonest first."""
        found = [
            Mistake(lab, task, name, hint, number, mistake_key(lab, task, name))
            for (lab, task, name, hint), number in self._mistakes.items()
        ]
        return sorted(found, key=lambda one: (-one.students, one.lab, one.task, one.name))

    @cached_property
    def late(self) -> list[Row]:
        return [row for row in self.rows if row.late or row.withheld]

    @cached_property
    def problems(self) -> list[Row]:
        return [row for row in self.rows if row.problems]

    @cached_property
    def broken(self) -> list[Row]:
        return [row for row in self.rows if row.broken]

    @cached_property
    def ignored(self) -> list[Row]:
        return [row for row in self.rows if row.ignored]


def grouped(told: Disclosed, missing: bool) -> str:
    """A student's problems, with the labs that have them."""
    labs: dict[str, list[str]] = {}
    for lab in told.labs:
        if lab.problem and lab.is_missing is missing:
            labs.setdefault(lab.problem, []).append(lab.id)
    return "; ".join(f"{', '.join(ids)}: {problem}" for problem, ids in labs.items())


def task_key(lab: str, task: str) -> str:
    return f"t:{lab} {task}"


def mistake_key(lab: str, task: str, name: str) -> str:
    return f"m:{lab} {task} {name}"
