"""What to show a learner whose test fails: where the trace departs, and which known bug does the same.

The failed test is run again on the reference, and on each bug of the zoo, and what they did is
compared. Neither their code nor any tensor is ever shown.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from textwrap import fill

from labs.kit import compare, loading
from labs.kit.driver import RUNS
from labs.kit.guard import TimeUp, deadline, describe, silence
from labs.kit.manifest import Lab, find_lab
from mini_engine.trace import Trace

PATIENCE = 5.0  # seconds for all that a failed test looks up


@dataclass(frozen=True)
class Outcome:
    """What a test did with one implementation: its recorded runs, and how it failed, if it did."""

    runs: tuple[tuple[dict, Trace], ...]
    failure: str = ""

    @property
    def fingerprint(self) -> str:
        return json.dumps([[compare.fingerprint(trace) for _, trace in self.runs], self.failure])


def outcome(item, implementation, seconds: float = 1.0) -> Outcome:
    """Run a test function again, in this process, on another implementation."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames if name in item.funcargs}
    RUNS.clear()
    failure = ""
    try:
        with deadline(seconds), silence():
            item.obj(**arguments | {"lab": implementation})
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's own Failed is none of Exception's kind
        failure = describe(error)
    return Outcome(tuple(RUNS), failure)


def sections(item, lab: Lab, call) -> list[tuple[str, str]]:
    """Titled texts for the report of a failed test; none when there is nothing to say."""
    yours = Outcome(tuple(RUNS), describe(call.excinfo.value))
    found = []
    try:
        with deadline(PATIENCE):
            found += [
                ("where your run departs from the reference", text) for text in departures(item, lab, yours)
            ]
            found += [("looks like", text) for text in lookalikes(item, lab, yours)]
    except TimeUp:
        pass
    except Exception as error:  # whatever the learner's run was like, the report of the test comes out
        found.append(("no comparison with the reference", describe(error)))
    return found


def departures(item, lab: Lab, yours: Outcome) -> list[str]:
    """The first run of the test whose trace departs from the reference's, as text."""
    impl = "solution" if lab.file("solution.py").exists() else "engine"
    reference = outcome(item, loading.namespace(lab.id, impl))
    for (scenario, trace), (_, expected) in zip(yours.runs, reference.runs, strict=False):
        found = compare.departure(trace, expected)
        if found and found.index < max(len(trace.steps), len(expected.steps)):
            columns = item.config.get_terminal_writer().fullwidth
            return [compare.show(scenario, trace, expected, found, columns)]
    return []


def lookalikes(item, lab: Lab, yours: Outcome) -> list[str]:
    """A bug of the zoo that does exactly the same in this test, by name and with its hint.

    Where several do, the one that explained an earlier failure of this run wins, then the one that
    this test is there to catch.
    """
    test = getattr(item, "originalname", item.name)
    for bug in sorted(lab.bugs, key=lambda bug: (-_suspects[lab.id, bug.id], bug.caught_by != test)):
        if outcome(item, _buggy(lab.id, bug.id)).fingerprint == yours.fingerprint:
            _suspects[lab.id, bug.id] += 1
            columns = item.config.get_terminal_writer().fullwidth
            return [fill(f"{bug.title}: {bug.hint.strip()}", columns)]
    return []


_suspects: Counter[tuple[str, str]] = Counter()


@cache
def _buggy(lab_id: str, bug_id: str):
    lab = find_lab(lab_id)
    return loading.buggy(lab, next(bug for bug in lab.bugs if bug.id == bug_id))
