"""The attention mask of a fused batch, padded and ragged: the keys that each query sees."""

from itertools import islice, pairwise

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace, replay

MASK: dict[str, style.Data] = {
    "seen": {"facecolor": style.BLUE, "hatch": "", "edgecolor": style.BLUE, "linewidth": 0},
    "later": {"facecolor": style.PALE, "hatch": "", "edgecolor": style.PALE, "linewidth": 0},
    "pad": {"facecolor": "none", "hatch": "////", "edgecolor": style.GREY, "linewidth": 0},
}
NAMES = {"seen": "seen (key position)", "later": "hidden: later in the sequence", "pad": "padding"}


def step_rows(trace: Trace, step: int) -> tuple[list[str], list[int], list[int]]:
    """Return the batch of one step of a trace as `attention_mask` takes it: ids, past_lens, num_new."""
    for record, views in islice(replay(trace), step, step + 1):
        ids = list(record.scheduled)
        return ids, [views[rid].num_computed_tokens for rid in ids], list(record.scheduled.values())
    raise ValueError(f"the trace has steps 0 to {len(trace.steps) - 1}, but not {step}")


def attention_mask_data(past_lens: list[int], num_new: list[int], ids: list[str] | None = None) -> style.Data:
    """Return the mask of one fused batch in both layouts: {"padded": ..., "ragged": ...}.

    Each has `rows`, a (request, query position) per row with None for a pad, and `cells`, [row][key]:
    the key's position where the query sees it, "later" where causality hides it, "pad" for padding.
    Padded keys are the past, then the new tokens, each padded on the left, so that all rows have
    P_max + T_max cells; ragged rows end with their keys. `seen` counts the cells that are needed,
    `computed` all cells.
    """
    if len(past_lens) != len(num_new) or not num_new:
        given = f"{past_lens} and {num_new}"
        raise ValueError(f"each row needs a past length and a number of new tokens, but got {given}")
    ids = ids or [chr(ord("A") + i) for i in range(len(num_new))]
    most_past, most_new = max(past_lens), max(num_new)
    data = {}
    for name in ("padded", "ragged"):
        rows: list[tuple[str, int | None]] = []
        cells: list[list[int | str]] = []
        for rid, past, new in zip(ids, past_lens, num_new, strict=True):
            before, within = (most_past - past, most_new - new) if name == "padded" else (0, 0)
            own = range(past, past + new)
            keys = ["pad"] * before + list(range(past)) + ["pad"] * within + list(own)
            for query in [None] * within + list(own):
                rows.append((rid, query))
                cells.append([_sees(query, key) for key in keys])
        data[name] = {
            "rows": rows,
            "cells": cells,
            "seen": sum(isinstance(cell, int) for row in cells for cell in row),
            "computed": sum(map(len, cells)),
        }
    return data


def _sees(query: int | None, key: int | str) -> int | str:
    if query is None or isinstance(key, str):
        return "pad"
    return key if key <= query else "later"


def attention_mask(
    past_lens: list[int], num_new: list[int], *, ids: list[str] | None = None
) -> tuple[Axes, ...]:
    """Draw the keys that each query sees, for the padded batch and the ragged one. Return two Axes.

    A row is a query, named by its request and position; the number in a cell is the position of the
    key. Raise ValueError for a batch too large to label (more than 28 keys or 40 padded rows).
    """
    data = attention_mask_data(past_lens, num_new, ids)
    keys, rows = max(map(len, data["padded"]["cells"])), len(data["padded"]["rows"])
    if keys > 28 or rows > 40:
        size = f"{rows} padded rows of {keys} keys"
        raise ValueError(f"{size} do not fit a page; take a step with fewer tokens")
    if keys <= 12:  # side by side
        heights, cell = [rows, rows], min(0.26, 3.0 / keys)
        axes = style.panels(1, 2, cell * rows + 1.0)
    else:
        heights, cell = [rows, len(data["ragged"]["rows"])], min(0.26, 6.6 / keys)
        axes = style.panels(2, 1, cell * sum(heights) + 1.5, height_ratios=heights)
    for ax, (name, mask), height in zip(axes, data.items(), heights, strict=True):
        title = f"{name.capitalize()}: {mask['computed']} cells, {mask['seen']} needed"
        style.cell_grid(ax, keys, height, title)
        _draw_mask(ax, mask)
    cells = [cell for mask in data.values() for row in mask["cells"] for cell in row]
    drawn = {cell if isinstance(cell, str) else "seen" for cell in cells}
    style.add_legend(axes[0].figure, style.patches(MASK, NAMES, drawn))
    return tuple(axes)


def _draw_mask(ax: Axes, mask: style.Data) -> None:
    for y, row in enumerate(mask["cells"]):
        for x, cell in enumerate(row):
            kind, text = (cell, "") if isinstance(cell, str) else ("seen", str(cell))
            style.draw_cell(ax, x, y, text, "white", **MASK[kind])
    for y, ((above, _), (below, _)) in enumerate(pairwise(mask["rows"])):
        if above != below:
            longer = max(len(mask["cells"][y]), len(mask["cells"][y + 1]))
            ax.hlines(y + 0.5, -0.5, longer - 0.5, color=style.INK, linewidth=0.8)
    labels = [f"{rid} pad" if query is None else f"{rid} {query}" for rid, query in mask["rows"]]
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(length=0)
