"""lab-07: one turn of the loop, and a stop string that comes in pieces."""

from itertools import islice

from labs.kit.author.pictures.sheet import SOFT, Sheet, solution
from labs.kit.judge import loading
from mini_engine.show.figures import style
from mini_engine.trace import replay
from mini_engine.trace.fold import copy_view


def turn() -> Sheet:
    """One turn of the engine with what goes from part to part, in a step with a decode and a chunk of a
    prompt: the scheduler decides, one forward pass computes both, the decode alone gets a token, the
    books are closed, and its reader gets a Delta; then the next turn begins."""
    scenarios = loading.load("lab-07", "scenarios")
    scenario = next(s for s in scenarios.SCENARIOS if s["name"] == "a long prompt beside a chat")
    played = scenarios.play(solution("lab-07"), scenario)
    number = next(i for i, record in enumerate(played.trace.steps) if len(record.scheduled) == 2)
    views = {name: copy_view(v) for name, v in list(islice(replay(played.trace), number + 1))[-1][1].items()}
    record, deltas = played.trace.steps[number], played.turns[number]
    counts = ", ".join(f"{name}: {n}" for name, n in record.scheduled.items())
    said = ", ".join(f"{name}: {ids}" for name, ids in record.new_tokens.items())
    given = ", ".join(f"Delta({delta.request_id}, {delta.token_ids})" for delta in deltas)
    rest = ", ".join(
        f"{view.num_new_tokens - view.num_scheduled} tokens of {name} are left: no row, no token"
        for name, view in views.items()
        if view.num_new_tokens > view.num_scheduled
    )
    steps = (
        ("decide", "the scheduler", f"{{{counts}}}", "which requests compute, and how many tokens each"),
        ("compute", "the backend", f"logits: a row for {', '.join(record.new_tokens)}", rest),
        ("choose", "the sampler", f"{{{said}}}", "a token for each row that ends its sequence"),
        (
            "take back",
            "the scheduler",
            "counters, finished",
            "the room of the finished is free for the next turn",
        ),
        ("hand out", "the engine", given, "what each reader gets"),
    )
    sheet = Sheet(392)
    for place, (name, part, passed, words) in enumerate(steps):
        y = 16 + place * 76
        sheet.box(70, y, 176, 50, face="#E3F0F8", edge=style.BLUE, radius=8)
        sheet.text(158, y + 17, name, size=11, weight="bold", ha="center")
        sheet.note(158, y + 36, part, ha="center")
        if place < 4:
            sheet.arrow((158, y + 52), (158, y + 74))
        sheet.line([(250, y + 25), (282, y + 25)], colour=SOFT)
        sheet.text(290, y + 16, passed, family="monospace", size=10)
        sheet.note(290, y + 36, words)
    bottom, top = 16 + 4 * 76 + 25, 16 + 25
    sheet.line([(70, bottom), (34, bottom), (34, top), (58, top)], colour=SOFT, line=1.4)
    sheet.arrow((50, top), (68, top))
    sheet.note(22, (top + bottom) / 2, "the next turn", ha="center", rotation=90, va="center")
    return sheet


def stop() -> Sheet:
    """The stop string END across tokens: after E and N the end of the text might become END, so it is
    held back; x decides that it does not, and all is given out. Later E, N and D complete it: the text
    ends before it, and no part of it is ever shown."""
    output, size, left = solution("lab-07").OutputText(None, ("END",)), 24, 112
    sheet = Sheet(370)
    for x, words in (
        (14, "token"),
        (left, "the text; its stop string is END"),
        (left + 11 * size + 40, "given out now"),
    ):
        sheet.title(x, 22, words)
    told = ("", "may begin END", "may begin END", "it does not", "may begin END", "END: it stops")
    text = ""
    for row, (token, words) in enumerate(zip(("so ", "E", "N", "x ", "EN", "D"), told, strict=True)):
        y, before = 42 + row * 46, output.num_given
        text += token
        stopped = output.append(token)
        given = output.take(finished=bool(stopped))
        sheet.box(
            14, y, 20 + 12 * len(token), 30, token.replace(" ", "\N{OPEN BOX}"), family="monospace", size=11
        )
        for place, letter in enumerate(text):
            kind = "past" if place < before else "now" if place < output.num_given else "held"
            kind = "cut" if stopped and place >= len(output.text) else kind
            x = left + place * size
            sheet.cell(
                x,
                y,
                size - 2,
                30,
                letter.replace(" ", "\N{OPEN BOX}"),
                LETTERS[kind],
                family="monospace",
                size=11,
            )
        x = left + 11 * size + 40
        if given:
            sheet.text(x, y + 15, repr(given), family="monospace", size=11)
        sheet.note(x + (84 if given else 0), y + 15, words)
    sheet.legend(
        left, 344, ("cached", "given out before"), ("prefill", "given out now"), ("decode", "held back"),
        ("pad", "never shown"),
    )  # fmt: skip
    return sheet


LETTERS = {"past": "cached", "now": "prefill", "held": "decode", "cut": "pad"}
PICTURES = (turn, stop)
