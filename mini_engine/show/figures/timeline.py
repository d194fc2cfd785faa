"""The timeline: a row per request, a column per step, and below it the KV pool and the token budget."""

from itertools import groupby, islice, pairwise
from typing import Any

from mini_engine.show.figures import style
from mini_engine.show.figures.budget import draw_budget
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Finished, Scheduled, Trace, replay

# state: (face, hatch, hatch colour, share of the row's height, width of its frame). Waiting is a thin line,
# and idle an empty frame, distinct from decoding without colour.
STYLES = {
    style.WAITING: (style.GREY, "", style.GREY, 0.10, 0),
    style.PREFILL: (style.BLUE, "", style.BLUE, 0.6, 0),
    style.DECODE: (style.LIGHT_ORANGE, "", style.LIGHT_ORANGE, 0.6, 0),
    style.IDLE: ("none", "", style.GREY, 0.6, 0.8),
    style.PREEMPTED: (style.VERMILLION, "xxxxxx", "#3A1500", 0.6, 0),
}
MAX_ROWS, MAX_STEPS = 60, 600
HIT = "\N{BLACK DOWN-POINTING TRIANGLE}"
POINTS = 5.2  # width of a character at 8 points
SUM = "\N{GREEK CAPITAL LETTER SIGMA}"
BAR = 0.13  # distance of a row's bar below the middle of its band; marks and sums are above it


def timeline_data(trace: Trace, steps: tuple[int, int] | None = None) -> style.Data:
    """Return the data of `timeline`: a row per request, a column per step.

    ids; priorities; steps (their numbers); states and tokens, both [row][column], the state None
    before a request arrives; finished {id: (first column without it, reason)}; hits {id: {column:
    cached tokens}}; decode_tokens, prefill_tokens and used_blocks, a value per step (used_blocks None
    without a pool); num_blocks; budget. `steps` (first, last) selects a part of a longer trace.
    """
    first, last = steps or (0, len(trace.steps) - 1)
    records = trace.steps[first : last + 1]
    cells: dict[str, dict[int, tuple[str, int]]] = {}
    finished: dict[str, tuple[int, str]] = {}
    hits: dict[str, dict[int, int]] = {}
    priorities: dict[str, int] = {}
    for column, (record, views) in enumerate(islice(replay(trace), last + 1), -first):
        if column < 0:
            continue
        for rid, view in views.items():
            if view.state != style.FINISHED or rid in cells:
                cells.setdefault(rid, {})[column] = (style.drawn_state(view), view.num_scheduled)
                priorities[rid] = view.priority
        for event in record.events:
            if isinstance(event, Finished):
                finished[event.id] = (column + (event.id in record.scheduled), event.reason)
            elif isinstance(event, Scheduled) and event.num_cached_tokens:
                hits.setdefault(event.id, {})[column] = event.num_cached_tokens
    grid = [[cells[rid].get(column, (None, 0)) for column in range(len(records))] for rid in cells]

    def total(state: str) -> list[int]:
        return [sum(row[c][1] for row in grid if row[c][0] == state) for c in range(len(records))]

    config = trace.header.config
    num_blocks = config.get("num_blocks")
    return {
        "ids": list(cells),
        "priorities": priorities,
        "steps": [record.step for record in records],
        "states": [[state for state, _ in row] for row in grid],
        "tokens": [[num_tokens for _, num_tokens in row] for row in grid],
        "finished": finished,
        "hits": hits,
        "decode_tokens": total(style.DECODE),
        "prefill_tokens": total(style.PREFILL),
        "used_blocks": [num_blocks - r.num_free_blocks for r in records] if num_blocks else None,
        "num_blocks": num_blocks,
        "budget": config.get("max_num_batched_tokens"),
    }


def timeline(trace: Trace, *, steps: tuple[int, int] | None = None) -> tuple[Axes, ...]:
    """Draw a row per request and a cell per step; below it the KV blocks in use and the token budget.

    `steps` (first, last) shows a part. Return the three Axes. Raise ValueError for more than can be read.
    """
    data = timeline_data(trace, steps)
    refuse_unreadable(data)
    rows = 0.29 * max(len(data["ids"]), 3) + 0.2
    heights = [rows, 0.85, 0.85]
    axes = style.panels(3, 1, rows + 2.7, height_ratios=heights, sharex=True)
    _draw_pool(axes[1], data)
    draw_budget(axes[2], data)
    axes[1].tick_params(labelbottom=False)
    draw_rows(axes[0], data)
    legend_rows(axes[0], [data])
    axes[2].set_xlabel("engine step", fontsize=9, color=style.INK)
    return tuple(axes)


def refuse_unreadable(data: style.Data) -> None:
    rows, columns = len(data["ids"]), len(data["steps"])
    if not rows:
        raise ValueError("there is no request to draw in these steps; choose others or record a longer run")
    if rows > MAX_ROWS or columns > MAX_STEPS:
        raise ValueError(
            f"{rows} requests over {columns} steps do not fit one picture (at most {MAX_ROWS} by "
            f"{MAX_STEPS}); show a part with steps=(first, last), or open the trace in the player"
        )


def draw_rows(ax: Axes, data: style.Data, *, ylabel: str = "", columns: int = 0) -> None:
    """Draw the rows of the requests in a grid `columns` wide; `compare` draws two of them."""
    ids, first, columns = data["ids"], data["steps"][0], columns or len(data["steps"])
    ranked = any(data["priorities"].values())
    names = [f"{rid} (p{data['priorities'][rid]})" if ranked else rid for rid in ids]
    style.frame(ax, ylabel=ylabel, grid="")
    ax.set(xlim=(first - 0.5, first + columns - 0.5), ylim=(len(ids) - 0.4, -0.6))
    ax.set_yticks([row + BAR for row in range(len(ids))], names)
    ax.tick_params(length=0, labelbottom=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    figure: Any = ax.figure
    figure.draw_without_rendering()  # layout decides the width of a cell
    cell_pt = ax.bbox.width / figure.dpi * 72 / columns
    gap = 0.6 / cell_pt if cell_pt > 3 else 0  # between cells
    for row, states in enumerate(data["states"]):
        for state, (face, hatch, edge, height, line) in STYLES.items():
            runs: list[tuple[float, float]] = [(first + a - 0.5, b - a) for a, b in _runs(states, state)]
            if gap and state != style.WAITING:
                runs = [(start + i, 1 - gap) for start, length in runs for i in range(int(length))]
            y = (row + BAR - height / 2, height)
            look: style.Data = {"facecolor": face, "hatch": hatch, "edgecolor": edge, "linewidth": line}
            ax.broken_barh(runs, y, snap=False, **look)  # snapping would make narrow gaps uneven
        _label_chunks(ax, row, data, cell_pt)
    for rid, (column, reason) in data["finished"].items():
        x, middle = first + column - 0.5, ids.index(rid) + BAR
        ax.vlines(x, middle - 0.33, middle + 0.33, color=style.INK, linewidth=2.6, clip_on=False)
        if reason not in ("stop", "length"):
            beside: style.Data = {"xytext": (3, 0), "textcoords": "offset points", "va": "center_baseline"}
            ax.annotate(reason, (x, middle), fontsize=8, color=style.INK, **beside)


def _runs(values: list[Any], wanted: object) -> list[tuple[int, int]]:
    """Return the ranges [start, end) in which `values` equals `wanted`."""
    runs, start = [], 0
    for value, group in groupby(values):
        end = start + len(list(group))
        if value == wanted:
            runs.append((start, end))
        start = end
    return runs


def _label_chunks(ax: Axes, row: int, data: style.Data, cell_pt: float) -> None:
    """Write the token count into each prefill cell; above cells too narrow for it, the sum of their run."""
    tokens, first = data["tokens"][row], data["steps"][0]
    hits = data["hits"].get(data["ids"][row], {})
    runs = _runs(data["states"][row], style.PREFILL)
    above: style.Data = {"fontsize": 8, "color": style.INK, "va": "bottom"}
    for (start, end), (following, _) in pairwise([*runs, (len(tokens), 0)]):
        counts, room = tokens[start:end], (following - start) * cell_pt
        text = HIT if start in hits else ""
        if fits(counts, cell_pt):
            for column, count in enumerate(counts, first + start):
                inside: style.Data = {"ha": "center", "va": "center_baseline", "color": "white"}
                ax.text(column, row + BAR, str(count), fontsize=8, **inside)
        else:
            text += (SUM if counts[1:] else "") + str(sum(counts))
        at_end = following == len(tokens) and len(text) * POINTS > room
        x, align = (first + end - 0.5, "right") if at_end else (first + start - 0.5, "left")
        if text:
            ax.text(x, row - 0.16, text, ha=align, **above)
    for column in hits:  # all but one token was cached: it decodes at once
        if data["states"][row][column] == style.DECODE:
            ax.text(first + column - 0.5, row - 0.16, HIT, **above)


def fits(counts: list[int], cell_pt: float) -> bool:
    """Return whether each count fits into a cell of that many points."""
    return len(str(max(counts))) * POINTS + 2 <= cell_pt


def legend_rows(ax: Axes, drawn: list[style.Data], *more: Any) -> None:
    """Add the legend of the rows that were drawn, and the handles `more`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {state for data in drawn for row in data["states"] for state in row}
    summed = any(SUM in text.get_text() for axes in ax.figure.axes for text in axes.texts)
    names = {style.PREFILL: f"prefill (tokens{f'; {SUM}: of all chunks' if summed else ''})"}
    handles: list[Any] = [
        Line2D([], [], color=face, linewidth=2.5, label=state)
        if state == style.WAITING
        else Patch(facecolor=face, hatch=hatch, edgecolor=edge, linewidth=line, label=names.get(state, state))
        for state, (face, hatch, edge, _, line) in STYLES.items()
        if state in seen
    ]
    look: style.Data = {"color": style.INK, "linestyle": ""}
    if any(data["finished"] for data in drawn):
        handles.append(
            Line2D([], [], marker="|", markersize=9, markeredgewidth=2.4, label="finished", **look)
        )
    if any(data["hits"] for data in drawn):
        handles.append(Line2D([], [], marker="v", markersize=5, label="prefix-cache hit", **look))
    handles += more
    style.add_legend(ax, handles, ncols=6 if len(handles) < 7 else 4)


def _draw_pool(ax: Axes, data: style.Data) -> None:
    style.frame(ax, ylabel="KV blocks\nin use", grid="")
    if not data["num_blocks"]:
        none: style.Data = {"transform": ax.transAxes, "ha": "center", "fontsize": 8, "color": style.INK}
        ax.text(0.5, 0.5, "this trace has no KV pool", **none)
        return
    edges = [data["steps"][0] - 0.5 + i for i in range(len(data["steps"]) + 1)]
    ax.stairs(data["used_blocks"], edges, fill=True, color=style.LIGHT_GREEN, linewidth=0)
    ax.stairs(data["used_blocks"], edges, color=style.GREEN, linewidth=1)
    style.draw_limit(ax, data["num_blocks"], f"pool: {data['num_blocks']} blocks")
