"""`python -m labs check` notices each promise that is broken; make test runs it on every lab."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from labs.kit.author import check
from labs.kit.author.blamed import Replayed, wrongly_blamed
from labs.kit.judge.manifest import LABS_DIR, find_lab, functions, lab_ids
from labs.kit.judge.processes import Outcomes
from labs.kit.judge.task_status import Result

POINTERS = [(lab_id, pointer["where"]) for lab_id in lab_ids() for pointer in find_lab(lab_id).pointers]


@pytest.mark.parametrize(("lab_id", "where"), POINTERS, ids=[f"{i} {w}" for i, w in POINTERS])
def test_a_pointer_leads_to_something(lab_id, where):
    """Each file that lab.toml points at exists, and defines every name that stands behind it."""
    for part in where.split("; "):
        path, _, names = part.partition(": ")
        defined = functions(source := (LABS_DIR.parent / path).read_text("utf-8"))
        for name in names.split(", "):
            assert name in defined or re.search(rf"^class {name}\b", source, re.MULTILINE), name


def problems_of_files(lab) -> str:
    verdict = check.Verdict(lab.id)
    check.check_texts(lab, verdict)
    check.check_sources(lab, verdict, strict=True)
    return "\n".join(verdict.problems)


FAULTS = {  # (file, old text, new text): what is said of it
    ("README.md", "images/turn.svg", "images/gone.svg"):
        "README.md links images/gone.svg, which is not there",
    ("lab.toml", '"test_random_scripts"', '"test_random_scripts", "test_random_scripts"'):
        "task schedule_step lists a test twice",
    ("lab.toml", '    "test_nobody_there",\n', ""):
        "lab.toml gives test_nobody_there to no task",
    ("lab.toml", '"test_nobody_there"', '"test_gone"'):
        "lab.toml names test_gone, which test_lab.py does not have",
    ("test_lab.py", '    """With no request running and none waiting the schedule is empty."""\n', ""):
        "test_nobody_there has no docstring",
    ("mistakes.toml", 'caught_by = "test_head_of_line_blocks"', 'caught_by = "test_gone"'):
        "mistake skip-past-the-head names no test of this lab: 'test_gone'",
    ("mistakes.toml", 'hint = "An assert says nothing', 'hint = ""  # "An assert says nothing'):
        "mistake bare-assert lacks a text",
    ("solution.py", "def schedule_step(", "def helper():\n    pass\n\n\ndef schedule_step("):
        "solution.py: helper is neither a task nor given",
    ("solution.py", "\n\n\ndef ", "\nimport mini_engine.schedule_step.schedule_step\n\n\ndef "):
        "solution.py imports its engine twin mini_engine.schedule_step.schedule_step",
    ("starter.py", "def schedule_step", "x = 1\n\n\ndef schedule_step"):
        "starter.py is not what `python -m labs generate lab-01` writes",
}  # fmt: skip


def test_each_fault_is_noticed_and_an_untouched_copy_has_none(course, copied_lab):
    for (name, old, new), problem in FAULTS.items():
        before = course.file(name).read_text("utf-8")
        course.edit(name, old, new)
        assert problem in problems_of_files(copied_lab())
        course.file(name).write_text(before, "utf-8")
    assert problems_of_files(copied_lab()) == ""


def test_a_task_that_is_blamed_for_another_s_mistake_is_a_problem(monkeypatch):
    """An examination that judges no task by itself blames the first that has a failing test."""
    lab = find_lab("lab-03")
    late = next(mistake for mistake in lab.mistakes if mistake.id == "list-changes-under-the-loop")
    monkeypatch.setattr(type(lab), "mistakes", [late])
    failing = {late.caught_by, "test_victim_computes_nothing", "test_random_scripts"}
    results = [Result(test, test not in failing, "AssertionError") for test in lab.tests]
    outcomes = Outcomes(lab, {f"mistake:{late.id}": results})
    assert wrongly_blamed(lab, outcomes) == []
    monkeypatch.setattr(Replayed, "run_alone", lambda self, wanted: True)
    said = f"mistake {late.id} sits in Scheduler.update, but Scheduler.schedule is blamed"
    assert wrongly_blamed(lab, outcomes) == [said]


def test_an_edited_starter_is_work_in_progress(course, copied_lab):
    course.write("return {}")
    lab = copied_lab()
    verdict = check.Verdict(lab.id)
    check.check_sources(lab, verdict, strict=False)
    assert verdict.problems == []
    assert "work in progress" in verdict.notes[0]


SLOTS, LIMIT = "test_slots_cap_the_running_set", "len(running) < max_num_seqs"
HEAD, NOBODY = "test_head_of_line_blocks", "test_nobody_there"
MISTAKES = [  # id, title, the test named for it, and what is replaced by what
    ("off-by-one", "one slot too many", SLOTS, LIMIT, "len(running) <= max_num_seqs"),
    ("off-by-one-again", "in other words", HEAD, LIMIT, "not len(running) > max_num_seqs"),
    ("off-by-one-once-more", "another name", SLOTS, LIMIT, "len(running) - 1 < max_num_seqs"),
    ("only-a-test-sees-it", "an attribute", NOBODY, "{}\n", "{}\n    schedule_step.seen = True\n"),
    ("cannot-be-made", "its snippet is gone", HEAD, "no such line", ""),
]
KEYS = ("id", "title", "caught_by", "find", "replace")


def test_behaviour_is_judged_in_a_process_of_its_own(course):
    """Starter that passes a test, failing solution, mistake that survives, twins: all in one run."""
    text = ""
    for row in MISTAKES:
        text += "[[mistakes]]\nmisconception = 'm'\nhint = 'h'\n"
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in zip(KEYS, row, strict=True))
    course.file("mistakes.toml").write_text(text, "utf-8")
    claim = "step(lab, queue(), [], FakeKV(8)) == {}\n"
    course.edit("test_lab.py", claim, "not hasattr(lab.schedule_step, 'seen')\n")
    course.edit("test_lab.py", '{"long": 64}', '{"long": 65}')
    result = course.run("labs", "check", "lab-01")
    text = result.stdout
    assert result.returncode == 1
    assert "mistakes.toml has 5 mistakes; it needs 12" in text
    assert "it needs two right solutions of another shape, lab_01_*.py in " in text  # the copy has no tests
    assert "the starter passes test_nobody_there" in text
    assert "solution fails test_long_prompt_alone_may_use_the_whole_budget" in text
    assert "engine fails test_long_prompt_alone_may_use_the_whole_budget" in text
    assert "mistake off-by-one-again is not caught by test_head_of_line_blocks" in text
    assert "mistakes off-by-one and off-by-one-again behave alike in every test" in text
    alike = "mistake off-by-one-once-more does what 'one slot too many' does in all tests of schedule_step"
    assert f"{alike}: give both one title and one hint" in text
    assert "the random scripts miss mistake only-a-test-sees-it, and no reason is given" in text
    unnamed = "fingerprints.json does not name the mistakes as they are: python -m labs check lab-01 --write"
    assert unnamed in text
    assert "mistake cannot-be-made cannot be made" in text and "occurs 0 times" in text
    assert "caught  off-by-one  " in text and "MISSED  off-by-one-again" in text


@pytest.mark.parametrize("lab_id", lab_ids())
def test_a_lab_needs_little_python_of_its_own(lab_id):
    """Beyond the files that a learner sees, a lab has at most 400 lines; the rest is shared."""
    files = (find_lab(lab_id).path / "author").glob("*.py")
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= 400


@pytest.mark.parametrize(
    ("said", "names"), [("TimeUp: no answer", {"nodes-by-hand"}), ("AssertionError", set())]
)
def test_a_mistake_whose_scripts_do_not_end_in_time_keeps_its_names(tmp_path, said, names):
    """They may end on another machine; what other mistakes are named is what was seen now."""
    lab = replace(find_lab("lab-09"), path=shutil.copytree(find_lab("lab-09").path, tmp_path / "lab-09"))
    seen = Outcomes(lab, {"mistake:nodes-by-hand": [Result("test_random_scripts", False, said)]})
    verdict = check.Verdict(lab.id)
    check.check_names(lab, seen, verdict, write=True)
    written = json.loads(lab.file("fingerprints.json").read_text("utf-8"))
    named = {name for digests in written.values() for name in digests.values()}
    assert named == names and not verdict.problems
