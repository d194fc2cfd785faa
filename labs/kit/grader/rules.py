"""Rules that change a grade without grading anew: deadlines, manual points, the roster, the chosen attempt.

docs/instructors.md describes the files.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

from labs.kit.grader import late
from labs.kit.grader.intake import Entry
from labs.kit.grader.late import Deadlines, check_names, lab_of, rows
from labs.kit.grader.names import safe, shown
from labs.kit.grader.results import Grade
from labs.kit.judge.manifest import LabError

BEST, LAST, FIRST = "best", "last", "first"
STUDENT, NAME, ID, SECTION, EMAIL = "student", "name", "id", "section", "email"
COLUMNS = {  # of a roster: what Canvas, Moodle and Gradescope call them in the files that they export
    STUDENT: ("student folder", "folder"),
    NAME: ("student", "name", "full name"),
    ID: ("id", "id number", "sid", "identifier", "student id"),
    SECTION: ("section", "sections", "groups"),
    EMAIL: ("email", "email address", "sis login id"),
}
KEPT = ("SIS User ID", "SIS Login ID")  # of a Canvas gradebook, which an import wants again
NOBODY = ("Points Possible", "Student, Test")  # rows of a Canvas gradebook
STAFF = ("instructor", "ta", "reader")  # in Gradescope's roster
MOST = 1_000_000  # points


@dataclass(frozen=True)
class Files:
    """The arguments of the command line."""

    late: Path | None = None
    roster: Path | None = None
    manual: Path | None = None
    attempts: str = ""  # "": a student has one
    max_attempts: int = 0  # 0: all of them


@dataclass(frozen=True)
class Rules:
    """The rules that are applied to each grade."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    members: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of the roster, by student
    absent: Sequence[Mapping[str, str]] = ()  # members without a submission
    has_roster: bool = False
    points: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by student and lab
    comments: Mapping[tuple[str, str], str] = field(default_factory=dict)
    attempts: str = ""

    def applied(self, grade: Grade) -> Grade:
        """Return the grade with what lateness costs, manual points and comments."""
        grade, labs = self.deadlines.applied(grade), [lab.lab for lab in grade.labs]
        manual = {lab: self.points[grade.student, lab] for lab in labs if (grade.student, lab) in self.points}
        said = {lab: self.comments[key] for lab in labs if (key := (grade.student, lab)) in self.comments}
        member = dict(self.members.get(grade.student, {}))
        return replace(grade, manual=manual, comments=said, member=member)

    def counted(self, tries: Sequence[Grade]) -> Grade:
        """Return what counts of a student's attempts, in their order: of each lab the best, last or first.

        A lab that an attempt lacks was not tried in it.
        """
        if [one.attempt for one in tries] == [0]:
            return tries[0]
        found = replace(tries[-1], labs=[], attempt=0, late={}, costs={}, attempts={}, ignored=[])
        for at, name in enumerate(lab.lab for lab in tries[-1].labs):
            there = [one for one in tries if one.labs[at].cases] or [tries[-1]]
            nets = [one.labs[at].earned - one.costs.get(name, 0.0) for one in there]
            which = {BEST: nets.index(max(nets)), LAST: -1, FIRST: 0}[self.attempts]
            chosen = there[which]
            found.labs.append(chosen.labs[at])
            found.late |= {name: chosen.late[name]} if name in chosen.late else {}
            found.costs |= {name: chosen.costs[name]} if name in chosen.costs else {}
            found.ignored += [one for one in chosen.ignored if one not in found.ignored]
            if there == [tries[-1]] and not chosen.labs[at].cases:
                continue
            each = ", ".join(f"{one.attempt}: {net:g}" for one, net in zip(there, nets, strict=True))
            which_one = f"the {self.attempts} of {len(there)} ({each})"
            found.attempts[name] = f"attempt {chosen.attempt} counts, {which_one}"
        return found


def read(files: Files, entries: Sequence[Entry]) -> Rules:
    """Return the rules for these students. Raise LabError if something in a file is unclear."""
    students = list(dict.fromkeys(entry.student for entry in entries))
    deadlines = late.read(files.late, students) if files.late else Deadlines()
    points, comments = read_manual(files.manual, students) if files.manual else ({}, {})
    members, absent = read_roster(files.roster, entries) if files.roster else ({}, [])
    return Rules(deadlines, members, absent, files.roster is not None, points, comments, files.attempts)


def within(entries: Sequence[Entry], limit: int) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries that count, and those beyond the limit of attempts, each with a reason."""
    order: dict[str, list[Entry]] = {}
    for entry in entries:
        order.setdefault(entry.student, []).append(entry)
    counted = [one for tries in order.values() for one in (tries[:limit] if limit else tries)]
    beyond = [one for tries in order.values() for one in (tries[limit:] if limit else ())]
    why = f"only {limit} attempts count"
    return counted, {f"{one.student}/attempt-{one.attempt}": why for one in beyond}


# ------------------------------------------------------------------------------------- tables of instructors


def read_manual(
    path: Path, students: Collection[str]
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], str]]:
    """Return the manual points and the comments in a CSV: student,lab,points,comment."""
    points: dict[tuple[str, str], float] = {}
    comments: dict[tuple[str, str], str] = {}
    for line, row in rows(path, "student,lab,points"):
        where = f"{path}: line {line}"
        if not row["student"]:
            continue
        key = safe(row["student"].removesuffix(".zip")), lab_of(where, row["lab"])
        if key in points:
            raise LabError(f"{where}: {shown(row['student'])} and {row['lab']} are there twice")
        try:
            points[key] = float(row["points"] or 0)
        except ValueError:
            raise LabError(f"{where}: points should be a number, but are {row['points']!r}") from None
        if not isfinite(points[key]) or abs(points[key]) > MOST:
            raise LabError(f"{where}: points should be a number up to {MOST}, but are {row['points']!r}")
        if comment := row.get("comment", ""):
            comments[key] = comment
    check_names(path, points, students)
    return points, comments


def read_roster(
    path: Path, entries: Sequence[Entry]
) -> tuple[dict[str, dict[str, str]], list[dict[str, str]]]:
    """Return the members of a roster by student, and the members without a submission."""
    by = {folded(key): one.student for one in entries for key in (one.student, one.number) if key}
    members: dict[str, dict[str, str]] = {}
    absent = []
    for line, row in rows(path):
        member = member_of(row)
        if any(key.casefold() == "role" and row[key].casefold() in STAFF for key in row):
            continue
        if member[NAME] in NOBODY or not (member[ID] or member[STUDENT] or member[EMAIL]):
            if member[NAME] not in ("", *NOBODY):
                raise LabError(f"{path}: line {line}: {shown(member[NAME])} has neither an id nor an address")
            continue
        last_first = member[NAME].replace(",", "").replace(" ", "")
        keys = (member[STUDENT], member[ID], member[EMAIL], member[NAME], last_first)
        found = next((by[key] for key in map(folded, filter(None, keys)) if key in by), None)
        if found is None:
            absent.append(member)
        elif found in members:
            raise LabError(f"{path}: line {line}: {shown(found)} is there twice")
        else:
            members[found] = member
    if not members:
        needed = "folder, id, email, name and section"
        raise LabError(f"{path} names no student of this class; it may have the columns {needed}")
    return members, absent


def member_of(row: Mapping[str, str]) -> dict[str, str]:
    """Return a roster's row with the names of `COLUMNS`, and the columns that a Canvas import wants again."""
    low = {key.casefold(): value for key, value in row.items()}
    found = {key: next((low[name] for name in names if low.get(name)), "") for key, names in COLUMNS.items()}
    if "first name" in low and not found[NAME]:
        last = low.get("last name") or low.get("surname") or ""
        found[NAME] = f"{low['first name']} {last}".strip()
    found |= {key: row[key] for key in KEPT if key in row}
    for key in row:  # Canvas: lab-01 (98765); the number is the assignment's
        if key.endswith(")") and key.lower().startswith("lab"):
            found[key] = ""
    return found


def folded(key: str) -> str:
    return safe(key).casefold()
