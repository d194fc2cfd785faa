"""Outcomes of a lab's tests are kept until something changes that they depend on."""

import json

import pytest

from labs.kit.author import kept
from labs.kit.judge import matrix, processes
from labs.kit.judge.manifest import find_lab


@pytest.fixture
def played(course, copied_lab, tmp_path, monkeypatch):
    """Asks for outcomes of the copied lab-01; returns how often its tests have been run so far."""
    runs, module = [], course.labs / "kit" / "judge" / "guard.py"
    monkeypatch.setattr(kept, "ROOT", course.root)

    def run_matrix(lab, variants, out):
        runs.append(variants)
        rows = [["solution", {"test": "test_it", "passed": True}], {"modules": [str(module)]}, "the end"]
        out.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return processes.read_outcomes(lab, out)

    monkeypatch.setattr(processes, "run_matrix", run_matrix)
    (folder := tmp_path / "kept").mkdir()

    def ask(*variants):
        outcomes = kept.outcomes_of(copied_lab(), ["solution", *variants], folder)
        assert outcomes.results["solution"][0].test == "test_it"
        return len(runs)

    ask.module = module
    return ask


def test_what_has_not_changed_is_not_run_again(played):
    assert [played(), played()] == [1, 1]
    assert [played("engine"), played("engine")] == [2, 2]


@pytest.mark.parametrize("name", ["solution.py", "test_lab.py", "mistakes.toml"])
def test_a_changed_file_of_the_lab_is_seen(played, course, name):
    played()
    path = course.file(name)
    path.write_text(path.read_text("utf-8") + "# more\n", "utf-8")
    assert [played(), played()] == [2, 2]


def test_a_changed_module_is_seen_and_a_learners_starter_is_not_looked_at(played, course):
    played()
    course.solve()
    assert played() == 1
    played.module.write_text("", "utf-8")
    assert played() == 2


def test_a_mistake_is_judged_by_the_tests_of_the_tasks_it_changes():
    """All of them where it keeps state: what a test then sees depends on the tests before it."""
    lab = find_lab("lab-07")
    close = {*lab.task("Stream.close").tests}
    assert matrix.tests_for(lab, "closing-again-aborts-again") == close < {*lab.tests}
    lab = find_lab("lab-04")
    assert matrix.tests_for(lab, "mask-kept-by-its-shape") == {*lab.tests}
