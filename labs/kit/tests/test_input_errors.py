"""Bad input of the course gets one clear error, and nothing is half-written: a row for each, with its words.

A lab's files, the book's questions, submissions and deadlines, an instructor's cases, reports, commands
with odd arguments, signals. The engine's inputs are in mini_engine/tests/test_input_errors.py.
"""

import copy
import functools
import json
import operator
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labs.kit.author import export as author
from labs.kit.grader import arguments, commands, late, regrade, store
from labs.kit.grader.results import Case, Grade, LabGrade, TaskGrade
from labs.kit.judge import manifest
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab
from labs.kit.learner import progress, quiz
from labs.kit.tests.conftest import ROOT, Course
from mini_engine.tests.helpers import refusal, table

refused = functools.partial(refusal, error=LabError)
LONE = "a\udcff"
PIPES = hasattr(os, "mkfifo")  # which Windows has not


# ---------------------------------------------------------------------- lab.toml, mistakes.toml, quizzes

LAB = """
title = "a lab"
question = "What?"
minutes = 90
prerequisites = []
timeout = 5

[given]
Row = ""

[[tasks]]
name = "schedule_step"
points = 100
engine = "mini_engine.scheduler:Scheduler.schedule"
tests = ["test_a"]
hints = ["one", "two", "three"]
"""
TASK = LAB[LAB.index("[[tasks]]") :]
LABS = [
    ("minutes = 90", 'minutes = "90"', "minutes must be a whole number, but is '90'"),
    ("minutes = 90", "minutes = 0", "minutes must be above 0"),
    ("minutes = 90", "", "'minutes' is missing"),
    ("timeout = 5", "timeout = inf", "timeout must be a number, but is inf"),
    ("timeout = 5", "timeout = -1", "timeout and minutes must be above 0"),
    ("timeout = 5", "colour = 5", "'colour' is not known; there are id, path, title"),
    ("timeout = 5", 'id = "lab-07"', "'id' must not be given"),
    ('title = "a lab"', "title = 5", "title must be text, but is 5"),
    ('title = "a lab"', "title = ", "lab.toml: "),
    ("prerequisites = []", 'prerequisites = "lab-01"', "prerequisites must be a list of text"),
    ('Row = ""', "Row = 5", "given must be a table"),
    (TASK, "", "it needs sections [[tasks]]"),
    (TASK, "[tasks]\nname = 'a'", "it needs sections [[tasks]]"),
    (TASK, TASK + TASK, "there are two tasks 'schedule_step'"),
    ("points = 100", 'points = "100"', "'schedule_step': points must be a whole number, but is '100'"),
    ("points = 100", "points = -1", "'schedule_step': points must be 0 or more, but is -1"),
    ("points = 100", "", "'schedule_step': 'points' is missing"),
    ("points = 100", "points = 100\nweight = 2", "'schedule_step': 'weight' is not known"),
    (":Scheduler.schedule", "", "engine must be module:name, but is 'mini_engine.scheduler'"),
    ('["test_a"]', "[1, 2]", "tests must be a list of text, but is [1, 2]"),
    ('["one", "two", "three"]', "[[]]", "hints must be a list of text"),
]


@pytest.fixture
def a_lab(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "LABS_DIR", tmp_path)
    (tmp_path / "lab-01" / "author").mkdir(parents=True)
    return tmp_path / "lab-01"


@table(LABS)
def test_lab_toml(row, a_lab):
    old, new, words = row
    assert old in LAB
    (a_lab / "author" / "lab.toml").write_text(LAB.replace(old, new))
    refused(lambda: find_lab("lab-01"), "lab.toml", words)


@table([(b"\xff\xfe",), (b"title = '\xe9'",), (b"\0",), (b"a = " + b"[" * 5000,), (b"",)])
def test_lab_toml_that_is_no_toml(row, a_lab):
    (a_lab / "author" / "lab.toml").write_bytes(row[0])
    refused(lambda: find_lab("lab-01"), "lab.toml: ")


MISTAKE = '[[mistakes]]\nid = "b"\ntitle = "t"\nmisconception = "m"\nhint = "h"\ncaught_by = "test_a"\n'
MISTAKES = [
    ("", "it needs sections [[mistakes]]"),
    ("mistakes = [5]", "it needs sections [[mistakes]]"),
    ('[[mistakes]]\nid = "b"', "'b': 'title' is missing"),
    (MISTAKE + "find = 5", "'b': find must be text, but is 5"),
    (MISTAKE + "edits = 5", "edits must be a list of list of text"),
    (MISTAKE + 'edits = [["a", 5]]', "edits must be a list of list of text"),
    (MISTAKE + "colour = 5", "'b': 'colour' is not known"),
    ("= 3", "mistakes.toml: "),
]


@table(MISTAKES)
def test_mistakes_toml(row, a_lab):
    text, words = row
    (a_lab / "author" / "lab.toml").write_text(LAB)
    (a_lab / "author" / "mistakes.toml").write_text(text)
    refused(lambda: find_lab("lab-01").mistakes, "mistakes.toml", words)


ANSWER = '[[a.question.answer]]\ntext = "x"\nwhy = "because"\n'
RIGHT = ANSWER + "right = true\n"
TOPIC = '[a]\ntitle = "A"\npage = "docs/a.md"\n[[a.question]]\nask = "Why?"\n'
QUIZZES = [
    ("a = 5", "'a' is not a section"),
    ("[a]\n", "it needs sections [[question]]"),
    (TOPIC, "it needs sections [[answer]]"),
    (TOPIC + ANSWER, "'Why?' needs a right answer"),
    (TOPIC + RIGHT * 7, "and 6 answers at most"),
    (TOPIC + RIGHT.replace("true", "1"), "right must be true or false, but is 1"),
    (TOPIC + RIGHT + "colour = 5", "'colour' is not known"),
    (TOPIC.replace('title = "A"', "") + RIGHT, "'title' is missing"),
    ("[", "quizzes.toml: "),
]


@table(QUIZZES)
def test_quizzes_toml(row, tmp_path, monkeypatch):
    text, words = row
    (tmp_path / "quizzes.toml").write_text(text)
    monkeypatch.setattr(quiz, "FILE", tmp_path / "quizzes.toml")
    refused(quiz.topics.__wrapped__, "quizzes.toml", words)


# ---------------------------------------------------------------------------------- deadlines and their times

HEAD, DUE = 'zone = "UTC"\ntimes = "times.csv"\n', "[lab-01]\ndue = 2026-10-12T23:59:00\n"
DEADLINES = [
    (HEAD + "grace_minutes = 1e300\n" + DUE, "", "grace_minutes must be a number"),
    (HEAD + "points_per_day = 1" + "0" * 400 + "\n" + DUE, "", "points_per_day must be a number"),
    (HEAD + "[lab-01]\ndue = 0001-01-01T00:00:00+14:00\n", "", "is outside the range of dates"),
    (HEAD + '[lab-01]\ndue = "soon"\n', "", "'soon' is not a time such as"),
    (HEAD + "[lab-01]\ndue = 2026-10-12\n", "", "2026-10-12 is not a time"),
    (HEAD + "[lab-01]\n", "", "'due' is missing"),
    (HEAD + "[lab-99]\ndue = 2026-10-12T23:59:00\n", "", "deadlines.toml: there is no lab"),
    (HEAD + DUE + "due_date = 3\n", "", "'due_date' is not known"),
    (HEAD + "penalty = 3\n", "", "'penalty' is not known here"),
    (HEAD + DUE + "points_per_day = -1\n", "", "a number from 0 up"),
    (HEAD + DUE + "points_per_day = nan\n", "", "must be a number"),
    (HEAD + DUE + "fraction_per_day = 10\n", "", "at most 1"),
    (HEAD + DUE + "fraction_per_day = 0.1\npoints_per_day = 1\n", "", "not both"),
    (DUE, "", "times should name the file"),
    ('times = "times.csv"\n' + DUE, "", "has no offset from UTC"),
    (HEAD + "[students]\nann = 5\n", "", "an extension is a section"),
    (HEAD + DUE + "[students.ann]\nlab-99 = 2026-10-12T23:59:00\n", "", "there is no lab"),
    (HEAD + "zone = 'UTC'\n" + DUE, "", "deadlines.toml: "),
    (HEAD.replace('"UTC"', '"../../etc/passwd"') + DUE, "", "zone should be a name"),
    (HEAD.replace("times.csv", "none.csv") + DUE, "", "none.csv: there is no such file"),
    (HEAD.replace("times.csv", ".") + DUE, "", "there is no such file"),
    (HEAD + DUE, "", "needs the columns student,submitted"),
    (HEAD + DUE, "student,submitted\nann,\udcff", "is not UTF-8 text (at byte 22); save it as UTF-8"),
    (HEAD + DUE + "until = 2020-01-01T00:00:00\n", "", "[lab-01]: until should not be before due"),
    (HEAD + DUE, "student,submitted\nann,yesterday", "line 2: 'yesterday' is not a time"),
    (HEAD + DUE, "student,submitted\nann,2026-13-12 00:00", "line 2: '2026-13-12 00:00'"),
    (HEAD + DUE, "student,submitted" + 2 * "\nann,2026-10-12 00:00", "line 3: ann is there twice"),
    (HEAD + DUE, "student,submitted\nann," + "x" * 200_000, "cannot be read"),
    (HEAD + DUE, "student,submitted,lab\nann,2026-10-12 00:00,lab-99", "line 2: there is no lab"),
]


@table(DEADLINES)
def test_deadlines(row, tmp_path):
    deadlines, times, words = row
    (tmp_path / "deadlines.toml").write_text(deadlines)
    (tmp_path / "times.csv").write_bytes(times.encode("utf-8", "surrogateescape"))
    refused(lambda: late.read(tmp_path / "deadlines.toml"), words)


@table([("none.toml",), (".",), ("/dev/zero",), *([("a pipe",)] if PIPES else [])])
def test_deadlines_that_are_no_file(row, tmp_path):
    if row[0] == "a pipe":
        os.mkfifo(tmp_path / row[0])  # which nobody writes to: to open it would hang
    refused(lambda: late.read(tmp_path / row[0]), "there is no such file")


# -------------------------------------------------------------------------------------------- cases, reports

CASES = [
    (b"\xff", "is not a case"),
    (b"[" * 100_000, "is not a case"),
    (b'{"config": 5, "calls": []}', "is not a case"),
    (b'{"config": {}, "calls": [[5]]}', "is not a case"),
    (b'{"config": {}, "calls": []}', "cannot be played: KeyError: 'queue'"),
]


@table(CASES)
def test_an_instructors_cases(row, tmp_path):
    data, words = row
    (tmp_path / "lab-01").mkdir()
    (tmp_path / "lab-01" / "mine.json").write_bytes(data)
    refused(lambda: arguments.own_cases(tmp_path, ("lab-01",)), "mine.json", words)


def a_grade():
    task = TaskGrade("schedule_step", 100, 50.0, "wrong", 1, 2)
    lab = LabGrade("lab-01", [task], cases=[Case("public 1", False, True)])
    return Grade("ann", [lab], "s", "limits", "d")


GRADES = [
    (("student",), 5), (("seed",), 7), (("withheld",), None), (("withheld",), "1"), (("late",), []),
    (("ignored",), "x"), (("labs",), {"a": 1}), (("labs",), 5), (("labs", 0), None),
    (("labs", 0, "tasks"), None), (("labs", 0, "tasks", 0), 5), (("labs", 0, "lab"), ["lab-01"]),
    (("labs", 0, "tasks", 0, "earned"), "50"), (("labs", 0, "tasks", 0, "points"), None),
    (("labs", 0, "tasks", 0, "colour"), 1), (("labs", 0, "cases", 0, "passed"), 1),
    (("labs", 0, "cases", 0, "name"), 5), (("labs", 0, "departs"), "x"), (("isolation",), [1]),
]  # fmt: skip


@table(GRADES)
def test_a_grade_that_was_edited_is_none(row, tmp_path):
    """--regrade, replay and a run that goes on take it for one that is not there."""
    (*path, key), value = row
    data = json.loads(a_grade().to_json())
    functools.reduce(operator.getitem, path, data)[key] = value
    (tmp_path / "ann.json").write_text(json.dumps(data))
    assert store.load(tmp_path, "ann") is None


@table([(b"[" * 100_000,), (b"\xff",), (b"",), (b"5",), (b"[]",), (b"null",)])
def test_a_grade_that_is_no_json(row, tmp_path):
    (tmp_path / "ann.json").write_bytes(row[0])
    assert store.load(tmp_path, "ann") is None


SETTINGS = [
    b"", b"[]", b"\xff", b"[" * 100_000, b'{"seed": 5}', b'{"seed": "a"}',
    b'{"seed": "a", "labs": 5, "submissions": ".", "late": null, "own": null}',
    b'{"seed": "a", "labs": ["lab-01"], "submissions": 5, "late": null, "own": null}',
    b'{"seed": "a", "labs": ["lab-01"], "submissions": ".", "late": null, "own": null, "hidden": "x"}',
    b'{"seed": "a", "labs": ["lab-01"], "submissions": ".", "late": null, "own": null, "colour": 1}',
]  # fmt: skip


@table([(data,) for data in SETTINGS])
def test_replay_of_a_report_that_is_none(row, tmp_path):
    (tmp_path / "settings.json").write_bytes(row[0])
    refused(lambda: commands.replay(tmp_path, "ann", "1", ["public", "1"]), "is not a report")


def test_a_grade_of_which_any_value_was_exchanged_is_none_or_can_be_reported(tmp_path):
    grade = json.loads(a_grade().to_json())
    for seed in range(300):
        rng, data = random.Random(seed), copy.deepcopy(grade)
        at = data
        while isinstance(at, dict | list) and at:
            key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            holder, at = at, at[key]
        holder[key] = rng.choice([None, 0, -1, 10**400, 1e300, "", "x", LONE, [], {}, True, [[]], 1.5])
        (tmp_path / "ann.json").write_text(json.dumps(data))
        if found := store.load(tmp_path, "ann"):
            list(regrade.differences(found, a_grade()))
            assert found.earned >= 0


# ------------------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """Only looked at: no row changes it."""
    course = Course(tmp_path_factory.mktemp("course"))
    (course.root / "class" / "ann").mkdir(parents=True)
    (course.root / "file").write_text("a file")
    if PIPES:
        os.mkfifo(course.root / "pipe")
    return course


NO_LAB = "there is no lab"
COMMANDS = [
    *[(f"{command} {lab}", NO_LAB) for command in ("test", "hint", "watch", "solution", "check", "generate")
      for lab in ("nolab", "lab-99", "99", "lab-01x")],
    ("reset ../lab-01", NO_LAB),
    ("demo nolab", NO_LAB),
    ("demo ", "there is no lab ''"),
    ("demo lab-01,,lab-02", NO_LAB),
    ("demo lab-01 --out file", "file is not a writable folder"),
    ("hint lab-01 nothing", "has no task 'nothing'"),
    ("hint lab-01 --again 99999999999999999999", "has not been shown yet"),
    ("quiz nothing", "no quiz is called 'nothing'"),
    ("nothing", "Usage"),
    ("check lab-01 --keep file", "file"),
    ("export --student file", "file"),
    ("export --student class", "class is not empty, and not an exported course"),
    ("grade nowhere --out r", "nowhere is not a folder"),
    ("grade class --out file", "file is not a writable folder"),
    ("grade class --out class/r", "--out should lie outside"),
    ("grade class --out r --labs 99", NO_LAB),
    ("grade class --out r --labs ,,", "--labs ,, names no lab"),
    ("grade class --out r --seed a\udcff", "--seed should be at most 100 letters that print"),
    ("grade class --out r --time-limit nan", "Usage"),
    ("grade class --out r --hidden nowhere", "nowhere has no cases"),
    ("grade class --out r --late nowhere.toml", "nowhere.toml: there is no such file"),
    ("grade class --out r --regrade nowhere", "nowhere is not a report: it has no folder grades"),
    ("grade class --out r --cluster nowhere", "--cluster should be an address such as"),
    ("replay nowhere ann 1 public 1", "nowhere is not a report"),
    ("gradescope --out class", "class is a folder"),
    ("gradescope --out pipe", "pipe is not a regular file"),
    ("gradescope --out file/x.zip", "file"),
]  # fmt: skip


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


@table([row for row in COMMANDS if PIPES or "pipe" not in row[0]])
def test_commands(row, course):
    line, words = row
    before = files(course.root)
    ended = course.command(*line.split(" "))
    assert ended.returncode == 2, (ended.stdout, ended.stderr)
    assert words in ended.stderr, ended.stderr
    said = [line for line in ended.stderr.splitlines() if not line.startswith("loading ")]
    assert len(said) == 1 or "Usage" in said[0], said
    assert files(course.root) == before


# ----------------------------------------------------------- a full disk, and what comes while it is written


def no_room(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_starter_stays_where_there_is_no_room_for_a_new_one(a_lab, monkeypatch, tmp_path):
    lab = LABS_DIR / "lab-01"
    shutil.copytree(lab, a_lab, dirs_exist_ok=True)
    (a_lab / "starter.py").write_text("mine")
    monkeypatch.setattr(progress, "STATE", tmp_path / ".state")
    with monkeypatch.context() as patch:
        patch.setattr(progress.Path, "replace", no_room)
        patch.setattr(progress.shutil, "move", no_room)
        patch.setattr(progress.Path, "write_text", no_room)
        with pytest.raises(OSError, match="No space"):
            progress.reset(find_lab("lab-01"))
    assert (a_lab / "starter.py").read_text() == "mine"
    progress.reset(find_lab("lab-01"))
    assert (a_lab / "starter.py").read_text() == (lab / "starter.py").read_text()
    assert not list(a_lab.glob("*.part"))


def test_half_an_edition_is_none(tmp_path, monkeypatch):
    """A full disk leaves nothing where the edition was to be, so that the same command works again."""
    (tmp_path / "empty").mkdir()
    for why in (no_room, lambda *_, **__: (_ for _ in ()).throw(shutil.Error([("a", "b", "no room")]))):
        monkeypatch.setattr(author.shutil, "copytree", why)
        for name in ("new", "empty"):
            with pytest.raises((OSError, LabError)):
                author.export(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_reports_and_states_end_with_what_was_there(tmp_path, monkeypatch):
    store.save(tmp_path, a_grade())
    monkeypatch.setattr(store.Path, "replace", no_room)
    with pytest.raises(OSError, match="No space"):
        store.save(tmp_path, Grade("ann", [], "other", "limits", "d"))
    assert store.load(tmp_path, "ann") == a_grade()


SIGNALS = [
    ("check lab-01", "SIGTERM", "labs.kit.judge.matrix", 143, "terminated (SIGTERM)"),
    ("status", "SIGINT", "labs.kit.judge.examine", 130, "interrupted"),
    ("watch lab-01", "SIGTERM", "", 143, "terminated (SIGTERM)"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@table(SIGNALS)
def test_a_signal_ends_a_command_in_one_line(row, tmp_path):
    """Nothing of it goes on: what it had started ends with it, and its scratch folder is gone."""
    line, name, child, code, words = row
    course, scratch = Course(tmp_path), tmp_path / "scratch"
    course.solve()
    scratch.mkdir()
    env = course.environment() | {"TMPDIR": str(scratch), "PYTHONPATH": f"{course.root}:{ROOT}"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "labs", *line.split()]
    run = subprocess.Popen(command, cwd=course.root, env=env, **pipes)
    children = wait_for(run, child)
    run.send_signal(getattr(signal, name))
    _, stderr = run.communicate(timeout=20)
    assert (run.returncode, stderr.decode()) == (code, f"{words}\n")
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]
    assert not list(scratch.iterdir())


def wait_for(run, child):
    """Its processes, once it has one of this module; where that is "", once it has printed a line."""
    if not child:
        run.stdout.readline()
        return []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        tasks = Path(f"/proc/{run.pid}/task").glob("*/children")  # a thread's are listed at the thread
        if found := " ".join(task.read_text() for task in tasks).split():
            time.sleep(0.3)  # it has begun
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {child} was begun")
