"""lab-01: how the budget and the slots fill, and one call of schedule_step."""

from labs.kit.author.pictures.sheet import Sheet, trace_of
from mini_engine.trace import Fold, RequestView, StepTrace, Trace
from mini_engine.trace.fold import copy_view

BUDGET, SLOTS = 10, 4
Step = tuple[StepTrace, dict[str, RequestView]]


def run() -> tuple[Trace, list[Step]]:
    config = {
        "max_num_batched_tokens": BUDGET, "max_num_seqs": SLOTS, "long_prefill_token_threshold": 0,
        "num_blocks": 64, "watermark": 0,
    }  # fmt: skip
    requests = [("d0", 3, 9, 0), ("d1", 2, 5, 0), ("a", 5, 6, 1), ("b", 8, 6, 1), ("c", 4, 5, 1)]
    trace = trace_of("lab-01", config, requests)
    fold = Fold(trace.header)
    steps = []
    for record in trace.steps:
        views = {name: copy_view(view) for name, view in fold.add(record).items()}
        steps.append((record, views))
    return trace, steps


def budget() -> Sheet:
    """Six steps of a run under a budget of 10 tokens and 4 slots, a row a step: the tokens that each
    request takes of the budget, the slots that are taken, and the request that waits, c, which gets in
    when d1 is done."""
    _, steps = run()
    sheet = Sheet(324)
    left, cell, slots, wait = 62, 30, 386, 550
    sheet.title(left, 22, f"token budget: {BUDGET} a step")
    sheet.title(slots, 22, f"slots: {SLOTS}")
    sheet.title(wait, 22, "waiting")
    before: list[str] = []
    for row, (record, views) in enumerate(steps[1:7]):
        y = 42 + row * 40
        sheet.note(14, y + 14, f"step {record.step}")
        names = [name for name, num_tokens in record.scheduled.items() for _ in range(num_tokens)]
        for place in range(BUDGET):
            name = names[place] if place < len(names) else ""
            kind = views[name].state if name else "empty"
            sheet.cell(left + place * cell + 1, y, cell - 2, 28, name, kind, dashed=not name)
        running = [name for name, view in views.items() if view.running]
        for slot in range(SLOTS):
            name = running[slot] if slot < len(running) else ""
            sheet.cell(slots + slot * 35, y, 31, 28, name, "plain" if name else "empty", dashed=not name)
        waiting = [view for view in views.values() if view.state == "waiting"]
        for view in waiting:
            sheet.cell(wait, y, 50, 28, f"{view.request_id} ({view.num_new_tokens})", "waiting")
            sheet.note(wait + 58, y + 14, "no slot is free" if len(running) == SLOTS else "no budget is left")
        if not waiting and (left_now := [name for name in before if name not in running]):
            sheet.note(wait, y + 14, f"{left_now[0]} is done, {running[-1]} gets in")
        before = running
    sheet.legend(left, 302, ("prefill", "a token of a prompt"), ("decode", "a decode"), ("empty", "not used"))
    return sheet


def turn() -> Sheet:
    """One call of schedule_step: two running decodes take a token each of the budget of 10, then the
    waiting requests come in from the front: a with its 5 tokens, b with 3 of its 8; c stays in the
    queue."""
    _, steps = run()
    (record, views), (_, before) = steps[1], steps[0]
    sheet = Sheet(374)
    new = [view for view in views.values() if view.request_id not in before]
    old = [view for view in views.values() if view.request_id in before]
    left, cell, y = 100, 57, 158
    sheet.title(16, 62, "before")
    entries = [(view.request_id, f"{view.num_new_tokens} left", "decode") for view in old]
    sources = queue(sheet, left, 14, "running", entries)
    entries = [(view.request_id, f"{view.num_new_tokens} left", "waiting") for view in new]
    sources |= queue(sheet, 328, 14, "waiting, a is the front", entries)
    sheet.title(16, y + 17, "budget")
    x = left
    for name, num_tokens in record.scheduled.items():
        for place in range(num_tokens):
            sheet.cell(x + place * cell + 1, y, cell - 2, 34, name, views[name].state)
        sheet.arrow((sources[name], 86), (x + num_tokens * cell / 2, y - 4))
        x += num_tokens * cell
    two = left + cell * len(old)
    sheet.brace(left + 2, two - 4, y + 46, "1. running")
    sheet.brace(two + 4, x - 2, y + 46, "2. waiting, from the front, while there is budget and a slot")
    sheet.title(16, 294, "after")
    entries = []
    for view in views.values():
        if view.running:
            rest = view.num_new_tokens - view.num_scheduled
            words = (
                f"gets {view.num_scheduled}" if not rest else f"{view.num_scheduled} of {view.num_new_tokens}"
            )
            entries.append((view.request_id, words, view.state))
    queue(sheet, left, 246, "running", entries)
    entries = [
        (v.request_id, f"{v.num_new_tokens} left", "waiting") for v in views.values() if v.state == "waiting"
    ]
    queue(sheet, 500, 246, "waiting", entries)
    sheet.text(left, 346, "returned", colour="#595959")
    returned = ", ".join(f'"{name}": {num_tokens}' for name, num_tokens in record.scheduled.items())
    sheet.text(left + 70, 346, f"{{{returned}}}", family="monospace", size=10)
    return sheet


def queue(
    sheet: Sheet, x: float, y: float, name: str, entries: list[tuple[str, str, str]]
) -> dict[str, float]:
    """A row of requests, each with words below its name; where the middle of each one is."""
    sheet.note(x, y + 10, name)
    for place, (request_id, words, kind) in enumerate(entries):
        sheet.cell(x + place * 66, y + 26, 60, 42, f"{request_id}\n{words}", kind, va="center")
    return {request_id: x + place * 66 + 30 for place, (request_id, _, _) in enumerate(entries)}


PICTURES = (budget, turn)
