"""The KV pool as a grid: the owner of each block at some steps of a run."""

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Fold, Trace

# Light enough for black letters. Colours repeat; the name in the block identifies the owner.
OWNERS = (
    style.LIGHT_ORANGE, style.LIGHT_BLUE, style.LIGHT_GREEN, "#E3B0CB", style.YELLOW, "#EE9A66", "#BFC7D5",
)  # fmt: skip
LOOKS: dict[str, style.Data] = {
    "held": {"facecolor": OWNERS[0], "edgecolor": style.GREY, "linewidth": 0.6},
    "shared": {"facecolor": OWNERS[0], "edgecolor": style.INK, "linewidth": 2.4},
    "cached": {"facecolor": "none", "edgecolor": style.GREY, "linewidth": 0.6, "hatch": "/////"},
    "free": {"facecolor": "none", "edgecolor": style.GREY, "linewidth": 0.5},
}
NAMES = {
    "held": "held by the named request", "shared": "shared by \N{MULTIPLICATION SIGN}n requests",
    "cached": "free, content cached", "free": "free",
}  # fmt: skip


def block_map_data(trace: Trace, steps: list[int] | None = None) -> style.Data:
    """Return the owners of each block at some steps (default: six, evenly spread).

    steps; owners [snapshot][block], a tuple of request ids, two or more where a prefix is shared;
    cached [snapshot], the blocks, held or free, whose content the prefix cache can find;
    num_blocks, block_size. Raise ValueError for a step that the trace does not have.
    """
    config = trace.header.config
    last = len(trace.steps) - 1
    steps = sorted({round(i * last / 5) for i in range(6)}) if steps is None else list(steps)
    if not steps or min(steps) < 0 or max(steps) > last:
        raise ValueError(f"steps must be within 0 to {last}, but are {steps}")
    owners, cached = [], []
    fold = Fold(trace.header)
    for index, record in enumerate(trace.steps):
        views = fold.add(record)
        if index in steps:
            holders: list[list[str]] = [[] for _ in range(config["num_blocks"])]
            for rid, view in views.items():
                for block in view.blocks:
                    holders[block].append(rid)
            owners.append([tuple(ids) for ids in holders])
            cached.append(set(fold.cached))
    sizes = {name: config[name] for name in ("num_blocks", "block_size")}
    return {"steps": sorted(set(steps)), "owners": owners, "cached": cached, **sizes}


def block_map(trace: Trace, steps: list[int] | None = None) -> tuple[Axes, ...]:
    """Draw the pool as a grid at some steps: each block with its owner, shared and cached blocks marked.

    Return an Axes for each step. Raise ValueError for a pool of more than 250 blocks.
    """
    from matplotlib.patches import Patch

    data = block_map_data(trace, steps)
    if data["num_blocks"] > 250:
        raise ValueError(f"{data['num_blocks']} blocks are too many to label; show a pool of at most 250")
    width = max(4, round((data["num_blocks"] * 1.3) ** 0.5))
    height = -(-data["num_blocks"] // width)
    axes = tuple(_block_grid(len(data["steps"]), width, height))
    ids = sorted({rid for owners in data["owners"] for held in owners for rid in held}, key=_natural)
    names = {rid: rid if max(map(len, ids)) <= 3 else str(i) for i, rid in enumerate(ids, 1)}
    looks = {rid: (names[rid], OWNERS[i % len(OWNERS)]) for i, rid in enumerate(ids)}
    kinds = set()
    for ax, step, owners, cached in zip(axes, data["steps"], data["owners"], data["cached"], strict=True):
        for block, held in enumerate(owners):
            kinds.add(_draw_block(ax, block % width, block // width, held, block in cached, looks))
        style.cell_grid(ax, width, height, title=f"step {trace.steps[step].step}")
    # Ids that are too long for a cell are numbered in it.
    named = {} if list(names) == list(names.values()) else looks
    legend = [Patch(facecolor=c, edgecolor=style.GREY, label=f"{n}: {rid}") for rid, (n, c) in named.items()]
    style.add_legend(axes[0].figure, style.patches(LOOKS, NAMES, kinds) + legend)
    return axes


def _block_grid(count: int, width: int, height: int) -> list[Axes]:
    ncols = 3 if width <= 9 else 2
    nrows = -(-count // ncols)
    panel = (style.WIDTH - 0.3) / ncols
    grid = style.panels(nrows, ncols, nrows * (panel * height / width + 0.2) + 0.5)
    for spare in grid[count:]:
        spare.remove()
    return grid[:count]


def _natural(rid: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, rid))
    return (int(digits or 0), rid)


def _draw_block(
    ax: Axes, x: int, y: int, held: tuple[str, ...], cached: bool, looks: dict[str, tuple[str, str]]
) -> str:
    """Draw a block and return its kind, a key of LOOKS."""
    kind = "shared" if held[1:] else "held" if held else "cached" if cached else "free"
    text, face = looks[held[0]] if held else ("", "none")
    text = f"\N{MULTIPLICATION SIGN}{len(held)}" if held[1:] else text
    size = 0.86 if kind == "shared" else 0.92
    style.draw_cell(ax, x, y, text, size=size, **LOOKS[kind] | {"facecolor": face})
    return kind
