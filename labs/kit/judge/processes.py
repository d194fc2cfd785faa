"""Runs the tests of a lab in a separate process, and reads the outcomes that it wrote.

It imports no pytest, so that a learner's command starts at once.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from labs.kit.judge.manifest import LABS_DIR, Lab
from labs.kit.judge.task_status import Result

Item = TypeVar("Item")
Answer = TypeVar("Answer")
LOOK = 0.05  # seconds between two looks at what a process has written
FIRST = '{"first":'  # begins the row of the first failure
_running: set[subprocess.Popen[bytes]] = set()  # those that run_in_process waits for, in any thread


@dataclass
class Outcomes:
    """All results of a lab, by variant; `trouble` says why the process ended early."""

    lab: Lab
    results: dict[str, list[Result]] = field(default_factory=dict)
    trouble: str = ""

    report: str = ""  # of an examination
    hint: str = ""  # of the failure that it reports
    blamed: str = ""
    modules: list[str] = field(default_factory=list)  # the files of all that was imported

    def failed(self, variant: str) -> set[str]:
        """Return the test functions that failed in at least one case (not begun is not failed)."""
        failures = [result for result in self.results.get(variant, ()) if not result.passed]
        return {result.function for result in failures if not result.said.startswith("NotBegun")}

    def fingerprint(self, variant: str) -> str:
        """Return a text that is equal for two variants with the same results."""
        return json.dumps([(r.test, r.said, r.runs) for r in self.results.get(variant, ())])


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without what changes the results; CI makes pytest compare all."""
    left_out = ("LAB_IMPL", "PYTEST_ADDOPTS", "CI", "BUILD_NUMBER")
    return {k: v for k, v in os.environ.items() if k not in left_out} | variables


def run_matrix(lab: Lab, variants: list[str], out: Path | None = None) -> Outcomes:
    """Run all the lab's tests on these variants, in a separate process; `out` keeps the rows."""
    return run_in_process("labs.kit.judge.matrix", lab, variants, out)


def run_in_process(
    module: str,
    lab: Lab,
    arguments: list[str],
    out: Path | None = None,
    first: Callable[[str], None] | None = None,
) -> Outcomes:
    """Run a module on a lab, and return what it wrote; `first` is called with the first failure at once."""
    with tempfile.TemporaryDirectory(prefix="labs-") as folder, open(Path(folder, "said"), "w+b") as said:
        out = out or Path(folder, "matrix.jsonl")
        line = [sys.executable, "-m", module, lab.id, str(out.absolute()), *arguments]
        columns = str(shutil.get_terminal_size().columns)  # for its report
        # Plugins that happen to be installed take a tenth of a second, and have no say here.
        own = environment(COLUMNS=columns, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        with subprocess.Popen(
            line, cwd=LABS_DIR.parent, env=own, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        ) as process:
            _running.add(process)
            try:
                while first and process.poll() is None:
                    if text := first_failure(out):
                        first(text)
                        break
                    sleep(LOOK)
                code = process.wait()
            except BaseException:  # on an interrupt too
                process.kill()
                raise
            finally:
                _running.discard(process)
        said.seek(max(0, said.tell() - 10_000))
        return read_outcomes(lab, out, code, said.read().decode("utf-8", errors="replace").strip())


def first_failure(out: Path) -> str:
    """Return the first failure that an examination has written into `out` so far; "" if there is none."""
    written = out.read_text("utf-8") if out.exists() else ""
    whole = written[: written.rfind("\n") + 1].splitlines()
    found = next((row for row in whole if row.startswith(FIRST)), None)
    return str(json.loads(found)["first"]) if found else ""


def read_outcomes(lab: Lab, out: Path, code: int = 0, said: str = "") -> Outcomes:
    """Return what a matrix wrote into `out`, or why it ended early."""
    outcomes = Outcomes(lab)
    rows = [json.loads(row) for row in out.read_text("utf-8").splitlines()] if out.exists() else []
    if rows and rows[-1] == "the end":
        for row in rows:
            if isinstance(row, list):
                outcomes.results.setdefault(row[0], []).append(Result(**row[1]))
            elif isinstance(row, dict):
                for key in row.keys() & {"report", "hint", "blamed", "modules"}:
                    setattr(outcomes, key, row[key])
    else:
        outcomes.trouble = _trouble(lab, code, rows, said)
    return outcomes


def _trouble(lab: Lab, code: int, rows: list[Any], tail: str) -> str:
    """Return why the process ended early; `rows` end with the test that was begun."""
    if not rows or not isinstance(rows[-1], dict) or "begun" not in rows[-1]:
        return f"{lab.id}: pytest could not run the tests:\n" + "\n".join(tail.splitlines()[-15:])
    begun = f"{lab.id}: {rows[-1]['begun']}"
    if "stopped" in rows[-1]:
        return f"{begun} was stopped by {rows[-1]['stopped']}"
    if re.search(r"Timeout \(\d+:\d\d:\d\d", tail):  # after pytest's dots, perhaps in their line
        place = re.search(r'starter\.py", line (\d+) in (\S+)', tail)
        where = f", in {place[2]} (starter.py, line {place[1]})" if place else ""
        return f"{begun} does not end, and nothing interrupts it{where}"
    return f"{begun} ended the whole test process (exit code {code}); a crash?"


def side_by_side(work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Return `work` of each item, two at a time; an interrupt ends their processes and starts no more."""
    with ThreadPoolExecutor(2) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                process.kill()
            raise
