"""A run as text: aligned tables with a row for each step, and the timeline as letters."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from labs.kit.learner.screen import columns
from mini_engine.show import figures
from mini_engine.show.figures import counted, style
from mini_engine.trace import Finished, Preempted, Scheduled, StepTrace, Trace

WIDTH = 104  # characters of a notebook's line
MARKS = {
    style.WAITING: ".",
    style.PREFILL: "P",
    style.DECODE: "d",
    style.IDLE: "i",
    style.PREEMPTED: "x",
    style.FINISHED: " ",
    None: " ",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as aligned text, numbers to the right; the keys of the first row are the heading."""
    cells = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        column = [name, *map(cell, values)]
        width = max(map(len, column))
        if all(isinstance(value, int | float | None) for value in values):
            column = [text.rjust(width) for text in column]
        cells.append([column[0], "-" * width, *column[1:]])
    return "\n".join(columns([*zip(*cells, strict=True)]))


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def steps_table(trace: Trace, first: int = 0, last: int | None = None) -> str:
    """Return a row for each step: tokens of each request, budget, queue, free blocks, decisions."""
    config, data = trace.header.config, figures.timeline_data(trace)
    queues = list(zip(data["ids"], data["states"], strict=True))
    if config["policy"] == "priority":
        queues.sort(key=lambda row: data["priorities"][row[0]])
    rows = []
    for index, record in enumerate(trace.steps[first : None if last is None else last + 1], first):
        waiting = [rid for rid, states in queues if states[index] in (style.WAITING, style.PREEMPTED)]
        row = {
            "step": record.step,
            "computed": ", ".join(f"{rid} {n}" for rid, n in record.scheduled.items()) or "-",
            "budget": f"{record.num_batched_tokens}/{config['max_num_batched_tokens']}",
            "waiting": " ".join(waiting) or "-",
            "free": record.num_free_blocks,
            "what happened": "; ".join(happenings(record)) or "-",
        }
        rows.append(row)
    lines = table(rows).splitlines()
    start = lines[1].rindex(" ") + 1
    return "\n".join(_folded(line, start) for line in lines)


def _folded(line: str, start: int) -> str:
    """Wrap the last column of a line, from `start` on, where the line is too long."""
    if not line[start:].strip("-"):
        return line[:WIDTH]
    phrases = "; ".join(phrase.replace(" ", "\0") for phrase in line[start:].split("; "))
    rows = wrap(phrases, max(20, WIDTH - start), break_long_words=False, break_on_hyphens=False)
    return line[:start] + f"\n{' ' * start}".join(rows).replace("\0", " ")


def happenings(record: StepTrace) -> list[str]:
    """Return the decisions of one step in words: admitted, preempted, finished, and why a request waits."""
    words = []
    for event in record.events:
        if isinstance(event, Scheduled):
            cached = event.num_cached_tokens
            words.append(f"{event.id} admitted" + (f", {counted(cached, 'token')} cached" if cached else ""))
        elif isinstance(event, Preempted):
            words.append(f"{event.id} preempted: needed {event.needs}, free {event.free}")
        elif isinstance(event, Finished):
            words.append(f"{event.id} finished ({event.reason})")
    why = record.blocked
    reasons = {
        "preempted": "this step makes room, admits none",
        "slots": "no slot",
        "budget": "no budget",
        "memory": f"needs {counted(why.needs or 0, 'block')}, {why.free} free",
    }
    if why.reason in reasons:
        words.append(f"{why.id} waits: {reasons[why.reason]}")
    return words


def timeline_text(trace: Trace) -> str:
    """Return the timeline as letters, a row for each request and a column for each step."""
    data = figures.timeline_data(trace)
    width = max(4, max(map(len, data["ids"])))
    tens = "".join(f"{step:<10}" for step in data["steps"][::10])
    lines = [f"{'step':{width}}  {tens.rstrip()}"]
    for rid, states in zip(data["ids"], data["states"], strict=True):
        lines.append(f"{rid:{width}}  {''.join(MARKS[state] for state in states)}".rstrip())
    drawn = {state for states in data["states"] for state in states}
    legend = (f"{mark} {state}" for state, mark in MARKS.items() if state in drawn and mark.strip())
    return "\n".join([*lines, "      " + "   ".join(legend)])
