"""lab-03: the states of a request, and the README's run by hand."""

from collections.abc import Iterator

from labs.kit.author.pictures.sheet import LINE, Sheet, run_of, scenario_of
from mini_engine.show.figures import style, timeline_data
from mini_engine.trace import Trace, replay

STATES = tuple((state, state) for state in ("prefill", "decode", "preempted", "waiting"))
RIGHT = 688  # where a row of steps ends


def run() -> Trace:
    return run_of("lab-03", scenario_of("lab-03", "two in a tight pool"))


def row_of(trace: Trace, name: str) -> list[tuple[str, str]]:
    """Return a request's cells: in each step the tokens that it computes, and its state."""
    data = timeline_data(trace)
    row = data["ids"].index(name)
    cells = zip(data["tokens"][row], data["states"][row], strict=True)
    return [(str(tokens or ""), state or "finished") for tokens, state in cells]


def steps_with(trace: Trace, name: str, event_type: str) -> str:
    """Return the steps in which an event happened to a request, in words."""
    steps = [str(r.step) for r in trace.steps for e in r.events if (e.id, e.type) == (name, event_type)]
    return f"step{'s' * (len(steps) > 1)} {' and '.join(steps)}"


def counters(trace: Trace, name: str) -> Iterator[tuple[int, int]]:
    """Yield num_computed_tokens and num_tokens of a request at the end of each step."""
    for record, views in replay(trace):
        view, sampled = views[name], len(record.new_tokens.get(name, ()))
        known = view.num_prompt_tokens + view.num_output_tokens + sampled
        yield view.num_computed_tokens + view.num_scheduled, known


def life(sheet: Sheet) -> None:
    """The states of a request, and below them r0 of the run by hand with its two counters."""
    trace = run()
    draw_states(sheet, trace)
    left, y, width = 172, 232, (RIGHT - 172) / len(trace.steps)
    sheet.title(14, y - 20, "r0 of the run by hand")
    names = {"tokens computed": 17, "num_computed_tokens": 49, "num_tokens": 70, "step": 94}
    for words, line in names.items():
        sheet.note(left - 10, y + line, words, ha="right")
    sheet.cells(left, y, width, 34, row_of(trace, "r0"))
    for column, (computed, known) in enumerate(counters(trace, "r0")):
        x = left + (column + 0.5) * width
        sheet.text(x, y + 49, str(computed), ha="center")
        sheet.text(x, y + 70, str(known), ha="center")
        sheet.label(x, y + 94, str(trace.steps[column].step))
    sheet.note(14, y + 118, "both counters as they are when the step is over")
    sheet.legend(14, y + 142, *STATES)


def draw_states(sheet: Sheet, trace: Trace) -> None:
    y, middle = 66, 91
    for name, x, kind in (("waiting", 75, "waiting"), ("running", 315, "decode"), ("finished", 555, "plain")):
        sheet.cell(x, y, 110, 50, name, kind, size=11, weight="bold", radius=8)
    sheet.arrow((14, middle), (73, middle))
    sheet.text(40, middle - 14, "add", ha="center")
    for x, words, event in ((250, "schedule_step", "SCHEDULED"), (490, "update", "FINISHED")):
        sheet.arrow((x - 63, middle - 10), (x + 63, middle - 10))
        sheet.text(x, middle - 25, words, ha="center")
        sheet.label(x, middle - 42, f"r0: {steps_with(trace, 'r0', event)}")
    sheet.label(490, middle + 8, "stop or length")
    sheet.arrow((313, middle + 12), (187, middle + 12), colour=style.VERMILLION)
    sheet.text(250, middle + 27, "preempt", ha="center", colour=style.VERMILLION)
    sheet.label(250, middle + 44, f"r0: {steps_with(trace, 'r0', 'PREEMPTED')}")
    sheet.label(250, middle + 70, "outputs and arrival stay,\nnum_computed_tokens = 0", va="center")
    sheet.arrow((610, 30), (610, 63), dashed=True)
    sheet.text(610, 18, "abort, from anywhere", ha="center")


def by_hand(sheet: Sheet) -> None:
    """Two prompts of 10 tokens in a pool of 22 slots: what each step computes, and how the pool fills."""
    trace = run()
    left, width = 112, (RIGHT - 112) / len(trace.steps)
    sheet.title(14, 22, "tokens computed in each step")
    for top, name in ((42, "r1"), (78, "r0")):
        priority = timeline_data(trace)["priorities"][name]
        sheet.text(left - 10, top + 15, f"{name}, priority {priority}", ha="right")
        for column, cell in enumerate(row_of(trace, name)):
            if cell[1] != "finished":
                sheet.cells(left + column * width, top, width, 30, [cell])
    sheet.title(14, 136, "the pool: 22 slots, and whose they are")
    base, slot, num_slots = 342, 7.4, trace.header.config["num_blocks"]
    top = base - num_slots * slot
    sheet.note(left - 10, top - 10, "free", ha="right")
    sheet.note(left - 10, base + 13, "step", ha="right")
    for column, (record, views) in enumerate(replay(trace)):
        x, y = left + column * width, float(base)
        sheet.box(x + 2, top, width - 4, num_slots * slot, edge=LINE, radius=0)
        for name, face in (("r1", "#E3B0CB"), ("r0", style.LIGHT_GREEN)):
            if held := len(views[name].blocks):
                y -= held * slot
                words, size = f"{name}\n{held}", (width - 4, held * slot)
                sheet.box(x + 2, y, *size, words, face=face, edge=LINE, radius=0, va="center")
        sheet.label(x + width / 2, base + 13, str(record.step))
        sheet.label(x + width / 2, top - 10, str(record.num_free_blocks))
    for line, (event, words) in enumerate((
        ("PREEMPTED", "both need a slot and one is free: r0, the last in order, is preempted"),
        ("SCHEDULED", "r1 is done, r0 is back: its 10 + 1 tokens in one chunk"),
        ("FINISHED", "r0 ends with 10 + 10 - 1 = 19 slots: its last token is never computed"),
    )):  # fmt: skip
        last = steps_with(trace, "r0", event).split()[-1]
        sheet.text(left, 378 + line * 19, f"step {last}", weight="bold")
        sheet.note(left + 60, 378 + line * 19, words)
    sheet.legend(left, 440, *STATES)


PICTURES = {life: 392, by_hand: 456}  # and their heights
