"""lab-03: a request's life, and the README's run by hand."""

from typing import Any

from labs.kit.author.pictures.sheet import LOOKS, SOFT, Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style, timeline_data
from mini_engine.trace import Finished, Preempted, Scheduled, Trace, replay

POOL = {"r0": style.LIGHT_ORANGE, "r1": style.LIGHT_BLUE}


def run() -> Trace:
    scenarios = loading.load("lab-03", "scenarios")
    scenario = next(s for s in scenarios.SCENARIOS if s["name"] == "two in a tight pool")
    trace: Trace = scenarios.run(solution("lab-03"), scenario)
    return trace


def life() -> Sheet:
    """A request is waiting, running or finished. schedule moves it from waiting to running, preempt back,
    with its outputs kept and num_computed_tokens 0; a stop or its length ends it. Below it one that was
    preempted: its states step by step."""
    sheet = Sheet(330)
    trace = run()
    moves: dict[type, list[int]] = {}
    for record in trace.steps:
        for event in record.events:
            if event.id == "r0":
                moves.setdefault(type(event), []).append(record.step)
    boxes = {"waiting": 130, "running": 350, "finished": 580}
    for name, x in boxes.items():
        kind = {"waiting": "waiting", "running": "decode", "finished": "plain"}[name]
        sheet.cell(x - 55, 60, 110, 50, name, kind, size=11, weight="bold", radius=8)
    sheet.arrow((20, 85), (72, 85))
    sheet.note(14, 68, "add")
    sheet.arrow((186, 75), (294, 75))
    sheet.note(240, 62, "schedule_step", ha="center")
    sheet.arrow((294, 96), (186, 96), colour=style.VERMILLION)
    sheet.note(240, 112, "preempt", ha="center", colour=style.VERMILLION)
    sheet.note(240, 140, "outputs and arrival stay,\nnum_computed_tokens = 0", ha="center", va="center")
    sheet.arrow((406, 85), (524, 85))
    sheet.note(465, 70, "update: stop, length", ha="center")
    sheet.arrow((130, 58), (580, 58), bend=-0.16, dashed=True)
    sheet.note(350, 14, "abort: from anywhere", ha="center")
    sheet.title(20, 196, "r0 of the run by hand")
    data = timeline_data(trace)
    row = data["ids"].index("r0")
    x, width = 20, 660 / len(data["steps"])
    for column, (state, tokens) in enumerate(zip(data["states"][row], data["tokens"][row], strict=True)):
        kind = {None: "plain", "finished": "plain"}.get(state, state)
        sheet.cell(x + column * width + 1, 215, width - 2, 34, str(tokens or ""), kind)
        sheet.note(x + (column + 0.5) * width, 262, str(data["steps"][column]), ha="center")
    sheet.note(20, 280, "step")
    sheet.legend(
        20,
        308,
        ("prefill", "prefill, with its tokens"),
        ("decode", "decode"),
        ("preempted", "preempted"),
        ("waiting", "waiting"),
    )
    return sheet


def by_hand() -> Sheet:
    """Two prompts of 10 tokens in a pool of 22 slots, step by step: what each computes, and how the pool
    fills. In step 2 both need a slot, one is free, r0 is preempted; in step 5 it is back and computes its
    10 + 1 tokens in one chunk."""
    trace = run()
    data = timeline_data(trace)
    sheet = Sheet(400)
    left, width = 76, 604 / len(data["steps"])
    for place, name in enumerate(("r1", "r0")):
        row, y = data["ids"].index(name), 56 + place * 40
        sheet.text(
            left - 12,
            y + 15,
            f"{name}, priority {data['priorities'][name]}".replace(", priority", " p"),
            ha="right",
        )
        for column, (state, tokens) in enumerate(zip(data["states"][row], data["tokens"][row], strict=True)):
            if state not in (None, "finished"):
                sheet.cell(left + column * width + 1, y, width - 2, 30, str(tokens or ""), state)
    base, slot = 330, 8
    num_slots = trace.header.config["num_blocks"]
    for column, (record, views) in enumerate(replay(trace)):
        x, y = left + column * width, base
        sheet.box(
            x + 2,
            base - num_slots * slot,
            width - 4,
            num_slots * slot,
            face="white",
            edge="#B9B9B9",
            radius=0,
        )
        for name in ("r1", "r0"):
            held = len(views[name].blocks) if name in views else 0
            if held:
                y -= held * slot
                sheet.box(
                    x + 2,
                    y,
                    width - 4,
                    held * slot,
                    f"{name}\n{held}",
                    face=POOL[name],
                    edge="white",
                    radius=0,
                    va="center",
                )
        sheet.note(x + width / 2, base + 14, str(record.step), ha="center")
        sheet.note(x + width / 2, base - num_slots * slot - 9, str(record.num_free_blocks), ha="center")
    sheet.note(left - 12, base + 14, "step", ha="right")
    sheet.note(left - 12, base - num_slots * slot - 9, "free", ha="right")
    sheet.note(left - 12, base - num_slots * slot / 2, "pool of\n22 slots", ha="right", va="center")
    sheet.note(left, 30, "tokens computed in each step")
    sheet.legend(
        left,
        378,
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("preempted", "preempted"),
        ("waiting", "waiting"),
    )
    return sheet


PICTURES = (life, by_hand)
