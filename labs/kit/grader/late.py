"""What lateness costs, from a file of deadlines (--late deadlines.toml) and times of submission.

docs/instructors.md describes the file, docs/examples/deadlines.toml is one. Times never come from those of
files, nor from anything that a student hands in. A student without a time is not late; the report says so.
"""

import csv
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from io import StringIO
from math import ceil
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from labs.kit.grader.intake import safe
from labs.kit.grader.results import Grade, LabGrade
from labs.kit.judge.manifest import LabError, find_lab

TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(\.\d+)?\s*(Z|UTC|[+-]\d\d:?\d\d)?", re.ASCII | re.IGNORECASE
)
POLICY = ("grace_minutes", "points_per_day", "fraction_per_day")
DAY = timedelta(days=1)
MOST = 1_000_000  # minutes or points: two years


@dataclass(frozen=True)
class Deadline:
    """One lab's: when it is due, and what each day costs."""

    due: datetime
    grace: timedelta = timedelta(0)
    points: float = 0.0
    fraction: float = 0.0
    until: datetime | None = None


@dataclass(frozen=True)
class Deadlines:
    labs: Mapping[str, Deadline]
    times: Mapping[tuple[str, str], datetime]  # by student and lab; of all labs where that is ""
    extended: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    alone: datetime | None = None  # of the one submission there is
    zone: tzinfo = UTC  # in which times are shown; they are counted in UTC, where a day has 24 hours

    def submitted(self, student: str, lab: str = "") -> datetime | None:
        return self.times.get((student, lab)) or self.times.get((student, "")) or self.alone

    def written(self, student: str) -> str:
        """The time of a student's submission as a report has it; of several, the last."""
        times = [time for (one, _), time in self.times.items() if one == student]
        times = times or ([self.alone] if self.alone else [])
        return self.shown(max(times)) if times else ""

    def shown(self, time: datetime) -> str:
        return time.astimezone(self.zone).isoformat(timespec="seconds")

    def applied(self, grade: Grade) -> Grade:
        """The grade with what lateness costs. A grade that had it already comes out the same."""
        late, withheld = {}, 0.0
        for lab in grade.labs:
            said, cost = self.cost(grade.student, lab)
            withheld += cost
            if said:
                late[lab.lab] = said
        return replace(grade, late=late, withheld=round(withheld, 2))

    def cost(self, student: str, lab: LabGrade) -> tuple[str, float]:
        """Of one lab: in words, and in points."""
        deadline, time = self.labs.get(lab.lab), self.submitted(student, lab.lab)
        if deadline is None or not lab.earned:
            return "", 0.0
        due = self.extended.get((student, lab.lab), deadline.due)
        until = deadline.until and max(deadline.until, due)
        if time is None:
            return "no time of submission is known; taken as in time", 0.0
        if time <= due + deadline.grace:
            return "", 0.0
        days = ceil((time - due) / DAY)
        late = f"{days} day{'s' * (days != 1)} late (due {self.shown(due)}, handed in {self.shown(time)})"
        if until and time > until:
            return f"{late}, after the last day: nothing of {lab.earned:g} points", lab.earned
        lost = round(min(lab.earned, days * (deadline.points + deadline.fraction * lab.earned)), 2)
        return f"{late}: {lost:g} of {lab.earned:g} points withheld", lost


def read(path: Path, students: int = 0) -> Deadlines:
    """A file of deadlines with the times that it names. Raises LabError for what is unclear in it."""
    plain(path)
    try:
        data = tomllib.loads(path.read_text("utf-8-sig"))
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
            raise LabError(
                f"{path}: {name!r} is not known here; it may be zone, times, {', '.join(POLICY)} or a lab"
            )
        labs[find_lab(name).id] = deadline(f"{path}: [{name}]", common, section, zone)
    extended = {
        (safe(student), find_lab(lab).id): moment(due, zone, f"{path}: students.{student}")
        for student, dues in extensions.items()
        for lab, due in dues.items()
    }
    times, alone = read_times(path.parent / source, zone)
    if alone and students > 1:
        raise LabError(f"{source} has the time of one submission, but {students} are graded")
    return Deadlines(labs, times, extended, alone, zone or UTC)


def plain(path: Path) -> None:
    if not path.is_file():
        raise LabError(f"{path}: there is no such file")


def deadline(
    where: str, common: Mapping[str, Any], section: Mapping[str, Any], zone: tzinfo | None
) -> Deadline:
    if unknown := section.keys() - {*POLICY, "due", "until"}:
        raise LabError(
            f"{where}: {sorted(unknown)[0]!r} is not known; there are due, until, {', '.join(POLICY)}"
        )
    if "due" not in section:
        raise LabError(f"{where} needs a due date")
    if "points_per_day" in section or "fraction_per_day" in section:  # one rule in place of the other
        common = {key: value for key, value in common.items() if not key.endswith("_per_day")}
    rule = {**common, **section}
    if "points_per_day" in rule and "fraction_per_day" in rule:
        raise LabError(f"{where}: points_per_day or fraction_per_day, not both")
    for key in POLICY:
        value = rule.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise LabError(f"{where}: {key} should be a number from 0 up to {MOST}, but is {value!r}")
    if rule.get("fraction_per_day", 0) > 1:
        raise LabError(f"{where}: fraction_per_day should be at most 1; 0.1 is a tenth a day")
    return Deadline(
        moment(rule["due"], zone, where),
        timedelta(minutes=rule.get("grace_minutes", 0)),
        rule.get("points_per_day", 0),
        rule.get("fraction_per_day", 0),
        moment(rule["until"], zone, where) if "until" in rule else None,
    )


def moment(value: object, zone: tzinfo | None, where: str) -> datetime:
    """A time, in UTC. Raises LabError for one that might be meant in several zones."""
    if isinstance(value, str):
        match = TIME.fullmatch(value.strip())
        if not match:
            raise LabError(f"{where}: {value!r} is no time such as 2026-10-12T23:59:00+02:00")
        day, clock, fraction, offset = match.groups()
        offset = "+00:00" if offset and offset.upper() in ("Z", "UTC") else offset or ""
        try:
            value = datetime.fromisoformat(f"{day}T{clock}{(fraction or '')[:7]}{offset}")
        except ValueError as error:
            raise LabError(f"{where}: {value!r}: {error}") from None
    if not isinstance(value, datetime):
        raise LabError(f"{where}: {value} is no time such as 2026-10-12T23:59:00+02:00")
    if value.tzinfo is None:
        if zone is None:
            raise LabError(f"{where}: {value.isoformat()} has no offset from UTC; add one, or say zone = ...")
        value = value.replace(tzinfo=zone)
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise LabError(f"{where}: {value.isoformat()} is out of all time") from None


# ------------------------------------------------------------------------------------ times of submission


def read_times(path: Path, zone: tzinfo | None) -> tuple[dict[tuple[str, str], datetime], datetime | None]:
    """By student and lab; or the time of the only submission. Raises LabError for what it cannot read."""
    plain(path)
    if path.suffix.lower() == ".csv":
        return from_csv(path, zone), None
    try:
        data = metadata(path)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if isinstance(data, dict) and "created_at" in data:
        return {}, moment(data["created_at"], zone, str(path))
    if not isinstance(data, dict) or not all(isinstance(one, dict) for one in data.values()):
        raise LabError(f"{path} is no metadata of submissions as Gradescope writes it")
    times = {}
    for name, one in data.items():
        made = one.get(":created_at", one.get("created_at"))
        times[safe(str(name)), ""] = moment(made, zone, f"{path}: {name}")
    return times, None


def metadata(path: Path) -> Any:
    if path.suffix.lower() == ".json":
        return json.loads(path.read_text("utf-8-sig"))
    try:
        import yaml
    except ImportError:
        raise LabError(f"{path.name} needs the package pyyaml: pip install '.[grade]'") from None
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # texts, lists and dicts, whatever a tag says
    try:
        return yaml.load(path.read_text("utf-8-sig"), Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def from_csv(path: Path, zone: tzinfo | None) -> dict[tuple[str, str], datetime]:
    times: dict[tuple[str, str], datetime] = {}
    try:
        rows = csv.DictReader(StringIO(path.read_text("utf-8-sig"), newline=""))
        named, listed = set(rows.fieldnames or ()), [(rows.line_num, row) for row in rows]
    except (ValueError, csv.Error) as error:
        raise LabError(f"{path} cannot be read: {error}") from None
    if not {"student", "submitted"} <= named:
        raise LabError(f"{path} needs the columns student,submitted; its first line should name them")
    for number, row in listed:
        if not (row["student"] and row["submitted"]):
            continue  # an empty line, or a student with no submission
        lab = find_lab(row["lab"]).id if row.get("lab") else ""
        key = safe(row["student"].removesuffix(".zip")), lab
        if key in times:
            raise LabError(f"{path}: line {number}: {row['student']} is there twice")
        times[key] = moment(row["submitted"], zone, f"{path}: line {number}")
    return times
