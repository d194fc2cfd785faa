"""A sheet to draw on: 700 units wide, one unit is a pixel where a README shows it, y goes down.

Its ground is solid. Colours are those of mini_engine.show.figures, with their counterparts for dark pages.
"""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from labs.kit.judge import loading
from mini_engine.show.figures import style
from mini_engine.show.figures.svg import with_dark_palette
from mini_engine.trace import RequestView, StepTrace, Trace, replay
from mini_engine.trace.file import write_whole
from mini_engine.trace.fold import copy_view

WIDTH = 700
PAPER, INK, SOFT, LINE, OCHRE = "#FDFDFB", style.DARK, "#595959", "#B9B9B9", "#9A6A10"
SMALL, NORMAL, LARGE = 9, 10, 11  # points; at 700 pixels nothing smaller can be read
Look = dict[str, Any]
LOOKS: dict[str, Look] = {
    "prefill": {"face": style.BLUE, "edge": style.BLUE, "colour": "white"},
    "decode": {"face": style.LIGHT_ORANGE, "edge": style.LIGHT_ORANGE},
    "preempted": {"face": "#F4C9AC", "edge": style.VERMILLION, "hatch": "//////"},
    "waiting": {"face": "#E4E4E0", "edge": style.GREY},
    "cached": {"face": style.LIGHT_GREEN, "edge": style.LIGHT_GREEN},
    "empty": {"face": "none", "edge": LINE},
    "unused": {"face": "none", "edge": LINE, "dashed": True},
    "pad": {"face": "none", "edge": LINE, "hatch": "/////"},
    "plain": {"face": "white", "edge": style.GREY},
}


def solution(lab_id: str) -> Any:
    return loading.namespace(lab_id, "solution")


def scenario_of(lab_id: str, name: str) -> dict[str, Any]:
    scenarios: list[dict[str, Any]] = loading.load(lab_id, "scenarios").SCENARIOS
    return next(scenario for scenario in scenarios if scenario["name"] == name)


def run_of(lab_id: str, scenario: dict[str, Any]) -> Trace:
    """Return the run of a scenario by the lab's own solution."""
    trace: Trace = loading.load(lab_id, "scenarios").run(solution(lab_id), scenario)
    return trace


def made_up(lab_id: str, requests: Iterable[tuple[str, int, int, int]], **config: int) -> Trace:
    """Return the run of requests given as (id, prompt, max_tokens, at)."""
    entries = [dict(zip(("id", "prompt", "max_tokens", "at"), one, strict=True)) for one in requests]
    defaults = {"long_prefill_token_threshold": 0, "num_blocks": 4096, "watermark": 0}
    return run_of(lab_id, {"name": "a picture's", "config": defaults | config, "requests": entries})


def steps_of(trace: Trace) -> list[tuple[StepTrace, dict[str, RequestView]]]:
    """Return each step with its requests as they were in it."""
    return [(record, {name: copy_view(v) for name, v in views.items()}) for record, views in replay(trace)]


class Sheet:
    def __init__(self, height: float):
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 100, height / 100), facecolor=PAPER)
        self.ax = self.figure.add_axes((0, 0, 1, 1))
        self.ax.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.ax.axis("off")

    def text(self, x: float, y: float, words: str, *, size: float = SMALL, **look: Any) -> None:
        colour = look.pop("colour", INK)
        self.ax.text(x, y, words, fontsize=size, color=colour, **{"va": "center_baseline"} | look)

    def title(self, x: float, y: float, words: str, **look: Any) -> None:
        self.text(x, y, words, size=LARGE, weight="bold", **look)

    def note(self, x: float, y: float, words: str, **look: Any) -> None:
        self.text(x, y, words, **{"colour": SOFT} | look)

    def label(self, x: float, y: float, words: str, **look: Any) -> None:
        """A note with x in its middle."""
        self.note(x, y, words, ha="center", **look)

    def code(self, x: float, y: float, words: str, size: float = NORMAL) -> None:
        self.text(x, y, words, family="monospace", size=size)

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, face: str = "white",
        edge: str = style.GREY, colour: str = INK, line: float = 1, radius: float = 3, hatch: str = "",
        dashed: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        """A box by its upper left corner, with words in its middle."""
        shape = f"round,pad=0,rounding_size={radius}"
        look: Look = {"fc": face, "ec": edge, "lw": line, "hatch": hatch, "hatch_linewidth": 0.6}
        patch = FancyBboxPatch((x, y), width, height, shape, linestyle="--" if dashed else "-", **look)
        self.ax.add_patch(patch)
        if words:
            self.text(x + width / 2, y + height / 2, words, colour=colour, ha="center", **more)

    def cell(
        self, x: float, y: float, width: float, height: float, words: str, kind: str, **more: Any
    ) -> None:
        """A box that looks as its kind does, a key of LOOKS."""
        self.box(x, y, width, height, words, **LOOKS[kind] | {"radius": 2} | more)

    def cells(
        self, x: float, y: float, pitch: float, height: float, entries: Iterable[tuple[str, str]],
        gap: float = 2, **more: Any,
    ) -> None:  # fmt: skip
        """A row of cells, (words, kind) each; a cell and the gap behind it are `pitch` wide."""
        for place, (words, kind) in enumerate(entries):
            self.cell(x + place * pitch + gap / 2, y, pitch - gap, height, words, kind, **more)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, colour: str = SOFT, bend: float = 0,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        look: Look = {"color": colour, "lw": 1.4, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
        look |= {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}"}
        self.ax.add_patch(FancyArrowPatch(start, end, linestyle="--" if dashed else "-", **look))

    def line(self, *points: tuple[float, float], colour: str = LINE, line: float = 1) -> None:
        """A line, behind the boxes."""
        look: Look = {"color": colour, "lw": line, "solid_capstyle": "butt", "zorder": 0.5}
        self.ax.plot(*zip(*points, strict=True), **look)

    def dot(self, x: float, y: float) -> None:
        self.ax.plot([x], [y], "o", ms=6.5, color=style.LIGHT_ORANGE, mec=OCHRE, mew=0.8, zorder=4)

    def brace(self, x: float, end: float, y: float, words: str) -> None:
        """A bracket from x to end whose ticks show upwards, with words below."""
        self.line((x, y - 5), (x, y), (end, y), (end, y - 5), colour=SOFT)
        self.label((x + end) / 2, y + 11, words)

    def legend(self, x: float, y: float, *entries: tuple[str, str]) -> None:
        """Kinds of cells and what they mean, on one line."""
        for kind, words in entries:
            self.cell(x, y - 6, 13, 12, "", kind)
            self.note(x + 19, y, words)
            x += 19 + self.width(words) + 16

    def width(self, words: str) -> float:
        """Return the width of words in units."""
        from matplotlib.textpath import TextPath

        return float(TextPath((0, 0), words, size=SMALL).get_extents().width) * 100 / 72

    def save(self, path: Path) -> int:
        """Write the SVG, with a second palette for dark pages; return its size in bytes."""
        page = BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": path.name}):
            self.figure.savefig(page, format="svg", facecolor=PAPER, metadata={"Date": None})
        write_whole(path, with_dark_palette(page.getvalue().decode()).encode())
        return path.stat().st_size
