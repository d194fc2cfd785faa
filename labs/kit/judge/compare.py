"""Where two runs part: the first step in which a trace departs from the reference, side by side.

Decisions are compared (order included), and counts, events and tokens; never times or block ids.
Logs of operations (labs 05 and 06) are compared whole.
"""

import json
from dataclasses import dataclass

from mini_engine.trace import Trace, decisions, replay

BAR = 24


@dataclass(frozen=True)
class Departure:
    """The first step in which two traces differ; a row is None where a run had ended already."""

    index: int
    yours: dict | None
    reference: dict | None


def comparable(record: dict) -> dict:
    """The part of a record in which two correct implementations must agree."""
    return record if "op" in record else decisions(record)


def departure(trace: Trace, reference: Trace) -> Departure | None:
    """The first step in which `trace` departs from the reference; None if it never does."""
    for index in range(max(len(trace.steps), len(reference.steps))):
        rows = [t.steps[index] if index < len(t.steps) else None for t in (trace, reference)]
        if None in rows or comparable(rows[0]) != comparable(rows[1]):
            return Departure(index, *rows)
    ends = [t.end and t.end["end"] for t in (trace, reference)]
    return Departure(len(trace.steps), None, None) if ends[0] != ends[1] else None


def fingerprint(trace: Trace) -> str:
    """Equal for two runs that made the same decisions and ended alike."""
    end = {key: (trace.end or {}).get(key) for key in ("end", "error")}
    return json.dumps([[comparable(step) for step in trace.steps], end], default=str)


def show(scenario: dict, trace: Trace, reference: Trace, found: Departure, columns: int = 88) -> str:
    """The departure as text for a terminal: both rows, with queues and budget as bars."""
    width = max(20, min(36, (columns - 16) // 2))
    name = f" of scenario {scenario['name']!r}" if scenario.get("name") else ""
    yours, theirs = _row(trace, found.index), _row(reference, found.index)
    lines = [f"step {found.index}{name} is the first that differs", ""]
    lines.append(f"{'':14}{'yours':{width + 2}}reference")
    for key in dict.fromkeys([*yours, *theirs]):
        left, right = yours.get(key, ""), theirs.get(key, "")
        mark = " " if left == right else ">"
        for number, (a, b) in enumerate(_pair(left, right, width)):
            lines.append(f"{mark} {key if number == 0 else '':12}{a:{width + 2}}{b}".rstrip())
    return "\n".join(lines)


def _row(trace: Trace, index: int) -> dict[str, str]:
    """One step of one run, as labelled pieces of text."""
    if index >= len(trace.steps):
        end = trace.end or {"end": "unfinished"}
        how = end.get("error") or ("all requests done" if end["end"] == "drained" else end["end"])
        return {"ended": how}
    step = trace.steps[index]
    if "op" in step:
        name, *arguments = step["op"]
        call = f"{name}({', '.join(map(str, arguments))})"
        return {"call": call} | {k: _short(v) for k, v in step.items() if k not in ("op", "step")}
    config = trace.header["config"]
    row = {
        "scheduled": _counts(step["scheduled"]) or "nobody",
        "budget": bar(step["num_batched_tokens"], config["max_num_batched_tokens"]),
        "running": bar(step["num_running"], config["max_num_seqs"]),
        "waiting": f"{'#' * min(step['num_waiting'], BAR)} {step['num_waiting']}".strip(),
        "KV in use": bar(config["num_blocks"] - step["num_free_blocks"], config["num_blocks"]),
        "new tokens": _counts(step["new_tokens"]) or "none",
        "events": ", ".join(_event(event) for event in step["events"]) or "none",
    }
    for key, names in _queues(trace, index).items():
        row[key] += f" {names}".rstrip()
    return row


def _queues(trace: Trace, index: int) -> dict[str, str]:
    """Who is running and who waits: told by the record itself, or folded from the events."""
    if "queues" in trace.steps[index]:
        return {key: " ".join(names) for key, names in trace.steps[index]["queues"].items()}
    try:
        for record, views in replay(trace):
            if record["step"] == trace.steps[index]["step"]:
                by_arrival = sorted(views.values(), key=lambda view: view.arrival)
                return {
                    "running": " ".join(v.request_id for v in by_arrival if v.state in ("prefill", "decode")),
                    "waiting": " ".join(
                        v.request_id for v in by_arrival if v.state in ("waiting", "preempted")
                    ),
                }
    except (KeyError, AttributeError):  # a run so wrong that its events do not add up
        pass
    return {}


def bar(value: int, limit: int) -> str:
    """value/limit as a text bar; what is over the limit is marked by `!`."""
    filled = min(BAR - 8, round((BAR - 8) * value / limit)) if limit else 0
    over = " OVER" if value > limit else ""
    return f"[{'#' * filled}{'.' * (BAR - 8 - filled)}] {value}/{limit}{over}"


def _counts(mapping: dict) -> str:
    return ", ".join(f"{key}: {value}" for key, value in mapping.items())


def _event(event: dict) -> str:
    what = {
        "QUEUED": "queued",
        "SCHEDULED": "admitted",
        "PREEMPTED": "preempted",
        "FINISHED": f"finished ({event.get('reason')})",
    }
    return f"{event['id']} {what.get(event['type'], event['type'])}"


def _short(value) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."


def _pair(left: str, right: str, width: int):
    """Two texts wrapped to columns, padded to the same number of lines."""
    from textwrap import wrap

    a, b = (wrap(text, width) or [""] for text in (left, right))
    height = max(len(a), len(b))
    return zip(a + [""] * (height - len(a)), b + [""] * (height - len(b)), strict=True)
