"""The comparison of two runs: the first step in which a trace departs from the reference, side by side.

Decisions (order included), counts, events and tokens are compared; times and block ids are not.
Logs of operations (labs 05 and 06) are compared whole.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from labs.kit.toys.driver import OpLog, OpStep, Scenario
from mini_engine.trace import End, Event, Finished, StepTrace, Trace, decisions, replay

Run = Trace | OpLog
Runs = Sequence[tuple[Scenario, Run]]  # of one test
Step = StepTrace | OpStep

BAR = 24


@dataclass(frozen=True)
class Departure:
    """The first step in which two traces differ; a step is None if that run had already ended."""

    index: int
    yours: Step | None
    reference: Step | None


def comparable(step: Step) -> dict[str, Any]:
    """Return the part of a record in which two correct implementations must agree."""
    return step.to_json() if isinstance(step, OpStep) else decisions(step)


def same(yours: Any, model: Any) -> bool:
    """Equal; floats up to the rounding of another order of summation."""
    if yours is model:
        return True
    if isinstance(yours, dict) and isinstance(model, dict):
        return yours.keys() == model.keys() and all(same(yours[key], model[key]) for key in yours)
    if isinstance(yours, list) and isinstance(model, list):
        return len(yours) == len(model) and all(map(same, yours, model))
    if isinstance(yours, float) and isinstance(model, float):
        return math.isclose(yours, model, rel_tol=1e-6, abs_tol=1e-8)
    return type(yours) is type(model) and bool(yours == model)


def departure(trace: Run, reference: Run) -> Departure | None:
    """Return the first step in which `trace` departs from the reference; None if there is none."""
    for index in range(max(len(trace.steps), len(reference.steps))):
        yours, theirs = (t.steps[index] if index < len(t.steps) else None for t in (trace, reference))
        if yours is None or theirs is None:
            return Departure(index, yours, theirs)
        mine, other = comparable(yours), comparable(theirs)
        if mine != other and not same(mine, other):
            return Departure(index, yours, theirs)
    ends = [t.end and t.end.end for t in (trace, reference)]
    return Departure(len(trace.steps), None, None) if ends[0] != ends[1] else None


def first_departing(yours: Runs, reference: Runs) -> tuple[int, Departure] | None:
    """Return the index of the first run in which a step differs, and that step."""
    for number, ((_, trace), (_, expected)) in enumerate(zip(yours, reference, strict=False)):
        found = departure(trace, expected)
        if found and found.index < max(len(trace.steps), len(expected.steps)):
            return number, found
    return None


def fingerprint(trace: Run) -> str:
    """Return a text that is equal for two runs with the same decisions and the same end."""
    # Only the type of an error: its message differs by Python, torch and platform.
    end = trace.end and [trace.end.end, (trace.end.error or "").partition(":")[0]]
    return json.dumps(_canonical([[comparable(step) for step in trace.steps], end]))


def _canonical(value: Any) -> Any:
    """Return a value that JSON can hold, whatever a learner's code returned; other objects by their type."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else str(_canonical(key)): _canonical(value[key]) for key in value
        }
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"


def show(scenario: dict[str, Any], trace: Run, reference: Run, found: Departure, columns: int = 88) -> str:
    """Return the departure as text for a terminal: both steps, with queues and budget as bars."""
    name = f" of scenario {scenario['name']!r}" if scenario.get("name") else ""
    yours, theirs = _row(trace, found.index), _row(reference, found.index)
    lines = [*_wrapped(f"step {found.index}{name} is the first that differs", columns), ""]
    rows = [(key, yours.get(key, ""), theirs.get(key, "")) for key in dict.fromkeys([*yours, *theirs])]
    return "\n".join(lines + (_beside(rows, columns) if columns >= 60 else _below(rows, columns)))


def _beside(rows: list[tuple[str, str, str]], columns: int) -> list[str]:
    most = 24 if columns >= 80 else 12
    inset = max([12, *(len(key) + 1 for key, _, _ in rows if len(key) < most)])
    width = min(36, (columns - inset - 4) // 2)
    lines = [f"{'':{inset + 2}}{'yours':{width + 2}}reference"]
    for key, left, right in rows:
        mark = " " if left == right else ">"
        if len(key) >= inset:  # too long for its column
            lines.append(f"{mark} {key}")
            key = ""
        both = zip_longest(wrap(left, width) or [""], wrap(right, width), fillvalue="")
        for number, (a, b) in enumerate(both):
            lines.append(f"{mark} {key if number == 0 else '':{inset}}{a:{width + 2}}{b}".rstrip())
    return lines


def _below(rows: list[tuple[str, str, str]], columns: int) -> list[str]:
    """One below the other, for a terminal that is too narrow for two columns."""
    lines = []
    for key, left, right in rows:
        both = [("", left)] if left == right else [("yours: ", left), ("reference: ", right)]
        lines.append(f"{' ' if left == right else '>'} {key}")
        lines += [line for name, text in both for line in _wrapped(f"    {name}{text}", columns)]
    return lines


def _wrapped(text: str, columns: int) -> list[str]:
    inset = " " * (len(text) - len(text.lstrip()) + 2)
    return wrap(text, columns, subsequent_indent=inset, break_long_words=False, break_on_hyphens=False)


def _row(trace: Run, index: int) -> dict[str, str]:
    """Return one step of one run as labelled pieces of text."""
    if index >= len(trace.steps):
        end = trace.end or End("unfinished", index)
        return {"ended": end.error or ("all requests done" if end.end == "drained" else end.end)}
    if isinstance(trace, OpLog):
        op = trace.steps[index]
        name, *arguments = op.op
        call = f"{name}({', '.join(map(str, arguments))})"
        return {"call": call} | {k: _short(v) for k, v in ({"returned": op.returned} | op.observed).items()}
    step, config = trace.steps[index], trace.header.config
    row = {
        "scheduled": _counts(step.scheduled) or "none",
        "budget": bar(step.num_batched_tokens, config["max_num_batched_tokens"]),
        "running": bar(step.num_running, config["max_num_seqs"]),
        "waiting": f"{'#' * min(step.num_waiting, BAR)} {step.num_waiting}".strip(),
        "KV in use": bar(config["num_blocks"] - step.num_free_blocks, config["num_blocks"]),
        "new tokens": _counts({i: ", ".join(map(str, t)) for i, t in step.new_tokens.items()}) or "none",
        "events": ", ".join(map(_event, step.events)) or "none",
    }
    for key, names in _queues(trace, index).items():
        row[key] += f" {names}".rstrip()
    return row


def _queues(trace: Trace, index: int) -> dict[str, str]:
    """Return the running and the waiting requests of a step, folded from the records."""
    try:
        for record, views in replay(trace):
            if record is trace.steps[index]:
                there = [v for v in sorted(views.values(), key=lambda v: v.arrival) if v.state != "finished"]
                return {
                    "running": " ".join(view.request_id for view in there if view.running),
                    "waiting": " ".join(view.request_id for view in there if not view.running),
                }
    except ValueError:  # the events of a wrong run may contradict each other
        pass
    return {}


def bar(value: int, limit: int) -> str:
    """Return value/limit as a text bar, marked with OVER above the limit."""
    filled = min(BAR - 8, round((BAR - 8) * value / limit)) if limit else 0
    over = " OVER" if value > limit else ""
    return f"[{'#' * filled}{'.' * (BAR - 8 - filled)}] {value}/{limit}{over}"


def _counts(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in mapping.items())


def _event(event: Event) -> str:
    what = {"QUEUED": "queued", "SCHEDULED": "admitted", "PREEMPTED": "preempted", "FINISHED": "finished"}
    why = f" ({event.reason})" if isinstance(event, Finished) else ""
    return f"{event.id} {what[event.type]}{why}"


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."
