""" "looks like": of all bugs that fail one test alike, the learner's own is named."""

import pytest

from labs.kit.judge.manifest import find_lab

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
