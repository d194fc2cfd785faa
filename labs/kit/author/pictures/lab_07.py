"""lab-07: one step of the loop, and a stop string that comes in pieces."""

from labs.kit.author.pictures.sheet import SOFT, Look, Sheet, scenario_of, solution, steps_of
from labs.kit.judge import loading
from mini_engine.show.figures import style

LETTERS = (("cached", "given out before"), ("prefill", "given out now"), ("decode", "held back"))


def turn(sheet: Sheet) -> None:
    """One step of the engine, with what goes from part to part, for a decode and a chunk of a prompt."""
    scenario = scenario_of("lab-07", "a long prompt beside a chat")
    played = loading.load("lab-07", "scenarios").play(solution("lab-07"), scenario)
    number = next(i for i, record in enumerate(played.trace.steps) if len(record.scheduled) == 2)
    record, views = steps_of(played.trace)[number]
    deltas = played.turns[number]
    counts = ", ".join(f"{name}: {n}" for name, n in record.scheduled.items())
    sampled = ", ".join(f"{name}: {ids}" for name, ids in record.new_tokens.items())
    given = ", ".join(f"Delta({delta.request_id}, {delta.token_ids})" for delta in deltas)
    left = {name: view.num_new_tokens - view.num_scheduled for name, view in views.items()}
    rest = [f"{n} tokens of {name} are left: no row, no token" for name, n in left.items() if n > 0]
    for place, (name, part, passed, words) in enumerate((
        ("decide", "the scheduler", f"{{{counts}}}", "which requests compute, and how many tokens each"),
        ("compute", "the backend", f"logits: a row for {', '.join(record.new_tokens)}", ", ".join(rest)),
        ("choose", "the sampler", f"{{{sampled}}}", "a token for each row that ends its sequence"),
        ("take back", "the scheduler", "counters, finished",
         "the room of the finished is free for the next turn"),
        ("hand out", "the engine", given, "what each reader gets"),
    )):  # fmt: skip
        y = 16 + place * 76
        sheet.box(70, y, 176, 50, face="#E3F0F8", edge=style.BLUE, radius=8)
        sheet.title(158, y + 17, name, ha="center")
        sheet.label(158, y + 36, part)
        if place:
            sheet.arrow((158, y - 24), (158, y - 2))
        sheet.line((250, y + 25), (282, y + 25), colour=SOFT)
        sheet.code(290, y + 16, passed)
        sheet.note(290, y + 36, words)
    top, bottom = 41, 345
    sheet.line((70, bottom), (34, bottom), (34, top), (58, top), colour=SOFT, line=1.4)
    sheet.arrow((50, top), (68, top))
    sheet.label(22, (top + bottom) / 2, "the next turn", rotation=90, va="center")


def stop(sheet: Sheet) -> None:
    """The stop string END across tokens: what may become END is held back, and END is never shown."""
    output, pitch, left, right = solution("lab-07").OutputText(None, ("END",)), 24, 112, 416
    headings = {14: "token", left: "the text; its stop string is END", right: "given out now"}
    for x, words in headings.items():
        sheet.title(x, 22, words)
    text = ""
    for row, (token, words) in enumerate((
        ("so ", ""), ("E", "may begin END"), ("N", "may begin END"), ("x ", "it does not"),
        ("EN", "may begin END"), ("D", "END: it stops"),
    )):  # fmt: skip
        y, before = 42 + row * 46, output.num_given
        text += token
        stopped = output.append(token)
        given = output.take(finished=bool(stopped))
        now, held = output.num_given - before, len(output.text) - output.num_given
        kinds = ["cached"] * before + ["prefill"] * now + ["decode"] * held
        kinds += ["pad"] * (len(text) - len(kinds))
        seen = text.replace(" ", "\N{OPEN BOX}")
        look: Look = {"family": "monospace", "size": 11}
        sheet.box(14, y, 20 + 12 * len(token), 30, seen[-len(token) :], **look)
        sheet.cells(left - 1, y, pitch, 30, zip(seen, kinds, strict=True), **look)
        if given:
            sheet.code(right, y + 15, repr(given), size=11)
        sheet.note(right + (84 if given else 0), y + 15, words)
    sheet.legend(left, 344, *LETTERS, ("pad", "never shown"))


PICTURES = {turn: 392, stop: 370}  # and their heights
