"""Runs one lab's tests against many implementations in one pytest session, and tells the outcomes.

`python -m labs.kit.matrix lab-01 OUT.json [variant ...]`: a process of its own, so that labs run side
by side and nothing a wrong solution does reaches the caller. Variants are `starter` (pristine),
`solution`, `engine`, `yours` (starter.py as it stands), `file:PATH` and `bug:ID`.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from _pytest.reports import TestReport

from labs.kit import loading
from labs.kit.compare import fingerprint
from labs.kit.diagnose import describe
from labs.kit.driver import RUNS
from labs.kit.manifest import LABS_DIR, Lab, LabError, find_lab


@dataclass
class Result:
    """What one test did with one variant. `said` is its failure in one line, `runs` what it traced."""

    test: str  # the node's name, with its parameters
    passed: bool
    said: str = ""
    runs: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]


@dataclass
class Outcomes:
    """All results of a lab, by variant; `trouble` is what pytest said when it could not even start."""

    lab: Lab
    results: dict[str, list[Result]] = field(default_factory=dict)
    trouble: str = ""

    def failed(self, variant: str) -> set[str]:
        """The test functions that failed in at least one of their cases."""
        return {result.function for result in self.results.get(variant, ()) if not result.passed}

    def fingerprint(self, variant: str) -> str:
        """Equal for two variants that nothing tells apart."""
        return json.dumps([(r.test, r.said, r.runs) for r in self.results.get(variant, ())])


def bug_variants(lab: Lab) -> list[str]:
    return [f"bug:{bug.id}" for bug in lab.bugs]


def start(lab: Lab, variants: list[str]) -> tuple[subprocess.Popen, Path]:
    """Begin a run in a process of its own; `finish` waits for it."""
    out = Path(tempfile.mkdtemp(prefix="labs-")) / "matrix.json"
    line = [sys.executable, "-m", "labs.kit.matrix", lab.id, str(out), *variants]
    process = subprocess.Popen(
        line,
        cwd=LABS_DIR.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return process, out


def finish(lab: Lab, process: subprocess.Popen, out: Path) -> Outcomes:
    said, _ = process.communicate()
    outcomes = Outcomes(lab)
    if out.exists():
        for variant, rows in json.loads(out.read_text(encoding="utf-8")).items():
            outcomes.results[variant] = [Result(**row) for row in rows]
        out.unlink()
    else:
        outcomes.trouble = (
            "\n".join(said.strip().splitlines()[-15:]) or "the test process ended without a word"
        )
    out.parent.rmdir()
    return outcomes


def run_matrix(lab: Lab, variants: list[str]) -> Outcomes:
    return finish(lab, *start(lab, variants))


# -------------------------------------------------------------------- inside the process of its own


@cache
def implementation(lab_id: str, variant: str):
    lab = find_lab(lab_id)
    kind, _, name = variant.partition(":")
    try:
        if kind == "bug":
            return loading.buggy(lab, next(bug for bug in lab.bugs if bug.id == name))
        if kind == "file":
            source = Path(name).read_text(encoding="utf-8")
            return loading.execute(source, Path(name).stem, name)
        if kind == "starter":
            return loading.pristine_starter(lab)
        return loading.namespace(lab_id, "starter" if kind == "yours" else kind)
    except (LabError, SyntaxError) as error:
        return loading.Broken(loading.LoadProblem(f"{variant}: {error}"))


class Matrix:
    """The pytest plugin that multiplies the tests by the variants and gathers what they did."""

    def __init__(self, lab: Lab, variants: list[str]):
        self.lab, self.variants = lab, variants
        self.results: dict[str, list[dict]] = {variant: [] for variant in variants}

    def pytest_generate_tests(self, metafunc):
        if "lab" in metafunc.fixturenames:
            makers = [lambda v=variant: implementation(self.lab.id, v) for variant in self.variants]
            metafunc.parametrize("lab", makers, ids=self.variants, indirect=True)

    def pytest_runtest_makereport(self, item, call):
        """Keep one line of each outcome; rendering thousands of tracebacks would take seconds."""
        if call.when == "call" or call.excinfo is not None:
            self.keep(item, call)
        outcome = "failed" if call.excinfo else "passed"
        return TestReport(item.nodeid, item.location, {}, outcome, None, call.when, duration=call.duration)

    def keep(self, item, call):
        variant = self.variant_of(item)
        result = Result(
            item.name.replace(f"[{variant}]", "").replace(f"{variant}-", "").replace(f"-{variant}", ""),
            call.excinfo is None,
            describe(call.excinfo.value) if call.excinfo else "",
            json.dumps([fingerprint(trace) for _, trace in RUNS]),
            round(call.duration, 4),
        )
        self.results[variant].append(vars(result))

    def variant_of(self, item) -> str:
        callspec = getattr(item, "callspec", None)
        if callspec is None or "lab" not in callspec.params:
            return self.variants[0]  # a test without the fixture runs once
        return callspec.params["lab"].__defaults__[0]


def main(lab_id: str, out: str, *variants: str) -> None:
    import pytest

    lab = find_lab(lab_id)
    matrix = Matrix(lab, list(variants))
    said = io.StringIO()
    arguments = [
        str(lab.file("test_lab.py")),
        "-q",
        "--tb=no",
        "--capture=sys",
        "--no-header",
        "--no-summary",
    ]
    for plugin in ("cacheprovider", "logging", "subtests", "junitxml", "faulthandler"):
        arguments += ["-p", f"no:{plugin}"]
    with contextlib.redirect_stdout(said):
        code = pytest.main(arguments, plugins=[matrix])
    if code not in (0, 1):
        sys.exit(said.getvalue())
    Path(out).write_text(json.dumps(matrix.results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
