"""lab-07: one turn of the loop, and a stop string that comes in pieces."""

from typing import Any

from labs.kit.author.pictures.sheet import SOFT, Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style


def turn() -> Sheet:
    """One turn of the engine with what goes from part to part: schedule decides, forward computes all rows in
    one pass, sample chooses a token for each row that ends its sequence, update takes it back and lets the
    finished go, collect hands out a Delta a token; then the circle begins again."""
    scenarios = loading.load("lab-07", "scenarios")
    scenario = next(s for s in scenarios.SCENARIOS if s["name"] == "a long prompt beside a chat")
    played = scenarios.play(solution("lab-07"), scenario)
    number = next(i for i, record in enumerate(played.trace.steps) if len(record.scheduled) == 2)
    record, deltas = played.trace.steps[number], played.turns[number]
    sheet = Sheet(400)
    scheduled = ", ".join(f"{name}: {n}" for name, n in record.scheduled.items())
    said = ", ".join(f"{name}: {ids}" for name, ids in record.new_tokens.items())
    given = ", ".join(f"Delta({delta.request_id}, {delta.token_ids})" for delta in deltas)
    steps = (
        ("schedule()", "decide", f"scheduled  {{{scheduled}}}"),
        ("forward(rows)", "compute", f"logits  one row: {', '.join(record.new_tokens)}"),
        ("sample(logits, ending)", "choose", f"sampled  {{{said}}}"),
        ("update(scheduled, sampled, stopped)", "take back", "counters moved, the finished gone"),
        ("collect(ending, stopped)", "hand out", given),
    )
    for place, (call, name, passed) in enumerate(steps):
        y = 30 + place * 72
        sheet.text(110, y + 20, name, size=11, weight="bold", ha="right")
        sheet.box(130, y, 290, 40, call, family="monospace", size=10, face="#EAF3FA", edge=style.BLUE)
        sheet.note(445, y + 56 if place < 4 else y + 20, passed, family="monospace")
        if place < 4:
            sheet.arrow((275, y + 42), (275, y + 70))
    return sheet


def stop() -> Sheet:
    """The stop string END across tokens: after E and N the end of the text might become END, so it is held
    back; x decides that it does not, and all is given out. Later E, N and D complete it: the text ends before
    it, and no part of it is ever shown."""
    text = solution("lab-07").OutputText(None, ("END",))
    sheet = Sheet(370)
    for x, words in ((30, "token"), (130, "text so far"), (430, "given out")):
        sheet.title(x, 28, words)
    for row, token in enumerate(("so ", "E", "N", "x ", "EN", "D")):
        y = 50 + row * 46
        stopped = text.append(token)
        given = text.take(finished=bool(stopped))
        sheet.box(30, y, 60, 32, repr(token), family="monospace", size=10)
        sheet.text(130, y + 16, repr(text.text), family="monospace", size=10)
        sheet.text(430, y + 16, repr(given), family="monospace", size=10)
    return sheet


PICTURES = (turn, stop)
