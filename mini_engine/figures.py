"""Figures of a trace, for notebooks, docs and the demo. matplotlib is imported when one is drawn.

Every figure has a twin, `<name>_data`, that returns what is plotted: that is what to test and to
print. Colours are Okabe and Ito's, which colour-blind readers tell apart, and each also differs in
lightness, hatch or letter, so that a figure survives a grey printer.
"""

from itertools import groupby, islice, pairwise

from mini_engine.metrics import summary
from mini_engine.trace import replay

WAITING, PREFILL, DECODE, PREEMPTED, FINISHED = "waiting", "prefill", "decode", "preempted", "finished"

BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
VERMILLION, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, GREY, PALE = "#222222", "#8C8C8C", "#DDDDDD"
# state: (face, hatch, hatch colour, share of the row's height). Waiting is a thin line, so that
# it is told from decoding without any colour.
STYLES = {
    WAITING: (GREY, "", GREY, 0.10),
    PREFILL: (BLUE, "", BLUE, 0.52),
    DECODE: ("#F7C873", "", "#F7C873", 0.52),
    PREEMPTED: (VERMILLION, "xxxxxx", "#3A1500", 0.52),
}
WIDTH = 7.5  # inches: a notebook's column, a printed page
MAX_ROWS, MAX_STEPS = 60, 600
HIT = "\N{BLACK DOWN-POINTING TRIANGLE}"
POINTS = 5.2  # width of a character at 8 points


def _pyplot():
    """pyplot with our text sizes; drawing functions never show and never choose a backend."""
    import matplotlib.pyplot as plt

    return plt


def _style(ax, *, xlabel="", ylabel="", title="", grid="y"):
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    if title:
        ax.set_title(title, fontsize=10, loc="left", color=INK)
    ax.tick_params(labelsize=8, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(axis=grid, color=PALE, linewidth=0.6)
        ax.set_axisbelow(True)


def save(axes, path, *, alt: str = "", dpi: int = 150) -> None:
    """Write the figure that `axes` (one, or the tuple a figure function returned) belongs to, and close it.

    `alt` is stored in the PNG as its Description.
    """
    figure = (axes[0] if isinstance(axes, tuple) else axes).figure
    figure.savefig(path, dpi=dpi, bbox_inches="tight", metadata={"Description": alt} if alt else None)
    _pyplot().close(figure)


def alt_text(trace, figure: str) -> str:
    """What somebody who cannot see the `figure` (the name of its function) should know of it."""
    told = summary(trace)
    unit = "steps" if told.unit == "step" else told.unit
    many = "request" if told.num_requests == 1 else "requests"
    text = [
        f"{figure.replace('_', ' ').capitalize()} of {told.num_requests} {many} over {told.num_steps} steps:",
        f"{told.num_completed} completed, {told.num_preemptions} preemptions,",
        f"{told.num_cached_tokens} prompt tokens from the prefix cache,",
        f"{told.num_output_tokens} output tokens.",
    ]
    if told.ttft:
        text.append(f"Mean time to first token {told.ttft.mean:.3g} {unit},")
        text.append(f"longest gap between tokens {told.max_itl or 0:.3g} {unit}.")
    if told.kv_utilisation is not None:
        text.append(
            f"KV pool {told.kv_utilisation:.0%} full on average, {told.max_kv_utilisation:.0%} at most."
        )
    if told.budget_utilisation is not None:
        text.append(f"Token budget {told.budget_utilisation:.0%} used.")
    return " ".join(text)


# ------------------------------------------------------------------------------------ timeline


def timeline_data(trace, steps: tuple[int, int] | None = None) -> dict:
    """What `timeline` draws: a row a request, a column a step.

    ids; priorities; steps (their numbers); states and tokens, both [row][column], the state None
    before a request arrives; finished {id: (first column without it, reason)}; hits {id: {column:
    cached tokens}}; decode_tokens, prefill_tokens and used_blocks, a value a step (used_blocks None
    without a pool); num_blocks; budget. `steps` (first, last) cuts out a stretch of a longer trace.
    """
    first, last = steps or (0, len(trace.steps) - 1)
    records = trace.steps[first : last + 1]
    cells: dict[str, dict[int, tuple[str, int]]] = {}
    finished, hits, priorities = {}, {}, {}
    for column, (record, views) in enumerate(islice(replay(trace), last + 1), -first):
        if column < 0:
            continue
        for rid, view in views.items():
            if view.state != FINISHED or rid in cells:
                cells.setdefault(rid, {})[column] = (view.state, view.num_scheduled)
                priorities[rid] = view.priority
        for event in record["events"]:
            rid = event["id"]
            if event["type"] == "FINISHED":
                finished[rid] = (column + (rid in record["scheduled"]), event["reason"])
            if event["type"] == "SCHEDULED" and event["num_cached_tokens"]:
                hits.setdefault(rid, {})[column] = event["num_cached_tokens"]
    grid = [[cells[rid].get(column, (None, 0)) for column in range(len(records))] for rid in cells]

    def total(state: str) -> list[int]:
        return [sum(row[c][1] for row in grid if row[c][0] == state) for c in range(len(records))]

    config = trace.header.get("config", {})
    num_blocks = config.get("num_blocks")
    return {
        "ids": list(cells),
        "priorities": priorities,
        "steps": [record["step"] for record in records],
        "states": [[state for state, _ in row] for row in grid],
        "tokens": [[num_tokens for _, num_tokens in row] for row in grid],
        "finished": finished,
        "hits": hits,
        "decode_tokens": total(DECODE),
        "prefill_tokens": total(PREFILL),
        "used_blocks": [num_blocks - r["num_free_blocks"] for r in records] if num_blocks else None,
        "num_blocks": num_blocks,
        "budget": config.get("max_num_batched_tokens"),
    }


def timeline(trace, axes=None, *, steps: tuple[int, int] | None = None, width: float = WIDTH):
    """One row a request, a cell a step; below it the KV blocks in use and the token budget.

    `axes`: three Axes of your own, else a figure `width` inches wide is made. `steps` (first,
    last) shows a part. Returns the three Axes. Raises ValueError for more than can be read.
    """
    data = timeline_data(trace, steps)
    _refuse_unreadable(data)
    if axes is None:
        rows = 0.29 * max(len(data["ids"]), 3) + 0.2
        heights = [rows, 0.85, 0.85]
        _, axes = _pyplot().subplots(
            3, 1, figsize=(width, rows + 2.7), height_ratios=heights, sharex=True, layout="constrained"
        )
    _draw_rows(axes[0], data)
    _draw_pool(axes[1], data)
    _draw_budget(axes[2], data)
    axes[1].tick_params(labelbottom=False)
    axes[2].set_xlabel("engine step", fontsize=9)
    return tuple(axes)


def _refuse_unreadable(data: dict) -> None:
    rows, columns = len(data["ids"]), len(data["steps"])
    if not rows:
        raise ValueError("there is no request to draw in these steps; choose others or record a longer run")
    if rows > MAX_ROWS or columns > MAX_STEPS:
        raise ValueError(
            f"{rows} requests over {columns} steps do not fit one picture (at most {MAX_ROWS} by "
            f"{MAX_STEPS}); show a part with steps=(first, last), or open the trace in the player"
        )


BAR = 0.2  # a row's bar lies this far below the middle of its band; the labels stand above it


def _draw_rows(ax, data: dict) -> None:
    ids, columns = data["ids"], len(data["steps"])
    first = data["steps"][0]
    cell_pt = ax.get_position().width * ax.figure.get_figwidth() * 72 / columns
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
        x, y = first + column - 0.5, ids.index(rid) + BAR
        ax.vlines(x, y - 0.3, y + 0.3, color="black", linewidth=2.4, clip_on=False)
        if reason not in ("stop", "length"):
            ax.annotate(reason, (x, y), (3, 0), textcoords="offset points", fontsize=8, va="center_baseline")
    ax.set_xlim(first - 0.5, first + columns - 0.5)
    ax.set_ylim(len(ids) - 0.4, -0.6)
    ranked = any(data["priorities"].values())
    names = [f"{rid} (p{data['priorities'][rid]})" if ranked else rid for rid in ids]
    _style(ax, grid="")
    ax.set_yticks([row + BAR for row in range(len(ids))], names)
    ax.tick_params(length=0, labelbottom=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    _legend_rows(ax, data)


def _runs(values: list, wanted) -> list[tuple[int, int]]:
    """The stretches [start, end) in which `values` equals `wanted`."""
    runs, start = [], 0
    for value, group in groupby(values):
        end = start + len(list(group))
        if value == wanted:
            runs.append((start, end))
        start = end
    return runs


def _label_chunks(ax, row: int, data: dict, cell_pt: float) -> None:
    """Above each prefill its chunks' token counts: 16+16+8, or their sum where that is too long."""
    tokens, first = data["tokens"][row], data["steps"][0]
    hits = data["hits"].get(data["ids"][row], {})
    runs = _runs(data["states"][row], PREFILL)
    for (start, end), (following, _) in pairwise([*runs, (len(tokens), None)]):
        counts = tokens[start:end]
        mark = HIT if start in hits else ""
        text = mark + "+".join(map(str, counts))
        if len(text) * POINTS > (following - start) * cell_pt:
            text = mark + str(sum(counts))
        at_end = following == len(tokens) and len(text) * POINTS > (following - start) * cell_pt
        x, align = (first + end - 0.5, "right") if at_end else (first + start - 0.5, "left")
        ax.text(x, row - 0.1, text, fontsize=8, color=INK, ha=align, va="bottom")
    for column in hits:  # all but one token was found: it went on decoding at once
        if data["states"][row][column] == DECODE:
            ax.text(first + column - 0.5, row - 0.1, HIT, fontsize=8, color=INK, va="bottom")


def _legend_rows(ax, data: dict) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {state for row in data["states"] for state in row}
    names = {PREFILL: "prefill (tokens above)"}
    handles = [
        Line2D([], [], color=face, linewidth=2.5, label=state)
        if state == WAITING
        else Patch(facecolor=face, hatch=hatch, edgecolor=edge, linewidth=0, label=names.get(state, state))
        for state, (face, hatch, edge, _) in STYLES.items()
        if state in seen
    ]
    if data["finished"]:
        handles.append(
            Line2D(
                [],
                [],
                color="black",
                marker="|",
                markersize=9,
                markeredgewidth=2.4,
                linestyle="",
                label="finished",
            )
        )
    if data["hits"]:
        handles.append(
            Line2D([], [], color="black", marker="v", markersize=5, linestyle="", label="prefix-cache hit")
        )
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def _draw_pool(ax, data: dict) -> None:
    _style(ax, ylabel="KV blocks\nin use", grid="")
    if not data["num_blocks"]:
        ax.text(0.5, 0.5, "this trace has no KV pool", transform=ax.transAxes, ha="center", fontsize=8)
        return
    edges = [data["steps"][0] - 0.5 + i for i in range(len(data["steps"]) + 1)]
    ax.stairs(data["used_blocks"], edges, fill=True, color="#8CCFBB", linewidth=0)
    ax.stairs(data["used_blocks"], edges, color=GREEN, linewidth=1)
    _limit(ax, data["num_blocks"], f"pool: {data['num_blocks']} blocks")


def _draw_budget(ax, data: dict) -> None:
    _style(ax, ylabel="tokens\nin the step", grid="")
    ax.bar(data["steps"], data["decode_tokens"], width=1, color=STYLES[DECODE][0], linewidth=0)
    ax.bar(
        data["steps"], data["prefill_tokens"], width=1, bottom=data["decode_tokens"], color=BLUE, linewidth=0
    )
    if data["budget"]:
        _limit(ax, data["budget"], f"budget: {data['budget']} tokens")


def _limit(ax, value: float, text: str) -> None:
    """A dashed line that says what it is, with room above for the words."""
    ax.axhline(value, color=INK, linewidth=1, linestyle="--")
    ax.annotate(
        text,
        (1, value),
        (0, 2),
        ax.get_yaxis_transform(),
        "offset points",
        fontsize=8,
        ha="right",
        va="bottom",
    )
    ax.set_ylim(0, value * 1.4)
    ax.set_yticks([0, value])
