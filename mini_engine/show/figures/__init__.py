"""Figures of a trace, for notebooks, docs and the demo. matplotlib is imported when one is drawn.

Every figure has a twin, `<name>_data`, that returns what is plotted: that is what to test and to
print. Colours are Okabe and Ito's and tints of them, which colour-blind readers tell apart; lightness,
hatch, shape or letter say the same once more, so that a figure survives a grey printer.
"""

from itertools import cycle, groupby, islice, pairwise

from mini_engine.trace import decisions, first_difference, replay
from mini_engine.trace.metrics import request_metrics, summary

WAITING, PREFILL, DECODE, PREEMPTED, FINISHED = "waiting", "prefill", "decode", "preempted", "finished"

BLUE, GREEN, VERMILLION, PURPLE, YELLOW = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#F0E442"
LIGHT_ORANGE, LIGHT_BLUE, LIGHT_GREEN = "#F7C873", "#8CC6EC", "#8CCFBB"
INK, GREY, PALE = "#222222", "#8C8C8C", "#DDDDDD"
# state: (face, hatch, hatch colour, share of the row's height). Waiting is a thin line, so that
# it is told from decoding without any colour.
STYLES = {
    WAITING: (GREY, "", GREY, 0.10),
    PREFILL: (BLUE, "", BLUE, 0.52),
    DECODE: (LIGHT_ORANGE, "", LIGHT_ORANGE, 0.52),
    PREEMPTED: (VERMILLION, "xxxxxx", "#3A1500", 0.52),
}
WIDTH = 7.5  # inches: a notebook's column, a printed page
MAX_ROWS, MAX_STEPS = 60, 600
HIT = "\N{BLACK DOWN-POINTING TRIANGLE}"
POINTS = 5.2  # width of a character at 8 points


def _pyplot():
    """pyplot, for figures that a notebook shows by itself; nothing here shows one or picks a backend."""
    import matplotlib.pyplot as plt

    return plt


def _axes(ax, height: float):
    if ax is None:
        _, ax = _pyplot().subplots(figsize=(WIDTH, height), layout="constrained")
    return ax


def _plural(unit: str) -> str:
    return "steps" if unit == "step" else unit


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


def _legend(target, handles=None, ncols=4):
    """One line of legend above an Axes or a figure, where it covers nothing."""
    handles = handles or target.get_legend_handles_labels()[0]
    if hasattr(target, "add_axes"):
        place = {"loc": "outside upper left"}
    else:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
    ncols = min(ncols, len(handles))
    spacing = {"columnspacing": 1.1, "handlelength": 1.5, "handletextpad": 0.6}
    target.legend(handles=handles, ncols=ncols, fontsize=8, frameon=False, **spacing, **place)


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
    unit = _plural(told.unit)
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


def _draw_rows(ax, data: dict, *, legend: bool = True) -> None:
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
    if legend:
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
        end = {"marker": "|", "markersize": 9, "markeredgewidth": 2.4}
        handles.append(Line2D([], [], color="black", linestyle="", label="finished", **end))
    if data["hits"]:
        hit = {"marker": "v", "markersize": 5, "label": "prefix-cache hit"}
        handles.append(Line2D([], [], color="black", linestyle="", **hit))
    _legend(ax, handles, ncols=6)


def _draw_pool(ax, data: dict) -> None:
    _style(ax, ylabel="KV blocks\nin use", grid="")
    if not data["num_blocks"]:
        ax.text(0.5, 0.5, "this trace has no KV pool", transform=ax.transAxes, ha="center", fontsize=8)
        return
    edges = [data["steps"][0] - 0.5 + i for i in range(len(data["steps"]) + 1)]
    ax.stairs(data["used_blocks"], edges, fill=True, color=LIGHT_GREEN, linewidth=0)
    ax.stairs(data["used_blocks"], edges, color=GREEN, linewidth=1)
    _limit(ax, data["num_blocks"], f"pool: {data['num_blocks']} blocks")


def _draw_budget(ax, data: dict, headroom: float = 0.4) -> None:
    _style(ax, ylabel="tokens\nin the step", grid="")
    decode, prefill = data["decode_tokens"], data["prefill_tokens"]
    both = [a + b for a, b in zip(decode, prefill, strict=True)]
    edges = [data["steps"][0] - 0.5 + i for i in range(len(both) + 1)]
    ax.stairs(both, edges, baseline=decode, fill=True, color=BLUE, linewidth=0, label="prefill")
    ax.stairs(decode, edges, fill=True, color=STYLES[DECODE][0], linewidth=0, label="decode")
    ax.set_xlim(edges[0], edges[-1])
    if data["budget"]:
        _limit(ax, data["budget"], f"budget: {data['budget']} tokens", headroom)


def _limit(ax, value: float, text: str, headroom: float = 0.4) -> None:
    """A dashed line that says what it is, with room above for the words."""
    ax.axhline(value, color=INK, linewidth=1, linestyle="--")
    place = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "ha": "right"}
    ax.annotate(text, (1, value), (0, 2), fontsize=8, va="bottom", **place)
    ax.set_ylim(0, value * (1 + headroom))
    ax.set_yticks([0, value])


# -------------------------------------------------------------------------------------- budget


def budget_data(trace) -> dict:
    """Steps, the decode and the prefill tokens of each, the budget, and the share of it that was used."""
    decode, prefill = [], []
    for _, views in replay(trace):
        ran = [view for view in views.values() if view.num_scheduled]
        decode.append(sum(view.num_scheduled for view in ran if view.state == DECODE))
        prefill.append(sum(view.num_scheduled for view in ran if view.state == PREFILL))
    return {
        "steps": [record["step"] for record in trace.steps],
        "decode_tokens": decode,
        "prefill_tokens": prefill,
        "budget": trace.header.get("config", {}).get("max_num_batched_tokens"),
        "utilisation": summary(trace).budget_utilisation,
    }


def budget(trace, ax=None):
    """What each step computed, decode below prefill, against the token budget. Returns the Axes."""
    data = budget_data(trace)
    ax = _axes(ax, height=2.6)
    _draw_budget(ax, data, headroom=0.15)
    ax.set_xlabel("engine step", fontsize=9)
    _legend(ax)
    return ax


# --------------------------------------------------------------------------------- utilisation


def utilisation_data(static, continuous) -> dict:
    """Busy slots of two runs of one workload, {"static": ..., "continuous": ..., "speedup": ...}.

    A slot is busy in a step in which its request computes a token. `mean` is over all steps, so the
    drain at the end counts; `mean_while_waiting` over the steps in which somebody was queued (None if
    nobody ever was). `speedup` is the ratio of the output throughputs.
    """
    told = {name: _slots(trace) for name, trace in (("static", static), ("continuous", continuous))}
    slow, fast = told["static"]["output_throughput"], told["continuous"]["output_throughput"]
    return {**told, "speedup": fast / slow if slow and fast else None}


def _slots(trace) -> dict:
    busy = [len(record["scheduled"]) for record in trace.steps]
    slots = trace.header.get("config", {}).get("max_num_seqs") or max(busy, default=1)
    queued = [n for n, record in zip(busy, trace.steps, strict=True) if record["num_waiting"]]
    return {
        "busy": busy,
        "slots": slots,
        "num_steps": len(busy),
        "mean": sum(busy) / (slots * len(busy)) if busy else None,
        "mean_while_waiting": sum(queued) / (slots * len(queued)) if queued else None,
        "output_throughput": summary(trace).output_throughput,
    }


def utilisation(static, continuous, axes=None):
    """Busy slots a step, static batching above continuous batching. Returns the two Axes."""
    data = utilisation_data(static, continuous)
    if axes is None:
        _, axes = _pyplot().subplots(2, 1, figsize=(WIDTH, 3.8), sharex=True, layout="constrained")
    longest = max(data[name]["num_steps"] for name in ("static", "continuous"))
    for ax, name in zip(axes, ("static", "continuous"), strict=True):
        told = data[name]
        edges = [i - 0.5 for i in range(told["num_steps"] + 1)]
        idle = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "label": "idle slot"}
        ax.stairs([told["slots"]] * told["num_steps"], edges, fill=True, linewidth=0, **idle)
        ax.stairs(told["busy"], edges, fill=True, color=BLUE, linewidth=0, label="busy slot")
        share = f"{told['mean']:.2%} of the slots busy, {told['num_steps']} steps"
        _style(ax, ylabel="slots", title=f"{name.capitalize()} batching: {share}", grid="")
        ax.set(xlim=(-0.5, longest - 0.5), ylim=(0, told["slots"]), yticks=[0, told["slots"]])
    axes[1].set_xlabel("engine step", fontsize=9)
    _legend(axes[0].figure, axes[0].get_legend_handles_labels()[0])
    return tuple(axes)


# ----------------------------------------------------------------------------------- block map


def block_map_data(trace, steps: list[int] | None = None) -> dict:
    """Who holds which block at some steps (default: six, evenly spread).

    steps; owners [snapshot][block], a tuple of request ids, two or more where a prefix is shared;
    cached [snapshot], the blocks, held or free, whose content the prefix cache can find;
    num_blocks, block_size. Raises ValueError for a step that the trace does not have.
    """
    config = trace.header["config"]
    size, last = config["block_size"], len(trace.steps) - 1
    steps = sorted({round(i * last / 5) for i in range(6)}) if steps is None else list(steps)
    if not steps or min(steps) < 0 or max(steps) > last:
        raise ValueError(f"steps must be within 0 to {last}, the steps of this trace, but are {steps}")
    owners, cached = [], []
    published: set[int] = set()
    for index, (record, views) in enumerate(replay(trace)):
        published.difference_update(*record["blocks"].values())  # taken anew: the old content is gone
        if index in steps:
            holders = [[] for _ in range(config["num_blocks"])]
            for rid, view in views.items():
                for block in view.blocks:
                    holders[block].append(rid)
            owners.append([tuple(ids) for ids in holders])
            cached.append(set(published))
        if config.get("prefix_caching"):
            for view in views.values():
                published.update(view.blocks[: (view.num_computed_tokens + view.num_scheduled) // size])
    return {
        "steps": sorted(set(steps)),
        "owners": owners,
        "cached": cached,
        "num_blocks": config["num_blocks"],
        "block_size": size,
    }


def block_map(trace, steps: list[int] | None = None, axes=None):
    """The pool as a grid at some steps: each block with its owner, shared and cached ones marked.

    `axes`: as many Axes as steps. Returns them. Raises ValueError for a pool of more than 250 blocks.
    """
    data = block_map_data(trace, steps)
    if data["num_blocks"] > 250:
        raise ValueError(f"{data['num_blocks']} blocks are too many to letter; show a pool of at most 250")
    width = max(4, round((data["num_blocks"] * 1.3) ** 0.5))
    height = -(-data["num_blocks"] // width)
    if axes is None:
        axes = _block_grid(len(data["steps"]), width, height)
    ids = sorted({rid for owners in data["owners"] for held in owners for rid in held}, key=_natural)
    names = {rid: rid if max(map(len, ids)) <= 3 else str(i) for i, rid in enumerate(ids, 1)}
    looks = {rid: (names[rid], OWNERS[i % len(OWNERS)]) for i, rid in enumerate(ids)}
    for ax, step, owners, cached in zip(axes, data["steps"], data["owners"], data["cached"], strict=True):
        for block, held in enumerate(owners):
            _draw_block(ax, block % width, block // width, held, block in cached, looks)
        _cells(ax, width, height, title=f"step {step}")
    _legend_blocks(axes[0].figure, {} if list(names) == list(names.values()) else looks)
    return tuple(axes)


# Light enough for black letters. Colours come round again; the name in the block decides.
OWNERS = (LIGHT_ORANGE, LIGHT_BLUE, LIGHT_GREEN, "#E3B0CB", YELLOW, "#EE9A66", "#BFC7D5")


def _block_grid(count: int, width: int, height: int) -> list:
    ncols = 3 if width <= 9 else 2
    nrows = -(-count // ncols)
    panel = (WIDTH - 0.3) / ncols
    size = (WIDTH, nrows * (panel * height / width + 0.2) + 0.5)
    _, grid = _pyplot().subplots(nrows, ncols, figsize=size, squeeze=False, layout="constrained")
    for spare in grid.flat[count:]:
        spare.remove()
    return list(grid.flat[:count])


def _natural(rid: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, rid))
    return (int(digits or 0), rid)


def _cells(ax, width: int, height: int, title: str) -> None:
    """An Axes whose unit is a square cell, row 0 on top."""
    _style(ax, title=title, grid="")
    ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], aspect="equal", anchor="NW")
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _cell(ax, x: int, y: int, text="", colour=INK, *, size: float = 0.92, **look) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x - size / 2, y - size / 2), size, size, **look))
    ax.text(x, y, text, fontsize=8, ha="center", va="center_baseline", color=colour)


def _draw_block(ax, x: int, y: int, held: tuple[str, ...], cached: bool, looks: dict) -> None:
    if not held:
        look = {"hatch": "/////", "edgecolor": GREY} if cached else {"edgecolor": PALE}
        _cell(ax, x, y, facecolor="white", linewidth=0.6, **look)
        return
    name, face = looks[held[0]]
    if len(held) == 1:
        _cell(ax, x, y, name, facecolor=face, edgecolor=GREY, linewidth=0.6)
    else:
        text = f"\N{MULTIPLICATION SIGN}{len(held)}"
        _cell(ax, x, y, text, size=0.86, facecolor=face, edgecolor="black", linewidth=1.8)


def _legend_blocks(figure, looks: dict) -> None:
    """What the cells mean and, where ids are too long to stand in them, who is who."""
    from matplotlib.patches import Patch

    shared = "shared by \N{MULTIPLICATION SIGN}n requests"
    handles = [
        Patch(facecolor=OWNERS[0], edgecolor=GREY, label="held by the named request"),
        Patch(facecolor=OWNERS[0], edgecolor="black", linewidth=1.8, label=shared),
        Patch(facecolor="white", hatch="/////", edgecolor=GREY, label="free, content cached"),
        Patch(facecolor="white", edgecolor=PALE, label="free"),
    ]
    owners = [Patch(facecolor=c, edgecolor=GREY, label=f"{n}: {rid}") for rid, (n, c) in looks.items()]
    _legend(figure, handles=[*handles, *owners], ncols=4)


# ------------------------------------------------------------------------------ attention mask


def step_rows(trace, step: int) -> tuple[list[str], list[int], list[int]]:
    """The batch of one step of a trace, as `attention_mask` wants it: ids, past_lens, num_new."""
    for record, views in islice(replay(trace), step, step + 1):
        ids = list(record["scheduled"])
        return ids, [views[rid].num_computed_tokens for rid in ids], list(record["scheduled"].values())
    raise ValueError(f"the trace has {len(trace.steps)} steps, 0 to {len(trace.steps) - 1}, but not {step}")


def attention_mask_data(past_lens: list[int], num_new: list[int], ids: list[str] | None = None) -> dict:
    """The mask of one fused batch, twice: {"padded": ..., "ragged": ...}.

    Each has `rows`, a (request, query position) a row with None for a pad, and `cells`, [row][key]:
    the key's position where the query sees it, "later" where causality hides it, "pad" where there
    is nothing. Padded keys are the past, then the new tokens, each filled up on the left, so all
    rows are P_max + T_max long; ragged rows end where their keys end. `seen` counts the cells that
    matter, `computed` all that are there.
    """
    if len(past_lens) != len(num_new) or not num_new:
        raise ValueError(
            f"one past length and one number of new tokens a row, but got {past_lens} and {num_new}"
        )
    ids = ids or [chr(ord("A") + i) for i in range(len(num_new))]
    most_past, most_new = max(past_lens), max(num_new)
    told = {}
    for name in ("padded", "ragged"):
        rows, cells = [], []
        for rid, past, new in zip(ids, past_lens, num_new, strict=True):
            before, within = (most_past - past, most_new - new) if name == "padded" else (0, 0)
            keys = ["pad"] * before + list(range(past)) + ["pad"] * within + list(range(past, past + new))
            for query in [None] * within + list(range(past, past + new)):
                rows.append((rid, query))
                cells.append([_sees(query, key) for key in keys])
        told[name] = {
            "rows": rows,
            "cells": cells,
            "seen": sum(isinstance(cell, int) for row in cells for cell in row),
            "computed": sum(map(len, cells)),
        }
    return told


def _sees(query: int | None, key: int | str) -> int | str:
    if query is None or key == "pad":
        return "pad"
    return key if key <= query else "later"


def attention_mask(past_lens: list[int], num_new: list[int], axes=None, *, ids: list[str] | None = None):
    """Which key each query sees, cell by cell: the padded batch and the ragged one. Returns two Axes.

    A row is a query, named by its request and position; the number in a cell is the position of the
    key. Raises ValueError for a batch too large to letter (more than 28 keys or 40 padded rows).
    """
    data = attention_mask_data(past_lens, num_new, ids)
    keys, rows = max(map(len, data["padded"]["cells"])), len(data["padded"]["rows"])
    if keys > 28 or rows > 40:
        raise ValueError(
            f"{rows} padded rows of {keys} keys do not fit a page; take a step with fewer tokens"
        )
    beside = keys <= 12
    heights = [rows, rows if beside else len(data["ragged"]["rows"])]
    if axes is None:
        cell = min(0.26, 3.0 / keys if beside else 6.6 / keys)
        size = (WIDTH, cell * (rows if beside else sum(heights)) + (1.0 if beside else 1.5))
        shape = {"ncols": 2} if beside else {"nrows": 2, "height_ratios": heights}
        _, axes = _pyplot().subplots(**shape, figsize=size, layout="constrained")
    for ax, name, height in zip(axes, ("padded", "ragged"), heights, strict=True):
        told = data[name]
        _cells(ax, keys, height, f"{name.capitalize()}: {told['computed']} cells, {told['seen']} needed")
        _draw_mask(ax, told)
    _legend_mask(axes[0].figure)
    return tuple(axes)


MASK = {"seen": (BLUE, "", BLUE), "later": (PALE, "", PALE), "pad": ("white", "////", "#AAAAAA")}


def _draw_mask(ax, told: dict) -> None:
    for y, row in enumerate(told["cells"]):
        for x, cell in enumerate(row):
            face, hatch, edge = MASK[cell if isinstance(cell, str) else "seen"]
            text = "" if isinstance(cell, str) else cell
            _cell(ax, x, y, text, "white", facecolor=face, hatch=hatch, edgecolor=edge, linewidth=0)
    for y, ((above, _), (below, _)) in enumerate(pairwise(told["rows"])):
        if above != below:
            longer = max(len(told["cells"][y]), len(told["cells"][y + 1]))
            ax.hlines(y + 0.5, -0.5, longer - 0.5, color=INK, linewidth=0.8)
    labels = [f"{rid} pad" if query is None else f"{rid} {query}" for rid, query in told["rows"]]
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(length=0)


def _legend_mask(figure) -> None:
    from matplotlib.patches import Patch

    names = {"seen": "seen (key position)", "later": "hidden: later in the sequence", "pad": "padding"}
    _legend(
        figure,
        handles=[
            Patch(facecolor=face, hatch=hatch, edgecolor=edge, linewidth=0, label=names[key])
            for key, (face, hatch, edge) in MASK.items()
        ],
    )


# --------------------------------------------------------------------------------------- waste


def waste_data(trace, max_model_len: int | None = None) -> dict:
    """KV slots a step: taken by paging, reserved by contiguous allocation, and what each then holds.

    The contiguous way reserves prompt plus max_tokens for each running request (or `max_model_len`,
    where a server does not trust the limit it was told) and shares nothing, so it holds a copy of
    what paging shares. `wasted` is the share of the slots taken that hold no token, over all steps.
    """
    config = trace.header["config"]
    size = config["block_size"]
    held, copies, paged, contiguous = [], [], [], []
    for record, views in replay(trace):
        running = [(v, v.num_computed_tokens + v.num_scheduled) for v in views.values() if v.blocks]
        fill: dict[int, int] = {}  # a shared block is filled once
        for view, tokens in running:
            for i, block in enumerate(view.blocks):
                fill[block] = max(fill.get(block, 0), min(size, max(0, tokens - i * size)))
        held.append(sum(fill.values()))
        copies.append(sum(tokens for _, tokens in running))
        paged.append((config["num_blocks"] - record["num_free_blocks"]) * size)
        contiguous.append(sum(max_model_len or v.num_prompt_tokens + v.max_tokens for v, _ in running))

    def wasted(tokens: list[int], taken: list[int]) -> float | None:
        return 1 - sum(tokens) / sum(taken) if sum(taken) else None

    return {
        "steps": [record["step"] for record in trace.steps],
        "held": held,
        "held_contiguous": copies,
        "paged": paged,
        "contiguous": contiguous,
        "pool": config["num_blocks"] * size,
        "wasted": {"paged": wasted(held, paged), "contiguous": wasted(copies, contiguous)},
    }


def waste(trace, ax=None, *, max_model_len: int | None = None):
    """Reserved KV memory over the steps, contiguous against paged, and what really lies in it."""
    data = waste_data(trace, max_model_len)
    ax = _axes(ax, height=3.0)
    edges = [data["steps"][0] - 0.5 + i for i in range(len(data["steps"]) + 1)]
    ax.stairs(data["held"], edges, fill=True, color=LIGHT_GREEN, linewidth=0, label="tokens held")
    for name, colour, dash in (("paged", BLUE, "-"), ("contiguous", VERMILLION, (0, (4, 1.5)))):
        wasted = data["wasted"][name]
        label = f"{name}: {wasted:.0%} wasted" if wasted is not None else name
        ax.stairs(data[name], edges, color=colour, linewidth=1.6, linestyle=dash, label=label, baseline=None)
    ax.axhline(data["pool"], color=INK, linewidth=1, linestyle=":", label=f"pool: {data['pool']} slots")
    _style(ax, xlabel="engine step", ylabel="KV slots (tokens)")
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(0, 1.05 * max(data["pool"], *data["contiguous"]))
    _legend(ax)
    return ax


# ------------------------------------------------------------------------------------- latency

LINES = (
    (BLUE, "-"),
    (VERMILLION, (0, (4, 1.5))),
    (INK, (0, (1, 1.2))),
    (GREEN, (0, (6, 1.5, 1, 1.5))),
    (PURPLE, "-"),
)


def latency_data(traces) -> dict:
    """{label: {"ttft": sorted values, "tpot": ..., "itl": ...}} of a trace or of {label: trace}."""
    traces = traces if isinstance(traces, dict) else {"": traces}
    told = {}
    for label, trace in traces.items():
        requests = request_metrics(trace).values()
        told[label] = {
            "ttft": sorted(r.ttft for r in requests if r.ttft is not None),
            "tpot": sorted(r.tpot for r in requests if r.tpot is not None),
            "itl": sorted(gap for r in requests for gap in r.itl),
        }
    return told


def latency(traces, axes=None):
    """The share of TTFT, TPOT and ITL values up to each length, a line a trace. Returns three Axes."""
    data, traces = latency_data(traces), traces if isinstance(traces, dict) else {"": traces}
    unit = next(iter(traces.values())).header.get("unit", "step")
    if axes is None:
        _, axes = _pyplot().subplots(
            1, 3, figsize=(WIDTH, 2.7), sharey=True, layout="constrained", gridspec_kw={"wspace": 0.06}
        )
    titles = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency"}
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        for (label, told), (colour, dash) in zip(data.items(), cycle(LINES), strict=False):
            if told[name]:
                ax.ecdf(told[name], color=colour, linestyle=dash, linewidth=1.6, label=label)
        _style(ax, xlabel=f"{name.upper()} ({_plural(unit)})", title=title, grid="both")
        ax.set(xlim=(0, None), ylim=(0, 1.04))
    axes[0].set_ylabel("share of values", fontsize=9)
    axes[0].yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if any(data):
        _legend(axes[0].figure, axes[0].get_legend_handles_labels()[0])
    return tuple(axes)


def itl_vs_threshold_data(traces) -> list[dict]:
    """A row a trace, by long_prefill_token_threshold, 0 (off) last: its ITL and TTFT, None if it has none."""
    rows = []
    for trace in traces:
        told, config = summary(trace), trace.header["config"]
        rows.append(
            {
                "threshold": config["long_prefill_token_threshold"],
                "itl_mean": told.itl and told.itl.mean,
                "itl_p99": told.itl and told.itl.p99,
                "itl_max": told.itl and told.itl.max,
                "ttft_mean": told.ttft and told.ttft.mean,
                "ttft_max": told.ttft and told.ttft.max,
            }
        )
    return sorted(rows, key=lambda row: row["threshold"] or float("inf"))


def itl_vs_threshold(traces, axes=None):
    """What a smaller chunk buys (short gaps between tokens) and costs (a later first token).

    `traces`: one workload under several thresholds, on a clock with a cost model; on a clock of one
    a step every gap is 1. Returns the two Axes.
    """
    rows = itl_vs_threshold_data(traces)
    unit = _plural(traces[0].header.get("unit", "step"))
    if axes is None:
        _, axes = _pyplot().subplots(
            1, 2, figsize=(WIDTH, 2.9), layout="constrained", gridspec_kw={"wspace": 0.1}
        )
    labels = [str(row["threshold"] or "off") for row in rows]
    looks = {
        "p99": {"color": GREY, "marker": "s", "markersize": 9, "markerfacecolor": "white", "linestyle": "--"},
        "max": {"color": VERMILLION, "marker": "^", "markersize": 5},
        "mean": {"color": BLUE, "marker": "o", "markersize": 5},
    }
    names = {"itl": "Gap between tokens", "ttft": "Time to first token"}
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        for what, look in looks.items():
            if f"{name}_{what}" in rows[0]:
                ax.plot(labels, [row[f"{name}_{what}"] for row in rows], label=what, **look)
        _style(ax, xlabel="chunk threshold (tokens)", ylabel=f"{name.upper()} ({unit})", title=title)
        ax.margins(y=0.15)
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=8, frameon=False)
    return tuple(axes)


# -------------------------------------------------------------------------------------- ladder


def ladder_data(traces: dict) -> list[tuple[str, float, float]]:
    """(label, output tokens per unit of time, multiple of the first one's) of {label: trace}."""
    rates = {label: summary(trace).output_throughput or 0.0 for label, trace in traces.items()}
    first = next(iter(rates.values()))
    return [(label, rate, rate / first if first else float("nan")) for label, rate in rates.items()]


def ladder(traces: dict, ax=None):
    """Output throughput of each way to run the same workload, in the order given. Returns the Axes."""
    rows = ladder_data(traces)
    unit = next(iter(traces.values())).header.get("unit", "step")
    ax = _axes(ax, height=0.34 * len(rows) + 0.9)
    colours = [BLUE if i == len(rows) - 1 else LIGHT_BLUE for i in range(len(rows))]
    bars = ax.barh([label for label, _, _ in rows], [rate for _, rate, _ in rows], color=colours, height=0.66)
    labels = [f"{rate:.3g}  (\N{MULTIPLICATION SIGN}{ratio:.2g})" for _, rate, ratio in rows]
    ax.bar_label(bars, labels, fontsize=8, padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.16)
    _style(ax, xlabel=f"output tokens per {unit}", grid="x")
    ax.tick_params(axis="y", length=0)
    return ax


# ------------------------------------------------------------------------------------- compare


def compare_data(trace, reference) -> dict:
    """The first departing step (an index, None if there is none) and what differs in it.

    `fields` maps each differing part of the decision to (ours, theirs); a step that only one of the
    two has differs as a whole, and counts as {} for the other.
    """
    index = first_difference(trace, reference)
    fields = {}
    if index is not None:
        ours, theirs = (
            {} if index >= len(t.steps) else decisions(t.steps[index]) for t in (trace, reference)
        )
        fields = {
            key: (ours.get(key), theirs.get(key))
            for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key)
        }
    return {"first_difference": index, "fields": fields}


def compare(
    trace, reference, axes=None, *, labels=("yours", "reference"), steps: tuple[int, int] | None = None
):
    """Two traces of one workload, one above the other, the first departing step marked.

    Shows the steps around it (or `steps`, first and last) where the traces are long. Returns two Axes.
    """
    told = compare_data(trace, reference)
    index, longest = told["first_difference"], max(len(trace.steps), len(reference.steps))
    if steps is None:
        first = max(0, (index or 0) - 20) if longest > 80 else 0
        steps = (first, min(longest, first + 80) - 1)
    both = [timeline_data(t, steps) for t in (trace, reference)]
    for data in both:
        _refuse_unreadable(data)
    if axes is None:
        rows = [0.29 * max(len(data["ids"]), 2) for data in both]
        size = (WIDTH, sum(rows) + 1.7)
        _, axes = _pyplot().subplots(2, 1, figsize=size, height_ratios=rows, layout="constrained")
    for ax, data, label in zip(axes, both, labels, strict=True):
        _draw_rows(ax, data, legend=ax is axes[0])
        ax.set_xlim(steps[0] - 0.5, steps[1] + 0.5)
        ax.tick_params(labelbottom=True)
        ax.set_ylabel(label, fontsize=9)
        if index is not None:
            ax.axvspan(index - 0.5, index + 0.5, color=YELLOW, alpha=0.45, linewidth=0, zorder=0)
            ax.axvline(index - 0.5, color=INK, linewidth=1, linestyle=":")
    words = "the two are the same"
    if index is not None:
        words = f"first differ at step {index}: {', '.join(told['fields'])}"
    axes[1].set_xlabel(f"engine step ({words})", fontsize=9)
    return tuple(axes)
