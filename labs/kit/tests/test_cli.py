"""`python -m labs` as a learner uses it."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from labs.__main__ import every_command
from labs.kit.judge import loading, manifest
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab, lab_ids, replace_body
from labs.kit.judge.pristine import pristine_source
from labs.kit.learner import board, progress
from labs.kit.learner.hints import short_names
from labs.kit.tests.conftest import UNPAID, num_tests

TESTS = num_tests("lab-01")


def passed(board: str) -> int:
    """The number of lab-01's tests that pass, from the board."""
    return int(re.search(rf"lab-01 .* (\d+)/{TESTS} ", board)[1])


def test_each_command_is_there_once_however_often_it_is_asked_for():
    commands = [one for _ in range(2) for one in every_command().registered_commands]
    names = [one.name or one.callback.__name__ for one in commands]
    assert len(names) == 2 * len({*names})


def test_status_of_an_untouched_course(course):
    course.add("lab-02")
    result = course.command("status")
    assert result.returncode == 0
    assert re.search(r"lab-01 .* - +0/100", result.stdout)  # no test has run
    assert f" 0/{TESTS}" in result.stdout  # of lab-02, which is not as it was generated
    assert "next: lab-01 schedule_step, in labs/lab-01/starter.py" in result.stdout
    assert "left: about 3 hours;" in result.stdout


def test_status_comes_from_the_tests_and_is_remembered_until_a_file_changes(course):
    course.add("lab-02")
    course.solve("len(running) < max_num_seqs", "len(running) <= max_num_seqs")
    first = course.command("status").stdout
    assert 0 < passed(first) < TESTS and f" 0/{TESTS}" in first
    kept = (course.labs / ".state" / "results.json").stat().st_mtime_ns
    assert course.command("status").stdout == first
    assert (course.labs / ".state" / "results.json").stat().st_mtime_ns == kept  # nothing was run
    course.solve()
    assert "done" in course.command("status").stdout
    assert "next: lab-02" in course.command("status").stdout


def test_a_lab_is_tested_again_when_one_that_it_builds_on_has_changed(course, copied_lab, monkeypatch):
    monkeypatch.setattr(progress, "LABS_DIR", course.labs)
    course.add("lab-02")
    course.edit("lab.toml", "prerequisites = []", 'prerequisites = ["lab-01"]', "lab-02")
    before = progress.digest(find_lab("lab-02"))
    course.solve()
    assert progress.digest(find_lab("lab-02")) != before


def test_status_has_a_bar_and_on_a_terminal_colours(course, monkeypatch):
    """A pipe, and NO_COLOR, get none."""
    course.add("lab-02")
    course.solve()
    plain = course.command("status").stdout
    assert "[##########----------] 1 of 2 labs done, 100 of 200 points\n" in plain and "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = course.command("status").stdout
    assert re.findall(r"\x1b\[3\dm.*?\x1b\[0m", shown) == ["\x1b[32mdone\x1b[0m"]
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(?:\d;)*3\d", course.command("status").stdout)


def test_status_goes_on_past_a_broken_lab(course):
    course.add("lab-02")
    course.file("starter.py").write_text("def f(:\n", "utf-8")
    course.solve(lab_id="lab-02")
    text = course.command("status").stdout
    assert "lab-01: starter.py does not parse, line 1" in text
    assert "done" in text and "next: lab-01" in text


def test_the_failing_run_is_shown_in_the_player_when_asked(course, monkeypatch):
    browser, opened = course.root / "browser.py", course.root / "opened"
    browser.write_text(f"import sys\nopen({str(opened)!r}, 'w').write(sys.argv[1])\n")
    monkeypatch.setenv("BROWSER", f"{sys.executable} {browser} %s")
    page = course.root / "out" / "lab-01.html"
    page.parent.mkdir()
    page.write_text("of an earlier run")
    course.write("raise SystemExit")
    text = course.command("test").stdout  # the run ended before a step
    assert "player" in text and "no comparison" not in text
    course.file("starter.py").write_text("x = (\n", "utf-8")
    assert "player" not in course.command("test").stdout
    assert "no run to show in the player: starter.py could not" in course.command("test", "--open").stdout
    course.solve(*UNPAID)
    assert "see your run in the player: python -m labs test lab-01 --open\n" in course.command("test").stdout
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>") and not opened.exists()
    course.run("labs", "test", "--open")  # a process looks for a browser once
    assert opened.read_text() == page.as_uri()
    monkeypatch.setenv("BROWSER", "no-such-browser %s")
    monkeypatch.setenv("PATH", str(course.root))
    assert f"no browser was found; open {page}" in course.run("labs", "test", "--open").stdout
    course.solve()
    course.edit("test_lab.py", "assert step(lab, queue(), [], FakeKV(8)) == {}", "assert lab is None")
    why = "no run to show in the player: this test calls single functions, or it failed before the first step"
    assert course.command("test", "--open").stdout.endswith(why + "\n")


def test_demo_runs_the_engine_on_the_labs_that_pass(course, monkeypatch):
    monkeypatch.setattr("labs.kit.learner.parts.namespace", loading.namespace.__wrapped__)  # not cached
    course.add("lab-02")
    refused = course.command("demo", "lab-01")
    assert (refused.returncode, refused.stderr.splitlines()) == (
        1, ["loading shakespeare and lab-01", "lab-01: schedule_step is not written yet"],
    )  # fmt: skip
    course.solve()
    result = course.command("demo", "auto", "--out", "seen", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    loads, compares = result.stderr.splitlines()
    assert loads == "loading shakespeare and every lab that passes its tests"
    assert compares == "comparing with the engine's own parts"
    assert re.search(r"not used:\n  lab-02: test_\w+ fails, and \d+ more tests\n", result.stdout)
    assert result.stdout.endswith("All answers are those of the engine's own parts.\n")
    assert re.search("schedule_step +│ lab-01, yours", result.stdout)
    assert re.search("clamp +│ the engine's own", result.stdout)
    header = (course.root / "seen" / "trace.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(header)["parts"] == {"schedule_step": "lab-01"}


def test_hints_come_one_at_a_time_and_are_shown_again_without_moving_on(course):
    first, second = (course.command("hint", "1").stdout for _ in range(2))
    assert "hint 1 of 3" in first and "hint 2 of 3" in second and "spoil" not in first
    for number, text in ((1, first), (2, second), (1, first)):
        assert course.command("hint", "1", "--again", str(number)).stdout == text
    for number in ("3", "0", "-1"):
        result = course.command("hint", "1", "--again", number)
        assert result.returncode == 2
        assert f"schedule_step, hint {number} has not been shown yet; without --again" in result.stderr
    third, fourth = (course.command("hint", "1").stdout for _ in range(2))
    assert third == fourth and "hint 3 of 3" in third and "solution lab-01 --spoil" in fourth


@pytest.fixture
def two(course):
    """lab-01, and lab-02 with its three tasks."""
    shutil.copytree(manifest.LABS_DIR / "lab-02", course.labs / "lab-02")
    course.file("starter.py", "lab-02").write_text(pristine_source(find_lab("lab-02")), "utf-8")
    return course


def test_a_hint_is_for_the_task_that_is_next(two):
    assert "lab-01 schedule_step, hint 1 " in two.command("hint").stdout
    two.solve()
    assert "lab-02 clamp, hint 1 " in two.command("hint").stdout
    starter = two.file("starter.py", "lab-02")
    unwritten = starter.read_text("utf-8")
    body = "return max(0, min(num_new, budget, threshold or num_new))"
    starter.write_text(replace_body(unwritten, "clamp", body), "utf-8")
    assert re.search("next: lab-02 next_chunk,", two.command("status").stdout)
    assert "lab-02 next_chunk, hint 1 " in two.command("hint", "2").stdout
    starter.write_text(unwritten + "def (", "utf-8")
    result = two.command("hint", "2").stdout
    assert "does not parse" in result and "hint for: clamp, next_chunk, prefill_budget" in result
    assert "lab-02 next_chunk, hint 2 " in two.command("hint", "2", "next_chunk").stdout


def test_with_all_done_there_is_no_hint_unless_one_is_named(course):
    course.solve()
    assert course.command("hint").stdout == "all labs are done: no task is left for a hint\n"
    assert "lab-01 is done; its hints can still be read:" in course.command("hint", "1").stdout
    assert "hint 1 of 3" in course.command("hint", "1", "schedule_step").stdout


def test_a_task_may_be_named_by_a_part_of_it():
    assert find_lab("lab-06").task("ADMIT()").name == "BlockManager.admit"
    assert find_lab("lab-07").task("next").name == "Stream.__next__"
    for lab in map(find_lab, lab_ids()):
        assert [lab.task(name) for name in short_names(lab)] == lab.tasks
    with pytest.raises(LabError, match="'stream' may be Stream.__next__ or Stream.close; which one?"):
        find_lab("lab-07").task("stream")
    with pytest.raises(LabError, match="has no task 'admiss'; its tasks are hash_block, BlockManager.get"):
        find_lab("lab-06").task("admiss")


@pytest.mark.parametrize("line", ["--help", "demo --help", "hint 2 clamp"])
def test_no_word_is_broken_in_a_narrow_terminal(two, line):
    def said(width):
        two.variables["COLUMNS"] = str(width)
        (two.labs / ".state" / "hints.json").unlink(missing_ok=True)
        return two.command(*line.split()).stdout

    narrow = said(36)
    assert narrow.split() == said(1000).split() and max(map(len, narrow.splitlines())) <= 36


@pytest.mark.soak
def test_a_failure_is_shown_in_a_narrow_terminal(course):
    course.solve(*UNPAID)

    def said(width):
        course.variables["COLUMNS"] = str(width)
        return course.command("test").stdout

    narrow, wide = said(36), said(120)
    assert max(map(len, narrow.splitlines())) <= 36
    assert {*wide.split()} - {"yours", "reference"} <= {*narrow.split()}
    assert "reference: r0: 8, r1: 2" in " ".join(narrow.split()), "one below the other"
    assert "see your run in the player" in wide, "what was kept can still be played"


@pytest.mark.parametrize("columns", [36, 80])
def test_the_board_names_every_task_at_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    status = [progress.Progress(find_lab(lab_id), []) for lab_id in lab_ids()]
    lines = board.board(status)
    assert max(map(len, lines)) <= columns
    for one in status:
        names = [task.name if columns > 40 else task.name.split(".")[-1] for task in one.lab.tasks]
        assert [name for name in names if not any(name in line.split() for line in lines)] == []
    status[0].problem = "lab-01: starter.py does not parse, line 3: invalid syntax"
    assert sum(line.split().count("?") for line in board.board(status)) == 1


def test_hints_fit_a_narrow_terminal_and_pseudocode_keeps_its_lines(course):
    course.variables["COLUMNS"] = "50"
    course.edit("lab.toml", 'hints = [\n    """\n', 'hints = [\n    """\n' + "word\n" * 30)
    texts = [course.command("hint", "lab-01").stdout.split("\n\n")[1].splitlines() for _ in range(3)]
    assert max(len(line) for text in texts for line in text) <= 50
    assert len(texts[0]) < 15
    code = find_lab("lab-01").tasks[0].hints[2].splitlines()
    kept = [line for line in code if len(line) <= 50]
    assert len(kept) >= 3 and set(kept) <= set(texts[2])


KILLED = f"ended the whole test process (exit code {9 if os.name == 'nt' else -9})"
ENDS = {
    "killed": ("import os\nos.kill(os.getpid(), 9)", f"test_nobody_there {KILLED}"),
    "interrupt": (
        "raise KeyboardInterrupt", "test_nobody_there was stopped by KeyboardInterrupt in starter.py, line 4",
    ),
    "hang": (
        "from itertools import count\nsum(count())", "nothing interrupts it, in schedule_step (starter.py, l",
    ),
}  # fmt: skip


@pytest.mark.parametrize("body, words", ENDS.values(), ids=ENDS)
def test_the_end_of_the_test_process_is_reported_and_not_kept(course, body, words):
    course.edit("lab.toml", "timeout = 5", "timeout = 0.3")
    course.edit("../kit/judge/guard.py", "WAIT * seconds + HELD", "WAIT * seconds")
    course.write(body)
    result = course.command("test", "1")
    assert result.returncode == 1
    assert words in result.stdout and len(result.stdout.splitlines()) == 1
    assert not (course.labs / ".state").exists()


@pytest.mark.soak  # seconds of computing
def test_an_endless_loop_is_blamed_on_its_task_where_right_ones_are_slow(course):
    """A test takes 1.5 s with each task. With the second it does not end, and the first is not blamed."""
    shutil.copytree(LABS_DIR / "lab-02", course.labs / "lab-02", ignore=shutil.ignore_patterns("__pyc*"))
    course.edit("lab.toml", "minutes = 60", "minutes = 60\ntimeout = 3", "lab-02")
    slow = """import os, time
    os.environ["SLOW"] = "yes"
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass
    judge_random_scripts("""
    course.edit("test_lab.py", "judge_random_scripts(", slow, "lab-02")
    first = "    start = request.num_computed_tokens\n"
    endless = f"    import os\n    while 'SLOW' in os.environ:\n        pass\n{first}"
    course.solve(first, endless, "lab-02")
    result = course.command("test", "lab-02")
    assert "a loop that never ends? It was in starter.py" in result.stdout
    assert "lab-02 clamp: 23 of 24 tests pass; waits for next_chunk" in result.stdout


def test_test_shows_the_first_failure_only_whatever_the_environment(course, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x --lf")  # --lf needs a plugin that is left out
    course = type(course)(course.root / "the [new] k\u00f6urse")
    course.solve(*UNPAID)
    result = course.command("test")
    assert result.returncode == 1
    assert int(re.search(rf"lab-01 schedule_step: (\d+) of {TESTS} tests", result.stdout)[1]) > TESTS / 2
    assert "test_budget_caps_the_total" in result.stdout and "test_threshold_is" not in result.stdout
    assert "where your run departs from the reference" in result.stdout and "looks like" in result.stdout


@pytest.mark.timeout(300)
def test_the_first_failure_is_shown_while_the_other_tests_run(course):
    """The last test waits until the sentence has been read. The same failure is not printed twice."""
    course.solve(*UNPAID)
    course.edit("lab.toml", "timeout = 5", "timeout = 60")
    read, waited = course.root / "read", course.root / "waited"
    last = f"""

def test_the_rest_waits(lab):
    import time
    while not pathlib.Path({str(read)!r}).exists():
        time.sleep(0.01)
    pathlib.Path({str(waited)!r}).touch()
"""
    tests = course.file("test_lab.py")
    tests.write_text(f"import pathlib\n{tests.read_text('utf-8')}{last}", "utf-8")
    line, said = [sys.executable, "-u", "-m", "labs", "test", "1"], []
    with subprocess.Popen(
        line, cwd=course.root, env=course.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        for text in process.stdout:
            said.append(text)
            if text.startswith("Your step"):
                read.touch()
    assert waited.exists() and said[0] == "the first failure, while the other tests run:\n"
    sentence = next(text for text in said if text.startswith("Your step"))
    assert (said.count("test_budget_caps_the_total\n"), said.count(sentence)) == (1, 1), "".join(said)
    more = said.index("more on the first failure, the most informative one:\n")
    assert said[more - 2].startswith("lab-01 schedule_step: ")
    name, _, rest = "".join(said[more + 1 :]).partition("\n\n")  # the name first, then pytest's differences
    assert name.startswith("--- looks like ---\n")
    assert "in test_budget_caps_the_total\n" in rest.splitlines(True)[0]


def test_a_test_that_is_gone_is_said(course):
    course.solve()
    course.edit("test_lab.py", "def test_nobody_there", "def nobody_there")
    shown = "lab-01: test_lab.py no longer has test_nobody_there; put it back\n"
    assert course.command("test", "1").stdout == shown
    assert not (course.labs / ".state").exists()


def test_threads_left_running_keep_nobody(course):
    course.write("import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()\nreturn {}")
    assert 0 < passed(course.run("labs", "status", timeout=100).stdout) < TESTS / 2


def test_a_folder_in_place_of_the_starter(course):
    course.file("starter.py").unlink()
    course.file("starter.py").mkdir()
    why = os.strerror(errno.EACCES if os.name == "nt" else errno.EISDIR)
    course.file("starter.py").joinpath("notes.txt").write_text("mine")
    assert f"lab-01: starter.py cannot be read: {why}" in course.command("test", "1").stdout
    assert course.command("reset", "1", "--yes").returncode == 0
    (backup,) = (course.labs / ".state" / "backups").iterdir()
    assert (backup / "notes.txt").read_text() == "mine"
    assert "not written yet" in course.command("test", "1").stdout


def test_without_a_place_to_remember(course):
    """labs/.state cannot be made: the tests run again, and commands that must keep something fail."""
    (course.labs / ".state").write_text("in the way")
    course.write("return {}")
    mine = course.file("starter.py").read_text("utf-8")
    assert 0 < passed(course.command("status").stdout) < TESTS / 2
    for command in (["hint", "1"], ["reset", "1", "--yes"]):
        result = course.command(*command)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
        assert ".state" in result.stderr
    assert course.file("starter.py").read_text("utf-8") == mine


@pytest.mark.parametrize("command", ["reset", "generate"])
def test_the_starter_is_restored_with_a_backup(course, command):
    pristine = course.file("starter.py").read_text("utf-8")
    course.write("return {'mine': 1}")
    mine = course.file("starter.py").read_text("utf-8")
    if command == "reset":
        assert course.command("reset", "lab-01", stdin="n\n").returncode == 1
        assert course.file("starter.py").read_text("utf-8") == mine
    assert "kept in" in course.command(command, "lab-01", stdin="y\n").stdout
    assert course.file("starter.py").read_text("utf-8") == pristine
    (backup,) = (course.labs / ".state" / "backups").iterdir()
    assert backup.read_text("utf-8") == mine
    assert "kept in" not in course.command(command, "lab-01", stdin="y\n").stdout  # nothing to keep


def test_solution_is_shown_once_yours_passes(course):
    result = course.command("solution", "lab-01")
    assert result.returncode == 1
    assert "no test passes; finish yours first, or add --spoil" in result.stderr
    assert "kv.admit" not in result.stdout
    course.variables |= {"COLUMNS": "40", "FORCE_COLOR": "1"}  # it is whole, and in no colour
    source = course.file("solution.py").read_text("utf-8")
    assert course.command("solution", "lab-01", "--spoil").stdout == source
    course.solve()
    assert "kv.admit" in course.command("solution", "lab-01").stdout
    done = course.command("test", "lab-01")
    assert (done.returncode, "lab-01 is done: 100 points" in done.stdout) == (0, True)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminal to look at")
def test_a_terminal_shows_that_tests_are_running(course):
    import pty

    course.solve()
    screen, terminal = pty.openpty()
    line, shown = [sys.executable, "-m", "labs", "status"], ""
    own = course.environment() | {"TERM": "xterm"}
    with subprocess.Popen(
        line, cwd=course.root, env=own, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        with contextlib.suppress(OSError):  # the end of the process, and of what it shows
            while "running the tests" not in shown:
                shown += os.read(screen, 1000).decode()
        assert "done" in process.stdout.read()
    assert "running the tests" in shown
    os.close(screen)
    assert course.command("status").stderr == ""


def test_results_of_a_file_that_was_saved_meanwhile_are_not_shown(course):
    course.solve_meanwhile()
    shown = "lab-01: starter.py was saved while its tests ran; they have to run again\n"
    assert course.command("test", "1").stdout == shown
    assert not (course.labs / ".state").exists()
    assert f"{TESTS} of {TESTS} tests pass" in course.command("test", "1").stdout


@pytest.mark.timeout(200)
def test_watch_tests_on_save_and_obeys_keys(course):
    line = [sys.executable, "-u", "-m", "labs", "watch", "lab-01"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = subprocess.Popen(line, cwd=course.root, env=course.environment(), text=True, **pipes)

    def read_until(words):
        for text in process.stdout:
            if words in text:
                return text
        raise AssertionError(f"watch ended without saying {words!r}")

    def press(key):
        process.stdin.write(f"{key}\n")
        process.stdin.flush()

    try:
        read_until("Save labs/lab-01/starter.py")
        press("h")
        read_until("hint 1 of 3")
        course.solve()
        read_until(f"{TESTS} of {TESTS} tests pass")
        read_until("Save labs/lab-01")
        press("h")
        read_until("lab-01 is done; its hints can still be read")
        press("q")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
