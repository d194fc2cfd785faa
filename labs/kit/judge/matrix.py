"""Runs one lab's tests on many implementations in one pytest session, and writes the outcomes to a file.

`python -m labs.kit.judge.matrix lab-01 OUT.jsonl [variant ...]` is a separate process, so that labs run in
parallel and a wrong solution cannot harm the caller. Variants are `starter` (pristine), `solution`, `engine`,
`yours` (starter.py as it is), `file:PATH` and `mistake:ID`. With `yours@TASK` and `mistake:ID@TASK` only this
task's code is used, in the reference.
"""

import json
import os
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TextIO

import pytest

from labs.kit.judge import isolate, loading, random_scripts
from labs.kit.judge.compare import fingerprint
from labs.kit.judge.guard import deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab, Mistake, find_lab
from labs.kit.judge.task_status import Result
from labs.kit.toys.driver import RUNS
from labs.kit.toys.words import describe, kind

RANDOM_SCRIPTS = "test_random_scripts"
# Among the variants: run on each mistake all tests, or only the one that catches it and the random scripts.
WHOLE, QUICK = "--whole", "--quick"
NAMING = 50  # seconds for a fingerprint: in a page the slowest mistakes take half of it
HURRY = False  # a learner waits, and a test did not end: less time for others


def test_file(lab: Lab) -> str:
    """Return the path for pytest, relative: in an absolute path a bracket would be read as a parameter."""
    return f"labs/{lab.id}/test_lab.py"


# ------------------------------------------------------------------------ inside the separate process


_lab = cache(find_lab)  # reading a hundred mistakes takes as long as a test


@cache
def implementation(lab_id: str, variant: str) -> ModuleType | loading.Broken:
    lab = _lab(lab_id)
    variant, _, task = variant.partition("@")
    kind, _, name = variant.partition(":")
    try:
        if task:
            path = lab.file("starter.py" if kind == "yours" else "solution.py")
            wrong = _mistake(lab, name).apply if kind == "mistake" else None
            source = wrong(path.read_text("utf-8")) if wrong else loading.read(lab, path)
            return isolate.isolated(lab, lab.task(task), source, path)
        if kind == "mistake":
            return loading.mistaken(lab, _mistake(lab, name))
        if kind == "file":
            source = Path(name).read_text(encoding="utf-8")
            return loading.execute(source, Path(name).stem, name)
        if kind == "starter":
            return loading.pristine_starter(lab)
        return loading.namespace(lab_id, "starter" if kind == "yours" else kind)
    except Exception as error:
        return loading.Broken(loading.LoadProblem(f"{variant}: {describe(error)}"))


def _mistake(lab: Lab, name: str) -> Mistake:
    return next(mistake for mistake in lab.mistakes if mistake.id == name)


def tests_for(lab: Lab, name: str, quick: bool = False) -> set[str]:
    """Return the tests to run on a mistake, or on its part in one task (ID@TASK): those of its tasks.

    If it is to be `quick`, only those that must catch it.
    A class with attributes of one's own is judged whole: all its tests show which of its methods is at fault.
    If it keeps state all tests run, as for a learner: otherwise its fingerprint would differ.
    """
    name, _, task = name.partition("@")
    if task:
        return {*lab.task(task).tests}
    mistake = _mistake(lab, name)
    needed = {mistake.caught_by, RANDOM_SCRIPTS}
    if quick:
        return needed
    tasks = [task.name for task in lab.tasks] if mistake.keeps_state else isolate.tasks_of(lab, mistake)
    whole = isolate.of_ones_own(lab) & {name.partition(".")[0] for name in tasks}
    tasks += [task.name for task in lab.tasks if isolate.class_of(task) in whole]
    return needed.union(*(lab.task(one).tests for one in tasks))


class Matrix:
    """The pytest plugin that runs each test on each variant and writes the results."""

    def __init__(self, lab: Lab, variants: list[str], out: TextIO):
        self.lab, self.out = lab, out
        self.variants = [variant for variant in variants if variant not in (WHOLE, QUICK)]
        self.quick = QUICK in variants
        random_scripts.quick, random_scripts.brief = True, self.quick
        mistakes = [] if WHOLE in variants else [one for one in variants if one.startswith("mistake:")]
        self.tests = {one: tests_for(lab, one.partition(":")[2], self.quick) for one in mistakes}

    def write(self, row: object) -> None:
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()  # the next test may end the process

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "lab" in metafunc.fixturenames:
            test = metafunc.function.__name__
            variants = [one for one in self.variants if test in self.tests.get(one, (test,))]
            makers = [partial(implementation, self.lab.id, variant) for variant in variants]
            metafunc.parametrize("lab", makers, ids=variants, indirect=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.begun = test_of(item)
        self.write({"begun": self.begun})

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        line = loading.line_in_starter(excinfo.value)
        where = f" in starter.py, line {line}" if line else ""
        self.write({"begun": self.begun, "stopped": describe(excinfo.value) + where})

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Keep one line of each outcome: rendering thousands of tracebacks would take seconds."""
        failed = call.excinfo is not None
        if call.when == "call" or failed:
            result = result_of(item, self.lab, call, test_of(item), not self.quick)
            self.keep(variant_of(item) or self.variants[0], result)
        outcome: Literal["failed", "passed"] = "failed" if failed else "passed"
        when: Any = call.when  # never "collect" here
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, None, when, duration=call.duration)

    def keep(self, variant: str, result: Result) -> None:
        self.write([variant, vars(result)])


def test_of(item: pytest.Item) -> str:
    """Return a test's name with its own parameters, without the variant."""
    variant = variant_of(item)
    return item.name.replace(f"[{variant}]", "").replace(f"{variant}-", "").replace(f"-{variant}", "")


def result_of(
    item: pytest.Item, lab: Lab, call: pytest.CallInfo[None], test: str, named: bool = True
) -> Result:
    """Return a test's result in a form that can be compared; `named`, with the fingerprint of its scripts."""
    said, runs, is_mistake = "", "", "mistake:" in item.name
    if call.excinfo:
        said = describe(call.excinfo.value)
        runs = json.dumps([fingerprint(trace) for _, trace in RUNS])
        if (
            named
            and test == RANDOM_SCRIPTS
            and random_scripts.only is None
            and call.when == "call"
            and not said.startswith("TimeUp" if is_mistake else ("TimeUp", "NotBegun"))
        ):
            try:
                with deadline(NAMING), silence(), kept_alive():
                    part = item.funcargs["lab"]  # type: ignore[attr-defined]  # an Item of pytest's own has it
                    runs = json.dumps(random_scripts.fingerprint(lab.id, part, random_scripts.passed))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                runs = kind(error)
                if said.startswith("NotBegun") and not isinstance(error, Exception):
                    said = describe(error)  # else what failed is known, and only its name takes too long
    return Result(test, call.excinfo is None, said, runs, round(call.duration, 4))


def variant_of(item: pytest.Item) -> str | None:
    """Return the variant that a test runs on; None in an ordinary pytest run."""
    callspec = getattr(item, "callspec", None)
    maker = callspec and callspec.params.get("lab")
    return maker.args[1] if maker else None


def run_pytest(lab: Lab, plugin: object, *options: str) -> int:
    line = [test_file(lab), "-q", "--tb=short", "--capture=sys", "--no-header", "--no-summary", *options]
    plugins = ("cacheprovider", "logging", "subtests", "junitxml", "faulthandler")
    return int(pytest.main([*line, *(f"-pno:{name}" for name in plugins)], plugins=[plugin]))


def main(lab_id: str, out: str, *variants: str) -> None:
    lab = find_lab(lab_id)
    with open(out, "w", encoding="utf-8") as file:
        matrix = Matrix(lab, list(variants), file)
        code = run_pytest(lab, matrix)
        if code in (0, 1):
            modules = {str(vars(module).get("__file__")) for module in [*sys.modules.values()]}
            matrix.write({"modules": sorted(modules)})
            matrix.write("the end")  # an exit code of 0 alone proves nothing
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads that a starter left running


if __name__ == "__main__":
    main(*sys.argv[1:])
