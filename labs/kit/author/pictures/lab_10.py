"""lab-10: one step that verifies drafts, and the two parts that a distribution is made of."""

from fractions import Fraction
from typing import Any

from labs.kit.author.pictures.sheet import INK, SOFT, Look, Sheet, scenario_of, solution
from labs.kit.toys.speculation import request_of, spec_loop
from mini_engine.show.figures import style


def with_accepted(name: str, num: int) -> tuple[list[int], list[int], list[int]]:
    """Return the text, the drafts and the yield of a scenario's first step that accepts so many of four."""
    scenario = scenario_of("lab-10", name)
    loop = spec_loop(solution("lab-10"), scenario["config"])
    request = request_of(scenario["requests"][0])
    loop.add(request)
    while loop.has_work:
        scheduled = loop.schedule()
        text, drafts = request.token_ids(), list(request.spec_token_ids)
        said = loop.compute(scheduled)
        if len(drafts) == 4 and len(said[request.request_id]) == num + 1:
            return text, drafts, said[request.request_id]
        loop.update(scheduled, said)
    raise ValueError(f"no step of {name!r} accepts {num} of four drafts")


def step(sheet: Sheet) -> None:
    """The last known tokens, four drafts, the row behind each, and what is kept."""
    text, drafts, said = with_accepted("a draft model", 2)
    shown, pitch, left = text[-5:], 52, 118
    first = left + (len(shown) - 1) * pitch  # where the last known token stands
    sheet.title(left, 24, "known")
    sheet.title(first + pitch, 24, "drafts")
    num_kept = len(said) - 1
    kinds = ["cached"] * 4 + ["plain"] + ["decode"] * num_kept + ["preempted"] * (4 - num_kept)
    sheet.cells(left, 40, pitch, 32, zip(map(str, [*shown, *drafts]), kinds, strict=True), size=11)
    sheet.note(left - 14, 56, "the text", ha="right")
    sheet.brace(first + 2, first + 5 * pitch - 2, 88, "one pass computes these five")
    sheet.note(left - 14, 146, "the model says", ha="right")
    for place in range(5):
        x = first + place * pitch + pitch / 2
        sheet.arrow((x, 110), (x, 128))
        words, kind = (str(said[place]), "decode") if place < len(said) else ("void", "unused")
        sheet.cell(x - pitch / 2 + 1, 130, pitch - 2, 32, words, kind, size=11 if words != "void" else 9)
        note = "= draft" if place < len(said) - 1 else "instead" if place == len(said) - 1 else ""
        sheet.label(x, 176, note)
    sheet.line((14, 200), (686, 200))
    before, now = len(text), len(text) + len(said)
    sheet.title(14, 226, "the two counters")
    columns = (250, 400, 560)
    for x, words in zip(columns, ("before", "after the pass", "after the rewind"), strict=True):
        sheet.label(x, 226, words)
    computed = (before - 1, f"{before - 1} + 5 in the cache", now - 1)
    rows = {"num_tokens": (before, before, now), "num_computed_tokens": computed}
    for number, (name, values) in enumerate(rows.items()):
        y = 252 + number * 24
        sheet.code(14, y, name, size=10)
        for x, value in zip(columns, values, strict=True):
            sheet.text(x, y, str(value), ha="center", size=10)
    kept, void = ("decode", "kept"), ("preempted", "rejected, or behind it")
    sheet.legend(14, 312, ("cached", "computed before"), kept, void)


def residual(sheet: Sheet) -> None:
    """p of the target and q of the draft model; what accepted drafts bring, and what p still lacks."""
    p, q = ([Fraction(n, 20) for n in row] for row in ((2, 9, 5, 4), (9, 6, 1, 4)))
    both = [min(a, b) for a, b in zip(p, q, strict=True)]
    missing: list[Any] = [a - b for a, b in zip(p, both, strict=True)]
    rest = solution("lab-10").residual(p, q)
    base, scale = 190, 240
    panels = (
        ("the draft model, q", [(q, style.GREY, "q")], 40),
        ("the target, p", [(both, style.LIGHT_ORANGE, "accepted"), (missing, style.BLUE, "missing")], 268),
        ("the residual", [(rest, style.BLUE, "drawn when a draft is refused")], 496),
    )
    for title, layers, left in panels:
        sheet.title(left, 26, title)
        sheet.line((left, base), (left + 168, base), colour=SOFT)
        heights = [Fraction(0)] * 4
        for values, colour, _ in layers:
            for token, value in enumerate(values):
                top = base - float(heights[token] + value) * scale
                if value:
                    size, look = (32, float(value) * scale), Look(face=colour, edge=colour, radius=0.5)
                    sheet.box(left + 8 + token * 40, top, *size, **look)
                heights[token] += value
        for token, height in enumerate(heights):
            x = left + 24 + token * 40
            sheet.label(x, base + 14, "abcd"[token], colour=INK)
            if height:
                sheet.label(x, base - float(height) * scale - 10, f"{float(height):.2f}")
    sheet.legend(268, 228, ("decode", "min(p, q): accepted drafts"))
    sheet.legend(268, 248, ("prefill", f"what p lacks: {float(sum(missing)):.2f}"))
    share = float(sum(both))
    sheet.note(40, 228, "accepted with min(1, p / q):")
    sheet.note(40, 248, f"{share:.2f} of all drafts")
    sheet.note(496, 228, "what is missing, scaled")
    sheet.note(496, 248, "to add up to 1")
    words = f"{share:.2f} of the tokens are accepted drafts, {1 - share:.2f} come from the residual"
    sheet.note(40, 282, f"{words}: together p.")


PICTURES = {step: 330, residual: 300}  # and their heights
