"""Honest work: the reference earns all, the starter nothing, a known mistake costs its task's points."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from labs.kit.author.check import imports
from labs.kit.grader import blame, grading, inside
from labs.kit.grader.grading import replayed
from labs.kit.grader.report.disclosure import lab_disclosed
from labs.kit.grader.results import NOT_WRITTEN, RIGHT, WAITS, WRONG, Grade
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge import isolate, random_scripts
from labs.kit.judge.manifest import find_lab, lab_ids, replace_body
from labs.kit.judge.pristine import pristine_source
from labs.kit.tests import files, marks
from labs.kit.tests.conftest import fewer_cases
from labs.kit.tests.files import another, mistaken, solution
from labs.kit.tests.test_grader_imports import escaping, importing
from mini_engine.tests.soak import SOAK, count

pytestmark = marks.namespaces

ALL = [  # but for those that build on the engine's answers, which no sandbox has
    path
    for path in sorted((Path(__file__).parent / "alternatives").glob("lab_*.py"))
    if not imports(path.read_text("utf-8")) & {"mini_engine.block_manager.BlockManager"}
]
# In a soak all of it is graded, which takes minutes; else of each lab the first.
ALTERNATIVES = ALL if SOAK else [*{path.stem[:6]: path for path in reversed(ALL)}.values()][::-1]
MISTAKES = [
    (lab_id, mistake)
    for lab_id in lab_ids()
    for mistake in find_lab(lab_id).mistakes
    if not mistake.missed_by_scripts
]
HIDDEN = 30 if SOAK else 10  # what is right passes ten cases as it passes thirty
FIRST = [*{lab_id: (lab_id, mistake) for lab_id, mistake in reversed(MISTAKES)}.values()]
# What it answers is right, and how it comes to it is not; another one is below. A soak has all.
SOME = [one for one in MISTAKES if (one[0], one[1].id) == ("lab-08", "torch-at-the-top")]
graded = partial(files.graded, hidden=HIDDEN, seconds=20.0)


@pytest.mark.parametrize(
    "lab_id", marks.some(lab_ids(), "lab-02", "lab-08", "lab-11")
)  # two shapes, and torch
def test_right_files_earn_all_the_starter_nothing_and_a_mistake_costs_its_task(lab_id):
    """The reference imports all that it may; another right file looks for answers around that list."""
    lab = find_lab(lab_id)
    sources = [solution(lab_id) + importing(lab_id), solution(lab_id) + escaping(lab_id)]
    sources += [path.read_text("utf-8") for path in ALTERNATIVES if path.stem[:6] == lab_id.replace("-", "_")]
    with fewer_cases():
        for source in sources:
            right = graded(lab_id, source)
            assert right.earned == right.points == sum(task.points for task in lab.tasks), (
                right.problem or [case.said for case in right.cases if not case.passed][:1]
            )
            assert {task.state for task in right.tasks} == {RIGHT}
            assert all(case.passed for case in right.cases)
        starter = graded(lab_id, pristine_source(lab))
    assert starter.earned == 0 and {task.state for task in starter.tasks} == {NOT_WRITTEN}
    mistake = next(mistake for of, mistake in FIRST if of == lab_id)
    names = costs_its_task(lab_id, mistake)
    if lab_id != "lab-07":  # whose scripts are graded in another form
        assert names == {mistake.title}


@pytest.mark.parametrize(
    ("lab_id", "mistake"), MISTAKES if SOAK else SOME, ids=lambda one: getattr(one, "id", one)
)
def test_a_known_mistake_costs_the_points_of_its_task(lab_id, mistake):
    costs_its_task(lab_id, mistake)
    count("known mistakes graded")


def costs_its_task(lab_id, mistake) -> set[str]:
    """Grade a known mistake; return its names."""
    lab = find_lab(lab_id)
    found = graded(lab_id, mistake.apply(solution(lab_id)))
    wrong = [task for task in found.tasks if task.state == WRONG]
    at_fault = {task.name for task in lab.tests[mistake.caught_by]} | {*isolate.tasks_of(lab, mistake)}
    assert wrong and {task.task for task in wrong} <= at_fault
    assert found.earned == found.points - sum(task.points for task in wrong)
    for task in found.tasks:
        if task.state != WRONG:
            assert (task.state, task.earned, task.waits_for) == (WAITS, task.points, wrong[0].task)
    names = {task.name for task in wrong}
    assert names <= {mistake.title, ""}
    return names


@pytest.mark.parametrize("budget", ["budget == 3", "budget == 8 and len(running) == 2"])
def test_a_rare_second_mistake_costs_its_points_too(budget, monkeypatch):
    """Beside a common one, on the first case of which it is right; once it shows in a hidden case alone."""
    monkeypatch.setattr(blame, "FEW", 1)
    right = "    return budget - sum("
    (common,) = (one for one in find_lab("lab-02").mistakes if one.id == "threshold-off-by-one")
    rare = solution("lab-02").replace(right, f"    if {budget}:\n        return budget\n{right}")
    alone, found = (graded("lab-02", source, hidden=30) for source in (rare, common.apply(rare)))
    passed = {case.name for case in alone.cases if case.passed}
    assert len(passed) < len(alone.cases)
    assert next(case.name for case in found.cases if not case.passed) in passed
    assert [task.state for task in found.tasks] == [WRONG, WAITS, WRONG]
    assert found.tasks[0].name == common.title


def test_a_mistake_that_two_tasks_make_together_costs_both(few_cases):
    """Each is right among the reference's others: what one notes, the other says."""
    found = graded("lab-03", mistaken("lab-03", "an-older-preemption-counts"))
    wrong = {task.task for task in found.tasks if task.state == WRONG}
    assert wrong == {"Scheduler.preempt", "Scheduler.make_room"}


@pytest.mark.soak
@pytest.mark.parametrize("rare", [False, True])
def test_a_changed_helper_costs_the_tasks_that_call_it(rare, few_cases):
    """Also beside another task's mistake. The reference's methods call the helper as it was given."""
    source = solution("lab-06").replace("return (request.cache_salt, tuple(", "return ('', tuple(")
    wrong = {"BlockManager.get_computed_blocks", "BlockManager.cache_blocks"}
    if rare:
        source = source.replace("ref_count = 1\n", "ref_count = 1 + (num_blocks > 4)\n")
        wrong |= {"BlockManager.take"}
    found = graded("lab-06", source)
    assert {task.task for task in found.tasks if task.state == WRONG} == wrong


SLIPS = {  # in books of the file's own, by the task that they cost
    "BlockManager.allocate": ("fits = count <= self", "fits = count < self"),
    "BlockManager.num_new_blocks": ("request.num_computed_tokens + num_new_tokens)", "num_new_tokens)"),
    "BlockManager.admit": ("left < self.watermark", "left <= self.watermark"),
    "BlockManager.free": ("self.tables.pop(request.request_id, [])", "self.tables.pop(request.request_id)"),
}


@pytest.mark.parametrize(
    "task", [pytest.param(name, marks=() if "admit" in name else pytest.mark.soak) for name in SLIPS]
)
def test_in_a_class_that_is_judged_whole_one_slip_costs_one_task(task, few_cases):
    source = another("lab-05")
    assert source.count(SLIPS[task][0]) == 1
    found = graded("lab-05", source.replace(*SLIPS[task]), hidden=0)
    assert {one.task for one in found.tasks if one.state == WRONG} == {task}


def test_no_file_is_excused_from_being_counted():
    """Whatever names it has: a free list that is searched costs its points."""
    source = mistaken("lab-05", "free-list-searched")
    found = graded("lab-05", source + "\nSLOW = is_oracle = ONE_BY_ONE = True\n")
    assert any(task.state == WRONG for task in found.tasks)


def test_a_file_may_define_what_it_likes(few_cases):
    """A dataclass whose annotations are text looks up its own module."""
    own = "from __future__ import annotations\nimport dataclasses\n\n"
    own += "@dataclasses.dataclass\nclass Row:\n    number: int\n\n"
    assert graded("lab-01", own + solution("lab-01")).earned == 100


def test_what_is_not_written_costs_its_own_points_alone(few_cases):
    """Five tasks of seven are there; each is judged among the reference's others."""
    source, left = solution("lab-06"), ("BlockManager.take", "BlockManager.free")
    for name in left:
        source = replace_body(source, name, f'raise NotImplementedError("lab-06: {name} is not written yet")')
    found = {task.task: task for task in graded("lab-06", source).tasks}
    assert [name for name, task in found.items() if task.state == NOT_WRITTEN] == [*left]
    assert sum(task.earned for task in found.values()) == 75
    assert found["BlockManager.admit"].waits_for == "BlockManager.take"


def test_another_seed_draws_other_cases_and_the_same_seed_the_same():
    source = solution("lab-01").replace("len(running) < max", "len(running) <= max")
    one, again = (graded("lab-01", source) for _ in range(2))
    assert one == again
    failing = next(case for case in one.cases if case.hidden and not case.passed)
    settings = Settings(("lab-01",), "a seed", hidden=HIDDEN)
    played = replayed("lab-01", failing.name, settings, Submission("ada", {"lab-01": source.encode()}))
    assert played == failing


FIRST_LINE = "    scheduled = {}\n"  # of lab-01's solution


def test_a_loop_in_one_case_leaves_the_cases_before_it_judged():
    loop = solution("lab-01").replace(FIRST_LINE, f"{FIRST_LINE}    while max_num_seqs == 6: pass\n")
    found = graded("lab-01", loop, seconds=2.0)
    said = [case.said for case in found.cases]
    assert found.earned == 0 and any(case.passed for case in found.cases)
    assert said.count("no answer within 2 s of computing") == 1 and "not begun" in said
    assert "no answer within 2 s of computing" in found.problem
    whole = Grade("ada", [found], "a seed", "namespaces", "digest")
    [task] = lab_disclosed(found, whole, reveal=False).tasks
    assert task.words == "too slow: no answer within 2 s of computing"


def test_a_case_that_waits_is_ended_and_said_to_wait():
    sleep = solution("lab-01").replace(FIRST_LINE, f"{FIRST_LINE}    __import__('time').sleep(99)\n")
    problem = graded("lab-01", sleep, seconds=0.5).problem
    assert problem.endswith("no answer within 2 s, and it waits without computing")


def test_time_in_which_another_program_runs_is_no_waiting(monkeypatch):
    monkeypatch.setattr(inside, "spent", lambda session: (0.4, 9.0))  # computed; ready to run, and did not
    took = inside.times(0, 10.0)
    assert took == pytest.approx([0.4, 0.6, 10.0])
    request = {"seconds": 0.8, "left": [9, 9, 99], "limit": 1, "weak": True}
    assert not inside.beyond(request, 0, took)
    assert "computing" in inside.beyond(request, 0, [0.9, 0, 10])
    assert "waits" in inside.beyond(request, 0, [0.4, 9, 10])


@pytest.mark.soak
def test_a_busy_machine_costs_no_points(spinning, few_cases, monkeypatch):
    """The limit is for computing: kept from the processor longer than one may wait, all are judged."""
    source = solution("lab-01")
    slow = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end:\n    pass\n"
    monkeypatch.setattr(grading, "_boxes", own := {})  # a sandbox that starts on one processor
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        assert graded("lab-01", source, seconds=0.8, hidden=0).earned == 100
        began = time.monotonic()
        with spinning(9):
            assert graded("lab-01", source + slow, seconds=0.8, hidden=0).earned == 100
    finally:
        os.sched_setaffinity(0, processors)
        own["lab-01"].stop()
    assert time.monotonic() - began > 0.8  # or the machine was not busy


def test_an_instructors_own_scripts_are_cases(tmp_path):
    folder = tmp_path / "lab-02"
    folder.mkdir()
    script = random_scripts.drawn("lab-02", 1) | {"calls": [["clamp", 8, 3, 0]]}
    (folder / "short.json").write_text(json.dumps(script), "utf-8")
    source = solution("lab-02")
    right = graded("lab-02", source, own=tmp_path).cases[-1]
    assert (right.name, right.hidden, right.passed) == ("own short.json", True, True)
    body = "return 7 if (num_new, budget) == (8, 3) else max(0, min(num_new, budget, threshold or num_new))"
    assert not graded("lab-02", replace_body(source, "clamp", body), own=tmp_path).cases[-1].passed
