"""lab-01: how the budget and the slots fill, and one call of schedule_step."""

from labs.kit.author.pictures.sheet import Sheet, made_up, steps_of
from mini_engine.trace import RequestView, StepTrace

BUDGET, SLOTS = 10, 4


def run() -> list[tuple[StepTrace, dict[str, RequestView]]]:
    config = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SLOTS}
    requests = [("d0", 3, 9, 0), ("d1", 2, 5, 0), ("a", 5, 6, 1), ("b", 8, 6, 1), ("c", 4, 5, 1)]
    return steps_of(made_up("lab-01", requests, **config))


def budget(sheet: Sheet) -> None:
    """Six steps under a budget of 10 tokens and 4 slots; c gets in when d1 is done."""
    left, slots, wait = 62, 386, 550
    for x, words in ((left, f"token budget: {BUDGET} a step"), (slots, f"slots: {SLOTS}"), (wait, "waiting")):
        sheet.title(x, 22, words)
    before: list[str] = []
    for row, (record, views) in enumerate(run()[1:7]):
        y = 42 + row * 40
        sheet.note(14, y + 14, f"step {record.step}")
        tokens = [(name, views[name].state) for name, n in record.scheduled.items() for _ in range(n)]
        sheet.cells(left, y, 30, 28, tokens + [("", "unused")] * (BUDGET - len(tokens)))
        running = [name for name, view in views.items() if view.running]
        taken = [(name, "plain") for name in running]
        sheet.cells(slots - 2, y, 35, 28, taken + [("", "unused")] * (SLOTS - len(running)), gap=4)
        waiting = [view for view in views.values() if view.state == "waiting"]
        for view in waiting:
            sheet.cell(wait, y, 50, 28, f"{view.request_id} ({view.num_new_tokens})", "waiting")
            sheet.note(wait + 58, y + 14, "no slot is free" if len(running) == SLOTS else "no budget is left")
        if not waiting and (done := [name for name in before if name not in running]):
            sheet.note(wait, y + 14, f"{done[0]} is done, {running[-1]} gets in")
        before = running
    sheet.legend(left, 302, ("prefill", "a token of a prompt"), ("decode", "a decode"), ("empty", "not used"))


def turn(sheet: Sheet) -> None:
    """One call of schedule_step: two running decodes, then the waiting requests from the front."""
    (_, before), (record, views) = run()[:2]
    left, cell, y = 100, 57, 158
    sheet.title(16, 62, "before")
    old = [view for name, view in views.items() if name in before]
    new = [view for name, view in views.items() if name not in before]
    sources = queue(sheet, left, 14, "running", old, "decode")
    sources |= queue(sheet, 328, 14, "waiting, a is the front", new, "waiting")
    sheet.title(16, y + 17, "budget")
    x = left
    for name, num_tokens in record.scheduled.items():
        sheet.cells(x, y, cell, 34, [(name, views[name].state)] * num_tokens)
        sheet.arrow((sources[name], 86), (x + num_tokens * cell / 2, y - 4))
        x += num_tokens * cell
    two = left + cell * len(old)
    sheet.brace(left + 2, two - 4, y + 46, "1. running")
    sheet.brace(two + 4, x - 2, y + 46, "2. waiting, from the front, while there is budget and a slot")
    sheet.title(16, 294, "after")
    queue(sheet, left, 246, "running", [view for view in views.values() if view.running])
    queue(sheet, 500, 246, "waiting", [v for v in views.values() if v.state == "waiting"], "waiting")
    sheet.note(left, 346, "returned")
    returned = ", ".join(f'"{name}": {num_tokens}' for name, num_tokens in record.scheduled.items())
    sheet.code(left + 70, 346, f"{{{returned}}}")


def queue(
    sheet: Sheet, x: float, y: float, title: str, views: list[RequestView], kind: str = ""
) -> dict[str, float]:
    """Draw a row of requests, each with its tokens left, or without a kind with what it gets.

    Return the middle of each.
    """
    sheet.note(x, y + 10, title)
    middles = {}
    for place, view in enumerate(views):
        gets, needs = view.num_scheduled, view.num_new_tokens
        words = f"{needs} left" if kind else f"gets {gets}" if gets == needs else f"{gets} of {needs}"
        text = f"{view.request_id}\n{words}"
        sheet.cell(x + place * 66, y + 26, 60, 42, text, kind or view.state, va="center")
        middles[view.request_id] = x + place * 66 + 30
    return middles


PICTURES = {budget: 324, turn: 374}  # and their heights
