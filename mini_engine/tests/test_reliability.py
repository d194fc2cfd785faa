"""docs/reliability.md says of every rule and every case which tests prove it; here it is held to that."""

import inspect
import re
from pathlib import Path

from mini_engine.invariants import RULES
from mini_engine.tests import test_conformance, test_real_bugs

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reliability.md").read_text("utf-8")


def rows(heading):
    """The cells of the table under a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_rule_of_behaviour_stands_with_all_its_tests():
    found = {}
    for number, rule, tests in rows("The rules of behaviour"):
        assert len(rule.split()) > 4
        found[int(number)] = sorted(re.findall(r"`(\w+)`", tests))
    tests = [name for name in vars(test_conformance) if re.match(r"test_\d\d_", name)]
    numbers = range(1, 40)
    assert list(found) == list(numbers)
    assert found == {n: sorted(name for name in tests if name.startswith(f"test_{n:02}_")) for n in numbers}


def test_the_monitors_rules_are_the_pages():
    assert dict(rows("Watch any run")) == RULES


def test_every_case_is_told_and_tested_by_its_issue():
    """Numbers of issues stand in the page, in the test's first line, and in the page that tells the case."""
    shown = (DOCS / "real-bugs.md").read_text("utf-8")
    cases = rows("What real engines got wrong")
    for _, issues, name in cases:
        test = inspect.unwrap(getattr(test_real_bugs, name.strip("`")))
        assert inspect.getdoc(test).startswith(issues)
        for number in re.findall(r"\d+", issues):
            assert re.search(rf"(?:/issues/|/pull/|#){number}\b", shown), number
    tests = {f"`{name}`" for name in vars(test_real_bugs) if name.startswith("test_")}
    assert {name for _, _, name in cases} == tests
    titles = set(re.findall(r"^## (.+)", shown, re.M)) - {"Mistakes in articles"}
    assert {title for case, _, _ in cases for title in re.findall(r"^\[(.+?)\]", case)} == titles
