"""lab-03: a request's life, and the README's run by hand."""

from typing import Any

from labs.kit.author.pictures.sheet import Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style, timeline_data
from mini_engine.trace import Trace, replay

POOL = {"r0": style.LIGHT_GREEN, "r1": "#E3B0CB"}


def run() -> Trace:
    scenarios = loading.load("lab-03", "scenarios")
    scenario = next(s for s in scenarios.SCENARIOS if s["name"] == "two in a tight pool")
    trace: Trace = scenarios.run(solution("lab-03"), scenario)
    return trace


def life() -> Sheet:
    """A request is waiting, running or finished. schedule_step moves it from waiting to running,
    preempt back, with its outputs kept and num_computed_tokens 0; update finishes it, abort from
    anywhere. Below them r0 of the run by hand: its state, num_tokens and num_computed_tokens in each
    step."""
    trace = run()
    sheet = Sheet(392)
    draw_states(sheet, moves(trace, "r0"))
    data = timeline_data(trace)
    row, left, y = data["ids"].index("r0"), 172, 232
    width = (688 - left) / len(data["steps"])
    sheet.title(14, y - 20, "r0 of the run by hand")
    known, computed = counters(trace, "r0")
    for words, line in (
        ("tokens computed", 17),
        ("num_computed_tokens", 49),
        ("num_tokens", 70),
        ("step", 94),
    ):
        sheet.note(left - 10, y + line, words, ha="right")
    for column, (state, tokens) in enumerate(zip(data["states"][row], data["tokens"][row], strict=True)):
        x = left + column * width
        sheet.cell(x + 1, y, width - 2, 34, str(tokens or ""), state)
        sheet.text(x + width / 2, y + 49, str(computed[column]), ha="center")
        sheet.text(x + width / 2, y + 70, str(known[column]), ha="center")
        sheet.note(x + width / 2, y + 94, str(data["steps"][column]), ha="center")
    sheet.note(14, y + 118, "both counters as they are when the step is over")
    sheet.legend(14, y + 142, *STATES)
    return sheet


STATES = (("prefill", "prefill"), ("decode", "decode"), ("preempted", "preempted"), ("waiting", "waiting"))


def moves(trace: Trace, name: str) -> dict[str, str]:
    """In which steps what happened to a request, by the type of the event."""
    found: dict[str, list[str]] = {}
    for record in trace.steps:
        for event in record.events:
            if event.id == name:
                found.setdefault(event.type, []).append(str(record.step))
    return {what: f"step{'s' * (len(steps) > 1)} {' and '.join(steps)}" for what, steps in found.items()}


def counters(trace: Trace, name: str) -> tuple[list[int], list[int]]:
    """num_tokens and num_computed_tokens of a request at the end of each step."""
    known, computed = [], []
    for record, views in replay(trace):
        view, said = views[name], len(record.new_tokens.get(name, ()))
        known.append(view.num_prompt_tokens + view.num_output_tokens + said)
        computed.append(view.num_computed_tokens + view.num_scheduled)
    return known, computed


def draw_states(sheet: Sheet, steps: dict[str, str]) -> None:
    y, middle = 66, 91
    for name, x, kind in (
        ("waiting", 130, "waiting"),
        ("running", 370, "decode"),
        ("finished", 610, "plain"),
    ):
        sheet.cell(x - 55, y, 110, 50, name, kind, size=11, weight="bold", radius=8)
    sheet.arrow((14, middle), (73, middle))
    sheet.text(40, middle - 14, "add", ha="center")
    for x, words, event in ((250, "schedule_step", "SCHEDULED"), (490, "update", "FINISHED")):
        sheet.arrow((x - 63, middle - 10), (x + 63, middle - 10))
        sheet.text(x, middle - 25, words, ha="center")
        sheet.note(x, middle - 42, f"r0: {steps[event]}", ha="center")
    sheet.note(490, middle + 8, "stop or length", ha="center")
    sheet.arrow((313, middle + 12), (187, middle + 12), colour=style.VERMILLION)
    sheet.text(250, middle + 27, "preempt", ha="center", colour=style.VERMILLION)
    sheet.note(250, middle + 44, f"r0: {steps['PREEMPTED']}", ha="center")
    sheet.note(
        250, middle + 70, "outputs and arrival stay,\nnum_computed_tokens = 0", ha="center", va="center"
    )
    sheet.arrow((610, 30), (610, 63), dashed=True)
    sheet.text(610, 18, "abort, from anywhere", ha="center")


def by_hand() -> Sheet:
    """Two prompts of 10 tokens in a pool of 22 slots, step by step: what each computes, and how the
    pool fills. In step 2 both need a slot, one is free, r0 is preempted; in step 5 it is back and
    computes its 10 + 1 tokens in one chunk; it ends with 19 slots."""
    trace = run()
    data = timeline_data(trace)
    sheet = Sheet(456)
    left = 112
    width = (688 - left) / len(data["steps"])
    sheet.title(14, 22, "tokens computed in each step")
    for place, name in enumerate(("r1", "r0")):
        row, top = data["ids"].index(name), 42 + place * 36
        sheet.text(left - 10, top + 15, f"{name}, priority {data['priorities'][name]}", ha="right")
        for column, (state, tokens) in enumerate(zip(data["states"][row], data["tokens"][row], strict=True)):
            if state not in (None, "finished"):
                sheet.cell(left + column * width + 1, top, width - 2, 30, str(tokens or ""), state)
    sheet.title(14, 136, "the pool: 22 slots, and whose they are")
    base, slot, num_slots = 342, 7.4, trace.header.config["num_blocks"]
    top = base - num_slots * slot
    sheet.note(left - 10, top - 10, "free", ha="right")
    sheet.note(left - 10, base + 13, "step", ha="right")
    for column, (record, views) in enumerate(replay(trace)):
        x, y = left + column * width, float(base)
        sheet.box(x + 2, top, width - 4, num_slots * slot, edge="#B9B9B9", radius=0)
        for name in ("r1", "r0"):
            if held := len(views[name].blocks):
                y -= held * slot
                look: dict[str, Any] = {"face": POOL[name], "edge": "#B9B9B9", "radius": 0, "va": "center"}
                sheet.box(x + 2, y, width - 4, held * slot, f"{name}\n{held}", **look)
        sheet.note(x + width / 2, base + 13, str(record.step), ha="center")
        sheet.note(x + width / 2, top - 10, str(record.num_free_blocks), ha="center")
    steps = moves(trace, "r0")
    back = steps["SCHEDULED"].split()[-1]
    for line, (step, words) in enumerate((
        (steps["PREEMPTED"], "both need a slot and one is free: r0, the last in order, is preempted"),
        (f"step {back}", "r1 is done, r0 is back: its 10 + 1 tokens in one chunk"),
        (steps["FINISHED"], "r0 ends with 10 + 10 - 1 = 19 slots: its last token is never computed"),
    )):  # fmt: skip
        sheet.text(left, 378 + line * 19, step, weight="bold")
        sheet.note(left + 60, 378 + line * 19, words)
    sheet.legend(left, 440, *STATES)
    return sheet


PICTURES = (life, by_hand)
