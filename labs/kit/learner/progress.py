"""A learner's progress: the results of the tests on starter.py, cached by a hash of all files involved.

Results, hints shown and backups are kept in labs/.state, which git ignores.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from labs.kit.judge import isolate, page
from labs.kit.judge.manifest import LABS_DIR, Lab, Task, find_lab, lab_ids
from labs.kit.judge.pristine import pristine_source
from labs.kit.judge.processes import run_in_process, side_by_side
from labs.kit.judge.task_status import Result, TaskStatus, load_problem
from mini_engine.trace.file import write_whole

STATE = LABS_DIR / ".state"
_writing = threading.Lock()


@dataclass
class Progress(TaskStatus):
    """The status of a lab's starter.py; `problem` says why there are no results.

    `report` shows the most informative failure, `hint` helps with it.
    """

    problem: str = ""
    started: bool = True
    report: str = ""
    hint: str = ""


def progress(lab: Lab, report: bool = False, first: Callable[[str], None] | None = None) -> Progress:
    """Return the results of the lab's tests on starter.py, from the cache if no file has changed.

    With `report` the most informative failure is run again and reported; that writes out/lab-NN.html. While
    the tests run, `first` gets the first that fails.
    """
    text = starter_text(lab)
    if text == pristine_source(lab):
        return Progress(lab, [], unwritten=[task.name for task in lab.tasks], started=False)
    unwritten, key = isolate.unwritten(lab, text), digest(lab)
    kept = read_state("results.json").get(lab.id, {})
    reported = not report or all(row["passed"] for row in kept.get("results", ()))  # or no need to
    columns = shutil.get_terminal_size().columns  # of the report, as it was kept
    if kept.get("key") == key and (reported or (kept["report"] and kept.get("columns") == columns)):
        by_task = {task: [Result(**row) for row in rows] for task, rows in kept["alone"].items()}
        results = [Result(**row) for row in kept["results"]]
        said = {name: kept[name] for name in ("blamed", "problem", "report", "hint")}
        return Progress(lab, results, by_task, unwritten, **said)
    with contextlib.suppress(OSError):
        page.path_of(lab).unlink()  # it shows another starter

    def tell(failure: str) -> None:
        if first and starter_text(lab) == text:
            first(failure)

    options = ["report"] if report else []
    outcomes = run_in_process("labs.kit.judge.examine", lab, options, first=first and tell)
    saved = f"{lab.id}: starter.py was saved while its tests ran; they have to run again"
    if trouble := saved if starter_text(lab) != text else outcomes.trouble:  # may lie outside: not kept
        return Progress(lab, [], unwritten=unwritten, problem=trouble)
    results = outcomes.results.get("yours", [])
    if missing := sorted(set(lab.tests) - {result.function for result in results}):
        problem = f"{lab.id}: test_lab.py no longer has {', '.join(missing)}; put it back"
        return Progress(lab, results, unwritten=unwritten, problem=problem)
    problem = load_problem(results)
    alone = {k.partition("@")[2]: v for k, v in outcomes.results.items() if k != "yours"}
    said = {name: getattr(outcomes, name) for name in ("blamed", "report", "hint")} | {"problem": problem}
    entry = said | {
        "key": key,
        "columns": columns,
        "results": [vars(result) for result in results],
        "alone": {task: [vars(result) for result in rows] for task, rows in alone.items()},
    }
    with _writing, contextlib.suppress(OSError):  # without a place to keep them, the tests run again
        write_state("results.json", read_state("results.json") | {lab.id: entry})
    return Progress(lab, results, alone, unwritten, **said)


def all_progress() -> list[Progress]:
    return side_by_side(lambda lab_id: progress(find_lab(lab_id)), lab_ids())


def first_open(report: bool = False, first: Callable[[str], None] | None = None) -> Progress | None:
    """Return the first lab that is not done, if any; with its report, as `progress` does."""
    labs = (progress(find_lab(lab_id), report, first) for lab_id in lab_ids())
    return next((status for status in labs if not status.is_done), None)


def digest(lab: Lab) -> str:
    """Return a hash of everything that a result can depend on."""
    root = LABS_DIR.parent
    files = [*lab.path.glob("*.py"), *lab.path.glob("author/*.py"), lab.file("lab.toml")]
    for room in ("labs/kit", "mini_engine"):
        paths = (path for kind in ("*.py", "*.toml") for path in (root / room).rglob(kind))
        files += [path for path in paths if "tests" not in path.parts]
    # lab-07 runs the learner's earlier parts.
    files += [find_lab(earlier).file("starter.py") for earlier in lab.prerequisites]
    total = hashlib.blake2b()
    for path in sorted(file for file in files if os.access(file, os.R_OK) and file.is_file()):
        total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()


def last_hint(lab: Lab, task: Task) -> int:
    """Return the number of the last hint that was shown for a task; 0 if none was."""
    return int(read_state("hints.json").get(f"{lab.id} {task.name}", 0))


def next_hint(lab: Lab, task: Task) -> int:
    """Return the number of the next hint, which counts as shown from now on; after the last one, the last.

    Raise OSError if labs/.state, where that is kept, cannot be written.
    """
    number = min(last_hint(lab, task) + 1, len(task.hints))
    write_state("hints.json", read_state("hints.json") | {f"{lab.id} {task.name}": number})
    return number


def reset(lab: Lab) -> Path | None:
    """Restore the pristine starter. Return the backup of the learner's file, if it had been edited."""
    path, backup = lab.file("starter.py"), None
    pristine = pristine_source(lab)
    new = path.with_name(f"starter.py.{os.getpid()}.part")
    new.write_text(pristine, encoding="utf-8")
    if os.path.lexists(path) and starter_text(lab) != pristine:
        backup = STATE / "backups" / f"{lab.id}-{datetime.now():%Y%m%d-%H%M%S-%f}.py"
        backup.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, backup)  # works for a folder and an unreadable file too
    new.replace(path)
    return backup


def starter_text(lab: Lab) -> str:
    """Return the learner's file as text, whatever is in it; "" if it cannot be read."""
    try:
        return lab.file("starter.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_state(name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((STATE / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there yet, or damaged: the tests run again
        return {}


def write_state(name: str, content: dict[str, Any]) -> None:
    STATE.mkdir(exist_ok=True)
    write_whole(STATE / name, json.dumps(content))
