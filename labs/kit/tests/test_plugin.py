"""pytest's output for a learner's starter.py: readable, short, and never an error at collection."""

import os
import re

import pytest

from labs.kit.tests.conftest import UNPAID

FIRST = "labs/lab-01/test_lab.py::test_budget_caps_the_total"


def counts(result) -> dict[str, int]:
    """{"failed": 3, "passed": 1} from pytest's closing line."""
    kinds = "passed|failed|error|not written|not run"
    closing = [line for line in result.stdout.splitlines() if re.search(r" in [\d.]+s", line)][-1]
    return {what: int(n) for n, what in re.findall(rf"(\d+) ({kinds})\b", closing)}


def test_an_untouched_starter_says_its_line_once_a_task(course):
    result = course.pytest("labs/lab-01")
    assert result.returncode == 1
    (kind, tests), *others = counts(result).items()
    assert kind == "not written" and tests > 40 and not others
    assert f"lab-01: schedule_step is not written yet ({tests} tests)\nwrite it in" in result.stdout
    assert result.stdout.count("is not written yet") == 1 and len(result.stdout.splitlines()) < 9
    assert "Traceback" not in result.stdout and "error" not in result.stdout.lower()


def test_side_by_side_each_thing_is_said_once_and_the_page_has_one_writer(course):
    course.add("lab-02")
    course.solve(*UNPAID)
    both = course.pytest("labs", "-n", "2")
    assert both.returncode == 1 and "Traceback" not in both.stdout + both.stderr
    assert both.stdout.count("testing starter.py, your own") == 1
    assert both.stdout.count("lab-01: schedule_step is not written yet") == 1  # as the other's file has it
    assert both.stdout.count("yours beside the reference") <= 1 and "no page" not in both.stdout
    kinds = counts(both)
    assert {*kinds} == {"failed", "passed", "not written"} and kinds["failed"] > 2
    named = [line for line in both.stdout.splitlines() if " looks like: " in line]
    title = "lab-01 schedule_step looks like: the budget is checked, but never reduced"
    assert {line.partition(".")[0] for line in named} == {title}
    reference = course.pytest("labs/lab-01", "-n", "2", "-k", "budget or memory", impl=None)
    assert reference.stdout.count("testing solution.py, the reference; yours:") == 1
    alone = course.pytest(FIRST, impl=None)
    assert alone.returncode == 0 and "yours: " in alone.stdout and "pytest labs/lab-01" in alone.stdout


def test_the_kit_s_own_tests_are_no_learner_s_matter(course):
    tests = course.labs / "kit" / "tests"
    tests.mkdir()
    (tests / "test_kit.py").write_text("def test_it():\n    pass\n")
    assert set(counts(course.pytest("labs", "-k", "test_it or budget_caps"))) == {"not written"}
    assert set(counts(course.pytest("labs/kit"))) == {"passed"}, "named, they run"
    assert counts(course.pytest("labs", "-k", "test_it or budget_caps", impl="engine")) == {"passed": 2}


def test_unknown_impl_is_one_clear_error(course):
    result = course.pytest(FIRST, impl="mine")
    assert result.returncode == 4
    assert "LAB_IMPL must be solution, starter or engine, but is 'mine'" in result.stderr


def others(course, number: int) -> list[str]:
    """Add labs, whose tests may compute for 0.3 s; return their ids."""
    lab_ids = [f"lab-{n:02}" for n in range(2, 2 + number)]
    for lab_id in lab_ids:
        course.add(lab_id)
        course.edit("lab.toml", "timeout = 5", "timeout = 0.3", lab_id)
    return lab_ids


def before_summary(result) -> str:
    """Return what was printed before pytest's summary, which has each message again."""
    return result.stdout.partition(" short test summary ")[0]


TROUBLES = {
    "syntax error": ("def schedule_step(:\n", "starter.py does not parse, line 1: invalid syntax"),
    "import fails": ("x = 1\ny = x + z\n", "starter.py fails at import, line 2: NameError"),
    "exits": ("import sys\nsys.exit(3)\n", "starter.py fails at import, line 2: SystemExit: 3"),
    "task deleted": ("def clamp(): ...\n", "starter.py no longer has schedule_step"),
    "prints a flood": ("while True:\n    print('tick')\n", "importing starter.py floods the screen"),
    "null byte": ("x = 1\ny = '\0'\n", "starter.py has a null byte in line 2; delete it"),
    "error without words": ("class E(Exception):\n    __str__ = None\nraise E", "line 3: E: (E, "),
    "import loops": ("while True:\n    pass\n", "importing starter.py: no answer within 0.3 s of computing"),
}


def test_broken_starters_are_a_message_each_and_the_other_labs_go_on(course):
    course.solve()
    for lab_id, (source, _) in zip(others(course, len(TROUBLES)), TROUBLES.values(), strict=True):
        course.file("starter.py", lab_id).write_text(source, "utf-8")
    result = course.pytest("labs", "-k", "budget_caps or head_of_line")
    assert counts(result) == {"not run": 2 * len(TROUBLES), "passed": 2}, result.stdout
    assert [message for _, message in TROUBLES.values() if result.stdout.count(message) != 1] == []
    assert "Traceback" not in result.stdout and len(result.stdout.splitlines()) < 20


def test_a_starter_s_bytes(course):
    """A byte order mark is ignored; another encoding, and no file at all, is one message."""
    latin, none = others(course, 2)
    course.solve()
    course.file("starter.py").write_bytes(b"\xef\xbb\xbf" + course.file("starter.py").read_bytes())
    course.file("starter.py", latin).write_bytes("# Gr\u00fc\u00dfe\n".encode("latin-1"))
    course.file("starter.py", none).unlink()
    result = course.pytest("labs", "-k", "budget_caps")
    assert counts(result) == {"not run": 2, "passed": 1}
    assert f"{latin}: starter.py is not UTF-8 text (byte 4 is 0xfc); save it" in result.stdout
    assert f"{none}: starter.py is missing; restore it with: python -m labs reset {none}" in result.stdout


ENDLESS = {
    "while True:\n    pass": "within 0.3 s of computing: a loop that never ends? It was in starter.py, line",
    "while True:\n    try:\n        pass\n    except Exception: pass": "within 0.3 s",
    "while True:\n    print('still here')": "characters were printed in one step; print less",
}


def test_code_that_does_not_end(course):
    for lab_id, body in zip(others(course, len(ENDLESS)), ENDLESS, strict=True):
        course.write(body, lab_id)
    result = course.pytest("labs", "-k", "budget_caps")
    assert counts(result) == {"not written": 1, "failed": len(ENDLESS)}
    assert [message for message in ENDLESS.values() if message not in result.stdout] == []
    assert before_summary(result).count("within 0.3 s") == 2
    claim = "A budget of 10 computes 8, 2 and 0 tokens of three prompts of 8"
    assert result.stdout.count(claim) == len(ENDLESS)
    assert len(result.stdout.splitlines()) < 20 * len(ENDLESS)


def test_what_is_printed_counts_a_step_at_a_time(course):
    """The README's own log line, in every step of a long run, is no flood; one endless step is."""
    course.add("lab-02")
    course.solve("    return scheduled", "    print('x' * 15_000)\n    return scheduled")
    course.solve("    return scheduled", "    print('x' * 25_000)\n    return scheduled", "lab-02")
    result = course.pytest("labs", "-k", "limits_hold")
    assert counts(result) == {"passed": 1, "failed": 1} and "FAILED labs/lab-02" in result.stdout


def test_state_kept_between_calls_is_named(course):
    """Each test passes alone; in the run the second meets what the first has left."""
    course.solve("    scheduled = {}", "    scheduled = SEEN")
    with course.file("starter.py").open("a", encoding="utf-8") as file:
        file.write("SEEN = {}\n")
    text = course.pytest("labs/lab-01", "-k", "budget_caps or head_of_line").stdout
    assert "look for state kept between calls" in text
    assert "look for state" not in course.pytest(FIRST).stdout


def test_a_file_saved_while_its_tests_run_is_not_taken_for_state(course):
    """A file that failed is loaded again as it was, not as it was saved since."""
    course.solve_meanwhile()
    text = course.pytest("labs/lab-01", "-k", "budget_caps").stdout
    assert "is the first that differs" in text and "look for state" not in text


def test_after_one_that_does_not_end_no_more_are_run(course):
    course.edit("lab.toml", "timeout = 5", "timeout = 0.3")
    course.write("while True:\n    pass")
    result = course.pytest("labs/lab-01", "-rN")
    assert result.stdout.count("no answer within 0.3 s") == 1
    assert result.stdout.count("lab-01: not run, because a test before it did not end") == 1
    assert counts(result)["failed"] == 1 and counts(result)["not run"] > 30


def test_threads_left_running_do_not_keep_pytest(course):
    course.write("import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()\nreturn {}")
    result = course.run("pytest", FIRST, "-p", "no:cacheprovider", impl="starter", timeout=60)
    assert (result.returncode, counts(result)) == (1, {"failed": 1})
    assert "threads are still running" in result.stdout


@pytest.mark.parametrize("ci", ["", "true"])  # where CI is set, pytest itself cuts nothing
def test_only_the_learner_s_lines_are_shown_and_an_endless_message_is_cut(course, monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    course.write("raise ValueError('x' * 10**6)")
    text = course.pytest(FIRST).stdout
    assert "starter.py" in text and "labs/kit" not in text and "mini_engine/" not in text
    assert len(text) < 5000


def test_a_test_of_an_error_is_explained_too(course):
    """pytest's own "DID NOT RAISE", in whichever implementation, is a failure like others."""
    course.write("return {}")
    result = course.pytest("labs/lab-01/test_lab.py::test_no_room_for_a_running_request_is_named")
    assert counts(result) == {"failed": 1}
    assert "DID NOT RAISE" in result.stdout and "INTERNALERROR" not in result.stdout


def test_a_message_about_what_is_not_written_is_no_failure_of_its_own(course):
    """A test that reads the text of a RuntimeError may meet NotImplementedError's."""
    with course.file("test_lab.py").open("a") as file:
        file.write("\n\ndef test_text(lab):\n    with pytest.raises(RuntimeError) as caught:\n")
        file.write("        step(lab, queue(), [], FakeKV(8))\n    assert 'memory' in str(caught.value)\n")
    text = course.pytest("labs/lab-01/test_lab.py::test_text").stdout
    assert "\nlab-01: schedule_step is not written yet (1 test)\nwrite it in" in text


def test_a_starter_gives_no_verdict_on_itself_and_an_exit_in_a_task_is_a_failed_test(course):
    ends = "AssertionError: {lab_id}: starter.py ends the test by itself"
    ways = {f"import pytest; pytest.{way}('nothing to see')": ends for way in ("skip", "xfail", "exit")}
    ways |= {"import sys; sys.exit(0)": "> ended       SystemExit: 0"}
    ways |= {"import os; os._exit(0)": "> ended       SystemExit: os._exit(0), which wo"}
    lab_ids = others(course, len(ways))
    for lab_id, body in zip(lab_ids, ways, strict=True):
        course.write(body, lab_id)
    result = course.pytest("labs", "-k", "budget_caps")
    assert counts(result) == {"not written": 1, "failed": len(ways)} and result.returncode == 1
    for lab_id, said in zip(lab_ids, ways.values(), strict=True):
        assert before_summary(result).count(said.format(lab_id=lab_id)) == 1
    assert "passed" not in result.stdout and "skipped" not in result.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_os_exit_at_import_is_said_and_a_fork_may_leave_that_way(course):
    forking = "import os\nif not os.fork():\n    os._exit(0)\nos.wait()\nos._exit(0)\n"
    course.file("starter.py").write_text(forking)
    text = course.pytest(FIRST).stdout
    assert "starter.py fails at import, line 5: SystemExit: os._exit(0), which would end the whole" in text


# ------------------------------------------------------------------------- the page of a failing run

OPENED = "out/lab-01.html"


def page(course):
    return course.root / "out" / "lab-01.html"


def test_a_failure_shows_claim_and_departure_the_first_has_the_page_and_the_others_say_so(course):
    course.solve(*UNPAID)
    alone = course.pytest(FIRST).stdout
    assert "A budget of 10 computes 8, 2 and 0 tokens of three prompts of 8" in alone
    assert "step 0 is the first that differs" in alone
    assert re.search(r"> scheduled +r0: 8, r1: 8, r2: 8 +r0: 8, r1: 2", alone)
    assert re.search(r"> budget +\[#+\] 24/10 OVER +\[#+\] 10/10", alone)
    assert re.search(r"> waiting +0 +# 1 r2", alone)
    assert "kv.admit(request)" not in alone and "solution.py" not in alone  # no line of the reference
    first = page(course).read_bytes()
    all_of_them = course.pytest("labs/lab-01")
    found = all_of_them.stdout
    assert page(course).read_bytes() == first
    failed = counts(all_of_them)["failed"]
    assert failed > 2 and found.count(OPENED) == failed
    assert found.count("shows the first failure of these tests; run this one alone") == failed - 1
    assert "run this one alone" not in alone
    course.pytest("labs/lab-01/test_lab.py::test_limits_hold_in_every_step")
    assert page(course).read_bytes() != first


def test_only_a_learner_s_run_is_written_and_not_by_status(course):
    course.pytest("labs/lab-01")  # nothing is written yet
    course.solve(*UNPAID)
    course.command("status")
    course.edit("test_lab.py", 'budget=10) == {"r0": 8, "r1": 2}', 'budget=10) == {"r0": 8}')
    assert counts(course.pytest(FIRST, impl="engine")) == {"failed": 1}
    assert not page(course).parent.exists()


def test_a_run_that_does_not_end_is_shown_up_to_there(course):
    course.edit("lab.toml", "timeout = 5", "timeout = 0.3")
    looping = "    scheduled = {}\n    while running and running[0].output_token_ids:\n        pass\n"
    course.solve("    scheduled = {}\n", looping)
    result = course.pytest("labs/lab-01/test_lab.py::test_b_is_admitted_when_a_finishes")
    assert counts(result) == {"failed": 1} and "no answer within 0.3 s" in result.stdout
    assert f"{OPENED} in a browser: yours beside the reference" in result.stdout and page(course).exists()


def test_without_a_reference_yours_is_shown_alone(course):
    course.solve(*UNPAID)
    course.file("solution.py").write_text("def schedule_step(*_, **__):\n    raise OSError\n", "utf-8")
    result = course.pytest(FIRST)
    assert counts(result) == {"failed": 1}
    assert f"{OPENED} in a browser: yours\n" in result.stdout
    assert '"reference"' not in page(course).read_text("utf-8").split("</script>")[0]


WAYS = ["raise SystemExit", "raise ValueError('\\ud800')", "while True: pass", ""]


@pytest.mark.parametrize("way", WAYS, ids=["exit", "error", "loop", "full disk"])
def test_no_run_whatever_it_was_like_makes_an_error_of_a_failure(course, way):
    """The learner's code can reach what writes the page, and the disk may refuse it."""
    course.edit("../kit/judge/page.py", "SECONDS = 5.0", "SECONDS = 0.3")
    course.solve(*UNPAID)
    if way:
        with course.file("starter.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\nimport mini_engine.show.player as p\n\n\ndef no(*_, **__):\n    {way}\n\n\n")
            file.write("p.write_player = no\n")
    else:
        page(course).parent.write_text("in the way")
    result = course.pytest(FIRST)
    assert counts(result) == {"failed": 1}
    assert "is the first that differs" in result.stdout and "no page for the player: " in result.stdout
