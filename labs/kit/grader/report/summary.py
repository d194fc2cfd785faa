"""The numbers of a class: a row for each student, and counts of missed tasks and known mistakes."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median

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
    broken: str  # code that does not load, or does not run to its end
    ignored: str
    keys: frozenset[str]  # the filters that show the row


@dataclass
class Count:
    """A task, or a known mistake of one, and the number of students who missed or made it."""

    lab: str
    task: str
    key: str
    students: int = 0
    not_written: int = 0
    name: str = ""  # of the mistake
    hint: str = ""


@dataclass
class Summary:
    """The numbers of a class, to which students are added one by one."""

    seed: str
    rows: list[Row] = field(default_factory=list)
    labs: dict[str, tuple[str, dict[str, float]]] = field(default_factory=dict)  # title; points by task
    is_weak: bool = False
    others: dict[str, str] = field(default_factory=dict)  # files that are no student's, and why
    _missed: dict[str, Count] = field(default_factory=dict)  # by key
    _mistakes: dict[str, Count] = field(default_factory=dict)

    def add(self, student: Disclosed) -> None:
        self.is_weak |= student.isolation != "namespaces"
        share = student.earned / student.points if student.points else 0.0
        keys = {f"b{min(BINS - 1, int(share * BINS + 1e-9))}"}
        for lab in student.labs:
            self.labs.setdefault(lab.id, (lab.title, {task.name: task.points for task in lab.tasks}))
            for task in lab.tasks:
                if task.earned < task.points:
                    keys.add(key := f"t:{lab.id} {task.name}")
                    missed = self._missed.setdefault(key, Count(lab.id, task.name, key))
                    missed.students += 1
                    missed.not_written += task.state in (NOT_WRITTEN, MISSING)
                if task.mistake:
                    keys.add(key := f"m:{lab.id} {task.name} {task.mistake}")
                    made = Count(lab.id, task.name, key, name=task.mistake, hint=task.hint)
                    self._mistakes.setdefault(key, made).students += 1
        late = "; ".join(f"{lab.id}: {lab.late}" for lab in student.labs if lab.late)
        problems, broken = (problems_of(student, missing) for missing in (True, False))
        keys |= {key for key, text in (("late", late), ("problem", problems), ("broken", broken)) if text}
        self.rows.append(
            Row(
                student=student.name,
                stem=student.stem,
                earned=student.earned,
                share=share,
                labs={lab.id: lab.earned for lab in student.labs},
                tasks={(lab.id, task.name): task.earned for lab in student.labs for task in lab.tasks},
                late=late,
                withheld=student.withheld,
                problems=problems,
                broken=broken,
                ignored=", ".join(student.ignored[:3]) + (", ..." if len(student.ignored) > 3 else ""),
                keys=frozenset(keys),
            )
        )

    def close(self) -> None:
        """Put everything in an order that does not depend on that of the grades."""
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
        return fmean(row.earned for row in self.rows) if self.rows else 0.0

    @cached_property
    def bins(self) -> list[int]:
        """The number of students in each tenth of all points; the last one includes all points."""
        counts = Counter(key for row in self.rows for key in row.keys if key[0] == "b")
        return [counts[f"b{number}"] for number in range(BINS)]

    @cached_property
    def complete(self) -> int:
        return sum(row.share >= 1 for row in self.rows)

    @cached_property
    def missed(self) -> list[Count]:
        """Tasks, the most missed first."""
        return sorted(self._missed.values(), key=lambda one: (-one.students, one.lab, one.task))

    @cached_property
    def mistakes(self) -> list[Count]:
        """Known mistakes, the commonest first."""
        return sorted(self._mistakes.values(), key=lambda one: (-one.students, one.lab, one.task, one.name))


def problems_of(student: Disclosed, missing: bool) -> str:
    """Return a student's problems with their labs: of missing labs, or of those that were graded."""
    labs: dict[str, list[str]] = {}
    for lab in student.labs:
        if lab.problem and lab.is_missing is missing:
            labs.setdefault(lab.problem, []).append(lab.id)
    return "; ".join(f"{', '.join(ids)}: {problem}" for problem, ids in labs.items())
