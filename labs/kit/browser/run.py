"""Judges one lab in this process as `python -m labs test` does, and reports it as JSON.

A page's worker calls it repeatedly: no thread, no subprocess, no file outside of memory.
"""

import contextlib
import gc
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from labs.kit.judge import clock, compare, examine, isolate, loading, matrix, page, plugin, random_scripts
from labs.kit.judge.guard import deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab, find_lab
from labs.kit.judge.pristine import pristine_source
from labs.kit.judge.sentences import sentence
from labs.kit.judge.task_status import Result, TaskStatus, load_problem
from mini_engine.show.player import payload

Send = Callable[[str], object]
PATIENCE = 2.0  # seconds for a run that only the player needs
PLACE = re.compile(r"starter\.py(?::|, line | does not parse, line | fails at import, line )(\d+)")
if sys.platform == "emscripten":
    # Each frame of an endless recursion costs time, in every test; no test has more than 200 requests.
    sys.setrecursionlimit(500)
HERE = {  # an action in the terminal, and the same in the page
    r"write it in labs/\S+\.py; a hint: python -m labs hint \S+": "write it in the editor; help: Hints",
    r"python -m labs reset \S+": "Start over",
    r"(?m)^the player shows": "The player shows",
}


class LiveExamination(examine.Examination):
    """Reports each test of the whole file as it begins and as it ends."""

    def __init__(self, lab: Lab, unwritten: list[str], send: Send):
        super().__init__(lab, unwritten, io.StringIO())
        self.send, self.begun = send, "the first test"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if matrix.test_of(item).partition("[")[0] in self.lab.tests]
        super().pytest_collection_modifyitems(items)

    def write(self, row: object) -> None:
        if isinstance(row, dict):
            self.send(json.dumps(row))

    def keep(self, variant: str, result: Result) -> None:
        super().keep(variant, result)
        if result.said.startswith("TimeUp"):
            matrix.HURRY = True
        if variant == examine.YOURS:
            tasks = [task.name for task in self.lab.tests.get(result.function, ())]
            claim = self.lab.claims.get(result.function) or result.test
            self.send(json.dumps({**vars(result), "runs": "", "tasks": tasks, "claim": claim}))


def run(
    lab_id: str, source: str, send: Send = lambda row: None, columns: int = 88, scale: float = 1.0
) -> str:
    """Judge `source`: send each test as it ends, and return the verdict. `scale` shortens limits in tests."""
    clock.begin(scale, lambda: send(json.dumps({"alive": True})))
    lab = find_lab(lab_id)
    lab.file("starter.py").write_text(source, encoding="utf-8")
    os.environ |= {"LAB_IMPL": "starter", "COLUMNS": str(columns)}
    if source == pristine_source(lab):
        return json.dumps({"problem": f"{lab.tasks[0].name} is not written yet", "started": False})
    forget()
    shown: list[dict[str, Any]] = []
    page.screen, output = shown.append, io.StringIO()
    try:
        unwritten = isolate.unwritten(lab.without_torch, loading.read(lab, lab.file("starter.py")))
    except loading.LoadProblem:  # every test will report it
        unwritten = []
    with contextlib.redirect_stdout(output):
        examination = LiveExamination(lab.without_torch, unwritten, send)
        ended = examination.examine()
        report, _ = examine.report(examination.status) if ended else ("", "")
    gc.unfreeze()
    if not ended:
        return json.dumps({"problem": "pytest could not run the tests:\n" + output.getvalue()[-2000:]})
    verdict = judged(examination.status, report)
    verdict["player"] = shown[0] if shown else None if verdict["problem"] else played(lab)
    return json.dumps(verdict)


def judged(status: TaskStatus, report: str) -> dict[str, Any]:
    """Return the verdict on a file: its tasks, the next one, and the most informative failure."""
    for terminal, here in HERE.items():
        report = re.sub(terminal, here, report)
    test, _, text = folded(report).partition("\n")
    following, tasks = status.next_task, status.lab.tasks
    name = status.name(following) if following else None
    problem = load_problem(status.results)
    lines = PLACE.findall(problem or text)
    return {
        "done": status.is_done,
        "problem": re.sub(r"python -m labs reset \S+", "Start over", problem),
        "tasks": [{"name": t.name, "status": status.describe(t), "done": status.done(t)} for t in tasks],
        "next": following and following.name,
        "name": name and {"title": name.title, "hint": name.hint.strip()},
        "test": test,
        "report": re.sub(r"\n*--- looks like ---\n\n?[^\n]*(?:\n[^\n]+)*", "", text).strip("\n"),
        "line": int(lines[-1]) if lines else None,
        # What the tests of a task did, in the form in which known mistakes are compared.
        "fingerprints": {
            t.name: [[r.test, r.passed, r.said.partition(":")[0], r.runs] for r in status.judged(t)]
            for t in tasks
        },
    }


def played(lab: Lab) -> dict[str, Any] | None:
    """Return a run for the player, if no test has one: the first scenario in which the learner's departs."""
    scenarios = loading.load(lab.id, "scenarios").SCENARIOS
    yours, reference = loading.namespace(lab.id, "starter"), loading.load(lab.id, "solution")
    found = None
    with contextlib.suppress(BaseException), deadline(PATIENCE), silence(), kept_alive():
        for scenario in sorted(scenarios, key=lambda scenario: -len(scenario.get("requests", ()))):
            run, expected = recorded(lab, yours, scenario), recorded(lab, reference, scenario)
            parted = compare.departure(run, expected)
            if run.steps and (found is None or parted):
                at = parted and (parted.yours or parted.reference)
                said = sentence(run, expected, parted).text if parted and at else ""
                step = at.step if at else None
                found = payload(run, expected, names=("yours", "reference"), step=step, said=said)
            if parted:
                break
    return found


def recorded(lab: Lab, part: Any, scenario: dict[str, Any]) -> compare.Run:
    trace: compare.Run = loading.load(lab.id, "scenarios").run(part, scenario, raise_errors=False)
    return trace


def warm(lab_id: str) -> None:
    """Load what the first verdict needs while the learner still reads: pytest, the tests, the oracle."""
    run(lab_id, pristine_source(find_lab(lab_id)) + "\n")
    for number in range(random_scripts.count(lab_id)):
        random_scripts.expected(lab_id, number)


def preview(lab_id: str) -> str:
    """Return the reference's run, which the player shows before anything is written."""
    lab, scenarios = find_lab(lab_id), loading.load(lab_id, "scenarios").SCENARIOS
    scenario = max(scenarios, key=lambda scenario: len(scenario.get("requests", ())))
    run = recorded(lab, loading.load(lab_id, "solution"), scenario)
    return json.dumps(payload(run, names=("the reference",)))


def folded(text: str) -> str:
    """Shorten the traceback of a recursion: of equal entries the first three are kept."""
    seen: Counter[str] = Counter()
    kept: list[str] = []
    for entry in re.split(r"(?m)^(?=\S+\.py:\d+: in )", text):
        seen[entry] += 1
        kept += [entry] if seen[entry] <= 3 else ["... and so on\n"] if seen[entry] == 4 else []
    return "".join(kept)


def forget() -> None:
    """Clear the state that the last file left in this process."""
    matrix.implementation.cache_clear()
    loading.namespace.cache_clear()
    plugin.timed_out.clear()
    plugin.REPORTING = matrix.HURRY = False
    gc.collect()
