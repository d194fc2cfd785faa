"""The pytest side of the labs: the `lab` fixture, LAB_IMPL, the guards, and kind failures.

conftest.py registers it. It touches only tests that lie in a lab's folder.
"""

import inspect
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from labs.kit import diagnose, loading
from labs.kit.driver import RUNS
from labs.kit.guard import PrintFlood, TimeUp, deadline, limited_prints
from labs.kit.manifest import LABS_DIR, Lab, LabError, find_lab, impl_from_environment

NOT_WRITTEN = re.compile(r"^(lab-\d+): (\S+) is not written yet$")
_timed_out: set[str] = set()  # labs that ran into the time limit once: their next tests get a second


def pytest_configure(config):
    try:
        impl_from_environment()
    except LabError as error:
        raise pytest.UsageError(str(error)) from None


def lab_of(item) -> Lab | None:
    """The lab that a test belongs to, if any."""
    return _lab_in(item.path.parent)


@cache  # asked several times a test, and reading lab.toml takes as long as a test
def _lab_in(folder: Path) -> Lab | None:
    is_lab = folder.parent == LABS_DIR and re.fullmatch(r"lab-\d+", folder.name)
    return find_lab(folder.name) if is_lab else None


def pytest_collection_finish(session):
    """Say what is being tested: a green run on the reference must not pass for one's own."""
    if "hypothesis" not in sys.modules:  # its closing report would import it all, for over a second
        session.config.pluginmanager.set_blocked("hypothesispytest")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    labs = sorted({lab.id for item in session.items if (lab := lab_of(item))})
    if reporter is None or not labs:
        return
    impl = impl_from_environment()
    folder = f"labs/{labs[0]}" if len(labs) == 1 else "labs"
    if impl == "solution":
        reporter.write_line(
            f"testing solution.py, the reference; yours: {command(f'pytest {folder}', LAB_IMPL='starter')}"
        )
    else:
        what = {"starter": "starter.py, your own", "engine": "mini_engine's own parts"}[impl]
        reporter.write_line(f"testing {what} (LAB_IMPL={impl})")


def command(line: str, **variables: str) -> str:
    """A shell line with environment variables, as this system's usual shell spells it."""
    if os.name == "nt":
        return "".join(f"$env:{name}='{value}'; " for name, value in variables.items()) + line
    return "".join(f"{name}={value} " for name, value in variables.items()) + line


@pytest.fixture
def lab(request):
    """The implementation under test, as LAB_IMPL says: its functions are attributes."""
    if hasattr(request, "param"):  # labs/kit/matrix.py runs many in one session
        return request.param()
    return loading.namespace(lab_of(request.node).id, impl_from_environment())


@pytest.hookimpl(wrapper=True, trylast=True)  # inside pytest's capture, which sets sys.stdout too
def pytest_runtest_call(item):
    lab = lab_of(item)
    if lab is None:
        return (yield)
    RUNS.clear()
    variant = getattr(item, "callspec", None) and item.callspec.params.get("lab")
    key = f"{lab.id} {variant}"
    with deadline(1.0 if key in _timed_out else lab.timeout), limited_prints():
        try:
            return (yield)
        except TimeUp:
            _timed_out.add(key)
            raise


@dataclass
class Kind(TerminalRepr):
    """A failure in a few words, in place of a page of traceback."""

    lines: list[str]

    @property
    def reprcrash(self):
        return ReprFileLocation("", 0, self.lines[0])

    def __str__(self):
        return "\n".join(self.lines)

    def toterminal(self, tw):
        for line in self.lines:
            tw.line(line)


@dataclass
class Claimed(TerminalRepr):
    """What a test proves, then how it failed."""

    claim: str
    failure: TerminalRepr

    @property
    def reprcrash(self):
        return self.failure.reprcrash

    def __str__(self):
        return f"{self.claim}\n{self.failure}"

    def toterminal(self, tw):
        tw.line(self.claim)
        self.failure.toterminal(tw)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    lab = lab_of(item)
    if lab is None or call.excinfo is None or not report.failed:
        return report
    words = in_words(lab, call.excinfo.value, call.excinfo.traceback)
    if words:
        report.longrepr = Kind(words)
        report.sections = []
    elif impl_from_environment() == "starter" and call.when == "call":
        explain(item, lab, call, report)
    return report


def in_words(lab: Lab, error: BaseException, traceback=()) -> list[str]:
    """The failures that need no traceback, as at most two lines; [] for all others."""
    not_written = error  # also inside `pytest.raises(RuntimeError)`, of which it is a kind
    while not_written is not None and not isinstance(not_written, NotImplementedError):
        not_written = not_written.__context__
    if NOT_WRITTEN.match(str(not_written)):
        return [
            str(not_written),
            f"write it in labs/{lab.id}/starter.py; a hint: python -m labs hint {lab.id}",
        ]
    if isinstance(error, loading.LoadProblem):
        return [str(error)]
    if isinstance(error, TimeUp):
        lines = [entry.lineno + 1 for entry in traceback if str(entry.path).endswith("starter.py")]
        where = f" It was in starter.py, line {lines[-1]}." if lines else ""
        return [f"{lab.id}: no answer within {lab.timeout:g} s: a loop that never ends?{where}"]
    if isinstance(error, PrintFlood):
        return [f"{lab.id}: {error} in one test; print less, for example one line a step"]
    return []


def explain(item, lab: Lab, call, report) -> None:
    """A failed test of the learner's code: what it claims, where the trace departs, whose face it has."""
    excinfo = call.excinfo
    excinfo.traceback = excinfo.traceback.cut(path=item.path)
    report.longrepr = Claimed(claim(item), excinfo.getrepr(style="short", tbfilter=True))
    printed = [(name, _tail(text)) for name, text in report.sections]
    report.sections = [*diagnose.sections(item, lab, call), *printed]


def claim(item) -> str:
    """The first line of a test's docstring."""
    return (inspect.getdoc(item.function) or item.name).splitlines()[0]


def _tail(text: str, lines: int = 20) -> str:
    kept = text.splitlines()[-lines:]
    return "\n".join(kept)


def pytest_unconfigure(config):
    for name in [name for name in sys.modules if name.startswith("lab_0") and name.endswith("_starter")]:
        del sys.modules[name]
