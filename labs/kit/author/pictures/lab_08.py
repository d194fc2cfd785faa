"""lab-08: what limits do to a distribution, how a number draws, and whose numbers they are."""

import random
from itertools import accumulate

from labs.kit.author.pictures.sheet import SOFT, Look, Sheet, solution
from labs.kit.toys.requests import make_request
from mini_engine.request import SamplingParams
from mini_engine.show.figures import style

ROW = [3.0, 2.0, 1.5, 1.0, 0.0, -1.0]
PROBS = [0.5, 0.25, 0.0, 0.25]


def limits(sheet: Sheet) -> None:
    """One row of logits four times: as it is, steeper, flatter, and cut to a nucleus."""
    lab = solution("lab-08")
    shown: tuple[tuple[str, Look], ...] = (
        ("as the model has it", {}),
        ("temperature 0.5", {"temperature": 0.5}),
        ("temperature 2", {"temperature": 2.0}),
        ("top_p 0.8", {"top_p": 0.8}),
    )
    for number, (title, settings) in enumerate(shown):
        left = 22 + number * 171
        sheet.text(left, 22, title, size=10, weight="bold")
        probs = lab.probabilities(ROW, SamplingParams(**settings))
        for token_id, prob in enumerate(probs):
            x, height = left + token_id * 25, prob * 170
            if prob:
                sheet.box(x, 220 - height, 20, height, face=style.BLUE, edge=style.BLUE, radius=0)
                words = f"{prob:.2f}".removeprefix("0") if prob >= 0.005 else "0+"
                sheet.label(x + 10, 211 - height, words)
            else:
                sheet.label(x + 10, 211, "out")
            sheet.label(x + 10, 233, f"{ROW[token_id]:g}")
        sheet.line((left - 3, 220.5), (left + 148, 220.5), colour=SOFT)
    sheet.note(22, 251, "below each bar the token's logit; all probabilities of a row sum to 1")


def stretches(sheet: Sheet) -> None:
    """Four tokens' probabilities end to end, and two numbers that draw."""
    lab = solution("lab-08")
    left, width = 40, 620
    ends = list(accumulate(PROBS))
    for token_id, (prob, end) in enumerate(zip(PROBS, ends, strict=True)):
        if prob:
            look: Look = {"face": style.LIGHT_ORANGE if token_id % 2 else style.LIGHT_GREEN, "radius": 0}
            start = left + (end - prob) * width
            sheet.box(start, 58, prob * width, 30, f"token {token_id}: {prob:g}", size=10, **look)
    for place in (0.0, *sorted({*ends})):
        sheet.line((left + place * width, 88), (left + place * width, 98), colour=SOFT)
        sheet.label(left + place * width, 107, f"{place:g}")
    sheet.label(left + 0.75 * width, 127, "token 2 ends here, too: it has no probability")
    for number, side, beside in ((0.62, "right", 16), (0.75, "left", -16)):
        x = left + number * width
        sheet.note(x + beside, 22, f"{number} draws token {lab.draw(PROBS, number)}", ha=side)
        sheet.arrow((x, 30), (x, 56))


def numbers(sheet: Sheet) -> None:
    """Requests a and b, twice: with one generator for all, and with one each."""
    lab = solution("lab-08")
    requests = {name: make_request(name, 1) for name in "ab"}
    for name, seed in (("a", 3), ("b", 7)):
        requests[name].sampling_params = SamplingParams(seed=seed)
    for top, title, is_shared in ((0, "one generator for all", True), (156, "one generator each", False)):
        sheet.title(22, top + 22, title)
        for column, late in enumerate((0, 1)):
            left = 120 + column * 300
            when = "b comes a step later" if late else "a and b come together"
            sheet.note(left, top + 46, when)
            shared, sampler = random.Random(3), lab.Sampler()
            for step in range(3):
                for row, name in enumerate("ab"):
                    index = step - late * row
                    if index < 0:
                        continue
                    number = shared.random() if is_shared else sampler.uniform(requests[name], index)
                    kind = "decode" if name == "a" else "cached"
                    sheet.cell(left + step * 84, top + 62 + row * 34, 78, 26, f"{number:.2f}", kind, size=10)
        for row, name in enumerate("ab"):
            sheet.text(96, top + 76 + row * 34, name, size=10, weight="bold", ha="right")
        for step in range(6):
            sheet.label(120 + step % 3 * 84 + step // 3 * 300 + 39, top + 138, f"step {step % 3}")


PICTURES = {limits: 262, stretches: 150, numbers: 316}  # and their heights
