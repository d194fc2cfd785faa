"""Reports are equal for equal grades and true to them; they show nothing hidden and run nothing hostile."""

import csv
import io
import json
import random
import re
import zlib
from base64 import b64decode
from copy import deepcopy
from functools import cache

import pytest
from markdown_it import MarkdownIt

from labs.kit.grader.names import safe
from labs.kit.grader.report import Around, write_reports
from labs.kit.grader.results import (
    MISSING,
    NO_TIME,
    NOT_WRITTEN,
    WAITS,
    WRONG,
    Case,
    Grade,
    LabGrade,
    TaskGrade,
)
from labs.kit.grader.submission import Settings
from labs.kit.judge import random_scripts
from labs.kit.judge.manifest import find_lab

LABS = ("lab-01", "lab-03")
TASKS = {lab_id: [(task.name, task.points) for task in find_lab(lab_id).tasks] for lab_id in LABS}
SETTINGS = Settings(LABS, "seed 5", hidden=10)
SECRET, ODD = "s3cret-input", "<script>alert('1')</script>\"|`*\n\x1b[2J\u202e\ud800=cmd"


@cache
def wrong_run() -> tuple[str, dict, dict, int]:
    """Return a story, a run of lab-01 whose last step is wrong, the expected run, and that step."""
    script, steps = random_scripts.drawn("lab-01", 0), random_scripts.expected("lab-01", 0)[:6]
    expected = {"config": script["config"], "steps": [{"call": s.call, "seen": s.seen} for s in steps]}
    yours = deepcopy(expected)
    yours["steps"][-1]["seen"]["returned"] = "another"
    return "story 0\n    step(6)\nreturned: 1, but should be 2", yours, expected, len(steps) - 1


def lab_grade(lab_id: str, kind: str = "right", **values) -> LabGrade:
    """Return a lab that is right, wrong (the first task, with a run), wrong in hidden cases, or missing."""
    cases = [Case(f"{k} {n}", k == "hidden", True) for k in ("public", "hidden") for n in range(10)]
    tasks = [TaskGrade(name, points, points, "right", 20, 20) for name, points in TASKS[lab_id]]
    lab = LabGrade(lab_id, tasks, cases=cases, **values)
    if kind == "missing":
        lab.tasks = [TaskGrade(name, points, 0, MISSING) for name, points in TASKS[lab_id]]
        lab.cases, lab.problem = [], "no file was handed in for this lab"
    elif kind != "right":
        name, points = TASKS[lab_id][0]
        lab.tasks[0] = TaskGrade(name, points, 0, WRONG, 9, 20, name="a mistake", hint="a hint")
        for task in lab.tasks[1:]:
            task.state, task.waits_for = WAITS, name
        cases[12] = Case("hidden 2", True, False, f"{SECRET} story")
        cases[13] = Case(f"own {SECRET}.json", True, False, SECRET)
        if kind == "wrong":
            said, lab.yours, lab.expected, lab.departs = deepcopy(wrong_run())
            cases[4] = Case("public 5", False, False, said)
    return lab


def student(name: str, first: str = "right", second: str = "right", **values) -> Grade:
    labs = [lab_grade(lab_id, kind) for lab_id, kind in zip(LABS, (first, second), strict=True)]
    return Grade(name, labs, "seed 5", "namespaces", "digest", **values)


def klass(number: int) -> list[Grade]:
    rng = random.Random(1)
    kinds = ["right", "right", "wrong", "hidden", "missing"]
    return [student(f"student {n:03}", rng.choice(kinds), rng.choice(kinds)) for n in range(number)]


def reported(folder, grades, settings=SETTINGS):
    """Return the files of a report: {name: bytes}."""
    write_reports(folder, grades, settings)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def packs(page: str) -> list[tuple[str, str]]:
    """Return the names and texts that a page carries packed."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', page)
    return [(name, zlib.decompress(b64decode(data)).decode("utf-8")) for name, data in found]


def texts(files) -> str:
    """Return all text of a report, unpacked."""
    found = []
    for name, data in files.items():
        text = data.decode("utf-8")
        found += [name, text, *(packed for _, packed in packs(text))]
    return "\n".join(found)


def test_equal_grades_give_equal_files_in_any_order(tmp_path):
    grades = klass(12)
    files = reported(tmp_path / "a", grades)
    names = {f"{folder}/student 0{n:02}.{end}" for n in range(12) for folder, end in FOLDERS}
    assert set(files) == {"grades.csv", "report.md", "index.html"} | names
    assert reported(tmp_path / "b", [Grade.from_json(one.to_json()) for one in reversed(grades)]) == files
    assert reported(tmp_path / "a", grades) == files  # once more, over what is there
    left = reported(tmp_path / "a", grades[1:])  # one has gone, and so has their feedback
    assert files.keys() - left.keys() == {f"{folder}/student 000.{end}" for folder, end in FOLDERS}


FOLDERS = (("feedback", "md"), ("feedback", "html"), ("gradescope", "json"))


def test_one_student_has_one_grade(tmp_path):
    with pytest.raises(ValueError, match="two grades of 'ann'"):
        reported(tmp_path, [student("ann"), student("ann")])


def test_what_was_not_understood_stands_in_the_table_with_a_reason(tmp_path):
    grades = [student("bob", "wrong", "missing", ignored=["starter.py: no lab"])]
    write_reports(tmp_path, grades, SETTINGS, Around({"=ann\x1b.py": "no student's"}))
    bob, other = csv.DictReader(io.StringIO((tmp_path / "grades.csv").read_text("utf-8")))
    assert bob["problems"] == "lab-03: no file was handed in for this lab; not read: starter.py: no lab"
    assert (other["student"], other["total"]) == ("'=ann\\x1b.py", "")
    assert other["problems"] == "not read: no student's"
    assert "no student's" in (tmp_path / "report.md").read_text("utf-8")


def test_a_class_of_none_has_a_report(tmp_path):
    files = reported(tmp_path, [])
    assert b"Grades of 0 students" in files["index.html"] and b"Grades of 0 students" in files["report.md"]


def test_the_table_holds_each_task_and_total(tmp_path):
    late = {"late": {"lab-03": "2 days late"}, "costs": {"lab-03": 12.5}}
    files = reported(tmp_path, [student("bob", "wrong", "missing"), student("ann", **late), student("=cmd")])
    rows = list(csv.DictReader(io.StringIO(files["grades.csv"].decode())))
    assert [row["student"] for row in rows] == ["'=cmd", "ann", "bob"]
    tasks = [f"{lab_id} {name}" for lab_id in LABS for name, _ in TASKS[lab_id]]
    more = {"late", "withheld", "manual", "comments", "attempts", "problems"}
    assert set(rows[0]) == {"student", *tasks, *LABS, "total", *more}
    ann, bob = rows[1:]
    whole = {lab_id: sum(points for _, points in TASKS[lab_id]) for lab_id in LABS}
    assert float(ann["lab-03"]) == whole["lab-03"] and float(ann["total"]) == sum(whole.values()) - 12.5
    assert (ann["late"], ann["withheld"]) == ("lab-03: 2 days late", "12.5")
    assert (bob["lab-03"], bob["total"], bob["lab-01 schedule_step"]) == ("0", "0", "0")


def test_feedback_shows_the_departure_and_its_name_and_counts_hidden_cases(tmp_path):
    files = reported(tmp_path, [student("ann", "hidden", "wrong", ignored=["conftest.py"])])
    text = files["feedback/ann.md"].decode()
    for words in (
        "Public cases: 0 of 10 depart; hidden cases: 2 of 10 depart.",
        "Public cases: 1 of 10 depart",
        "| `policy_key` | departs from what it should do | 0 of ",
        "right by itself; waits for policy\\_key",
        "9 of 20",
        "looks like: **a mistake**. a hint",
        "public case 5:",  # as `labs test` counts
        wrong_run()[0],
        "In lab-01 they do differ: all 10 public cases pass, and 2 of 10 hidden ones depart.",
        "`conftest.py`",
    ):
        assert words in text.replace("\\`", "`"), words
    value = json.loads(files["gradescope/ann.json"])
    assert value["score"] == student("ann", "hidden", "wrong").earned
    first = value["tests"][0]
    assert first["name"] == "lab-01: schedule_step" and first["status"] == "failed"
    assert (first["score"], first["max_score"], first["visibility"]) == (0, 100, "visible")
    assert {test["status"] for test in value["tests"][2:]} == {"passed"}
    assert wrong_run()[0] in value["tests"][1]["output"]
    agreed = reported(tmp_path / "b", [student("bob", "wrong")])["feedback/bob.md"].decode()
    assert "no lab is right in the public cases and wrong in hidden ones" in agreed


def test_hidden_cases_are_nowhere_unless_revealed(tmp_path):
    grades = [student("ann", "hidden", "wrong"), student("bob", "wrong", "hidden")]
    files = reported(tmp_path / "a", grades)
    assert SECRET not in texts(files)
    handed_out = texts({name: data for name, data in files.items() if name.startswith("feedback")})
    assert "seed 5" not in handed_out and "seed 5" in texts(files), "a reader could draw the hidden cases"
    revealed = Settings(LABS, "seed 5", hidden=10, reveal=True)
    assert f"{SECRET} story" in texts(reported(tmp_path / "b", grades, revealed))


def test_the_instructors_report_lists_missed_tasks_and_students_with_problems(tmp_path):
    grades = [
        student("ann", "wrong"),
        student("bob", "wrong", "missing", late={"lab-01": "1 day late"}),
        student("cy"),
        student("dee", ignored=["torch.py"]),
    ]
    grades[3].labs[0].problem = "after 3 of 20 cases: no answer within 20 s"
    grades[3].labs[1].tasks[1].state, grades[3].labs[1].tasks[1].earned = NOT_WRITTEN, 0
    text = reported(tmp_path, grades)["report.md"].decode()
    assert text.startswith("# Grades of 4 students")
    assert "| lab-01 `schedule_step` | 2 | 0 |" in text and "| lab-03 `policy_key` | 1 | 1 |" in text
    assert "| a mistake | lab-01 `schedule_step` | 2 |" in text
    rows = ("- bob: lab-01: 1 day late", "- bob: lab-03: no file was", "- dee: lab-01: after 3", "torch.py")
    assert all(row in text for row in rows)


def test_a_student_without_a_time_is_not_counted_as_late_and_has_the_rosters_name(tmp_path):
    member = {"name": "Ann A", "id": "7", "section": "b", "email": ""}
    ann = student("ann", late={"lab-01": NO_TIME, "lab-03": NO_TIME}, member=member)
    bob = student("bob", late={"lab-01": "1 day late", "lab-03": NO_TIME}, costs={"lab-01": 10.0})
    files = {name: data.decode() for name, data in reported(tmp_path, [ann, bob]).items()}
    index = files["index.html"]
    assert "<b>1</b> late" in index and ">ann</a> <small>Ann A</small>" in index
    assert "<li>bob: late in lab-01, 10 points withheld, a time of submission is not known</li>" in index
    assert "<li>ann: a time of submission is not known</li>" in index
    assert f"Deadline: {NO_TIME}" in files["feedback/ann.html"] and "Late" not in files["feedback/ann.html"]


@pytest.mark.parametrize(
    "problem, why, played, words, counts",
    [
        ("starter.py does not load: {}", "NameError: no", 0,
         "not judged, because the file does not load | 0 of 100 |  |", ""),
        ("after 3 of 20 cases: {}", "no answer within 20 s of computing", 3,
         "too slow: no answer within 20 s of computing | 0 of 100 | 3 of 20 |",
         "Public cases: 0 of 3 depart; 17 cases were not played to their end."),
        ("after 3 of 20 cases: {}", "ended by a signal: Killed", 3,
         "stopped: ended by a signal: Killed | 0 of 100 | 3 of 20 |", "Public cases: 0 of 3 depart; 17"),
    ],
    ids=["does not load", "slow", "killed"],
)  # fmt: skip
def test_what_was_not_played_does_not_depart(tmp_path, problem, why, played, words, counts):
    grade = student("ann")
    lab = grade.labs[0]
    lab.problem, lab.tasks[0] = problem.format(why), TaskGrade("schedule_step", 100, 0, WRONG, played, 20)
    for number, case in enumerate(lab.cases[played:]):
        case.passed, case.said = False, "not begun" if number else why
    files = reported(tmp_path, [grade])
    text = files["feedback/ann.md"].decode().partition("## lab-03")[0]
    assert f"| `schedule_step` | {words}" in text and counts in text and problem.format(why) in text
    assert "first case that departs" not in text and "departs from" not in text
    assert ("depart" in text) == bool(counts)
    assert b"departs from" not in files["gradescope/ann.json"]


def test_weak_isolation_is_said_first(tmp_path):
    grades = [student("ann")]
    grades[0].isolation = "limits"
    files = reported(tmp_path, grades)
    assert files["report.md"].startswith(b"**Weak isolation")
    assert files["index.html"].index(b"Weak isolation") < files["index.html"].index(b"<h1>")
    assert all(b"without isolation" in files[f"feedback/ann.{end}"] for end in ("md", "html"))


def test_a_hostile_submission_is_text_everywhere(tmp_path):
    """Names, problems and what code answered; no file lies elsewhere, no letter moves others."""
    grade = student(ODD, "wrong", "missing", ignored=[ODD, "../../x"], late={"lab-01": ODD})
    grade.labs[0].cases[4].said = f"{ODD}\n```\n</pre><img src=x>"
    grade.labs[1].problem = ODD
    grade.labs[0].yours["steps"][-1]["seen"]["lengths"] = {"a": 1e12, ODD: 10**9}
    others = ("../up", "/etc/x", "CON", "a\0b", "x" * 300, "..", "é", "a_b", "a/b")
    files = reported(tmp_path / "report", [grade, *map(student, others)])
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert len(files) == 3 + 3 * 10
    text = texts(files)
    for letter in "\x1b\u202e\0":
        assert letter not in text
    assert '"lengths":' not in text and "1000000000000" not in text
    pages = [data.decode() for name, data in files.items() if name.endswith(".html")]
    for markup in [*pages, *(text for page in pages for name, text in packs(page) if name.startswith("s-"))]:
        assert "<script>alert" not in markup and "<img" not in markup
    for name in ("report.md", f"feedback/{safe(ODD)}.md"):
        shown = MarkdownIt().enable("table").render(files[name].decode())
        assert "<script" not in shown and "<img src=x" not in shown and "alert(" in shown


def test_a_run_that_the_player_cannot_show_is_left_out_or_mended(tmp_path):
    odd = [{"x": float("nan")}, {"x": "y" * 500_000}, {"lengths": None}, {"x": "\ud800"}]
    grades = [student(f"s{number}", "wrong") for number in range(len(odd))]
    for grade, seen in zip(grades, odd, strict=True):
        grade.labs[0].yours["steps"][-1]["seen"] |= seen
    files = reported(tmp_path, grades)
    assert all("story 0" in files[f"feedback/{grade.student}.html"].decode() for grade in grades)


def test_a_long_story_is_cut(tmp_path):
    grade = student("ann", "wrong")
    grade.labs[0].cases[4].said = "\n".join(["z" * 10_000] * 10_000)
    files = reported(tmp_path, [grade])
    assert max(map(len, files.values())) < 600_000 and "9881 lines more" in files["feedback/ann.md"].decode()


# ------------------------------------------------------------------------------------------ in the browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """100 students, one of them with an odd name."""
    folder = tmp_path_factory.mktemp("report")
    odd = student(ODD, "wrong", "wrong")
    odd.labs[1].cases[4].said = "</pre><img src=x onerror=alert(1)><script>alert(1)</script>"
    reported(folder, [*klass(99), odd])
    return folder


@pytest.fixture
def page(browser, report):
    opened, troubles = browser.new_page(viewport={"width": 1200, "height": 800}), []
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("dialog", lambda dialog: troubles.append(dialog.message))
    opened.on("request", lambda request: troubles.append(request.url) if "index" not in request.url else None)
    opened.goto((report / "index.html").as_uri())
    yield opened
    opened.close()
    assert [one for one in troubles if not one.startswith(("data:", "file:"))] == []


def names(page) -> list[str]:
    return page.eval_on_selector_all("tbody tr:not([hidden]) a", "all => all.map((one) => one.textContent)")


def totals(page) -> list[float]:
    return [float(one) for one in page.locator("tbody tr:not([hidden]) .total").all_text_contents()]


def test_the_table_sorts_and_filters(page):
    assert len(names(page)) == 100 and names(page) == sorted(names(page))
    page.click("thead >> text=Total")
    assert totals(page) == sorted(totals(page), reverse=True)
    assert page.get_attribute("th:has(> [data-by='0'])", "aria-sort") == "descending"
    page.locator("thead >> text=Total").press("Enter")
    assert totals(page) == sorted(totals(page))
    page.fill("#find", "student 01")
    assert sorted(names(page)) == [f"student 01{n}" for n in range(10)]
    assert page.inner_text("#count") == "10 of 100 students"
    page.fill("#find", "no such name")
    assert page.is_visible("#none")
    page.fill("#find", "")
    page.click(".mistakes button >> nth=0")
    odd = student("odd", "wrong", "wrong")
    both = [[lab.tasks[0].name for lab in one.labs] for one in [*klass(99), odd]]
    assert len(names(page)) == max(sum(map(bool, kind)) for kind in zip(*both, strict=True))
    assert page.inner_text("#chip").startswith("a mistake")
    page.click("#chip")
    assert len(names(page)) == 100


def test_a_student_is_a_click_away_and_the_run_another(page):
    page.fill("#find", "alert")
    page.locator("tbody a").locator("visible=true").press("Enter")
    page.wait_for_selector("#feedback .lab")
    assert page.inner_text("#who").startswith("<script>alert('1')</script>")
    assert "<img src=x onerror" in page.inner_text("#feedback")
    assert page.locator("#feedback img, #feedback script").count() == 0
    page.click("#feedback .play >> nth=0")
    readout = page.locator("#feedback .mini-engine-player #readout")
    assert readout.inner_text() == f"Operation {wrong_run()[3]} of {wrong_run()[3]}"
    panes = page.inner_text("#feedback .mini-engine-player #panes")
    assert "yours" in panes and "undefined" not in panes
    assert page.is_hidden(".mini-engine-player .overview >> nth=0")  # this log names no one's blocks
    page.keyboard.press("Escape")
    page.wait_for_selector("#one", state="hidden")
    assert page.evaluate("location.hash") == "" and page.locator(".mini-engine-player").count() == 0


def test_the_next_student_follows_the_order_of_the_table(page):
    page.click("thead >> text=Total")
    second = names(page)[1]
    page.click("tbody a >> nth=0")
    page.wait_for_selector("#feedback .lab")
    page.click("#next")
    page.wait_for_function("name => document.getElementById('who')?.textContent === name", arg=second)
    assert page.inner_text("#place") == "2 of 100"
    address = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(address)  # a link leads there, too
    page.wait_for_function("name => document.getElementById('who')?.textContent === name", arg=second)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_needs_no_horizontal_scrolling(browser, report, scheme):
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.goto((report / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("tbody a >> nth=0")
    page.wait_for_selector("#feedback .lab")
    assert page.evaluate("document.getElementById('one').scrollWidth") <= 390
    page.close()


def test_a_students_own_page_plays_the_run(browser, report):
    page, troubles = browser.new_page(), []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((report / "feedback" / f"{safe(ODD)}.html").as_uri())
    page.click(".play >> nth=1")
    assert page.locator(".mini-engine-player #readout").inner_text().startswith("Operation")
    page.click(".play >> nth=1")
    assert page.locator(".mini-engine-player").count() == 0
    script = "Object.assign(document.createElement('script'), {text: 'window.did = 1'})"
    page.evaluate(f"document.body.append({script})")
    assert page.evaluate("window.did") is None  # its policy runs no other script
    page.close()
    assert len(troubles) == 1 and "Content Security Policy" in troubles[0]
