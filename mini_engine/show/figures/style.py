"""Shared parts of the figures: colours, axes, legends, saving, and alternative texts.

The colours are Okabe and Ito's and tints of them, which colour-blind readers can distinguish. Lightness,
hatch, shape or letter repeat the meaning, so that a figure can be printed in grey. Figures have no
background: text and lines beside coloured cells are grey, readable on white and on black.
"""

from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mini_engine.show.figures.svg import with_dark_palette
from mini_engine.trace import RequestView, Trace
from mini_engine.trace.file import write_whole
from mini_engine.trace.metrics import summary

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any

Data = dict[str, Any]  # plotted data, by name

WAITING, PREFILL, DECODE, PREEMPTED, FINISHED = "waiting", "prefill", "decode", "preempted", "finished"
IDLE = "idle"

BLUE, GREEN, VERMILLION, PURPLE, YELLOW = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#F0E442"
LIGHT_ORANGE, LIGHT_BLUE, LIGHT_GREEN = "#F7C873", "#8CC6EC", "#8CCFBB"
INK, GREY, PALE = "#7A7A7A", "#8C8C8C", "#8C8C8C55"  # INK: contrast 4.3 on white and on JupyterLab's #111111
DARK = "#1A1A1A"  # text on a light cell
DASH, DOT = (0, (4, 1.5)), (0, (1, 1.2))
WIDTH = 7.5  # inches: a notebook's column, a printed page


def panels(rows: int, columns: int, height: float, width: float = WIDTH, **options: Any) -> list[Axes]:
    """Return, row by row, the axes of a new figure of `width` by `height` inches."""
    import matplotlib.pyplot as plt

    size: Data = {"figsize": (width, height), "layout": "constrained"}
    return list(plt.subplots(rows, columns, squeeze=False, **size, **options)[1].flat)


def drawn_state(view: RequestView) -> str:
    """Return a request's state as it is drawn: one that runs without a token in a step is idle."""
    return IDLE if view.running and not view.num_scheduled else view.state


def plural(unit: str) -> str:
    return "steps" if unit == "step" else unit


def counted(number: float, noun: str) -> str:
    """Return a number with its noun or unit: "1 step", "3 steps", "2.5 steps", "28.5 ms"."""
    shown = str(number) if isinstance(number, int) else f"{number:.3g}"
    return f"{shown} {noun}" + ("" if number == 1 or noun in ("s", "ms") else "s")


def frame(ax: Axes, *, xlabel: str = "", ylabel: str = "", title: str = "", grid: Any = "y") -> None:
    """Set labels, title and a light grid (x, y, both, or "" for none)."""
    ax.set_xlabel(xlabel, fontsize=9, color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    if title:
        ax.set_title(title, fontsize=10, loc="left", color=INK)
    ax.tick_params(labelsize=8, length=3, colors=INK)
    ax.spines[:].set_color(INK)
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(axis=grid, color=PALE, linewidth=0.6)
        ax.set_axisbelow(True)


def add_legend(target: Any, handles: list[Any] | None = None, ncols: int = 4) -> None:
    """Add a legend above an Axes or a figure, where it covers nothing; without handles, none."""
    handles = target.get_legend_handles_labels()[0] if handles is None else handles
    if not handles:
        return
    place: Data = {"loc": "outside upper left"}
    if not hasattr(target, "add_axes"):
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
    spacing = {"columnspacing": 1.1, "handlelength": 1.5, "handletextpad": 0.6}
    look: Data = {"ncols": min(ncols, len(handles)), "fontsize": 8, "frameon": False, "labelcolor": INK}
    target.legend(handles=handles, **look, **spacing, **place)


def patches(looks: dict[str, Data], names: dict[str, str], drawn: set[str]) -> list[Any]:
    """Return the handles of a legend: a patch of each kind of cell that was drawn."""
    from matplotlib.patches import Patch

    return [Patch(**look, label=names[kind]) for kind, look in looks.items() if kind in drawn]


def draw_limit(ax: Axes, value: float, text: str, headroom: float = 0.4) -> None:
    """Draw a labelled dashed line, with room above for the label."""
    ax.axhline(value, color=INK, linewidth=1, linestyle="--")
    place: Data = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "ha": "right"}
    ax.annotate(text, (1, value), (0, 2), fontsize=8, va="bottom", color=INK, **place)
    ax.set_ylim(0, value * (1 + headroom))
    ax.set_yticks([0, value])


def cell_grid(ax: Axes, width: int, height: int, title: str) -> None:
    """Set the unit of an Axes to one square cell, with row 0 on top."""
    frame(ax, title=title, grid="")
    ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], aspect="equal", anchor="NW")
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def draw_cell(
    ax: Axes, x: int, y: int, text: str = "", colour: str = DARK, *, size: float = 0.92, **look: Any
) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x - size / 2, y - size / 2), size, size, **look))
    ax.text(x, y, text, fontsize=8, ha="center", va="center_baseline", color=colour)


def save(
    axes: Axes | tuple[Axes, ...], path: str | PathLike[str] | IO[bytes], *, alt: str = "", dpi: int = 150
) -> None:
    """Write the figure of `axes` (one, or the tuple that a figure function returned), and close it.

    It has no background. `alt` is stored as its Description. An SVG has a second palette, for dark pages.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    figure: Any = (axes[0] if isinstance(axes, tuple) else axes).figure
    kind = Path(path).suffix.lstrip(".") or "png" if isinstance(path, str | PathLike) else None
    metadata: Data = {"Date": None} if kind == "svg" else {}  # the same run, the same file
    metadata |= {"Description": alt} if alt else {}
    options: Data = {"format": kind, "metadata": metadata, "bbox_inches": "tight", "transparent": True}
    picture = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mini-engine"}):
        figure.savefig(picture, dpi=dpi, **options)
    plt.close(figure)
    drawn = picture.getvalue()
    if kind == "svg":
        drawn = with_dark_palette(drawn.decode()).encode()
    if isinstance(path, str | PathLike):
        write_whole(path, drawn)
    else:
        path.write(drawn)


def alt_text(trace: Trace, figure: str) -> str:
    """Return an alternative text for `figure`, the name of a figure's function."""
    run = summary(trace)
    many, steps = counted(run.num_requests, "request"), counted(run.num_steps, "step")
    text = [
        f"{figure.replace('_', ' ').capitalize()} of {many} over {steps}:",
        f"{run.num_completed} completed, {counted(run.num_preemptions, 'preemption')},",
        f"{counted(run.num_cached_tokens, 'prompt token')} from the prefix cache,",
        f"{counted(run.num_output_tokens, 'output token')}.",
    ]
    if run.ttft:
        text.append(f"Mean time to first token {counted(run.ttft.mean, run.unit)},")
        text.append(f"longest gap between tokens {counted(run.max_itl or 0, run.unit)}.")
    if run.kv_utilisation is not None:
        most = f"{run.max_kv_utilisation:.0%} at most"
        text.append(f"KV pool {run.kv_utilisation:.0%} full on average, {most}.")
    if run.budget_utilisation is not None:
        text.append(f"Token budget {run.budget_utilisation:.0%} used.")
    return " ".join(text)
