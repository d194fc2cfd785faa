"""The numbers of a class: a row for each student, and counts of missed tasks and known mistakes."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median

from labs.kit.grader.report.disclosure import Disclosed
from labs.kit.grader.results import MISSING, NO_TIME, NOT_WRITTEN

BINS = 10  # of the distribution


@dataclass(frozen=True)
class Row:
    """A student's line in the tables."""

    student: str
    stem: str
    earned: float
    share: float  # of all points
    labs: dict[str, float]
    net: dict[str, float]  # by lab: with what lateness costs, and manual points
    tasks: dict[tuple[str, str], float]
    late: str  # and where no time is known
    late_in: str  # labs
    withheld: float
    manual: float
    notes: dict[str, str]  # by lab: attempts, lateness, comments
    attempts: str
    comments: str
    member: dict[str, str]  # of the roster
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
    absent: list[dict[str, str]] = field(default_factory=list)  # of the roster, without a submission
    has_roster: bool = False
    alike: list[str] | None = None  # pairs of files; None: not looked for
    sections: list[str] = field(default_factory=list)  # of the students, one each
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
        late, attempts, comments = (
            "; ".join(f"{lab.id}: {getattr(lab, name)}" for lab in student.labs if getattr(lab, name))
            for name in ("late", "attempts", "comment")
        )
        problems, broken = (problems_of(student, missing) for missing in (True, False))
        late_in = ", ".join(lab.id for lab in student.labs if lab.late not in ("", NO_TIME))
        texts = {"late": late_in, "problem": problems, "broken": broken, "attempts": attempts}
        keys |= {key for key, text in texts.items() if text}
        if section := student.member.get("section"):
            keys.add(f"s:{section}")
            self.sections.append(section)
        self.rows.append(
            Row(
                student=student.name,
                stem=student.stem,
                earned=student.earned,
                share=share,
                labs={lab.id: lab.earned for lab in student.labs},
                net={lab.id: lab.net for lab in student.labs},
                tasks={(lab.id, task.name): task.earned for lab in student.labs for task in lab.tasks},
                late=late,
                late_in=late_in,
                withheld=student.withheld,
                manual=student.manual,
                notes={lab.id: " ".join(lab.notes) for lab in student.labs if lab.notes},
                attempts=attempts,
                comments=comments,
                member=student.member,
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
        self.sections.sort()
        self.absent.sort(key=lambda one: (one["name"].casefold(), one["id"]))
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
    def in_time(self) -> list[str]:
        """Lines on lateness and attempts, what costs most first."""
        rows = sorted(self.rows, key=lambda row: -row.withheld)
        return [text for row in rows if (text := not_in_time(row))]

    @cached_property
    def not_understood(self) -> list[str]:
        """Lines on files and students that are in no lab's numbers."""
        lines = [f"{row.student}: {text}" for row in self.rows if (text := row.problems or row.broken)]
        lines += [f"{row.student}: not read: {row.ignored}" for row in self.rows if row.ignored]
        lines += [f"{name}: {why}" for name, why in sorted(self.others.items())]
        strangers = [row.student for row in self.rows if self.has_roster and not row.member]
        lines += [f"{student}: not in the roster" for student in strangers]
        return lines + [f"{one['name'] or one['id']}: nothing was handed in" for one in self.absent]

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


def not_in_time(row: Row) -> str:
    """Return one line on a student's lateness and attempts, or ""."""
    late = f"late in {row.late_in}" if row.late_in else ""
    unknown = "a time of submission is not known" if NO_TIME in row.late else ""
    tries = "several attempts" if row.attempts else ""
    withheld = f"{row.withheld:g} points withheld" if row.withheld else ""
    text = ", ".join(filter(None, [late, withheld, unknown, tries]))
    return f"{row.student}: {text}" if text else ""


def problems_of(student: Disclosed, missing: bool) -> str:
    """Return a student's problems with their labs: of missing labs, or of those that were graded."""
    labs: dict[str, list[str]] = {}
    for lab in student.labs:
        if lab.problem and all(task.state == MISSING for task in lab.tasks) is missing:
            labs.setdefault(lab.problem, []).append(lab.id)
    return "; ".join(f"{', '.join(ids)}: {problem}" for problem, ids in labs.items())
