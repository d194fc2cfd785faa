"""lab-04: the rectangle of a fused step, and who may look at whom."""

from labs.kit.author.pictures.sheet import SOFT, Sheet, solution
from labs.kit.judge import loading


def rectangle() -> Sheet:
    """Three decodes with 21, 14 and 8 tokens in their caches and the first 8 of a prompt's 13 tokens:
    four rows, padded on the left twice, the past to 21 columns and the new tokens to 8. Each row's last
    token is in the last column. Of the 32 cells that are computed 11 are tokens, the others pads."""
    scenarios = loading.load("lab-04", "scenarios")
    rows, caches = scenarios.fleet(scenarios.SHAPES["the worked example"][:3])
    request, caches["D"] = scenarios.mid_flight("D", 0, 13)
    batch = solution("lab-04").assemble_fused_batch([*rows, scenarios.row(request, 8)], caches)
    past, new = batch.past_lens.tolist(), batch.num_new.tolist()
    p_max, t_max = max(past), max(new)
    sheet = Sheet(262)
    left, thin, wide = 34, 16.5, 22
    middle = left + p_max * thin + 14
    end = middle + t_max * wide
    sheet.note(left, 26, f"past: what the caches hold, {p_max} columns")
    sheet.note(middle, 26, f"new: computed now, {t_max}")
    for row, name in enumerate("ABCD"):
        y = 44 + row * 32
        sheet.text(left - 10, y + 13, name, ha="right", size=10, weight="bold")
        for column in range(p_max):
            kind = "cached" if column >= p_max - past[row] else "pad"
            sheet.cell(left + column * thin + 0.7, y, thin - 1.4, 26, "", kind, line=0.6)
        for column in range(t_max):
            real = column >= t_max - new[row]
            kind = ("decode" if batch.is_last[row] else "prefill") if real else "pad"
            words = str(int(batch.positions[row, column])) if real else ""
            sheet.cell(middle + column * wide + 0.7, y, wide - 1.4, 26, words, kind, line=0.6)
        sheet.arrow((end + 4, y + 13), (end + 26, y + 13), colour=SOFT if batch.is_last[row] else "#C9C9C5")
        left_over = request.num_tokens - new[row]
        words = "sampled" if batch.is_last[row] else f"{left_over} left:\nnot sampled"
        sheet.note(end + 32, y + 13, words, va="center")
    sheet.brace(middle, end, 182, f"{sum(new)} of {t_max * len(new)} cells are tokens")
    sheet.legend(
        left, 238, ("cached", "in a cache"), ("decode", "a decode"), ("prefill", "a chunk"), ("pad", "pad"),
    )  # fmt: skip
    sheet.note(left + 336, 238, "numbers are positions")
    return sheet


def mask() -> Sheet:
    """The masks of two steps, cell by cell: the queries are the rows, the keys the columns. A real
    query sees its real past and the new tokens up to itself, and no pad, neither of the past nor of the
    new ones; a pad sees its own column, so that its softmax is not one over nothing."""
    import torch

    fused = solution("lab-04").fused_attention_mask
    sheet = Sheet(392)
    steps = (
        (0, "a step in which both rows have three new tokens", [2, 4], [3, 3]),
        (166, "a decode, A, beside a chunk of four, B", [3, 0], [1, 4]),
    )
    for top, words, past, new in steps:
        sheet.title(14, top + 22, words)
        seen = fused(torch.tensor(past), torch.tensor(new))[:, 0].tolist()
        for row in range(2):
            draw_mask(sheet, 84 + row * 340, top + 66, "AB"[row], past, new, row, seen[row])
    sheet.legend(14, 374, *[(key, words) for key, words in MASK.items()])
    return sheet


MASK = {
    "prefill": "seen",
    "empty": "later: hidden",
    "pad": "a pad: hidden",
    "waiting": "seen by a pad, thrown away",
}


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
    """One row of a batch: a line for each query, a column for each key."""
    p_max, t_max, cell = max(past), max(new), 27
    gap = 10
    sheet.text(x - 70, y - 12, name, size=11, weight="bold")
    sheet.note(x, y - 12, f"past: {past[row]}")
    sheet.note(x + p_max * cell + gap, y - 12, f"new: {new[row]}")
    for t in range(t_max):
        query = t - (t_max - new[row])
        sheet.note(x - 8, y + t * cell + 13, "pad" if query < 0 else f"query {query}", ha="right")
        for k in range(p_max + t_max):
            real = k >= p_max - past[row] if k < p_max else k - p_max >= t_max - new[row]
            kind = "empty" if real else "pad"
            if seen[t][k]:
                kind = "prefill" if query >= 0 else "waiting"
            at = x + k * cell + (gap if k >= p_max else 0)
            sheet.cell(at, y + t * cell, cell - 2, cell - 2, "", kind, line=0.7)


PICTURES = (rectangle, mask)
