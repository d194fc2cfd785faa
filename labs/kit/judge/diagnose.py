"""The diagnosis of a failed test: the step in which its trace departs from the reference's.

The failed test runs again on the reference, and the two runs are compared. No code and no tensor of the
reference is ever shown.
"""

import importlib
import shutil
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import pytest

from labs.kit.judge import compare, loading, page
from labs.kit.judge.guard import TimeUp, deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab
from labs.kit.toys.driver import EXPECTED, RUNS
from labs.kit.toys.words import describe

PATIENCE = 5.0  # seconds for the diagnosis of one test
KEPT_STATE = (
    "This test passes when it runs alone, and fails in the run of all tests. Look for state that is kept "
    "between calls: a variable of the module or the class, or a default argument that is changed."
)


@dataclass(frozen=True)
class Outcome:
    """The recorded runs of a test on one implementation, and its failure, if any."""

    runs: compare.Runs
    failure: str = ""


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
    except BaseException as error:  # pytest's own Failed is no Exception
        failure = describe(error)
    return Outcome(tuple(RUNS), failure)


def given(item: pytest.Function) -> dict[str, Any]:
    """Return a test's arguments by name: its parameters, and its fixtures if it has been set up."""
    return (dict(item.callspec.params) if hasattr(item, "callspec") else {}) | item.funcargs


def sections(
    item: pytest.Function, lab: Lab, error: BaseException, look_for_state: bool = False
) -> list[tuple[str, str]]:
    """Return titled texts for the report of a failed test."""
    yours, reference = Outcome(tuple(RUNS), describe(error)), Outcome(tuple(EXPECTED))
    found = []
    try:
        ready(lab)
        with deadline(PATIENCE):
            reference = reference if reference.runs else on_reference(item, lab)
            found += [
                ("where your run departs from the reference", text)
                for text in departures(item, yours, reference)
            ]
            if look_for_state and not outcome(item, loading.fresh(lab)).failure:
                found.append(("look for state kept between calls", filled(KEPT_STATE)))
    except TimeUp:
        pass
    except Exception as error:  # no run may prevent the report of the test
        found.append(("no comparison with the reference", describe(error)))
    return found + [("step through it", line) for line in played(item, lab, yours, reference)]


def ready(lab: Lab) -> None:
    """Load slow modules before a clock starts: an interrupted `import torch` cannot be repeated."""
    if lab.uses_torch:
        importlib.import_module("torch")
    loading.load(lab.id, "solution")


def on_reference(item: pytest.Function, lab: Lab) -> Outcome:
    """Return the test's outcome on the reference; without runs if it failed there too."""
    done = outcome(item, loading.load(lab.id, "solution"))
    return Outcome((), done.failure) if done.failure else done


def played(
    item: pytest.Function, lab: Lab, yours: Outcome | None = None, reference: Outcome | None = None
) -> list[str]:
    """Write the page of the test's run. Return the line that names it, or nothing without a run."""
    yours = yours or Outcome(tuple(RUNS))
    if not yours.runs:
        return []
    if reference is None:
        try:
            ready(lab)
            reference = on_reference(item, lab)
        except Exception:  # solution.py does not load: the learner's run is shown alone
            reference = Outcome(())
    first_worker = getattr(item.config, "workerinput", {}).get("workerid", "gw0") == "gw0"
    line = page.write(lab, yours.runs, reference.runs, may_write=first_worker)
    columns = shutil.get_terminal_size().columns
    return [fill(line, columns, break_long_words=False, break_on_hyphens=False)] if line else []


def departures(item: pytest.Function, yours: Outcome, reference: Outcome) -> list[str]:
    """Return the first departure of the test's runs from the reference's, as text."""
    first = compare.first_departing(yours.runs, reference.runs)
    if first is None:
        return []
    number, found = first
    columns = shutil.get_terminal_size().columns
    return [compare.show(*yours.runs[number], reference.runs[number][1], found, columns)]


def filled(text: str, columns: int = 0) -> str:
    """Wrap a paragraph for the terminal; no word is broken."""
    width = columns or min(shutil.get_terminal_size().columns, 105)
    return fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
