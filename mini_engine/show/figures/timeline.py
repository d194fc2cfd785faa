"""The timeline: a row a request, a column a step, and below it the KV pool and the token budget."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, islice, pairwise
from typing import TYPE_CHECKING, Any

from mini_engine.show.figures import style
from mini_engine.show.figures.budget import draw_budget
from mini_engine.trace import Finished, Scheduled, Trace, replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# state: (face, hatch, hatch colour, share of the row's height). Waiting is a thin line, so that
# no colour is needed to tell it from decoding.
STYLES = {
    style.WAITING: (style.GREY, "", style.GREY, 0.10),
    style.PREFILL: (style.BLUE, "", style.BLUE, 0.52),
    style.DECODE: (style.LIGHT_ORANGE, "", style.LIGHT_ORANGE, 0.52),
    style.PREEMPTED: (style.VERMILLION, "xxxxxx", "#3A1500", 0.52),
}
MAX_ROWS, MAX_STEPS = 60, 600
HIT = "\N{BLACK DOWN-POINTING TRIANGLE}"
POINTS = 5.2  # width of a character at 8 points
BAR = 0.2  # a row's bar lies this far below the middle of its band; the labels stand above it


def timeline_data(trace: Trace, steps: tuple[int, int] | None = None) -> style.Data:
    """What `timeline` draws: a row a request, a column a step.

    ids; priorities; steps (their numbers); states and tokens, both [row][column], the state None
    before a request arrives; finished {id: (first column without it, reason)}; hits {id: {column:
    cached tokens}}; decode_tokens, prefill_tokens and used_blocks, a value a step (used_blocks None
    without a pool); num_blocks; budget. `steps` (first, last) cuts out a stretch of a longer trace.
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
                cells.setdefault(rid, {})[column] = (view.state, view.num_scheduled)
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


def timeline(
    trace: Trace,
    axes: Iterable[Axes] | None = None,
    *,
    steps: tuple[int, int] | None = None,
    width: float = style.WIDTH,
) -> tuple[Axes, ...]:
    """One row a request, a cell a step; below it the KV blocks in use and the token budget.

    `axes`: three Axes of your own, else a figure `width` inches wide is made. `steps` (first,
    last) shows a part. Returns the three Axes. Raises ValueError for more than can be read.
    """
    data = timeline_data(trace, steps)
    refuse_unreadable(data)
    rows = 0.29 * max(len(data["ids"]), 3) + 0.2
    heights = [rows, 0.85, 0.85]
    axes = style.panels(axes, 3, 1, rows + 2.7, width=width, height_ratios=heights, sharex=True)
    draw_rows(axes[0], data)
    _draw_pool(axes[1], data)
    draw_budget(axes[2], data)
    axes[1].tick_params(labelbottom=False)
    axes[2].set_xlabel("engine step", fontsize=9)
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


def draw_rows(ax: Axes, data: style.Data, *, legend: bool = True) -> None:
    """The requests' rows alone; `compare` draws two such."""
    ids, columns = data["ids"], len(data["steps"])
    first = data["steps"][0]
    cell_pt = ax.bbox.width / ax.figure.dpi * 72 / columns
    for row, states in enumerate(data["states"]):
        for state, (face, hatch, edge, height) in STYLES.items():
            runs = [(first + a - 0.5, b - a) for a, b in _runs(states, state)]
            y = (row + BAR - height / 2, height)
            ax.broken_barh(runs, y, facecolor=face, hatch=hatch, edgecolor=edge, linewidth=0)
        _label_chunks(ax, row, data, cell_pt)
    if cell_pt > 2:  # the borders of narrower cells would hide them
        edges = [first + column - 0.5 for column in range(1, columns)]
        ax.vlines(edges, -0.5, len(ids), color="white", linewidth=0.6 if cell_pt > 4 else 0.3)
    for rid, (column, reason) in data["finished"].items():
        x, middle = first + column - 0.5, ids.index(rid) + BAR
        ax.vlines(x, middle - 0.3, middle + 0.3, color="black", linewidth=2.4, clip_on=False)
        if reason not in ("stop", "length"):
            beside: style.Data = {"xytext": (3, 0), "textcoords": "offset points", "va": "center_baseline"}
            ax.annotate(reason, (x, middle), fontsize=8, **beside)
    ax.set_xlim(first - 0.5, first + columns - 0.5)
    ax.set_ylim(len(ids) - 0.4, -0.6)
    ranked = any(data["priorities"].values())
    names = [f"{rid} (p{data['priorities'][rid]})" if ranked else rid for rid in ids]
    style.frame(ax, grid="")
    ax.set_yticks([row + BAR for row in range(len(ids))], names)
    ax.tick_params(length=0, labelbottom=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    if legend:
        _legend_rows(ax, data)


def _runs(values: list[Any], wanted: object) -> list[tuple[int, int]]:
    """The stretches [start, end) in which `values` equals `wanted`."""
    runs, start = [], 0
    for value, group in groupby(values):
        end = start + len(list(group))
        if value == wanted:
            runs.append((start, end))
        start = end
    return runs


def _label_chunks(ax: Axes, row: int, data: style.Data, cell_pt: float) -> None:
    """Above each prefill its chunks' token counts: 16+16+8, or their sum where that is too long."""
    tokens, first = data["tokens"][row], data["steps"][0]
    hits = data["hits"].get(data["ids"][row], {})
    runs = _runs(data["states"][row], style.PREFILL)
    for (start, end), (following, _) in pairwise([*runs, (len(tokens), 0)]):
        counts, room = tokens[start:end], (following - start) * cell_pt
        mark = HIT if start in hits else ""
        text = mark + "+".join(map(str, counts))
        if len(text) * POINTS > room:
            text = mark + str(sum(counts))
        at_end = following == len(tokens) and len(text) * POINTS > room
        x, align = (first + end - 0.5, "right") if at_end else (first + start - 0.5, "left")
        ax.text(x, row - 0.1, text, fontsize=8, color=style.INK, ha=align, va="bottom")
    for column in hits:  # all but one token was found: it went on decoding at once
        if data["states"][row][column] == style.DECODE:
            ax.text(first + column - 0.5, row - 0.1, HIT, fontsize=8, color=style.INK, va="bottom")


def _legend_rows(ax: Axes, data: style.Data) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {state for row in data["states"] for state in row}
    names = {style.PREFILL: "prefill (tokens above)"}
    handles: list[Any] = [
        Line2D([], [], color=face, linewidth=2.5, label=state)
        if state == style.WAITING
        else Patch(facecolor=face, hatch=hatch, edgecolor=edge, linewidth=0, label=names.get(state, state))
        for state, (face, hatch, edge, _) in STYLES.items()
        if state in seen
    ]
    look: style.Data = {"color": "black", "linestyle": ""}
    if data["finished"]:
        handles.append(
            Line2D([], [], marker="|", markersize=9, markeredgewidth=2.4, label="finished", **look)
        )
    if data["hits"]:
        handles.append(Line2D([], [], marker="v", markersize=5, label="prefix-cache hit", **look))
    style.add_legend(ax, handles, ncols=6)


def _draw_pool(ax: Axes, data: style.Data) -> None:
    style.frame(ax, ylabel="KV blocks\nin use", grid="")
    if not data["num_blocks"]:
        ax.text(0.5, 0.5, "this trace has no KV pool", transform=ax.transAxes, ha="center", fontsize=8)
        return
    edges = [data["steps"][0] - 0.5 + i for i in range(len(data["steps"]) + 1)]
    ax.stairs(data["used_blocks"], edges, fill=True, color=style.LIGHT_GREEN, linewidth=0)
    ax.stairs(data["used_blocks"], edges, color=style.GREEN, linewidth=1)
    style.draw_limit(ax, data["num_blocks"], f"pool: {data['num_blocks']} blocks")
