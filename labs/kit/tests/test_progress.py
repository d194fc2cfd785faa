"""The status of a starter: tasks wrong by themselves, tasks that wait, and the most informative failure."""

from io import StringIO
from types import ModuleType

from labs.kit.judge import loading, matrix
from labs.kit.judge.examine import YOURS, Examination
from labs.kit.judge.manifest import find_lab
from labs.kit.judge.task_status import Result, TaskStatus
from labs.kit.tests.files import another

FIND, PUBLISH, ADMIT, TAKE = (
    f"BlockManager.{name}" for name in ("get_computed_blocks", "cache_blocks", "admit", "take")
)
WRONG = "AssertionError"


def results(lab, said: dict[str, str]) -> list[Result]:
    """All of the lab's tests; those of a task named in `said`, and of no other, fail with these words."""
    own = {test: tasks[0].name for test, tasks in lab.tests.items() if len(tasks) == 1}
    words = {test: said[task] for test, task in own.items() if task in said}
    return [Result(test, test not in words, words.get(test, "")) for test in lab.tests]


def status(whole: dict[str, str], alone: dict[str, str] | None = None, unwritten: tuple = ()) -> TaskStatus:
    """lab-06's status from the errors of tasks' tests: in the whole file, and of tasks alone."""
    lab = find_lab("lab-06")
    by_task = {
        name: [r for r in results(lab, {name: text} if text else {}) if r.function in lab.task(name).tests]
        for name, text in (alone or {}).items()
    }
    return TaskStatus(lab, results(lab, whole), by_task, unwritten)


def unwritten(name: str) -> str:
    return f"NotImplementedError: lab-06: {name} is not written yet"


def test_with_all_tests_passed_nothing_is_left():
    now = status({})
    assert now.is_done and now.points == 100
    assert (now.next_task, now.most_informative, now.wrong) == (None, None, [])


def test_what_is_right_by_itself_waits_for_what_is_wrong():
    """`take` is wrong, and the tests of `get_computed_blocks` fail for that alone."""
    now = status({FIND: WRONG, TAKE: WRONG}, {FIND: "", TAKE: WRONG})
    find, take = now.lab.task(FIND), now.lab.task(TAKE)
    assert (now.wrong, now.next_task, now.waits_for(find), now.waits_for(take)) == ([take], take, take, None)
    assert now.passed(find) == len(find.tests) and not now.done(find)
    assert now.most_informative.function == take.tests[0]


def test_tasks_that_do_not_fit_together_are_shown_in_the_whole_file():
    """One fills what only another of the file's own reads: each is right among the reference's others."""
    now = status({FIND: WRONG, TAKE: WRONG}, {FIND: "", TAKE: ""})
    find = now.lab.task(FIND)
    assert (now.next_task, now.most_informative.said, now.waits_for(find)) == (find, WRONG, None)


def test_what_is_right_by_itself_waits_for_what_is_not_written():
    whole = {FIND: unwritten(ADMIT), ADMIT: unwritten(ADMIT)}
    now = status(whole, {FIND: ""}, unwritten=(ADMIT,))
    assert now.waits_for(now.lab.task(FIND)).name == ADMIT
    assert now.next_task.name == ADMIT


def test_a_wrong_task_comes_before_one_that_is_not_written():
    """It is what was worked on; and a task alone can be judged although others are missing."""
    whole = {FIND: unwritten(FIND), TAKE: unwritten(FIND)}
    now = status(whole, {TAKE: WRONG}, unwritten=(FIND,))
    assert (now.next_task.name, now.most_informative.said) == (TAKE, WRONG)


def test_without_a_task_alone_the_whole_file_speaks():
    """Nothing was found out alone: what says "not written" waits for that, in a chain."""
    whole = {FIND: unwritten(ADMIT), ADMIT: unwritten(TAKE), TAKE: unwritten(TAKE)}
    now = status(whole, unwritten=(TAKE,))
    assert now.next_task.name == TAKE
    own = {TAKE: unwritten(PUBLISH), PUBLISH: unwritten(TAKE)}
    assert status(own).next_task.name in (PUBLISH, TAKE), "two that wait for each other end the search"


def test_books_kept_in_another_way_are_judged_whole():
    """A task that passes in the whole file and fails in the reference has other attributes: not wrong."""
    lab = find_lab("lab-06")
    now = status({PUBLISH: WRONG}, {PUBLISH: WRONG})
    publish = lab.task(PUBLISH)
    assert now.judged(publish) == now.of(publish, now.alone[PUBLISH])
    now = status({}, {PUBLISH: WRONG})
    now.results[[r.function for r in now.results].index("test_random_scripts")].passed = False
    assert now.judged(publish) == now.of(publish, now.results)
    assert [r.function for r in now.failures(publish)] == ["test_random_scripts"]


def test_of_two_that_fail_alike_the_one_that_says_more_is_wrong():
    """No task can be judged alone: all that the scripts look at fail in them, and one in its own tests."""
    now = status({TAKE: WRONG})
    random_scripts = now.results[[r.function for r in now.results].index("test_random_scripts")]
    random_scripts.passed, random_scripts.said = False, WRONG
    assert now.waits_for(now.lab.task(FIND)).name == TAKE
    assert now.wrong == [now.lab.task(TAKE)]


def test_only_a_task_of_this_lab_is_waited_for_and_it_owns_what_it_defines():
    for said in (unwritten("BlockManager.find_prefixes"), "NotImplementedError: lab-05: take is not written"):
        now = status({FIND: said})
        assert (now.waits_for(now.lab.task(FIND)), now.next_task.name) == (None, FIND)
    now = status({FIND: unwritten(ADMIT + ".inner")})
    assert now.waits_for(now.lab.task(FIND)).name == ADMIT


class Played(Examination):
    """An examination in which the tests named in `whole`, and those in `alone` of a task, fail."""

    def __init__(
        self, whole: set[str], alone: dict[str, set[str]], unwritten: tuple = (), left_whole=(), words=()
    ):
        super().__init__(find_lab("lab-06"), list(unwritten), StringIO())
        self.left_whole, self.words = {*left_whole}, dict(words)
        self.fails, self.runs = alone | {YOURS: whole}, []
        assert self.examine()

    def run(self, variants, wanted):
        for variant in variants:
            name = variant.removeprefix(f"{YOURS}@")
            tests = wanted.get(name, {*self.lab.tests})
            self.runs.append((name, len(tests)))
            for test in (test for test in self.lab.tests if test in tests):
                failed = test in self.fails.get(name, ())
                self.keep(variant, Result(test, not failed, self.words.get(test, WRONG) if failed else ""))
        return True


def test_a_task_runs_alone_only_where_that_can_change_the_verdict():
    """If one task alone is at fault it stands as in the whole file; what that passes is not run again."""
    lab = find_lab("lab-06")
    own = next(test for test in lab.task(TAKE).tests if len(lab.tests[test]) == 1)
    failing = {own, "test_random_scripts"}
    one = Played(failing, {TAKE: failing})
    assert dict(one.runs) == {YOURS: len(lab.tests)} | {task.name: 1 for task in lab.tasks} | {TAKE: 2}
    take = lab.task(TAKE)
    assert one.status.wrong == [take] and one.status.judged(take) == one.status.of(take, one.status.results)
    for task in (task for task in lab.tasks if task != take):
        assert one.status.passed(task) == len(task.tests) and one.status.waits_for(task) == take
    two = Played(failing, {TAKE: failing, FIND: {"test_random_scripts"}})
    for name in (TAKE, FIND):
        assert {result.test for result in two.status.alone[name]} == {*lab.task(name).tests}
    assert [name for name, _ in Played(set(), {}).runs] == [YOURS]


def test_the_task_that_does_not_end_alone_is_blamed_for_all_that_was_not_run():
    """Its one test runs on each task alone; the others, whose tests were not run, wait for it."""
    lab = find_lab("lab-06")
    own = next(test for test in lab.task(TAKE).tests if len(lab.tests[test]) == 1)
    later = {*list(lab.tests)[list(lab.tests).index(own) + 1 :]}
    words = {own: "TimeUp"} | dict.fromkeys(later, "NotBegun")
    one = Played({*words}, {TAKE: {own}}, words=words)
    assert dict(one.runs) == {YOURS: len(lab.tests)} | {task.name: 1 for task in lab.tasks}
    assert (one.status.next_task, one.status.most_informative.test) == (lab.task(TAKE), own)
    waiting = [task for task in lab.tasks if task.name != TAKE and not one.status.done(task)]
    assert waiting and all(one.status.waits_for(task) == lab.task(TAKE) for task in waiting)


def test_what_fails_in_a_run_of_all_tests_only_is_run_so_alone():
    """State that is kept between calls shows only after other tests: then a suspect runs all of its own."""
    lab = find_lab("lab-06")
    kept = Played({"test_random_scripts"}, {})
    assert {*kept.runs[-len(lab.tasks) :]} == {(task.name, len(task.tests)) for task in lab.tasks}
    missing = Played({"test_random_scripts"}, {}, unwritten=(PUBLISH,))
    assert (len(missing.runs), missing.status.next_task.name) == (len(lab.tasks), PUBLISH)


def test_of_a_class_left_whole_one_run_serves_all_tasks():
    """Each of its methods alone would be the same module; each is judged by its own tests of that run."""
    lab = find_lab("lab-06")
    methods = [task for task in lab.tasks if task.name.startswith("BlockManager.")]
    others = [task.name for task in lab.tasks if task not in methods]
    own = next(test for test in lab.task(TAKE).tests if len(lab.tests[test]) == 1)
    failing, first = {own, "test_random_scripts"}, methods[0].name
    one = Played(failing, {first: failing}, left_whole=["BlockManager"])
    assert one.runs == [(YOURS, len(lab.tests)), *((name, 1) for name in others), (first, 2)]
    assert [task.name for task in one.status.wrong] == [TAKE]
    two = Played(failing, {first: failing, others[0]: {"test_random_scripts"}}, left_whole=["BlockManager"])
    assert {name for name, _ in two.runs} == {YOURS, *others, first}
    for task in methods:
        alone = two.status.alone[task.name]
        assert sorted(r.test for r in alone) == sorted(task.tests)
        assert {r.test for r in alone if not r.passed} == failing & {*task.tests}


def test_what_a_file_leaves_whole_is_seen_in_the_file(monkeypatch):
    """And a file that does not load leaves nothing whole."""
    files = {
        "own": loading.execute(another("lab-05"), "own_books", "own_books.py"),
        "the reference's": loading.load("lab-05", "solution"),
        "broken": loading.Broken(loading.LoadProblem("no")),
        "empty": ModuleType("empty"),
    }
    found = {}
    for name, module in files.items():
        monkeypatch.setattr(matrix, "implementation", lambda *_, module=module: module)
        found[name] = Examination(find_lab("lab-05"), [], StringIO()).left_whole
    assert found == {"own": {"BlockManager"}, "the reference's": set(), "broken": set(), "empty": set()}
