"""The cost of lateness, and the source of the times."""

import json
from datetime import UTC, datetime

import pytest

from labs.kit.grader import late
from labs.kit.grader.results import Grade, LabGrade, TaskGrade
from labs.kit.judge.manifest import LabError

HEAD = 'zone = "Europe/Berlin"\ntimes = "times.csv"\n'
DUE = "[lab-01]\ndue = 2026-10-12T23:59:00\n"


@pytest.fixture
def read(tmp_path):
    """Read deadlines and times from texts; a CSV of times, unless it is named otherwise."""

    def made(deadlines, times="", name="times.csv", students=()):
        (tmp_path / "deadlines.toml").write_text(deadlines, "utf-8")
        (tmp_path / name).write_text(times if name != "times.csv" else f"student,submitted\n{times}", "utf-8")
        return late.read(tmp_path / "deadlines.toml", students)

    return made


def lab(lab_id="lab-01", earned=80.0):
    return LabGrade(lab_id, [TaskGrade("task", 100, earned, "right")])


def grade(*labs, student="ann"):
    return Grade(student, list(labs or [lab()]), "seed", "namespaces", "digest")


@pytest.mark.parametrize(
    "submitted, lost",
    [
        ("2026-10-12 23:59", 0),
        ("2026-10-13 00:09", 0),  # within the grace
        ("2026-10-13 00:10", 10),  # a day has begun
        ("2026-10-13 23:59", 10),
        ("2026-10-14 00:00", 20),
        ("2026-10-19 12:00", 70),
        ("2027-10-19 12:00", 80),  # never more than was earned
        ("2026-10-12T21:59:00Z", 0),
        ("2026-10-12T17:59:00-04:00", 0),
        ("2026-10-12T23:59:00-04:00", 10),
        ("", 0),  # not known
    ],
)
def test_points_a_day_and_a_grace(read, submitted, lost):
    times = f"ann,{submitted}" if submitted else ""
    deadlines = read(f"{HEAD}grace_minutes = 10\npoints_per_day = 10\n{DUE}", times)
    found = deadlines.applied(grade())
    assert (found.withheld, found.earned) == (lost, 80 - lost)
    assert bool(found.late) == bool(lost or not submitted)
    assert deadlines.applied(found) == found
    assert not deadlines.applied(grade(lab(earned=0))).late  # nothing is withheld of nothing


FRACTION = f"{HEAD}fraction_per_day = 0.25\n{DUE}until = 2026-10-15T23:59:00\n"
CLOCKS = f"{HEAD}points_per_day = 10\n[lab-01]\ndue = 2026-10-24T23:00:00\n"  # summer time ends that night


@pytest.mark.parametrize(
    "text, submitted, withheld",
    [
        (CLOCKS, "2026-10-25 22:30", 20),  # there were 24.5 hours in between
        (FRACTION, "2026-10-13 12:00", 20),
        (FRACTION, "2026-10-14 12:00", 40),
        (FRACTION, "2026-10-16 00:00", 80),  # after the last day
    ],
)
def test_days_of_24_hours_and_fractions_until_the_last_day(read, text, submitted, withheld):
    found = read(text, f"ann,{submitted}").applied(grade())
    assert found.withheld == withheld
    assert ("after the last day" in found.late["lab-01"]) == (withheld == 80)


def test_a_labs_own_rule_goes_in_place_of_the_common_one(read):
    text = f"{HEAD}points_per_day = 10\n{DUE}[lab-02]\ndue = 2026-10-12T23:59:00\nfraction_per_day = 0.5\n"
    found = read(text, "ann,2026-10-13 12:00").applied(grade(lab(), lab("lab-02"), lab("lab-03")))
    assert found.withheld == 50 and list(found.late) == ["lab-01", "lab-02"]
    assert "1 day late" in found.late["lab-01"] and "10 of 80 points withheld" in found.late["lab-01"]
    assert "2026-10-13T12:00:00+02:00" in found.late["lab-01"]


def test_an_extension_moves_one_students_due_date(read):
    text = f"{HEAD}points_per_day = 10\n{DUE}until = 2026-10-14T00:00:00\n"
    text += "[students.ann]\nlab-01 = 2026-10-20T23:59:00\n"
    deadlines = read(text, "ann,2026-10-20 12:00\nbob,2026-10-20 12:00")
    assert deadlines.applied(grade()).withheld == 0
    assert deadlines.applied(grade(student="bob")).withheld == 80


def test_a_time_a_lab(read, tmp_path):
    text = f"{HEAD}points_per_day = 10\n{DUE}[lab-02]\ndue = 2026-10-26T23:59:00\n"
    read(text)
    times = "\ufeffstudent,lab,submitted\nann,lab-01,2026-10-12 20:00\nann,2,2026-10-27 12:00\n"
    (tmp_path / "times.csv").write_text(times, "utf-8")
    deadlines = late.read(tmp_path / "deadlines.toml")
    found = deadlines.applied(grade(lab(), lab("lab-02")))
    assert list(found.late) == ["lab-02"] and found.withheld == 10
    assert deadlines.written("ann") == "2026-10-27T12:00:00+01:00" and deadlines.written("bob") == ""


@pytest.mark.parametrize(
    "more, times, words",
    [
        ("", "Anne,2026-10-12 20:00", "times.csv: Anne is not a student's name here; near it: ann"),
        ("[students.bop]\nlab-01 = 2026-10-20T23:59:00\n", "", "deadlines.toml: bop .*; near it: bob"),
        ("", "ann,2026-10-12 20:00\nx1,2026-10-12 20:00\nx2,2026-10-12 20:00", "x1 .*and 1 more .*ann, bob"),
    ],
)
def test_a_name_that_is_no_student_s_is_refused_with_those_near_it(read, more, times, words):
    with pytest.raises(LabError, match=words):
        read(HEAD + DUE + more, times, students=["bob", "ann"])


@pytest.mark.parametrize(
    "hour, there", [("01:59:59", True), ("02:00:00", False), ("02:59", False), ("03:00", True)]
)
def test_a_time_that_daylight_saving_leaves_out_is_refused(read, hour, there):
    for text, times in ((f'[lab-01]\ndue = "2026-03-29 {hour}"\n', ""), (DUE, f"ann,2026-03-29 {hour}")):
        if there:
            read(HEAD + text, times)
        else:
            with pytest.raises(LabError, match=r"Europe/Berlin shows that time"):
                read(HEAD + text, times)
    read(HEAD + DUE, "ann,2026-10-25 02:30")  # which comes twice, and counts as the first


# --------------------------------------------------------------------------------------------- Gradescope's

YAML = """---
submission_101:
  :submitters:
  - :name: Ann Example
  :created_at: 2026-10-13 06:10:12.123456789 Z
  :results:
    :tests: !ruby/hash:ActiveSupport::HashWithIndifferentAccess
submission_102:
  :created_at: '2026-10-12T12:00:00.000000-07:00'
"""


GRADESCOPE = "points_per_day = 10\n[lab-01]\ndue = 2026-10-12T23:59:00Z\n"


def test_gradescopes_metadata_of_a_class_and_of_one_submission(read):
    times = 'times = "submission_metadata.yml"\n'
    students = ["submission_101", "submission_102"]
    deadlines = read(times + GRADESCOPE, YAML, "submission_metadata.yml", students)
    assert deadlines.submitted("submission_101") == datetime(2026, 10, 13, 6, 10, 12, 123456, UTC)
    found = [deadlines.applied(grade(student=f"submission_{n}")).withheld for n in (101, 102)]
    assert found == [10, 0]
    one = json.dumps({"id": 7, "created_at": "2026-10-13T14:22:32.365935-07:00", "users": [{"name": "Ann"}]})
    given = 'times = "submission_metadata.json"\n' + GRADESCOPE, one, "submission_metadata.json"
    assert read(*given, students=["ann"]).applied(grade()).withheld == 10
    with pytest.raises(LabError, match="time of one submission, but 2 are graded"):
        read(*given, students=["ann", "bob"])


# ------------------------------------------- metadata that is none (deadlines: see test_input_errors)


@pytest.mark.parametrize(
    "name, text", [("m.json", "{"), ("m.json", "[1]"), ("m.json", '{"a": 1}'), ("m.yml", "a: [")]
)
def test_metadata_that_is_none_is_said(read, name, text):
    with pytest.raises(LabError):
        read(f'times = "{name}"\n', text, name)
