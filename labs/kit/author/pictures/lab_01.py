"""lab-01: how the budget and the slots fill, and one call of schedule_step."""

from labs.kit.author.pictures.sheet import INK, SOFT, Sheet, trace_of
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
    """Six steps of a run under a budget of 10 tokens and 4 slots: a row a step, with the tokens that each
    request takes of the budget, the slots that are taken, and the requests that still wait."""
    _, steps = run()
    sheet = Sheet(330)
    left, cell, slots, wait = 64, 32, 420, 590
    sheet.title(left, 22, f"token budget: {BUDGET} a step")
    sheet.title(slots, 22, f"slots: {SLOTS}")
    sheet.title(wait, 22, "waiting")
    for row, (record, views) in enumerate(steps[1:7]):
        y = 44 + row * 40
        sheet.note(14, y + 14, f"step {record.step}")
        x = left
        for name, num_tokens in record.scheduled.items():
            for _ in range(num_tokens):
                sheet.cell(x + 1, y, cell - 2, 28, name, views[name].state)
                x += cell
        while x < left + BUDGET * cell:
            sheet.cell(x + 1, y, cell - 2, 28, "", "empty", dashed=True)
            x += cell
        running = [name for name, view in views.items() if view.running]
        for slot in range(SLOTS):
            name = running[slot] if slot < len(running) else ""
            sheet.cell(slots + slot * 37, y, 33, 28, name, "plain" if name else "empty", dashed=not name)
        waiting = [view for view in views.values() if view.state == "waiting"]
        for place, view in enumerate(waiting):
            words = f"{view.request_id} ({view.num_new_tokens})"
            sheet.cell(wait + place * 50, y, 46, 28, words, "waiting")
    sheet.legend(left, 308, ("prefill", "prompt"), ("decode", "decode: one token"), ("empty", "not used"))
    return sheet


def turn() -> Sheet:
    """One call of schedule_step: two running decodes take a token each of the budget of 10, then the
    waiting requests come in from the front: a with 5 tokens, b with 3 of its 8; c stays in the queue."""
    _, steps = run()
    (record, views), (_, before) = steps[1], steps[0]
    sheet = Sheet(350)
    new = [view for view in views.values() if view.request_id not in before]
    old = [view for view in views.values() if view.request_id in before]
    sheet.title(20, 24, "before")
    queue(sheet, 100, 10, "running", [(view.request_id, "decode", view.num_new_tokens) for view in old])
    queue(sheet, 400, 10, "waiting", [(v.request_id, "waiting", v.num_prompt_tokens) for v in new])
    x, cell, y = 100, 55, 150
    sheet.title(20, y + 16, "budget")
    for name, num_tokens in record.scheduled.items():
        start = x
        for _ in range(num_tokens):
            sheet.cell(x + 1, y, cell - 2, 32, name, views[name].state)
            x += cell
        if name in ("d0", "a", "b"):
            source = {"d0": 150, "a": 440, "b": 505}[name]
            sheet.arrow((source, 78), ((start + x) / 2, y - 4))
    sheet.brace(100, 100 + 2 * cell - 2, y + 42, "1. the running, in order")
    sheet.brace(
        100 + 2 * cell,
        100 + 10 * cell,
        y + 42,
        "2. the waiting, from the front, while there is budget and a slot",
    )
    sheet.title(20, 270, "after")
    running = [v for v in views.values() if v.running]
    queue(
        sheet,
        100,
        256,
        "running",
        [
            (v.request_id, "decode" if v.state == "decode" else "prefill", v.num_new_tokens - v.num_scheduled)
            for v in running
        ],
    )
    waiting = [v for v in views.values() if v.state == "waiting"]
    queue(sheet, 480, 256, "waiting", [(v.request_id, "waiting", v.num_new_tokens) for v in waiting])
    return sheet


def queue(sheet: Sheet, x: float, y: float, name: str, entries: list[tuple[str, str, int]]) -> None:
    sheet.note(x, y + 12, name)
    for place, (request_id, kind, left) in enumerate(entries):
        sheet.cell(x + place * 65, y + 26, 58, 40, f"{request_id}\n{left} left", kind, va="center")


PICTURES = (budget, turn)
