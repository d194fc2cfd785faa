"""The labs' pytest plugin: the `lab` fixture, LAB_IMPL, the guards, and readable failures.

conftest.py registers it. It concerns only tests in a lab's folder.
"""

import copy
import gc
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from labs.kit.judge import diagnose, guard, loading, matrix
from labs.kit.judge.failures import NotBegun, a_few_words, claim, in_words, short_traceback
from labs.kit.judge.guard import PrintFlood, TimeUp, deadline, kept_alive, limited_prints
from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, find_lab, impl_from_environment
from labs.kit.judge.pristine import NOT_WRITTEN
from labs.kit.judge.task_status import Name, Result, TaskStatus
from labs.kit.toys.driver import EXPECTED, RUNS
from labs.kit.toys.words import brief

ENOUGH = 3  # tests of a known mistake that do not end, after which none is run; of a file one is enough
ENDLESS = 8.0  # seconds of computing, after which a known mistake is one that never ends
HURRIED = 10.0  # the same for a task of a file that did not end; on a slow machine a right one takes seconds
PRINTED_LINES = 20  # of what a failed test printed
REPORTING = False  # a process that shows one failure to a learner, whole: examine.py
SECONDS, EXIT = pytest.StashKey[float](), pytest.StashKey[int]()  # a test's limit; the session's status
timed_out: Counter[tuple[str, str | None]] = Counter()  # by lab and variant

_fresh: Counter[str] = Counter()  # tests of a lab that ran again on a newly loaded starter


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are small: more threads are slower
    guard.last_words = os.dup(2)
    try:
        impl_from_environment()
    except LabError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the kit's own tests out of `LAB_IMPL=starter pytest labs`: they do not test a starter."""
    return True if collection_path == LABS_DIR / "kit" and impl_from_environment() == "starter" else None


@cache  # called several times a test, and reading lab.toml takes as long as a test
def lab_in(folder: Path) -> Lab | None:
    """Return the lab that has its tests in this folder, if any."""
    is_lab = folder.parent == LABS_DIR and re.fullmatch(r"lab-\d+", folder.name)
    return find_lab(folder.name) if is_lab else None


def pytest_collection_finish(session: pytest.Session) -> None:
    labs = {lab.id for item in session.items if (lab := lab_in(item.path.parent))}
    if labs:
        gc.freeze()  # collecting the objects of the start again takes a tenth of the time
        say_what_is_tested(session.config, sorted(labs))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Under `pytest -n 2` the workers collect, all the same tests."""
    labs = {match[1] for test in ids if (match := re.match(r"labs/(lab-\d+)/", test))}
    if labs and node.gateway.id == "gw0":
        say_what_is_tested(node.config, sorted(labs))


def say_what_is_tested(config: pytest.Config, labs: list[str]) -> None:
    """Say which implementation is tested, so that a pass of the reference is not taken for one's own."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    folder = f"labs/{labs[0]}" if len(labs) == 1 else "labs"
    what = {
        "starter": "starter.py, your own (LAB_IMPL=starter)",
        "engine": "mini_engine's own parts (LAB_IMPL=engine)",
        "solution": f"solution.py, the reference; yours: {command(f'pytest {folder}', LAB_IMPL='starter')}",
    }
    if reporter is not None:
        reporter.write_line(f"testing {what[impl_from_environment()]}")


def command(line: str, **variables: str) -> str:
    """Return a shell line with environment variables in the syntax of this system's usual shell."""
    form = "$env:{}='{}'; " if os.name == "nt" else "{}={} "
    return "".join(form.format(*one) for one in variables.items()) + line


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Any:
    """The implementation under test, chosen by LAB_IMPL: its functions are attributes."""
    if hasattr(request, "param"):  # labs/kit/judge/matrix.py runs many in one session
        return request.param()
    return loading.namespace(request.path.parent.name, impl_from_environment())


@pytest.hookimpl(wrapper=True, trylast=True)  # inside pytest's capture, which sets sys.stdout too
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    lab = lab_in(item.path.parent)
    if lab is None:
        return (yield)
    RUNS.clear()
    EXPECTED.clear()
    key = lab.id, matrix.variant_of(item)
    if timed_out[key] >= (ENOUGH if "mistake:" in item.name else 1):
        raise NotBegun(f"{lab.id}: not run, because a test before it did not end")
    known = (key[1] or "").startswith("mistake:")  # one that never ends must not keep a learner waiting
    most = 1.0 if timed_out[key] else ENDLESS if known else HURRIED if matrix.HURRY else lab.timeout
    item.stash[SECONDS] = min(most, lab.timeout)
    with deadline(item.stash[SECONDS]), limited_prints(), kept_alive():
        try:
            return (yield)
        except TimeUp:
            timed_out[key] += 1
            raise
        except (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception) as verdict:
            if loading.line_in_starter(verdict) is None:
                raise
            raise AssertionError(f"{lab.id}: starter.py ends the test by itself: {brief(verdict)}") from None


def pytest_enter_pdb() -> None:
    guard.no_limit()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
    """Report a lab's test: a starter's failure in a few words, with its departure from the reference.

    None for what pytest reports itself: setup and teardown, skipped tests, failures of other implementations.
    """
    lab = lab_in(item.path.parent)
    if lab is None or call.when != "call" or (matrix.variant_of(item) and not REPORTING):
        return None
    if call.excinfo is None:
        report = pytest.TestReport.from_item_and_call(item, call)
        # pytest-xdist carries a report's own attributes over, as long as they are JSON.
        report.seen = [lab.id, vars(Result(item.name, True))]  # type: ignore[attr-defined]
        return report
    error, is_learners = call.excinfo.value, impl_from_environment() == "starter"
    words = in_words(lab, error, item.stash.get(SECONDS, None))
    if isinstance(error, pytest.skip.Exception) or not (words or is_learners):
        return None
    if is_learners and isinstance(error, TimeUp | PrintFlood):
        words = [*words, *diagnose.cut_short(item, lab), claim(item)]
    result = matrix.result_of(item, lab, call, item.name)
    silent = copy.copy(call)
    silent.excinfo = None  # rendering it takes long
    report = pytest.TestReport.from_item_and_call(item, silent)
    report.outcome = "failed"
    if words:
        report.longrepr = a_few_words(words)
    if is_learners and not REPORTING:
        report.seen = [lab.id, vars(result)]  # type: ignore[attr-defined]
    if not words:
        printed = [(name, "\n".join(text.splitlines()[-PRINTED_LINES:])) for name, text in report.sections]
        _fresh[lab.id] += 1
        look_for_state = not REPORTING and _fresh[lab.id] <= ENOUGH
        sentence, sections = diagnose.diagnosis(item, lab, error, look_for_state)
        opening = [*([diagnose.filled(sentence.text), ""] if sentence else []), claim(item)]
        report.longrepr = short_traceback(opening, lab, call.excinfo, whole=REPORTING)
        report.hint = sentence.hint if sentence else ""  # type: ignore[attr-defined]
        report.opening = opening  # type: ignore[attr-defined]  # pytest has no place for our own words
        report.sections = [*sections, *printed]
        return report
    report.sections = []
    if isinstance(error, NotBegun | loading.LoadProblem):
        report.once = ["not run", *words]  # type: ignore[attr-defined]
    elif NOT_WRITTEN.match(words[0]):
        report.once = ["not written", *words]  # type: ignore[attr-defined]
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count failures that many tests share; the summary reports them once."""
    once = getattr(report, "once", None)
    return (once[0], "F", once[0].upper()) if once and report.failed else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report each shared failure once, and where to read on."""
    write, stats = terminalreporter.write_line, terminalreporter.stats
    for category in ("not written", "not run"):
        said = Counter(tuple(report.once[1:]) for report in stats.get(category, ()))
        for lines, tests in said.items():
            write(f"{lines[0]} ({tests} test{'s' * (tests != 1)})")
            for line in lines[1:]:
                write(line)
    for status in seen(stats):
        for task, name in known_mistakes(status):
            write(f"{status.lab.id} {task} looks like: {name.title}")
        if any(not result.passed for result in status.results):
            write(f"the most informative failure: python -m labs test {status.lab.id}")


def seen(stats: dict[str, list[Any]]) -> list[TaskStatus]:
    """Return the status of each lab whose starter was tested."""
    reports = [*stats.get("failed", ()), *stats.get("passed", ())]
    found = [report.seen for report in reports if hasattr(report, "seen")]
    rows = {lab_id: [row for other, row in found if other == lab_id] for lab_id, _ in sorted(found, key=str)}
    return [TaskStatus(find_lab(lab_id), [Result(**row) for row in own]) for lab_id, own in rows.items()]


def known_mistakes(status: TaskStatus) -> list[tuple[str, Name]]:
    """Return the known mistakes that a lab's results show, each with its task."""
    return [(task.name, name) for task in status.lab.tasks if (name := status.name(task))]


def say_first(reporter: pytest.TerminalReporter) -> None:
    """Print the known mistakes, and the sentence on the most informative failure, above all failures."""
    lines = []
    failed = {report.location[2]: report for report in reporter.stats.get("failed", ())}
    for status in seen(reporter.stats):
        for task, name in known_mistakes(status):
            lines += [f"{status.lab.id} {task} looks like: {name.title}. {name.hint.strip()}"]
        best = status.most_informative
        opening = getattr(failed.get(best.test), "opening", None) if best else None
        if best and opening and len(failed) > 1:  # of one failure it stands there anyway
            lines += [f"{best.test}: {opening[0]}"]
    for line in ["", *lines] if lines else ():
        reporter.write_line(diagnose.filled(line))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT] = int(exitstatus)
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        say_first(reporter)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    for name in [name for name in sys.modules if name.startswith("lab_0") and name.endswith("_starter")]:
        del sys.modules[name]
    left = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if left and impl_from_environment() == "starter":
        print(f"threads are still running ({brief(left[0].name)}); the tests are over, and they are ended")
        sys.stdout.flush()
        os._exit(config.stash[EXIT])
