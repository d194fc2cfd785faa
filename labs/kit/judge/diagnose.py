"""The diagnosis of a failed test: the step in which its trace departs from the reference's.

The failed test runs again on the reference, and the two runs are compared. No code and no tensor of the
reference is ever shown.
"""

import importlib
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import fill
from typing import Any

import pytest

from labs.kit.judge import compare, direct, failures, loading, page, sentences
from labs.kit.judge.guard import TimeUp, deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab
from labs.kit.judge.pristine import NOT_WRITTEN
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


def outcome(item: pytest.Function, implementation: object, seconds: float | None = 1.0) -> Outcome:
    """Run a test function again, in this process, on another implementation; None for any time."""
    arguments = {name: value for name, value in given(item).items() if name in item._fixtureinfo.argnames}
    RUNS.clear()
    failure = ""
    try:
        with deadline(seconds) if seconds else nullcontext(), silence(), kept_alive():
            item.obj(**arguments | {"lab": implementation})
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's own Failed is no Exception
        failure = describe(error)
    return Outcome(tuple(RUNS), failure)


def given(item: pytest.Function) -> dict[str, Any]:
    """Return a test's arguments by name: its parameters, and its fixtures if it has been set up."""
    return (dict(item.callspec.params) if hasattr(item, "callspec") else {}) | item.funcargs


def diagnosis(
    item: pytest.Function, lab: Lab, error: BaseException, look_for_state: bool = False
) -> tuple[sentences.Sentence | None, list[tuple[str, str]]]:
    """Return the sentence on a failed test's run, if it parts from the reference's, and titled texts."""
    yours, reference = Outcome(tuple(RUNS), describe(error)), Outcome(tuple(EXPECTED))
    sentence, found = None, []
    try:
        ready(lab)
        with deadline(PATIENCE):
            reference = on_reference(item, lab)
            sentence = sentences.of_runs(yours.runs, reference.runs) or of_calls(item, lab)
            if first := compare.first_departing(yours.runs, reference.runs):
                number, parted = first
                both, columns = (*yours.runs[number], reference.runs[number][1]), terminal()
                text = compare.show(*both, parted, columns)
                found.append(("where your run departs from the reference", text))
            if look_for_state and not outcome(item, loading.fresh(lab)).failure:
                found.append(("look for state kept between calls", filled(KEPT_STATE)))
    except TimeUp:
        pass
    except Exception as error:  # no run may prevent the report of the test
        found.append(("no comparison with the reference", describe(error)))
    played = page_of(item, lab, yours, reference, sentence)
    return sentence, found + [("step through it", line) for line in played]


def opening(item: pytest.Function, lab: Lab, error: BaseException) -> list[str]:
    """Return the lines that open the report of a failed test, before anything else of it is made.

    [] for a failure that says nothing of what is written: a task that is not, a test that was not run.
    """
    words = failures.in_words(lab, error)
    if isinstance(error, failures.NotBegun | loading.LoadProblem) or (words and NOT_WRITTEN.match(words[0])):
        return []
    runs, sentence = tuple(RUNS), None
    try:  # without a deadline: what it would end in the middle, a first `import torch`, cannot be repeated
        sentence = sentences.of_runs(runs, on_reference(item, lab, seconds=None).runs)
        sentence = sentence or (None if words else of_calls(item, lab))
    except Exception:  # solution.py does not load
        pass
    said = [filled(sentence.text)] if sentence else []
    if words:
        return [*words, *said]
    return [*said, "", failures.claim(item)] if said else [failures.claim(item), "", describe(error)]


def ready(lab: Lab) -> None:
    """Load slow modules before a clock starts: an interrupted `import torch` cannot be repeated."""
    if lab.uses_torch and find_spec("torch"):  # a web page has none
        importlib.import_module("torch")
    loading.load(lab.id, "solution")


def on_reference(item: pytest.Function, lab: Lab, seconds: float | None = 1.0) -> Outcome:
    """Return the test's outcome on the reference: random scripts know it; without runs if it failed there."""
    if EXPECTED:
        return Outcome(tuple(EXPECTED))
    done = outcome(item, loading.load(lab.id, "solution"), seconds)
    return Outcome((), done.failure) if done.failure else done


def of_calls(item: pytest.Function, lab: Lab) -> sentences.Sentence | None:
    """Return the sentence on the functions that a test calls, where its runs say nothing."""
    yours, theirs = direct.Notes(), direct.Notes()
    outcome(item, direct.Noting(given(item)["lab"], lab, yours))
    outcome(item, direct.Noting(loading.load(lab.id, "solution"), lab, theirs), seconds=None)
    return direct.sentence(yours.calls, theirs.calls)


def cut_short(item: pytest.Function, lab: Lab) -> list[str]:
    """Return the sentence on the run of a test that was ended, and the line that names its page."""
    yours, reference, sentence = Outcome(tuple(RUNS)), Outcome(tuple(EXPECTED)), None
    try:
        ready(lab)
        reference = on_reference(item, lab)
        sentence = sentences.of_runs(yours.runs, reference.runs)
    except Exception:  # solution.py does not load: the learner's run is shown alone
        pass
    said = [filled(sentence.text)] if sentence else []
    return said + page_of(item, lab, yours, reference, sentence)


def page_of(
    item: pytest.Function, lab: Lab, yours: Outcome, reference: Outcome, sentence: sentences.Sentence | None
) -> list[str]:
    """Write the page of the test's run. Return the line that names it, or nothing without a run."""
    if not yours.runs:
        return []
    first_worker = getattr(item.config, "workerinput", {}).get("workerid", "gw0") == "gw0"
    said = sentence.text if sentence else ""
    line = page.write(lab, yours.runs, reference.runs, said, may_write=first_worker)
    return [filled(line, terminal())] if line else []


def terminal() -> int:
    return shutil.get_terminal_size().columns


def filled(text: str, columns: int = 0) -> str:
    """Wrap a paragraph for the terminal; no word is broken."""
    width = columns or min(terminal(), 105)
    return fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
