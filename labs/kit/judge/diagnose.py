"""What to show a learner whose test fails: where the trace departs, and which known bug does the same.

The failed test is run again on the reference, and on each bug of the zoo, and what they did is
compared. Neither their code nor any tensor is ever shown.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from textwrap import fill
from time import monotonic
from types import ModuleType
from typing import Any, cast

import pytest

from labs.kit.judge import compare, loading, page
from labs.kit.judge.guard import TimeUp, deadline, kept_alive, silence
from labs.kit.judge.manifest import Bug, Lab, find_lab
from labs.kit.toys.driver import RUNS, Scenario
from labs.kit.toys.words import describe

PATIENCE = 5.0  # seconds for all that a failed test looks up
TIE_BREAK = 2.0  # of them to tell bugs apart that do the same in it


@dataclass(frozen=True)
class Outcome:
    """What a test did with one implementation: its recorded runs, and how it failed, if it did."""

    runs: tuple[tuple[Scenario, compare.Run], ...]
    failure: str = ""

    @property
    def fingerprint(self) -> str:
        return json.dumps([[compare.fingerprint(trace) for _, trace in self.runs], self.failure])


def outcome(item: pytest.Function, implementation: object, seconds: float = 1.0) -> Outcome:
    """Run a test function again, in this process, on another implementation."""
    arguments = {name: value for name, value in given(item).items() if name in item._fixtureinfo.argnames}
    RUNS.clear()
    failure = ""
    try:
        with deadline(seconds), silence(), kept_alive():
            item.obj(**arguments | {"lab": implementation})
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's own Failed is none of Exception's kind
        failure = describe(error)
    return Outcome(tuple(RUNS), failure)


def given(item: pytest.Function) -> dict[str, Any]:
    """A test's arguments by name: its parameters, and its fixtures if it has been set up."""
    return (dict(item.callspec.params) if hasattr(item, "callspec") else {}) | item.funcargs


def sections(item: pytest.Function, lab: Lab, error: BaseException) -> list[tuple[str, str]]:
    """Titled texts for the report of a failed test; none when there is nothing to say."""
    yours, reference = Outcome(tuple(RUNS), describe(error)), Outcome(())
    found = []
    try:
        with deadline(PATIENCE):
            reference = on_reference(item, lab)
            found += [
                ("where your run departs from the reference", text)
                for text in departures(item, yours, reference)
            ]
            found += [("looks like", text) for text in lookalikes(item, lab, yours)]
    except TimeUp:
        pass
    except Exception as error:  # whatever the learner's run was like, the report of the test comes out
        found.append(("no comparison with the reference", describe(error)))
    return found + [("step through it", line) for line in played(item, lab, yours, reference)]


def on_reference(item: pytest.Function, lab: Lab) -> Outcome:
    """What the test did with the reference; without runs if it failed, which is no reference then."""
    impl = "solution" if lab.file("solution.py").exists() else "engine"
    done = outcome(item, loading.namespace(lab.id, impl))
    return Outcome((), done.failure) if done.failure else done


def played(
    item: pytest.Function, lab: Lab, yours: Outcome | None = None, reference: Outcome | None = None
) -> list[str]:
    """The line that names the page of the test's run, which is written now; none without a run."""
    yours = yours or Outcome(tuple(RUNS))
    if not yours.runs:
        return []
    if reference is None:
        try:
            reference = on_reference(item, lab)
        except Exception:  # a solution.py that does not load: yours is shown alone
            reference = Outcome(())
    first_worker = getattr(item.config, "workerinput", {}).get("workerid", "gw0") == "gw0"
    line = page.write(lab, yours.runs, reference.runs, may_write=first_worker)
    columns = item.config.get_terminal_writer().fullwidth
    return [fill(line, columns, break_long_words=False, break_on_hyphens=False)] if line else []


def departures(item: pytest.Function, yours: Outcome, reference: Outcome) -> list[str]:
    """The first run of the test whose trace departs from the reference's, as text."""
    apart = compare.first_apart(yours.runs, reference.runs)
    if apart is None:
        return []
    number, found = apart
    columns = item.config.get_terminal_writer().fullwidth
    return [compare.show(*yours.runs[number], reference.runs[number][1], found, columns)]


def lookalikes(item: pytest.Function, lab: Lab, yours: Outcome) -> list[str]:
    """A bug of the zoo that does exactly the same in this test, by name and with its hint.

    Where several do, the one that explained an earlier failure of this run wins, then the one that
    does the same in other tests, too. Skip bugs whose own test your code passes too.
    """
    alike: list[Bug] = []
    end = monotonic() + TIE_BREAK
    caught_here_first = sorted(lab.bugs, key=lambda bug: bug.caught_by != item.originalname)
    for bug in sorted(caught_here_first, key=lambda bug: -_suspects[lab.id, bug.id]):
        if alike and (_suspects[lab.id, alike[0].id] or monotonic() > end):
            break
        if outcome(item, _buggy(lab.id, bug.id)).fingerprint == yours.fingerprint:
            alike.append(bug)
    if not (alike and _suspects[lab.id, alike[0].id]):
        alike = closest(item, lab, alike)
    if not alike:
        return []
    _suspects[lab.id, alike[0].id] += 1
    columns = item.config.get_terminal_writer().fullwidth
    return [fill(f"{alike[0].title}: {alike[0].hint.strip()}", columns)]


def closest(item: pytest.Function, lab: Lab, bugs: list[Bug]) -> list[Bug]:
    """Of bugs that do the same as yours in this test, those that do in the lab's others, too."""
    mine, end = item.funcargs["lab"], monotonic() + TIE_BREAK
    if len(bugs) < 2 and all(bug.caught_by == item.originalname for bug in bugs):
        return bugs
    everything = cast(list[pytest.Function], list(cast(pytest.Collector, item.parent).collect()))
    cases = [case for case in everything if {"lab", *given(case)} >= {*case._fixtureinfo.argnames}]
    # The tests that these bugs must fail and that yours has not failed yet; a bug left in here is not yours.
    unseen = {case.originalname for case in cases} & {bug.caught_by for bug in bugs} - {item.originalname}
    here = item.function.__code__.co_firstlineno  # neighbours are of the same task, and tell most
    cases.sort(key=lambda case: abs(case.function.__code__.co_firstlineno - here))
    for case in sorted(cases, key=lambda case: case.originalname not in unseen):
        if len(bugs) < 2 and bugs[0].caught_by not in unseen:
            break
        if monotonic() > end:
            return bugs
        yours = outcome(case, mine)
        same = [bug for bug in bugs if outcome(case, _buggy(lab.id, bug.id)).fingerprint == yours.fingerprint]
        bugs = same or bugs
        if yours.failure:
            unseen.discard(case.originalname)
    return [bug for bug in bugs if bug.caught_by not in unseen]


_suspects: Counter[tuple[str, str]] = Counter()  # by lab and bug


@cache
def _buggy(lab_id: str, bug_id: str) -> ModuleType:
    lab = find_lab(lab_id)
    return loading.buggy(lab, next(bug for bug in lab.bugs if bug.id == bug_id))
