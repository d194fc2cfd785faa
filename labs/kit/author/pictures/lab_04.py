"""lab-04: the rectangle of a fused step, and which tokens may look at which."""

from labs.kit.author.pictures.sheet import SOFT, Sheet, solution
from labs.kit.judge import loading


def rectangle(sheet: Sheet) -> None:
    """Three decodes and a chunk of a prompt as one rectangle, padded on the left twice."""
    from labs.kit.tensor_toys import dense

    rows, caches = dense.fleet(loading.load("lab-04", "scenarios").SHAPES["the worked example"][:3])
    request, caches["D"] = dense.mid_flight("D", 0, 13)
    batch = solution("lab-04").assemble_fused_batch([*rows, dense.row(request, 8)], caches)
    past, new = batch.past_lens.tolist(), batch.num_new.tolist()
    p_max, t_max = max(past), max(new)
    left, thin, wide = 34, 16.5, 22
    middle = left + p_max * thin + 14
    end = middle + t_max * wide
    sheet.note(left, 26, f"past: what the caches hold, {p_max} columns")
    sheet.note(middle, 26, f"new: computed now, {t_max}")
    for row, name in enumerate("ABCD"):
        y, sampled = 44 + row * 32, batch.is_last[row]
        sheet.text(left - 10, y + 13, name, ha="right", size=10, weight="bold")
        pads = [("", "pad")] * (p_max - past[row])
        sheet.cells(left, y, thin, 26, pads + [("", "cached")] * past[row], gap=1.4, line=0.6)
        positions = batch.positions[row, t_max - new[row] :].tolist()
        cells = [(str(position), "decode" if sampled else "prefill") for position in positions]
        sheet.cells(middle, y, wide, 26, [("", "pad")] * (t_max - new[row]) + cells, gap=1.4, line=0.6)
        sheet.arrow((end + 4, y + 13), (end + 26, y + 13), colour=SOFT if sampled else "#C9C9C5")
        words = "sampled" if sampled else f"{request.num_tokens - new[row]} left:\nnot sampled"
        sheet.note(end + 32, y + 13, words, va="center")
    sheet.brace(middle, end, 182, f"{sum(new)} of {t_max * len(new)} cells are tokens")
    kinds = (("cached", "in a cache"), ("decode", "a decode"), ("prefill", "a chunk"), ("pad", "pad"))
    sheet.legend(left, 238, *kinds)
    sheet.note(left + 336, 238, "numbers are positions")


def mask(sheet: Sheet) -> None:
    """The masks of two steps, cell by cell: the queries are the rows, the keys the columns."""
    import torch

    for top, words, past, new in (
        (0, "a step in which both rows have three new tokens", [2, 4], [3, 3]),
        (166, "a decode, A, beside a chunk of four, B", [3, 0], [1, 4]),
    ):
        sheet.title(14, top + 22, words)
        seen = solution("lab-04").fused_attention_mask(torch.tensor(past), torch.tensor(new))[:, 0].tolist()
        for row, x in enumerate((84, 424)):
            draw_mask(sheet, x, top + 66, row, past, new, seen[row])
    sheet.legend(
        14, 374, ("prefill", "seen"), ("empty", "later: hidden"), ("pad", "a pad: hidden"),
        ("waiting", "seen by a pad, thrown away"),
    )  # fmt: skip


def draw_mask(
    sheet: Sheet, x: float, y: float, row: int, past: list[int], new: list[int], seen: list[list[bool]]
) -> None:
    """One row of a batch: a line for each query, a column for each key."""
    p_max, t_max, pitch = max(past), max(new), 27
    middle = x + p_max * pitch + 10
    sheet.title(x - 70, y - 12, "AB"[row])
    sheet.note(x, y - 12, f"past: {past[row]}")
    sheet.note(middle, y - 12, f"new: {new[row]}")
    real = [k >= p_max - past[row] for k in range(p_max)] + [t >= t_max - new[row] for t in range(t_max)]
    for t, line in enumerate(seen):
        query, top = t - (t_max - new[row]), y + t * pitch
        sheet.note(x - 8, top + 13, "pad" if query < 0 else f"query {query}", ha="right")
        by_query = "prefill" if query >= 0 else "waiting"
        both = zip(line, real, strict=True)
        kinds = [("", by_query if sees else "empty" if token else "pad") for sees, token in both]
        sheet.cells(x - 1, top, pitch, pitch - 2, kinds[:p_max], line=0.7)
        sheet.cells(middle - 1, top, pitch, pitch - 2, kinds[p_max:], line=0.7)


PICTURES = {rectangle: 262, mask: 392}  # and their heights
