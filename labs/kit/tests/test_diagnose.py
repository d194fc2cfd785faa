"""A known mistake is named for an equal fingerprint alone; a failing run is a page for the player."""

import shutil
from dataclasses import replace

import pytest

from labs.kit import load
from labs.kit.author.export import expanded
from labs.kit.judge import compare, loading, page
from labs.kit.judge.manifest import LABS_DIR, find_lab, lab_ids
from labs.kit.judge.task_status import Result, fingerprint
from labs.kit.tests.files import solution
from mini_engine.tests.soak import SOAK

LAB_01 = find_lab("lab-01")
MISTAKES = {mistake.id: mistake for mistake in LAB_01.mistakes}
PAYING = "        budget -= num_tokens\n\n    return"


def said(course, lab_id: str = "lab-01") -> str:
    """The output of `labs test`, in one line."""
    return " ".join(course.command("test", lab_id).stdout.split())


def test_a_known_mistake_is_named_with_its_hint_and_shown_by_its_own_test(course):
    """From mistakes.toml; for the last, in pytest, from fingerprints.json alone (test_edition: `labs test`).
    SOAK=1 takes three, else one: labs check holds the names of all."""
    for mistake in ("waiting-first", "budget-reset", "running-sorted")[0 if SOAK else 2 :]:
        source = MISTAKES[mistake].apply(course.file("solution.py").read_text("utf-8"))
        course.file("starter.py").write_text(source, "utf-8")
        text = said(course)
        assert f"looks like --- {MISTAKES[mistake].title}: {' '.join(MISTAKES[mistake].hint.split())}" in text
        assert f"the most informative failure: {MISTAKES[mistake].caught_by}" in text
    course.file("fingerprints.json").write_text(expanded(LAB_01), "utf-8")  # as in the student edition
    course.file("mistakes.toml").unlink()
    out = course.pytest("labs/lab-01", "-rN").stdout
    assert f"lab-01 schedule_step looks like: {MISTAKES[mistake].title}" in " ".join(out.split())


def test_name_and_sentence_stand_before_pytest_s_diff(course):
    """In `labs test` below the claim, in pytest above all failures; the name is the last word, too."""
    course.solve("len(running) < max_num_seqs", "len(running) <= max_num_seqs")
    known = next(mistake for mistake in LAB_01.mistakes if mistake.title == "one slot too many")
    report = course.command("test", "lab-01").stdout.partition("the most informative failure:")[2]
    sentence, name, diff = (report.index(text) for text in ("Your step 0", f"{known.title}: ", "\nE   "))
    assert sentence < name < diff and "looks like" not in report[diff:]
    out = course.pytest("labs/lab-01", "-rN").stdout
    before, failures = out.split("= FAILURES =")
    assert f"lab-01 schedule_step looks like: {known.title}. " in before and before.count("Your step 0") == 1
    assert f"\nlab-01 schedule_step looks like: {known.title}\nthe most informative failure:" in failures
    alone = course.pytest(f"labs/lab-01/test_lab.py::{known.caught_by}").stdout
    assert "looks like" not in alone and alone.count("Your step 0") == 1


@pytest.mark.parametrize(
    "lab_id, ids",
    [
        ("lab-02", ("threshold-off-by-one", "prompt-only")),
        pytest.param("lab-02", ("at-least-one", "every-chunk-samples"), marks=pytest.mark.soak),
        pytest.param("lab-03", ("last-row-evicted", "first-token-only"), marks=pytest.mark.soak),
    ],
)
def test_two_mistakes_in_different_tasks_get_both_names(course, lab_id, ids):
    """The one to correct first is shown with its failure; the other's task stands with its name."""
    lab = find_lab(lab_id)
    source = solution(lab_id)
    known = {mistake.id: mistake for mistake in lab.mistakes}
    for mistake in ids:
        source = known[mistake].apply(source)
    for name in lab_ids()[1 : lab_ids().index(lab_id) + 1]:
        shutil.copytree(LABS_DIR / name, course.labs / name, ignore=shutil.ignore_patterns("__pyc*"))
    course.file("starter.py", lab_id).write_text(source, "utf-8")
    text = said(course, lab_id)
    assert text.count("looks like ---") == 2
    assert all(f"looks like --- {known[mistake].title}:" in text for mistake in ids)


def test_what_no_known_mistake_does_has_no_name(course):
    """Under a budget of 16 alone nothing is paid: many tests fail as with that mistake, not all."""
    course.solve(PAYING, PAYING.replace("num_tokens", "num_tokens * (max_num_batched_tokens != 16)"))
    assert "looks like" not in said(course) and "the most informative failure" in said(course)
    assert "looks like" not in course.pytest("labs/lab-01").stdout


def test_what_comes_to_no_end_has_no_name(course):
    """The number of steps before the end depends on the machine."""
    course.edit("lab.toml", "timeout = 5", "timeout = 0.3")
    waiting = PAYING.replace("return", "while not budget: pass\n    return")
    course.solve(PAYING, waiting.replace("budget -=", "budget ="))
    text = said(course)
    assert "looks like" not in text and "tests pass, " in text
    assert "looks like" not in course.pytest("labs/lab-01").stdout


def result(test: str, said: str = "", runs: str = "[]") -> Result:
    return Result(test, not said, said, runs)


def test_a_fingerprint_is_what_was_done_and_no_message():
    task = LAB_01.tasks[0]
    rows = [result(test) for test in task.tests]
    assert fingerprint(task, rows) == "", "nothing failed"
    first, *others = rows
    wrong = [result(first.test, "AssertionError: 3 == 4"), *others]
    digest = fingerprint(task, wrong)
    assert digest and digest == fingerprint(task, [result(first.test, "AssertionError: x"), *others[::-1]])
    for other in (
        [result(first.test, "TypeError: 3 == 4"), *others],
        [result(first.test, "AssertionError: 3 == 4", "[1]"), *others],
        [*wrong[:-1], result(rows[-1].test, "AssertionError")],
    ):
        assert fingerprint(task, other) not in (digest, "")
    assert fingerprint(task, wrong[:-1]) == "", "a test is missing"
    assert fingerprint(task, [*wrong[:-1], result(rows[-1].test, "TimeUp")]) == ""
    assert fingerprint(task, [*wrong, result("test_of_another_task", "TypeError")]) == digest


# ------------------------------------------------------------------------------- the page, in a browser


def runs_of(lab_id: str, mistake_id: str, number: int) -> tuple[compare.Runs, compare.Runs]:
    """One of a lab's scenarios, run on a known mistake and on the solution."""
    lab, scenarios = find_lab(lab_id), load(lab_id, "scenarios")
    wrong = loading.mistaken(lab, next(mistake for mistake in lab.mistakes if mistake.id == mistake_id))
    scenario = scenarios.SCENARIOS[number]
    given = [wrong, loading.namespace(lab_id, "solution")]
    yours, reference = (scenarios.run(one, scenario, raise_errors=False) for one in given)
    return [(scenario, yours)], [(scenario, reference)]


@pytest.mark.parametrize(
    "lab_id, mistake_id, number",
    [("lab-01", "waiting-first", 5), ("lab-05", "offset-forgotten", 0), ("lab-06", "freed-is-forgotten", 0)],
)
def test_the_page_opens_where_the_two_part(browser, tmp_path, monkeypatch, lab_id, mistake_id, number):
    """Steps of a run, and operations of labs 05 and 06."""
    monkeypatch.setattr(page, "_written", set())
    lab = replace(find_lab(lab_id), path=tmp_path / "labs" / lab_id)
    yours, reference = runs_of(lab_id, mistake_id, number)
    _, apart = compare.first_departing(yours, reference)
    line = page.write(lab, yours, reference)
    step = apart.reference.step
    assert step > 3
    assert line == f"out/{lab_id}.html in a browser: yours beside the reference, opened at step {step}"
    assert (tmp_path / "out" / f"{lab_id}.html").stat().st_size < 400_000
    shown = browser.new_page()
    shown.goto(page.path_of(lab).as_uri())
    assert f" {step} of " in shown.locator("#readout").text_content()
    for name in ("yours", "reference"):
        assert shown.get_by_text(name, exact=True).first.is_visible()
    assert shown.locator("#difference-table").is_visible()
    shown.close()
