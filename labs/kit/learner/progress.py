"""How far a learner is: derived from running the tests on starter.py, cached by the files' hash.

What is kept between calls (results, hints shown, backups) lies in labs/.state, which git ignores.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from labs.kit.judge import matrix
from labs.kit.judge.manifest import LABS_DIR, Lab, Task, find_lab, lab_ids
from labs.kit.judge.matrix import Result
from labs.kit.judge.pristine import NOT_WRITTEN, pristine_source

STATE = LABS_DIR / ".state"
_writing = threading.Lock()


@dataclass
class Progress:
    """A lab's results on the learner's starter.py; `problem` says why there are none."""

    lab: Lab
    results: list[Result]
    problem: str = ""
    started: bool = True

    def passed(self, task: Task) -> int:
        """How many of the task's tests pass, in all their cases."""
        run = {result.function for result in self.results}
        return len(set(task.tests) & run - {result.function for result in self.results if not result.passed})

    def done(self, task: Task) -> bool:
        return self.passed(task) == len(task.tests)

    @property
    def is_done(self) -> bool:
        return all(self.done(task) for task in self.lab.tasks)

    @property
    def points(self) -> int:
        return sum(task.points for task in self.lab.tasks if self.done(task))

    def waits_for(self, task: Task) -> Task | None:
        """The task that must be written before this one's failing tests say anything of it."""
        needed = [self._needed(task, result) for result in self._failures(task)]
        return needed[0] if needed and all(needed) else None

    @property
    def next_task(self) -> Task | None:
        """The first that is not done, or what that waits for."""
        task = next((task for task in self.lab.tasks if not self.done(task)), None)
        seen: list[Task] = []
        while task and task not in seen and (needed := self.waits_for(task)):
            seen.append(task)
            task = needed
        return task

    @property
    def next_failure(self) -> Result | None:
        """The first failing test of the next task, if possible one that waits for nothing else."""
        if (task := self.next_task) is None:
            return None
        return min(
            self._failures(task), key=lambda result: self._needed(task, result) is not None, default=None
        )

    def _failures(self, task: Task) -> list[Result]:
        failed = [result for result in self.results if not result.passed]
        return [result for test in task.tests for result in failed if result.function == test]

    def _needed(self, task: Task, result: Result) -> Task | None:
        """The other task of this lab that a test ran into, unwritten."""
        found = NOT_WRITTEN.search(result.said)
        if not found or found[1] != self.lab.id:
            return None
        owners = (t for t in self.lab.tasks if f"{found[2]}.".startswith(f"{t.name}."))
        return next((owner for owner in owners if owner is not task), None)


def progress(lab: Lab) -> Progress:
    """Run the learner's starter through the lab's tests, or remember what it did last time."""
    if starter_text(lab) == pristine_source(lab):
        return Progress(lab, [], started=False)
    key = digest(lab)
    kept = read_state("results.json")
    if kept.get(lab.id, {}).get("key") == key:
        entry = kept[lab.id]
        return Progress(lab, [Result(**row) for row in entry["results"]], entry["problem"])
    outcomes = matrix.run_matrix(lab, ["yours"])
    if outcomes.trouble:  # not kept: it may have come from outside
        return Progress(lab, [], outcomes.trouble)
    results = outcomes.results.get("yours", [])
    if missing := sorted(set(lab.tests) - {result.function for result in results}):
        problem = f"{lab.id}: test_lab.py no longer has {', '.join(missing)}; put it back"
        return Progress(lab, results, problem)
    said, problem = {result.said for result in results}, ""
    if len(said) == 1 and next(iter(said)).startswith("LoadProblem: "):
        problem = said.pop().removeprefix("LoadProblem: ")
    rows = [vars(result) | {"runs": ""} for result in results]
    with _writing, contextlib.suppress(OSError):  # without a place to keep it, it is found out again
        entry = {"key": key, "problem": problem, "results": rows}
        write_state("results.json", read_state("results.json") | {lab.id: entry})
    return Progress(lab, results, problem)


def all_progress() -> list[Progress]:
    return matrix.side_by_side(lambda lab_id: progress(find_lab(lab_id)), lab_ids())


def first_open() -> Progress | None:
    """The first lab that is not done, which is the one to go on with."""
    return next((p for p in map(lambda i: progress(find_lab(i)), lab_ids()) if not p.is_done), None)


def digest(lab: Lab) -> str:
    """Changes with everything that a result can depend on."""
    root = LABS_DIR.parent
    files = [*lab.path.glob("*.py"), lab.file("lab.toml")]
    for room in ("labs/kit", "mini_engine"):
        files += [path for path in (root / room).rglob("*.py") if "tests" not in path.parts]
    # lab-07 runs the learner's earlier parts.
    files += [find_lab(earlier).file("starter.py") for earlier in lab.prerequisites]
    total = hashlib.blake2b()
    for path in sorted(file for file in files if os.access(file, os.R_OK) and file.is_file()):
        total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()


def next_hint(lab: Lab, task: Task) -> tuple[int, str]:
    """The number and text of the next hint that was not shown yet; the last one again at the end.

    Raises OSError where labs/.state, which remembers that, cannot be written.
    """
    shown = read_state("hints.json")
    key = f"{lab.id} {task.name}"
    number = min(shown.get(key, 0) + 1, len(task.hints))
    write_state("hints.json", shown | {key: number})
    return number, task.hints[number - 1]


def reset(lab: Lab) -> Path | None:
    """Put the pristine starter back; where the learner's file went, if it held anything."""
    path, backup = lab.file("starter.py"), None
    pristine = pristine_source(lab)
    if os.path.lexists(path) and starter_text(lab) != pristine:
        backup = STATE / "backups" / f"{lab.id}-{datetime.now():%Y%m%d-%H%M%S-%f}.py"
        backup.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, backup)  # a folder too, or a file that nobody can read
    path.write_text(pristine, encoding="utf-8")
    return backup


def starter_text(lab: Lab) -> str:
    """The learner's file as text, whatever is in it; "" if it cannot be read."""
    try:
        return lab.file("starter.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_state(name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((STATE / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there yet, or spoilt: it can be found out again
        return {}


def write_state(name: str, content: dict[str, Any]) -> None:
    STATE.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=STATE, suffix=".part", delete=False) as part:
        json.dump(content, part)
    os.replace(part.name, STATE / name)
