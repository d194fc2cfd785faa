"""A sheet to draw on: 700 units wide, a unit a pixel where a README shows it, y downwards.

Its ground is solid, so that it reads on a dark page too. Colours are those of mini_engine.show.figures.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from labs.kit.judge import loading
from mini_engine.show.figures import style
from mini_engine.trace import Trace

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
    "pad": {"face": "none", "edge": LINE, "hatch": "/////"},
    "plain": {"face": "white", "edge": style.GREY},
}


def solution(lab_id: str) -> Any:
    return loading.namespace(lab_id, "solution")


def trace_of(lab_id: str, config: dict[str, Any], requests: Sequence[tuple[Any, ...]], *names: str) -> Trace:
    """The run of a made-up scenario by the lab's own solution; a request a tuple of `names`."""
    names = names or ("id", "prompt", "max_tokens", "at")
    entries = [dict(zip(names, request, strict=True)) for request in requests]
    scenario = {"name": "a picture's", "config": config, "requests": entries}
    trace: Trace = loading.load(lab_id, "scenarios").run(solution(lab_id), scenario)
    return trace


class Sheet:
    def __init__(self, height: float):
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 100, height / 100), facecolor=PAPER)
        self.ax = self.figure.add_axes((0, 0, 1, 1))
        self.ax.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.ax.axis("off")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = SMALL,
        colour: str = INK,
        ha: str = "left",
        **more: Any,
    ) -> None:
        self.ax.text(
            x, y, words, fontsize=size, color=colour, ha=ha, va=more.pop("va", "center_baseline"), **more
        )

    def title(self, x: float, y: float, words: str) -> None:
        self.text(x, y, words, size=LARGE, weight="bold")

    def note(self, x: float, y: float, words: str, **more: Any) -> None:
        self.text(x, y, words, colour=more.pop("colour", SOFT), **more)

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, face: str = "white",
        edge: str = style.GREY, colour: str = INK, line: float = 1, radius: float = 3, hatch: str = "",
        size: float = SMALL, dashed: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        """A box by its upper left corner, with words in its middle."""
        shape = f"round,pad=0,rounding_size={radius}"
        look: Look = {"fc": face, "ec": edge, "lw": line, "hatch": hatch, "hatch_linewidth": 0.6}
        patch = FancyBboxPatch((x, y), width, height, shape, linestyle="--" if dashed else "-", **look)
        self.ax.add_patch(patch)
        if words:
            self.text(x + width / 2, y + height / 2, words, size=size, colour=colour, ha="center", **more)

    def cell(
        self, x: float, y: float, width: float, height: float, words: str, kind: str, **more: Any
    ) -> None:
        """A box that looks as its kind does, a key of LOOKS."""
        self.box(x, y, width, height, words, **LOOKS[kind] | {"radius": 2} | more)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, colour: str = SOFT, bend: float = 0,
        line: float = 1.4, style: str = "-|>", dashed: bool = False,
    ) -> None:  # fmt: skip
        look: Look = {"color": colour, "lw": line, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
        look |= {
            "arrowstyle": style,
            "connectionstyle": f"arc3,rad={bend}",
            "linestyle": "--" if dashed else "-",
        }
        self.ax.add_patch(FancyArrowPatch(start, end, **look))

    def line(
        self, points: Sequence[tuple[float, float]], *, colour: str = LINE, line: float = 1, **more: Any
    ) -> None:
        """A line, behind the boxes."""
        look: Look = {"color": colour, "lw": line, "solid_capstyle": "butt", "zorder": 0.5}
        self.ax.plot(*zip(*points, strict=True), **look | more)

    def dot(self, x: float, y: float, *, face: str = style.LIGHT_ORANGE, size: float = 6.5) -> None:
        self.ax.plot([x], [y], "o", ms=size, color=face, mec=OCHRE, mew=0.8, zorder=4)

    def brace(self, x: float, end: float, y: float, words: str, *, tick: float = 5, **more: Any) -> None:
        """A bracket from x to end whose ticks show upwards, with words below (or above, if tick < 0)."""
        self.line([(x, y - tick), (x, y), (end, y), (end, y - tick)], colour=SOFT)
        self.note((x + end) / 2, y + (11 if tick > 0 else -10), words, ha="center", **more)

    def legend(self, x: float, y: float, *entries: tuple[str, str], gap: float = 16) -> None:
        """Kinds of cells and what they mean, on one line."""
        for kind, words in entries:
            self.cell(x, y - 6, 13, 12, "", kind)
            self.note(x + 19, y, words)
            x += 19 + self.width(words) + gap

    def width(self, words: str, size: float = SMALL) -> float:
        """How wide words are, in units."""
        from matplotlib.textpath import TextPath

        return float(TextPath((0, 0), words, size=size).get_extents().width) * 100 / 72

    def save(self, path: Path, alt: str | None) -> int:
        """Write the PNG, in few colours; its size in bytes."""
        from PIL import Image, PngImagePlugin

        page = BytesIO()
        self.figure.savefig(page, dpi=200, facecolor=PAPER, metadata={"Software": None})
        info = PngImagePlugin.PngInfo()
        info.add_text("Description", " ".join((alt or "").split()))
        image = Image.open(page).convert("RGB").quantize(96, dither=Image.Dither.NONE)
        image.save(path, optimize=True, pnginfo=info)
        return path.stat().st_size
