"""Additions of an instructor to grades: attempts, a roster, manual points, and files for gradebooks."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from labs.kit.grader import cases, grading, intake, rules, run, store
from labs.kit.grader.commands import grade as grade_command
from labs.kit.grader.late import Deadlines
from labs.kit.grader.report import Around, write_reports
from labs.kit.grader.report.disclosure import disclose
from labs.kit.grader.results import MISSING, Case, Grade, LabGrade, TaskGrade
from labs.kit.grader.rules import Files, Rules
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.tests import marks
from labs.kit.tests.files import another, solution

LABS = ("lab-01", "lab-02")
SETTINGS = Settings(LABS, "a seed", as_root=True)


def grade(student: str, first: float | None, second: float | None, attempt: int = 0, **values) -> Grade:
    """Return a grade of two labs; None is a lab without a file."""
    labs = []
    for lab, earned in zip(LABS, (first, second), strict=True):
        task = TaskGrade("task", 100, earned or 0, MISSING if earned is None else "right")
        cases = [] if earned is None else [Case("public 1", False, True)]
        labs.append(LabGrade(lab, [task], cases=cases))
    return Grade(student, labs, "a seed", "namespaces", "digest", attempt=attempt, **values)


def entry(student: str, number: str = "", attempt: int = 0) -> intake.Entry:
    return intake.Entry(student, (("", Path(student)),), number, attempt)


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("which", "numbers", "total"), [("best", (2, 1), 170), ("last", (3, 2), 50), ("first", (1, 1), 140)]
)
def test_of_each_lab_the_best_the_last_or_the_first_attempt_counts(which, numbers, total):
    """After what lateness costs, and the report names what each earned."""
    costs = {"costs": {"lab-01": 60.0}, "late": {"lab-01": "3 days late"}}
    tries = [grade("ann", 60, 80, 1), grade("ann", 90, 20, 2), grade("ann", 90, None, 3, **costs)]
    found = Rules(attempts=which).counted(tries)
    assert found.earned == total and found.attempt == 0
    assert found.attempts == {
        "lab-01": f"attempt {numbers[0]} counts, the {which} of 3 (1: 60, 2: 90, 3: 30)",
        "lab-02": f"attempt {numbers[1]} counts, the {which} of 2 (1: 80, 2: 20)",
    }
    assert found.late == (costs["late"] if which == "last" else {})


def test_attempts_are_folders_or_zips_and_more_than_the_limit_are_named(tmp_path):
    ann, cy = ("ann/attempt-1", "ann/Attempt 2", "ann/attempt_10"), ("cy/attempt-1", "cy/lab-01")
    for name in (*ann, "bob/lab-01", *cy):  # cy has a file beside, so it is no set of attempts
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ann/attempt-1/lab-01.py").write_text("one")
    found, _ = intake.entries(tmp_path, with_attempts=True)
    names = [(one.student, one.attempt) for one in found]
    assert names == [("ann", 1), ("ann", 2), ("ann", 10), ("bob", 0), ("cy", 0)]
    first = intake.read(found[0], LABS)
    assert (first.files, first.name) == ({"lab-01": b"one"}, "ann, attempt 1")
    counted, beyond = rules.within(found, 2)
    assert len(counted) == 4 and beyond == {"ann/attempt-10": "only 2 attempts count"}
    assert [one.attempt for one in intake.entries(tmp_path)[0]] == [0, 0, 0]


def test_with_own_seeds_each_student_and_attempt_has_other_hidden_cases_each_time_the_same():
    own, lab = Settings(LABS, "a seed", 3, own_seeds=True), find_lab("lab-01")

    def hidden(student, attempt, settings=own):
        return [c.script for c in cases.cases(lab, settings.of(student, attempt)) if c.hidden]

    four = [hidden("ann", 0), hidden("ann", 1), hidden("ann", 2), hidden("bob", 0)]
    assert len({script for one in four for script in one}) == 12
    assert hidden("ann", 2) == four[2]
    assert hidden("ann", 2, Settings(LABS, "other", 3, own_seeds=True)) != four[2]
    assert hidden("ann", 1, Settings(LABS, "a seed", 3)) == hidden("bob", 2, Settings(LABS, "a seed", 3))


@marks.namespaces
def test_the_command_grades_attempts_and_replays_one_of_them(tmp_path):
    wrong = find_lab("lab-01").mistakes[0].apply(solution("lab-01"))
    for number, source in enumerate([wrong, another("lab-01"), "x = 1"], 1):
        (tmp_path / "class/ann" / f"attempt-{number}").mkdir(parents=True)
        (tmp_path / "class/ann" / f"attempt-{number}" / "lab-01.py").write_text(source, "utf-8")
    manual = written(tmp_path / "manual.csv", "student,lab,points,comment\nann,1,-2.5,=see me\n")
    roster = written(tmp_path / "roster.csv", "folder,id,name,section\nann,7,Ann A,b\nbo,8,Bo B,c\n")
    settings = Settings(("lab-01",), "s", 2, as_root=True, own_seeds=True)
    wished = (settings, 1, Files(None, roster, manual, "best", 2), "", False, None)
    assert run.grade(tmp_path / "class", tmp_path / "out", *wished) == 0
    found = store.load(tmp_path / "out/grades", "ann")
    assert found.attempts == {"lab-01": "attempt 2 counts, the best of 2 (1: 0, 2: 100)"}
    assert found.earned == 97.5 and store.load(tmp_path / "out/grades", "ann", 1).earned == 0
    table = list(csv.DictReader(io.StringIO((tmp_path / "out/grades.csv").read_text("utf-8"))))
    ann, bo, third = table
    noted = [ann[key] for key in ("id", "section", "manual", "comments")]
    assert noted == ["7", "b", "-2.5", "lab-01: =see me"]
    assert (bo["total"], bo["problems"], bo["id"]) == ("0", "nothing was handed in", "8")
    assert third["student"] == "ann/attempt-3" and third["problems"] == "not read: only 2 attempts count"
    feedback = (tmp_path / "out/feedback/ann.md").read_text("utf-8")
    assert "The instructor: -2.5 points, =see me" in feedback.replace("\\", "")
    wrong = next(c for c in store.load(tmp_path / "out/grades", "ann", 1).labs[0].cases if not c.passed)
    assert not run.replay(tmp_path / "out", "ann", "1", wrong.name, 1).passed
    assert run.replay(tmp_path / "out", "ann", "1", wrong.name, 2).passed
    with pytest.raises(LabError, match="has no attempt 4 of ann"):
        run.replay(tmp_path / "out", "ann", "1", wrong.name, 4)
    with pytest.raises(LabError, match="out has no lab-02; it has lab-01"):
        run.replay(tmp_path / "out", "ann", "2", wrong.name)
    with pytest.raises(LabError, match="--max-attempts needs --attempts"):
        grade_command(tmp_path / "class", tmp_path / "none", max_attempts=3)


CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Lab-01 one (501),Final
    Points Possible,,,,,100,
"Example, Ann",41,u41,ann@example.org,North,,
"Other, Bo",42,u42,bo@example.org,South,,
"Student, Test",9,,,,,
"""


def test_a_canvas_gradebook_is_a_roster_and_comes_back_with_points(tmp_path):
    roster = written(tmp_path / "roster.csv", CANVAS)
    ruled = rules.read(Files(roster=roster), [entry("exampleann", "41"), entry("stranger")])
    assert [one["name"] for one in ruled.absent] == ["Other, Bo"]
    noted = {"costs": {"lab-02": 10.0}, "late": {"lab-02": "1 day late"}}
    points = {("exampleann", "lab-02"): 5.0}
    applied = Rules(Deadlines(), ruled.members, points=points).applied(grade("exampleann", 100, 50))
    grades = [Grade(**vars(applied) | noted), grade("stranger", 1, 1)]
    write_reports(tmp_path, grades, SETTINGS, Around(absent=ruled.absent, has_roster=True))
    assert (tmp_path / "gradebook/canvas.csv").read_text("utf-8").splitlines() == [
        "Student,ID,SIS User ID,SIS Login ID,Section,Lab-01 one (501),lab-02",
        "Points Possible,,,,,100,100",
        '"Example, Ann",41,u41,ann@example.org,North,100,45',
    ]  # and no row of Bo: an empty cell would clear what Canvas has
    (ann,) = csv.DictReader(io.StringIO((tmp_path / "gradebook/moodle.csv").read_text("utf-8")))
    assert (ann["ID number"], ann["Email address"], ann["lab-02"]) == ("41", "ann@example.org", "45")
    assert ann["lab-02 feedback"] == "Deadline: 1 day late The instructor: +5 points"
    index = (tmp_path / "index.html").read_text("utf-8")
    assert "stranger: not in the roster" in index and "Other, Bo: nothing was handed in" in index


@pytest.mark.parametrize(
    ("head", "row"),
    [("folder,id", "ann,41"), ("Email address,ID number", "ann,41"), ("SID,Full Name", "41,Ann"),
     ("First Name,Last Name,SID", "Ann,Example,41"), ("student,id", "Example Ann,41"),
     ("Name;SID;Email;Role", "Ann;41;ann@example.org;Student\nIda;7;ida@example.org;TA")],
)  # fmt: skip
def test_a_roster_finds_a_student_by_folder_id_address_or_name(tmp_path, head, row):
    roster = written(tmp_path / "roster.csv", f"{head}\n{row}\n")
    members, absent = rules.read_roster(roster, [entry("ann", "41")])
    assert members["ann"]["id"] == "41" and not absent


@pytest.mark.parametrize(
    ("text", "why"),
    [("folder,id\nann,1\nann,1\n", "line 3: ann is there twice"), ("x,y\n1,2\n", "names no student of this"),
     ("folder,id\nbob,1\n", "names no student"), ("name\nAnn\n", "Ann has neither an id nor an address")],
)  # fmt: skip
def test_a_roster_that_is_unclear_is_refused(tmp_path, text, why):
    with pytest.raises(LabError, match=why):
        rules.read_roster(written(tmp_path / "roster.csv", text), [entry("ann")])


@pytest.mark.parametrize(
    ("row", "why"),
    [("amn,1,5,", "amn is not a student's name here; near it: ann"), ("ann,1,nan,", "a number up to 1000000"),
     ("ann,1,much,", "should be a number, but are 'much'"), ("ann,1,1,\nann,lab-01,2,", "are there twice"),
     ("ann,99,1,", "line 2: there is no lab '99'")],
)  # fmt: skip
def test_manual_points_that_are_unclear_are_refused(tmp_path, row, why):
    path = written(tmp_path / "manual.csv", f"student,lab,points,comment\n{row}\n")
    with pytest.raises(LabError, match=why):
        rules.read_manual(path, ["ann"])


def test_manual_points_are_in_every_report(tmp_path):
    noted = {"manual": {"lab-01": 3.0}, "comments": {"lab-01": "<b>well</b> done"}}
    write_reports(tmp_path, [grade("ann", 50, 20, **noted)], SETTINGS)
    assert "+3" in (tmp_path / "index.html").read_text("utf-8")
    assert "ann: 3 points; lab-01:" in (tmp_path / "report.md").read_text("utf-8")
    result = json.loads((tmp_path / "gradescope/ann.json").read_text("utf-8"))
    assert result["score"] == 73 and "<b>well</b> done" in result["tests"][0]["output"]
    page = (tmp_path / "feedback/ann.html").read_text("utf-8")
    assert "&lt;b&gt;well&lt;/b&gt; done" in page and "with +3 by the instructor" in page


def test_where_the_hidden_cases_end_is_not_said():
    """Neither in words nor in a number: a submission chooses it, and may have read them."""
    seen = set()
    for played in range(4):
        lab = LabGrade("lab-01", [TaskGrade("task", 100, 0, "wrong")])
        said = [""] * played + ["not begun"] * (4 - played)
        hidden = [Case(f"hidden {n}", True, not why, why) for n, why in enumerate(said)]
        lab.cases = [Case("public 1", False, True), *hidden]
        lab.problem = "after all public cases, in the hidden ones: its process ended"
        shown = disclose(Grade("ann", [lab], "s", "namespaces", "d"), SETTINGS).labs[0]
        seen.add((shown.problem, shown.public, shown.hidden, shown.unplayed, shown.counts))
    assert len(seen) == 1, seen


@marks.namespaces
def test_all_batches_of_a_lab_have_one_time_together():
    """It ends a file that takes a little less than its limit in each batch; what follows is unaffected."""
    lab = find_lab("lab-02")
    source = solution("lab-02")
    returns = "    return budget - sum("
    slow = source.replace(returns, "    for _ in range(10**5): pass\n    return 1 + budget - sum(")
    assert slow != source
    settings = Settings(("lab-02",), "s", 2, 1.0, as_root=True)
    box = grading.box(lab, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labs.kit.grader.sandbox.ALL", (0.5, 4, 30))
        found = grading.grade(Submission("ann", {"lab-02": slow.encode()}), settings).labs[0]
        assert min(box.left) < 0.1 and found.earned < found.points
        two = {"lab-02": slow.encode(), "lab-03": solution("lab-03").encode()}
        labs = grading.grade(Submission("cy", two), replace(settings, labs=("lab-02", "lab-03"))).labs
        assert labs[0].earned < labs[0].points and labs[1].earned == labs[1].points
    honest = grading.grade(Submission("bo", {"lab-02": source.encode()}), settings).labs[0]
    assert honest.earned == honest.points and min(box.left) > 1


def test_all_labs_of_a_submission_have_one_time_together(monkeypatch):
    """Where each lab takes all that it may, and more; and where only one does, first or last."""
    labs = tuple(f"lab-0{n}" for n in range(1, 8))
    for greedy in (labs, labs[:1], labs[-1:]):
        given = {}

        def grade_lab(lab, submission, settings, left, greedy=greedy, given=given):
            given[lab.id] = left
            return LabGrade(lab.id, []), [-0.5] * 3 if lab.id in greedy else left

        monkeypatch.setattr(grading, "grade_lab", grade_lab)
        grading.grade(Submission("ann", {}), Settings(labs, "s", as_root=True, weak=True))
        whole = [sum(given[lab][kind] for lab in greedy) for kind in range(3)]
        assert whole[0] <= 200 and whole[1] <= 200 and whole[2] <= 720
        assert whole == [200, 200, 720] or greedy == labs[:1]
        assert min(map(min, given.values())) >= 20 and given["lab-01"] == [80, 80, 600]
