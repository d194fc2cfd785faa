"""A learner's starter.py, examined: `python -m labs.kit.judge.examine lab-01 OUT.jsonl [report]`.

All tests run on the whole file; then those of each task that failed one run on this task alone, in the
reference; then, with `report`, the failure that says most runs once more, and its report is written.
"""

import os
import re
import sys
from functools import partial
from typing import TextIO

import pytest

from labs.kit.judge import diagnose, isolate, loading, matrix, storm
from labs.kit.judge import plugin as plugin_module
from labs.kit.judge.manifest import Lab, Task, find_lab
from labs.kit.judge.result import Result
from labs.kit.judge.standing import Standing

YOURS = "yours"
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Examination(matrix.Matrix):
    """Runs the whole file first, and a task alone only where the whole file fails one of its tests."""

    def __init__(self, lab: Lab, unwritten: list[str], out: TextIO):
        self.tasks = {f"{YOURS}@{task.name}": task for task in lab.tasks if task.name not in unwritten}
        super().__init__(lab, [YOURS, *self.tasks], out)
        self.standing = Standing(lab, [], unwritten=unwritten)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        keyed = [(item, matrix.variant_of(item) or YOURS) for item in items]
        kept = [
            (self.variants.index(variant), number, item)
            for number, (item, variant) in enumerate(keyed)
            if variant == YOURS or matrix.test_of(item).partition("[")[0] in self.tasks[variant].tests
        ]
        items[:] = [item for _, _, item in sorted(kept, key=lambda one: one[:2])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        task = self.tasks.get(matrix.variant_of(item) or YOURS)
        return True if task and self.standing.done(task) else None

    def keep(self, variant: str, result: Result) -> None:
        task = self.tasks.get(variant)
        kept = self.standing.alone.setdefault(task.name, []) if task else self.standing.results
        kept.append(result)
        super().keep(variant, result)


class Report:
    """Runs one test on one variant, loaded anew, and keeps pytest's report of it."""

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


def report(standing: Standing) -> str:
    """What a learner reads of the failure that says most; "" if nothing fails."""
    lab, task, result = standing.lab, standing.next_task, standing.telling
    if task is None or result is None:
        return ""
    whole = {r.test: r for r in standing.of(task, standing.results)}
    shown_alone = isolate_needed(standing, task, whole.get(result.test))
    variant = f"{YOURS}@{task.name}" if shown_alone else YOURS
    matrix.implementation.cache_clear()
    loading.namespace.cache_clear()
    plugin_module.timed_out.clear()
    plugin_module.REPORTING, storm.quick = True, False
    plugin = Report(lab, result.test, variant)
    matrix.run_pytest(lab, plugin, "-o", "verbosity_assertions=2")
    said = plugin.report
    lines = [result.test + (" (the other tasks filled in by the reference)" if shown_alone else "")]
    if said is None or said.passed:
        lines += [diagnose.filled(diagnose.KEPT_STATE)]
    else:
        lines += ["", ADDRESS.sub("", said.longreprtext).strip("\n")]
        for title, text in said.sections:
            lines += ["", f"--- {title} ---", text.rstrip("\n")]
    if name := standing.name(task):
        lines += ["", "--- looks like ---", diagnose.filled(f"{name.title}: {name.hint.strip()}")]
    return "\n".join(lines)


def isolate_needed(standing: Standing, task: Task, whole: Result | None) -> bool:
    """Whether the failure is to be shown on the task alone: in the whole file another task is in the way."""
    if standing.judged(task) == standing.of(task, standing.results):
        return False
    in_the_way = len(standing.unwritten) + len([other for other in standing.wrong if other is not task])
    return whole is None or whole.passed or in_the_way > 0


def main(lab_id: str, out: str, *options: str) -> None:
    lab = find_lab(lab_id)
    with open(out, "w", encoding="utf-8") as file:
        try:
            unwritten = isolate.unwritten(lab, loading.read(lab, lab.file("starter.py")))
        except loading.LoadProblem:  # every test will say so
            unwritten = []
        examination = Examination(lab, unwritten, file)
        code = matrix.run_pytest(lab, examination)
        if code in (0, 1):
            if "report" in options:
                os.environ["LAB_IMPL"] = "starter"
                examination.write({"report": report(examination.standing)})
            examination.write("the end")
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
