"""One lab, judged in this very process as `python -m labs test` judges it, and told as JSON.

A page's worker calls it, again and again: no thread, no subprocess, no file outside of memory.
"""

import ast
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

from labs.kit.judge import compare, examine, guard, isolate, loading, matrix, page, plugin, random_scripts
from labs.kit.judge.guard import deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab, find_lab
from labs.kit.judge.pristine import pristine_source
from labs.kit.judge.result import Result
from labs.kit.judge.task_status import TaskStatus
from mini_engine.show.player import payload

Tell = Callable[[str], object]
PATIENCE = 2.0  # seconds for a run that nobody asked for
PLACE = re.compile(r"starter\.py(?::|, line | does not parse, line | fails at import, line )(\d+)")
if sys.platform == "emscripten":
    # Each frame of an endless recursion costs time, in every test; no test has more than 200 requests.
    sys.setrecursionlimit(500)
HERE = {  # what a learner does in a terminal, and how in the page
    r"write it in labs/\S+\.py; a hint: python -m labs hint \S+": "write it in the editor; help: Hints",
    r"python -m labs reset \S+": "Start over",
    r"(?m)^the player shows": "The player shows",
}


class Disclosed(examine.Examination):
    """Tells of each test of the whole file as it begins and as it ends."""

    def __init__(self, lab: Lab, unwritten: list[str], tell: Tell):
        super().__init__(lab, unwritten, io.StringIO())
        self.tell, self.claims = tell, claims(lab)
        self.begun = "the first test"

    def write(self, row: object) -> None:
        if isinstance(row, dict):
            self.tell(json.dumps(row))

    def keep(self, variant: str, result: Result) -> None:
        super().keep(variant, result)
        if result.said.startswith("TimeUp"):
            matrix.HURRY = True
        if variant == examine.YOURS:
            tasks = [task.name for task in self.lab.tests.get(result.function, ())]
            claim = self.claims.get(result.function, result.test)
            self.tell(json.dumps({**vars(result), "runs": "", "tasks": tasks, "claim": claim}))


def run(
    lab_id: str, source: str, tell: Tell = lambda row: None, columns: int = 88, scale: float = 1.0
) -> str:
    """Judge `source`; each test is told as it ends, and the verdict is returned. `scale` is for tests."""
    guard.scale = scale
    lab = find_lab(lab_id)
    lab.file("starter.py").write_text(source, encoding="utf-8")
    os.environ |= {"LAB_IMPL": "starter", "COLUMNS": str(columns)}
    if source == pristine_source(lab):
        return json.dumps({"problem": f"{lab.tasks[0].name} is not written yet", "started": False})
    forget()
    shown: list[dict[str, Any]] = []
    page.screen, said = shown.append, io.StringIO()
    try:
        unwritten = isolate.unwritten(lab, loading.read(lab, lab.file("starter.py")))
    except loading.LoadProblem:  # every test will say so
        unwritten = []
    with contextlib.redirect_stdout(said):
        told = Disclosed(lab, unwritten, tell)
        ended = told.examine()
        report = examine.report(told.status) if ended else ""
    gc.unfreeze()
    if not ended:
        return json.dumps({"problem": "pytest could not run the tests:\n" + said.getvalue()[-2000:]})
    verdict = judged(told.status, report)
    verdict["player"] = shown[0] if shown else None if verdict["problem"] else played(lab)
    return json.dumps(verdict)


def judged(now: TaskStatus, report: str) -> dict[str, Any]:
    """How the file stands: its tasks, the one to go on with, and the failure that says most."""
    for terminal, here in HERE.items():
        report = re.sub(terminal, here, report)
    test, _, text = folded(report).partition("\n")
    following = now.next_task
    name = now.name(following) if following else None
    said = {result.said for result in now.results}
    problem = said.pop() if len(said) == 1 else ""
    problem = problem.removeprefix("LoadProblem: ") if problem.startswith("LoadProblem: ") else ""
    lines = PLACE.findall(problem or text)
    return {
        "done": now.is_done,
        "problem": re.sub(r"python -m labs reset \S+", "Start over", problem),
        "tasks": [
            {"name": task.name, "stands": now.stands(task), "done": now.done(task)} for task in now.lab.tasks
        ],
        "next": following and following.name,
        "name": name and {"title": name.title, "hint": name.hint.strip()},
        "test": test,
        "report": re.sub(r"\n*--- looks like ---\n\n?[^\n]*(?:\n[^\n]+)*", "", text).strip("\n"),
        "line": int(lines[-1]) if lines else None,
        "fingerprints": {task.name: fingerprinted(now, task.name) for task in now.lab.tasks},
    }


def fingerprinted(now: TaskStatus, task: str) -> list[list[Any]]:
    """Return what the tests of a task did, in the form in which known mistakes are compared."""
    results = now.judged(now.lab.task(task))
    return [[r.test, r.passed, r.said.partition(":")[0], r.runs] for r in results]


def played(lab: Lab) -> dict[str, Any] | None:
    """For the player, where no test has a run to show: the lab's first scenario in which yours departs."""
    scenarios = loading.load(lab.id, "scenarios").SCENARIOS
    yours, reference = loading.namespace(lab.id, "starter"), loading.load(lab.id, "solution")
    found = None
    with contextlib.suppress(BaseException), deadline(PATIENCE), silence(), kept_alive():
        for scenario in sorted(scenarios, key=lambda one: -len(one.get("requests", ()))):
            run, expected = recorded(lab, yours, scenario), recorded(lab, reference, scenario)
            parted = compare.departure(run, expected)
            if run.steps and (found is None or parted):
                at = parted and (parted.yours or parted.reference)
                found = payload(run, expected, names=("yours", "reference"), step=at.step if at else None)
            if parted:
                break
    return found


def recorded(lab: Lab, part: Any, scenario: dict[str, Any]) -> compare.Run:
    trace: compare.Run = loading.load(lab.id, "scenarios").run(part, scenario, raise_errors=False)
    return trace


def warm(lab_id: str) -> None:
    """Load what the first answer needs, while its learner still reads: pytest's parts, tests, the model."""
    run(lab_id, pristine_source(find_lab(lab_id)) + "\n")
    for number in range(random_scripts.count(lab_id)):
        random_scripts.expected(lab_id, number)


def preview(lab_id: str) -> str:
    """What the player shows before anything is written: the reference's run."""
    lab = find_lab(lab_id)
    scenario = max(loading.load(lab_id, "scenarios").SCENARIOS, key=lambda one: len(one.get("requests", ())))
    run = recorded(lab, loading.load(lab_id, "solution"), scenario)
    return json.dumps(payload(run, names=("the reference",)))


def folded(text: str) -> str:
    """A traceback of a recursion in a few lines: of equal entries the first three."""
    seen: Counter[str] = Counter()
    kept: list[str] = []
    for entry in re.split(r"(?m)^(?=\S+\.py:\d+: in )", text):
        seen[entry] += 1
        kept += [entry] if seen[entry] <= 3 else ["... and so on\n"] if seen[entry] == 4 else []
    return "".join(kept)


def claims(lab: Lab) -> dict[str, str]:
    """The first line of each test's docstring."""
    tree = ast.parse(lab.file("test_lab.py").read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: (ast.get_docstring(node) or node.name).splitlines()[0] for node in tests}


def forget() -> None:
    """What the last file left in this process."""
    matrix.implementation.cache_clear()
    loading.namespace.cache_clear()
    plugin.timed_out.clear()
    plugin.REPORTING = matrix.HURRY = False
    gc.collect()
