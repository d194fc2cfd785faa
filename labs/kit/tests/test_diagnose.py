""" "looks like": of all bugs that fail one test alike, the learner's own is named."""

from dataclasses import replace

import pytest

from labs.kit import load
from labs.kit.judge import compare, loading, page
from labs.kit.judge.manifest import find_lab
from mini_engine.tests.browser import find_browser, open_browser

BUGS = {bug.id: bug for bug in find_lab("lab-01").bugs}


def likeness(course, *line: str) -> str:
    said = course.pytest("labs/lab-01", "-x", *line).stdout.partition("- looks like -")[2]
    return " ".join(said.split("=== short")[0].strip(" -\n").split())


# Each does in its first failing test what another bug, further up in the zoo, does.
@pytest.mark.parametrize("bug", ["waiting-first", "budget-reset", "running-sorted"])
def test_bugs_alike_in_one_test_are_told_apart_by_others(course, bug):
    source = BUGS[bug].apply(course.file("solution.py").read_text("utf-8"))
    course.file("starter.py").write_text(source, "utf-8")
    assert likeness(course).startswith(BUGS[bug].title)


def test_no_bug_is_named_whose_own_test_passes(course):
    """Under a budget of 16 this pays nothing, like the bug; under 10, where that is caught, it pays."""
    own_test, other = "test_budget_caps_the_total", "test_prefix_hit_schedules_only_the_rest"
    never_paid = next(bug for bug in BUGS.values() if bug.title == "the budget is asked, but never paid")
    assert never_paid.caught_by == own_test
    paying = "        budget -= num_tokens\n\n    return"
    course.solve(paying, "\n    return")
    assert likeness(course, "-k", other).startswith(never_paid.title)
    course.solve(paying, paying.replace("num_tokens", "num_tokens * (max_num_batched_tokens != 16)"))
    assert likeness(course, "-k", other) == ""


# ------------------------------------------------------------------------------- the page, in a browser


@pytest.fixture(scope="module")
def browser():
    if (path := find_browser()) is None:
        pytest.skip("no Chromium found; name one in the environment variable BROWSER_PATH")
    with open_browser(path) as opened:
        yield opened


def runs_of(lab_id: str, bug_id: str, number: int) -> tuple[compare.Runs, compare.Runs]:
    """One of a lab's scenarios, run on a bug of its zoo and on the solution."""
    lab, scenarios = find_lab(lab_id), load(lab_id, "scenarios")
    wrong = loading.buggy(lab, next(bug for bug in lab.bugs if bug.id == bug_id))
    scenario = [*scenarios.SCENARIOS, *scenarios.draw(1, 20)][number]
    given = [wrong, loading.namespace(lab_id, "solution")]
    yours, reference = (scenarios.run(one, scenario, raise_errors=False) for one in given)
    return [(scenario, yours)], [(scenario, reference)]


@pytest.mark.parametrize(
    "lab_id, bug_id, number",
    [
        ("lab-01", "skip-past-the-head", 10),
        ("lab-05", "offset-forgotten", 0),
        ("lab-06", "freed-is-forgotten", 0),
    ],
)
def test_the_page_opens_where_the_two_part(browser, tmp_path, monkeypatch, lab_id, bug_id, number):
    """Steps of a run, and operations of labs 05 and 06."""
    monkeypatch.setattr(page, "_written", set())
    lab = replace(find_lab(lab_id), path=tmp_path / "labs" / lab_id)
    yours, reference = runs_of(lab_id, bug_id, number)
    _, apart = compare.first_apart(yours, reference)
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
