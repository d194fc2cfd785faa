"""The learner's trace beside the reference's, and a run on the clock of a cost model."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from labs.kit.judge import compare, loading
from labs.kit.judge.compare import Run
from labs.kit.judge.guard import deadline, kept_alive, silence
from labs.kit.judge.manifest import Lab, LabError, find_lab, impl_from_environment
from labs.kit.learner.notebook.pictures import show
from labs.kit.toys.driver import RUNS
from labs.kit.toys.words import describe
from mini_engine.show import figures
from mini_engine.show.figures import counted
from mini_engine.sim.cost_model import CostModel, backend_of
from mini_engine.trace import Queued, Trace

_NAMES = {"starter": "your starter.py", "engine": "mini_engine's own parts"}


def trace_of(lab_id: str, scenario: str | dict[str, Any]) -> Run:
    """Run a lab's scenario (or its name) under LAB_IMPL, print what ran, and return the trace.

    With LAB_IMPL=starter the learner's run is compared with the reference's. If they differ, both are shown
    and the reference's trace is returned, so that the text of the page stays true. Raise LabError for an
    unknown lab or scenario.
    """
    lab = find_lab(lab_id)
    scenarios = loading.load(lab.id, "scenarios")
    if isinstance(scenario, str):
        named: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in scenarios.SCENARIOS}
        if scenario not in named:
            names = ", ".join(map(repr, named))
            raise LabError(f"{lab.id} has no scenario {scenario!r}; it has {names}")
        scenario = named[scenario]
    what = f"{lab.id}, {scenario['name']!r}:"
    teacher = "solution" if lab.file("solution.py").exists() else "engine"
    reference, trouble = attempt(lab, lambda: scenarios.run(loading.namespace(lab.id, teacher), scenario))
    if trouble or reference is None:
        raise LabError(f"{what} the reference fails: {trouble}")
    impl = impl_from_environment()
    if impl == teacher:
        print(what, f"the reference, {counted(len(reference.steps), 'step')}")
        return reference
    name = _NAMES.get(impl, impl)
    yours, trouble = attempt(lab, lambda: scenarios.run(loading.namespace(lab.id, impl), scenario))
    if trouble:
        print(what, trouble)
    elif yours and compare.departure(yours, reference) is None:
        steps = counted(len(yours.steps), "step")
        print(what, f"{name}, {steps}; it makes the same decisions as the reference")
        return yours
    if yours and yours.steps:
        _report(what, name, scenario, yours, reference)
    print("The rest of this page shows the reference's run.")
    return reference


def attempt(lab: Lab, run: Callable[[], Run]) -> tuple[Run | None, str]:
    """Return the trace of a run as far as it went, and the error that stopped it, in words."""
    RUNS.clear()
    try:
        with deadline(lab.timeout), silence(), kept_alive():
            return run(), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit and the guards' exceptions too
        return (RUNS[-1][1] if RUNS else None), in_words(lab, error)


def in_words(lab: Lab, error: BaseException) -> str:
    from labs.kit.judge.failures import in_words  # needs pytest, and only a run that fails needs it

    words, line = in_words(lab, error), loading.line_in_starter(error)
    where = f" (starter.py, line {line})" if line else ""
    return "; ".join(words) if words else f"it stops with {describe(error)}{where}"


def _report(what: str, name: str, scenario: dict[str, Any], yours: Run, reference: Run) -> None:
    """Show where two runs differ, as text, and as a figure if they are small enough."""
    found = compare.departure(yours, reference)
    if found is None:  # it stopped after its last step
        return
    print(what, f"{name} and the reference differ from step {found.index} on")
    print(compare.show(scenario, yours, reference, found))
    if isinstance(yours, Trace) and isinstance(reference, Trace):
        with contextlib.suppress(ValueError):  # too many requests, or contradictory events
            axes = figures.compare(yours, reference)
            show(axes, f"{name} above the reference, from step {found.index} on")


def in_milliseconds(trace: Trace, cost: CostModel | None = None) -> Trace:
    """Return the run with the times that a cost model gives its steps."""
    price = (cost or CostModel()).clock(backend_of(trace))
    steps, now = [], 0.0
    for record in trace.steps:
        events = [replace(event, t=now) if isinstance(event, Queued) else event for event in record.events]
        end = now + price(record)
        steps.append(replace(record, t=now, t_end=end, events=events))
        now = end
    return Trace(replace(trace.header, unit="ms"), steps, trace.end)
