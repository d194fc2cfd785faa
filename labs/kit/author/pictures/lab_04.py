"""lab-04: the rectangle of a fused step, and who may look at whom."""

from typing import Any

from labs.kit.author.pictures.sheet import SOFT, Sheet, solution
from labs.kit.judge import loading


def rectangle() -> Sheet:
    """Three decodes with 21, 14 and 8 tokens in their caches and a chunk of 8 tokens: four rows, padded on
    the left twice, the past to 21 columns and the new tokens to 8. Each row's last token is in the last
    column. 11 of the 32 cells that are computed are tokens."""
    scenarios = loading.load("lab-04", "scenarios")
    rows, caches = scenarios.fleet(scenarios.SHAPES["the worked example"])
    batch = solution("lab-04").assemble_fused_batch(rows, caches)
    past, new = batch.past_lens.tolist(), batch.num_new.tolist()
    p_max, t_max = max(past), max(new)
    sheet = Sheet(270)
    left, gap, cell = 30, 14, 21.5
    middle = left + p_max * cell + gap
    for row, name in enumerate("ABCD"):
        y = 52 + row * 32
        sheet.text(left - 10, y + 13, name, ha="right", size=10, weight="bold")
        for column in range(p_max):
            real = column >= p_max - past[row]
            sheet.cell(
                left + column * cell + 0.7, y, cell - 1.4, 26, "", "cached" if real else "pad", line=0.6
            )
        for column in range(t_max):
            real = column >= t_max - new[row]
            kind = ("decode" if batch.is_last[row] else "prefill") if real else "pad"
            words = str(int(batch.positions[row, column])) if real else ""
            sheet.cell(middle + column * cell + 0.7, y, cell - 1.4, 26, words, kind, line=0.6)
    sheet.note(left, 30, f"past: keys and values from the caches, {p_max} columns")
    sheet.note(middle, 30, f"new: computed now, {t_max} columns")
    total = t_max * len(new)
    sheet.brace(middle, middle + t_max * cell, 190, f"{sum(new)} of {total} cells are tokens")
    sheet.legend(
        left,
        245,
        ("cached", "in a cache"),
        ("decode", "a decode's token"),
        ("prefill", "a chunk's token"),
        ("pad", "pad"),
    )
    return sheet


def mask() -> Sheet:
    """The masks of two steps, cell by cell: the queries are the rows, the keys the columns. A real query sees
    its real past and the new tokens up to itself, and no pad, neither of the past nor of the new ones; a pad
    sees its own column, so that its softmax is not one over nothing."""
    import torch

    fused = solution("lab-04").fused_attention_mask
    sheet = Sheet(400)
    for top, past, new in ((0, [2, 4], [3, 3]), (190, [3, 0], [1, 4])):
        seen = fused(torch.tensor(past), torch.tensor(new))[:, 0].tolist()
        for row in range(2):
            draw_mask(sheet, 90 + row * 330, top + 50, "AB"[row], past, new, row, seen[row])
    sheet.legend(20, 384, ("prefill", "seen"), ("empty", "hidden"), ("pad", "pad"))
    return sheet


def draw_mask(
    sheet: Sheet,
    x: float,
    y: float,
    name: str,
    past: list[int],
    new: list[int],
    row: int,
    seen: list[list[bool]],
) -> None:
    p_max, t_max, cell = max(past), max(new), 26
    words = f"{name}: {past[row]} in the past, {new[row]} new"
    sheet.text(x, y - 32, words, size=10, weight="bold")
    for t in range(t_max):
        pad = t < t_max - new[row]
        sheet.note(x - 8, y + t * cell + 12, "pad" if pad else f"query {t - (t_max - new[row])}", ha="right")
        for k in range(p_max + t_max):
            at = x + k * cell + (8 if k >= p_max else 0)
            real = k >= p_max - past[row] if k < p_max else k - p_max >= t_max - new[row]
            kind = (
                "prefill"
                if seen[t][k] and not pad
                else "waiting"
                if seen[t][k]
                else "empty"
                if real
                else "pad"
            )
            sheet.cell(at, y + t * cell, cell - 2, cell - 2, "", kind, line=0.7)
    sheet.note(x, y - 12, "past")
    sheet.note(x + p_max * cell + 8, y - 12, "new")


PICTURES = (rectangle, mask)
