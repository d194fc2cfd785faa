"""Counts lateness and its cost, from a file of deadlines (--late deadlines.toml) and times of submission.

docs/instructors.md describes the file; docs/examples/deadlines.toml is an example. Times of submission come
neither from the times of files nor from a submission. A student without a time is not late, and the report
says so.
"""

import csv
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from io import StringIO
from math import ceil
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from labs.kit.grader.names import safe, shown
from labs.kit.grader.results import NO_TIME, Grade, LabGrade
from labs.kit.judge.manifest import LabError, find_lab, made

TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(\.\d+)?\s*(Z|UTC|[+-]\d\d:?\d\d)?", re.ASCII | re.IGNORECASE
)
EXAMPLE = "2026-10-12T23:59:00+02:00"
POLICY = ("grace_minutes", "points_per_day", "fraction_per_day")
PER_DAY = {*POLICY[1:]}
DAY = timedelta(days=1)
MOST = 1_000_000  # minutes or points
# By student, lab and attempt. "" stands for the only student, or for all labs, and 0 for all attempts.
Times = dict[tuple[str, str, int], datetime]


@dataclass(frozen=True)
class Deadline:
    """One lab's due date, and what each day after it costs."""

    due: Any  # datetime
    until: Any = None
    grace_minutes: float = 0.0
    points_per_day: float = 0.0
    fraction_per_day: float = 0.0


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of a class, and its times of submission. Without any, no submission is late."""

    labs: Mapping[str, Deadline] = field(default_factory=dict)
    extended: Mapping[tuple[str, str], datetime] = field(default_factory=dict)  # by student and lab
    source: str = ""  # the file with the times of submission
    zone: tzinfo | None = None  # of times without an offset; days are counted in UTC, with 24 hours each
    times: Times = field(default_factory=dict)

    def submitted(self, student: str, lab: str = "", attempt: int = 0) -> datetime | None:
        tries = dict.fromkeys((attempt, 0))
        keys = [(student, one, number) for number in tries for one in (lab, "")] + [("", "", 0)]
        return next((self.times[key] for key in keys if key in self.times), None)

    def written(self, student: str, attempt: int = 0) -> str:
        """Return the time of a student's last submission for a report, or ""."""
        of = {n for one, _, n in self.times if one == student and n == attempt} or {0}
        times = [time for (one, _, n), time in self.times.items() if one in (student, "") and n in of]
        return self.shown(max(times)) if times else ""

    def shown(self, time: datetime) -> str:
        return time.astimezone(self.zone or UTC).isoformat(timespec="seconds")

    def applied(self, grade: Grade) -> Grade:
        """Return the grade with what lateness costs, in place of what it had before."""
        costs = {lab.lab: self.cost(grade.student, lab, grade.attempt) for lab in grade.labs}
        late = {lab: text for lab, (text, _) in costs.items() if text}
        return replace(grade, late=late, costs={lab: cost for lab, (_, cost) in costs.items() if cost})

    def cost(self, student: str, lab: LabGrade, attempt: int = 0) -> tuple[str, float]:
        """Return what lateness costs in a lab, in words and in points."""
        deadline, time = self.labs.get(lab.lab), self.submitted(student, lab.lab, attempt)
        if deadline is None or not lab.earned:
            return "", 0.0
        due = self.extended.get((student, lab.lab), deadline.due)
        until = deadline.until and max(deadline.until, due)
        if time is None:
            return NO_TIME, 0.0
        if time <= due + timedelta(minutes=deadline.grace_minutes):
            return "", 0.0
        days = ceil((time - due) / DAY)
        late = f"{days} day{'s' * (days != 1)} late (due {self.shown(due)}, handed in {self.shown(time)})"
        if until and time > until:
            return f"{late}, after the last day: nothing of {lab.earned:g} points", lab.earned
        a_day = deadline.points_per_day + deadline.fraction_per_day * lab.earned
        lost = round(min(lab.earned, days * a_day), 2)
        return f"{late}: {lost:g} of {lab.earned:g} points withheld", lost


def read(path: Path, students: Collection[str] = ()) -> Deadlines:
    """Return a file of deadlines with the times that it names, for these students.

    Raise LabError if something is unclear, or a name is no student's; without students no name is checked.
    """
    rules = read_rules(path)
    times = read_times(path.parent / rules.source, rules.zone)
    if ("", "", 0) not in times:
        check_names(path.parent / rules.source, times, students)
        check_names(path, rules.extended, students)
    elif len(students) > 1:
        raise LabError(f"{rules.source} has the time of one submission, but {len(students)} are graded")
    return replace(rules, times=times)


def check_names(path: Path, keys: Iterable[tuple[Any, ...]], students: Collection[str]) -> None:
    """Raise LabError, with similar names, if a file has a name that is not a student's."""
    unknown = sorted({name for name, *_ in keys} - {*students}) if students else []
    if unknown:
        folded = {student.casefold(): student for student in sorted(students)}
        near = [folded[one] for one in get_close_matches(unknown[0].casefold(), folded, 3, 0.5)]
        more = f" (and {len(unknown) - 1} more names are not)" if unknown[1:] else ""
        there = f"near it: {', '.join(near)}" if near else f"there are {', '.join([*folded.values()][:5])}"
        raise LabError(f"{path}: {shown(unknown[0])} is not a student's name here{more}; {there}")


def read_rules(path: Path) -> Deadlines:
    """Return a file of deadlines without the times. Raise LabError if something in it is unclear."""
    try:
        data = tomllib.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path}: {str(error).splitlines()[0]}") from None
    try:
        zone = ZoneInfo(data.pop("zone")) if "zone" in data else None
    except (ValueError, OSError, KeyError, TypeError):  # ZoneInfoNotFoundError is a KeyError
        raise LabError(f"{path}: zone should be a name such as Europe/Berlin") from None
    source = data.pop("times", None)
    if not isinstance(source, str):
        raise LabError(f"{path}: times should name the file with the times of submission")
    extensions = data.pop("students", {})
    if not isinstance(extensions, dict) or not all(isinstance(dues, dict) for dues in extensions.values()):
        raise LabError(f"{path}: an extension is a section [students.NAME] with a line lab-NN = TIME")
    common = {key: data.pop(key) for key in POLICY if key in data}
    labs = {}
    for name, section in data.items():
        if not isinstance(section, dict):
            known = f"it may be zone, times, {', '.join(POLICY)} or a lab"
            raise LabError(f"{path}: {name!r} is not known here; {known}")
        labs[lab_of(str(path), name)] = deadline(f"{path}: [{name}]", common, section, zone)
    extended = {
        (safe(student), lab_of(where, lab)): moment(due, zone, where)
        for student, dues in extensions.items()
        for where in [f"{path}: students.{student}"]
        for lab, due in dues.items()
    }
    return Deadlines(labs, extended, source, zone)


def text_of(path: Path) -> str:
    if not path.is_file():
        raise LabError(f"{path}: there is no such file")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is not UTF-8 text (at byte {error.start:,}); save it as UTF-8") from None


def lab_of(where: str, name: str) -> str:
    """Return a lab's id. Raise LabError with the place of the name if there is no such lab."""
    try:
        return find_lab(name).id
    except LabError as error:
        raise LabError(f"{where}: {error}") from None


def deadline(
    where: str, common: Mapping[str, Any], section: Mapping[str, Any], zone: tzinfo | None
) -> Deadline:
    if PER_DAY & section.keys():  # its own rule replaces the common one
        common = {key: value for key, value in common.items() if key not in PER_DAY}
    rule = {**common, **section}
    found = made(Path(where), Deadline, rule)
    if PER_DAY <= rule.keys():
        raise LabError(f"{where}: points_per_day or fraction_per_day, not both")
    for key in POLICY:
        if not 0 <= getattr(found, key) <= MOST:
            raise LabError(f"{where}: {key} should be a number from 0 up to {MOST}, but is {rule[key]!r}")
    if found.fraction_per_day > 1:
        raise LabError(f"{where}: fraction_per_day should be at most 1; 0.1 is a tenth for each day")
    due, until = (moment(rule[key], zone, where) if key in rule else None for key in ("due", "until"))
    if due and until and until < due:
        raise LabError(f"{where}: until should not be before due")
    return replace(found, due=due, until=until)


def moment(value: object, zone: tzinfo | None, where: str) -> datetime:
    """Return a time in UTC. Raise LabError if it is not a time, or its zone is not known."""
    if isinstance(value, str):
        match = TIME.fullmatch(value.strip())
        if not match:
            raise LabError(f"{where}: {value!r} is not a time such as {EXAMPLE}")
        day, clock, fraction, offset = match.groups()
        offset = "+00:00" if offset and offset.upper() in ("Z", "UTC") else offset or ""
        try:
            value = datetime.fromisoformat(f"{day}T{clock}{(fraction or '')[:7]}{offset}")
        except ValueError as error:
            raise LabError(f"{where}: {value!r}: {error}") from None
    if not isinstance(value, datetime):
        raise LabError(f"{where}: {value} is not a time such as {EXAMPLE}")
    if value.tzinfo is None and zone is None:
        raise LabError(f"{where}: {value.isoformat()} has no offset from UTC; add one, or say zone = ...")
    try:
        time = (value if value.tzinfo else value.replace(tzinfo=zone)).astimezone(UTC)
        there = value.tzinfo or time.astimezone(zone).replace(tzinfo=None, fold=0) == value.replace(fold=0)
    except OverflowError:
        raise LabError(f"{where}: {value.isoformat()} is outside the range of dates") from None
    if not there:
        why = f"no clock in {zone} shows that time, because daylight saving begins; write another"
        raise LabError(f"{where}: {value.isoformat()}: {why}")
    return time


# ------------------------------------------------------------------------------------ times of submission


def read_times(path: Path, zone: tzinfo | None) -> Times:
    """Return the times of submission in a CSV or in Gradescope's metadata. Raise LabError if unclear."""
    try:
        if path.suffix.lower() == ".csv":
            return from_csv(path, zone)
        text = text_of(path)
        data = json.loads(text) if path.suffix.lower() == ".json" else parsed_yaml(path, text)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if isinstance(data, dict) and "created_at" in data:
        return {("", "", 0): moment(data["created_at"], zone, str(path))}
    if not isinstance(data, dict) or not all(isinstance(one, dict) for one in data.values()):
        raise LabError(f"{path} is not the metadata of submissions that Gradescope writes")
    times: Times = {}
    for name, one in data.items():
        created = one.get(":created_at", one.get("created_at"))
        times[safe(str(name)), "", 0] = moment(created, zone, f"{path}: {name}")
    return times


def parsed_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise LabError(f"{path.name} needs the package pyyaml: pip install '.[grade]'") from None
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # texts, lists and dicts only, whatever the tags
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def from_csv(path: Path, zone: tzinfo | None) -> Times:
    times: Times = {}
    for line, row in rows(path, "student,submitted"):
        if not (row["student"] and row["submitted"]):
            continue  # a student without a submission
        where, number = f"{path}: line {line}", row.get("attempt") or "0"
        lab = lab_of(where, row["lab"]) if row.get("lab") else ""
        if not re.fullmatch("[0-9]{1,3}", number):
            raise LabError(f"{where}: attempt should be a number from 1, but is {number!r}")
        key = safe(row["student"].removesuffix(".zip")), lab, int(number)
        if key in times:
            raise LabError(f"{where}: {row['student']} is there twice")
        times[key] = moment(row["submitted"], zone, where)
    return times


def rows(path: Path, needed: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """Yield a table's rows, each with its line. Raise LabError if it cannot be read, or lacks a column."""
    try:
        text = text_of(path)
        first = text.partition("\n")[0]
        separator = ";" if first.count(";") > first.count(",") else ","  # as some languages' tables have it
        found = csv.DictReader(StringIO(text, newline=""), delimiter=separator)
        if not {*filter(None, needed.split(","))} <= {*map(str.strip, found.fieldnames or ())}:
            raise LabError(f"{path} needs the columns {needed}; its first line should name them")
        for row in found:
            yield found.line_num, {key.strip(): (row[key] or "").strip() for key in row if key}
    except (ValueError, csv.Error) as error:
        raise LabError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
