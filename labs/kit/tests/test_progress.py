"""Which task comes next: tasks lean on each other, and a test may run into one that is not written yet."""

import pytest

from labs.kit.judge.manifest import find_lab
from labs.kit.judge.matrix import Result
from labs.kit.learner.progress import Progress

FIND, PUBLISH, ADMIT, TAKE = (f"BlockManager.{name}" for name in ("find_prefix", "publish", "admit", "take"))


def progress(**said: str) -> Progress:
    """Of lab-06, whose tasks fail all their tests with these words; those not named pass theirs."""
    lab = find_lab("lab-06")
    results = [
        Result(test, passed=words is None, said=words or "")
        for task in lab.tasks
        for words in [said.get(task.name.removeprefix("BlockManager."))]
        for test in task.tests
    ]
    return Progress(lab, results)


def unwritten(name: str) -> str:
    return f"NotImplementedError: lab-06: {name} is not written yet"


@pytest.mark.parametrize(
    "said, comes_next",
    [
        ({}, None),
        ({"publish": "AssertionError", "take": unwritten(TAKE)}, PUBLISH),
        ({"find_prefix": unwritten(FIND), "admit": unwritten(FIND)}, FIND),
        ({"find_prefix": unwritten(ADMIT), "admit": unwritten(TAKE), "take": unwritten(TAKE)}, TAKE),
        ({"find_prefix": unwritten("BlockManager.find_prefixes")}, FIND),
        ({"find_prefix": "NotImplementedError: lab-05: BlockManager.admit is not written yet"}, FIND),
    ],
    ids=["done", "wrong", "itself", "a chain", "no task", "another lab"],
)
def test_what_a_task_waits_for_comes_first(said, comes_next):
    now = progress(**said)
    assert getattr(now.next_task, "name", None) == comes_next


def test_two_that_wait_for_each_other_end_the_search():
    assert progress(publish=unwritten(TAKE), take=unwritten(PUBLISH)).next_task.name in (PUBLISH, TAKE)


def test_a_failure_of_its_own_is_shown_before_one_that_waits():
    now = progress(find_prefix=unwritten(ADMIT), admit=unwritten(ADMIT))
    find, admit = now.lab.task(FIND), now.lab.task(ADMIT)
    assert (now.waits_for(find), now.waits_for(admit)) == (admit, None)
    wrong = next(result for result in reversed(now.results) if result.function in find.tests)
    wrong.said = "AssertionError"
    assert (now.waits_for(find), now.next_task, now.next_failure) == (None, find, wrong)


def test_the_owner_of_a_method_is_its_class():
    now = progress(find_prefix=unwritten(ADMIT + ".inner"))
    assert now.waits_for(now.lab.task(FIND)).name == ADMIT
