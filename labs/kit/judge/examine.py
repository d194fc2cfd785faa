"""The examination of a starter.py: `python -m labs.kit.judge.examine lab-01 OUT.jsonl [report]`.

All tests run on the whole file. Where several tasks may be at fault, each runs its tests alone, in the
reference. With `report` the opening of the first failure is written as soon as it is known, and at last the
whole report of the most informative one, which runs once more.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, TextIO

import pytest

from labs.kit.judge import diagnose, isolate, loading, matrix, random_scripts, suspects
from labs.kit.judge import plugin as plugin_module
from labs.kit.judge.manifest import Lab, Task, find_lab
from labs.kit.judge.task_status import Result, TaskStatus, load_problem

YOURS = "yours"
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Examination(matrix.Matrix):
    """Runs the whole file first, and then single tasks as far as the verdict needs it."""

    def __init__(self, lab: Lab, unwritten: list[str], out: TextIO):
        super().__init__(lab, [], out)
        self.status = TaskStatus(lab, [], unwritten=unwritten)
        self.wanted: dict[str, set[str]] = {}  # by task that runs alone: its tests
        self.asked: dict[str, set[str]] = {}  # by task: the tests that judge it
        self.served: dict[str, list[str]] = {}  # by task that runs alone: all tasks that its run judges
        self.first = False  # whether to write the first failure

    def examine(self) -> bool:
        """Run the whole file, then single tasks where needed. Return False if pytest did not end well."""
        if not self.run([YOURS], {}):
            return False
        status, lab = self.status, self.lab
        if load_problem(status.results):
            return True
        if len(lab.tasks) == 1:  # alone it is the whole file
            status.blamed = lab.tasks[0].name
            return True
        written = [task for task in lab.tasks if task.name not in status.unwritten]
        if status.endless:
            return self.examine_endless(status.endless.test, [task.name for task in written])
        matrix.HURRY = False
        tests = {task.name: {result.test for result in status.of(task, status.results)} for task in written}
        failed = {task.name: {result.test for result in status.failures(task)} for task in written}
        failing = [name for name in failed if failed[name]]
        # A script that the whole file passes, a task that is right passes alone too.
        random_scripts.only = departing(status)
        quick = random_scripts.only is not None
        ended = self.run_alone({name: failed[name] for name in failing})
        random_scripts.only = None
        wrong = [name for name in failing if any(not result.passed for result in status.alone.get(name, ()))]
        if len(self.together(wrong)) == 1 and not status.unwritten:  # the whole file shows the same
            whole = {result.test: result for result in status.results}
            for name in wrong:
                status.alone[name] = [r if r.passed else whole[r.test] for r in status.alone[name]]
        elif wrong:
            again = {matrix.RANDOM_SCRIPTS} if quick else set()
            ended = ended and self.run_alone({name: tests[name] - failed[name] | again for name in wrong})
        elif not status.unwritten:  # perhaps state is kept between calls: it shows in a run of all tests
            ended = ended and self.run_alone({name: tests[name] for name in failing})
        alike = [t.name for t in written if t.name in wrong and self.shares_an_object(t)]
        if not wrong and not status.unwritten:  # the tasks do not fit together
            alike = failing
        status.blamed = blamed(status, alike, self.part)
        for name, results in status.alone.items():
            for result in results:
                self.write([f"{YOURS}@{name}", vars(result)])
        return ended

    def examine_endless(self, test: str, names: Sequence[str]) -> bool:
        """Run the test that did not end on each task alone; blame one with which it does not end again."""
        matrix.HURRY = True
        ended = self.run_alone({name: {test} for name in names})
        wrong = [name for name in names if any(not result.passed for result in self.status.alone[name])]
        own = [name for name in wrong if test in self.lab.task(name).tests]
        self.status.blamed = next(iter([*own, *wrong]), "")
        self.status.alone.clear()  # one test says too little about a task
        return ended

    def run_alone(self, wanted: dict[str, set[str]]) -> bool:
        """Run these tests of these tasks; their earlier results are replaced."""
        for name, tests in wanted.items():
            self.status.alone[name] = [r for r in self.status.alone.get(name, ()) if r.test not in tests]
        self.asked, self.served = wanted, {names[0]: names for names in self.together(wanted)}
        merged = {first: {t for name in names for t in wanted[name]} for first, names in self.served.items()}
        return self.run([f"{YOURS}@{first}" for first in merged], merged)

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """Return groups of tasks that are judged in one module: all methods of a class that is left whole."""
        groups: dict[str, list[str]] = {}
        for name in names:
            owner = isolate.class_of(self.lab.task(name))
            groups.setdefault(owner if owner in self.left_whole else name, []).append(name)
        return list(groups.values())

    def shares_an_object(self, task: Task) -> bool:
        """Return whether the task cannot run beside the reference's: it has attributes of the file's own."""
        return isolate.class_of(task) in self.left_whole or not self.status.fits(task)

    @cached_property
    def part(self) -> Any:
        """The file as a module."""
        return matrix.implementation(self.lab.id, YOURS)

    @cached_property
    def left_whole(self) -> set[str]:
        """The classes that are judged as a whole; none if the file does not load, or lacks one."""
        left = self.status.unwritten
        try:
            made = isolate.made(self.lab, loading.load(self.lab.id, "solution"))
            return isolate.with_other_attributes(self.lab, self.part, made, left)
        except (loading.LoadProblem, AttributeError, TypeError):
            return set()

    def run(self, variants: list[str], wanted: dict[str, set[str]]) -> bool:
        self.variants, self.wanted = variants, wanted
        # 5: no test is left to run, because all failures need tasks that are not written.
        return not variants or matrix.run_pytest(self.lab, self) in (0, 1, 5)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        keyed = [(item, matrix.variant_of(item) or self.variants[0]) for item in items]
        kept = [
            (self.variants.index(variant), number, item)
            for number, (item, variant) in enumerate(keyed)
            if variant == YOURS or matrix.test_of(item) in self.wanted[task_of(variant)]
        ]
        items[:] = [item for _, _, item in sorted(kept, key=lambda one: one[:2])]

    def pytest_runtest_makereport(self, item: Any, call: pytest.CallInfo[None]) -> pytest.TestReport:
        report = super().pytest_runtest_makereport(item, call)
        if self.first and call.when == "call" and call.excinfo:
            if lines := diagnose.opening(item, self.lab, call.excinfo.value):
                self.write({"first": "\n".join([matrix.test_of(item), "", *lines])})
                self.first = False
        return report

    def keep(self, variant: str, result: Result) -> None:
        if task := task_of(variant):
            for name in self.served[task]:
                if result.test in self.asked[name]:
                    self.status.alone[name].append(result)  # written when all tasks are judged
        else:
            self.status.results.append(result)
            super().keep(variant, result)


def task_of(variant: str) -> str:
    return variant.partition("@")[2]


def departing(status: TaskStatus) -> list[int] | None:
    """Return the random scripts that depart in the whole file; None where that is not known."""
    runs = [r.runs for r in status.results if r.test == matrix.RANDOM_SCRIPTS and not r.passed]
    return random_scripts.departing(status.lab.id, runs[0]) if runs else None


def blamed(status: TaskStatus, names: Sequence[str], part: Any) -> str:
    """Return the task at fault among those that share an object of the file's own; "" without a name.

    It is the one that explains the random scripts, among those that fail a test of their own; else the one
    that fails most of its own.
    """
    failed: dict[str, float] = {}  # the share of its own tests, by task
    for task in map(status.lab.task, names):
        own = {r.function: True for r in status.judged(task) if r.test != matrix.RANDOM_SCRIPTS}
        own |= {r.function: False for r in status.judged(task) if not r.passed and r.function in own}
        failed[task.name] = 1 - sum(own.values()) / len(own) if own else 0
    names = [name for name in names if failed[name]] or names
    if len(names) < 2:
        return "".join(names)
    scripts = [random_scripts.drawn(status.lab.id, n) for n in departing(status) or ()][: suspects.FEW]
    found = suspects.explaining(status.lab.id, names, scripts, suspects.departing(status.lab, part))
    return found[0] if found else max(names, key=failed.__getitem__)


class Report:
    """Runs one test on one newly loaded variant, and keeps pytest's report of it."""

    def __init__(self, lab: Lab, test: str, variant: str):
        self.lab, self.test, self.variant = lab, test, variant
        self.report: pytest.TestReport | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "lab" in metafunc.fixturenames:
            maker = partial(matrix.implementation, self.lab.id, self.variant)
            metafunc.parametrize("lab", [maker], ids=[self.variant], indirect=True)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if matrix.test_of(item) == self.test]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.report = report


def report(status: TaskStatus) -> tuple[str, str]:
    """Return the report of the most informative failure, and its hint; two empty texts if nothing fails."""
    lab, task, result = status.lab, status.next_task, status.most_informative
    if task is None or result is None:
        return "", ""
    whole = {r.test: r for r in status.of(task, status.results)}
    shown_alone = isolate_needed(status, task, whole.get(result.test))
    variant = f"{YOURS}@{task.name}" if shown_alone else YOURS
    matrix.implementation.cache_clear()
    loading.namespace.cache_clear()
    plugin_module.timed_out.clear()
    plugin_module.REPORTING, random_scripts.quick = True, False
    plugin = Report(lab, result.test, variant)
    matrix.run_pytest(lab, plugin, "-o", "verbosity_assertions=2", "--color=no")
    said = plugin.report
    lines = [result.test + (" (the other tasks filled in by the reference)" if shown_alone else "")]
    opening, rest = diagnose.filled(diagnose.KEPT_STATE), ""
    if said and not said.passed:
        opening = "\n".join(getattr(said, "opening", ())) or said.longreprtext.strip("\n")
        rest = said.longreprtext.removeprefix(opening).strip("\n")
        lines += [""]
    lines += [ADDRESS.sub("", opening)]
    for one in status.wrong or [task]:
        if name := status.name(one):
            title = "--- looks like ---" if one is task else f"--- {one.name} looks like ---"
            lines += ["", title, diagnose.filled(f"{name.title}: {name.hint.strip()}")]
    if rest:
        lines += ["", ADDRESS.sub("", rest)]
    for title, text in said.sections if said else ():
        lines += ["", f"--- {title} ---", text.rstrip("\n")]
    return "\n".join(lines), getattr(said, "hint", "")


def isolate_needed(status: TaskStatus, task: Task, whole: Result | None) -> bool:
    """Return whether the failure is shown on the task alone, because another task hides it in the file."""
    if status.judged(task) == status.of(task, status.results):
        return False
    in_the_way = len(status.unwritten) + len([other for other in status.wrong if other is not task])
    return whole is None or whole.passed or in_the_way > 0


def main(lab_id: str, out: str, *options: str) -> None:
    lab = find_lab(lab_id)
    with open(out, "w", encoding="utf-8") as file:
        try:
            unwritten = isolate.unwritten(lab, loading.read(lab, lab.file("starter.py")))
        except loading.LoadProblem:  # every test will report it
            unwritten = []
        examination = Examination(lab, unwritten, file)
        examination.first = "report" in options
        if ended := examination.examine():
            examination.write({"blamed": examination.status.blamed})
            if "report" in options:
                os.environ["LAB_IMPL"] = "starter"
                text, hint = report(examination.status)
                examination.write({"report": text, "hint": hint})
            examination.write("the end")
    sys.stdout.flush()
    os._exit(0 if ended else 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
