"""Draws docs/images/architecture.svg from the code: layers from pyproject.toml, words from docstrings.

python docs/images/architecture.py [OUT.svg]
"""

import ast
import json
import sys
import tomllib
from functools import cache
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".svg")
INK, TORCH, PLAIN = "#222222", "#F7C873", "#DCEBF7"


def boxes() -> list[list[dict]]:
    """The engine's layers, the highest first: of each module or room its name, what it is for, and
    whether it imports torch."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["containers"] == ["mini_engine"])
    return [[_box(name.strip()) for name in layer.replace("|", ":").split(":")] for layer in layers]


def _box(name: str) -> dict:
    path = ROOT / "mini_engine" / name
    front = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    words = (ast.get_docstring(ast.parse(front.read_text("utf-8"))) or "").split("\n\n")[0]
    files = path.rglob("*.py") if path.is_dir() else [front]
    torch = any(_needs_torch(file) for file in files if "shakespeare" not in file.parts)
    shown = f"{name}/" if path.is_dir() else front.name
    return {"name": shown, "for": " ".join(words.split()), "torch": torch}


def _needs_torch(file: Path) -> bool:
    """Whether importing the file imports torch, by itself or through others of the engine."""
    seen, todo = set(), [file]
    while todo:
        names = _imported(todo.pop())
        if "torch" in names:
            return True
        ours = [ROOT / name.replace(".", "/") for name in names if name.startswith("mini_engine")]
        found = {f for path in ours for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()}
        todo += found - seen
        seen |= found
    return False


@cache
def _imported(file: Path) -> set[str]:
    """The modules that a file imports at its top, and the names that it takes from them."""
    names = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update([str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def draw(path: Path) -> None:
    """One row a layer, one box a module or room; an import goes down only."""
    from textwrap import wrap

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    from mini_engine.show.figures.svg import with_dark_palette

    layers = boxes()
    top = sum(0.42 if len(layer) == 1 else 0.78 for layer in layers)
    figure = Figure(figsize=(10, top + 0.5))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 10), ylim=(-0.45, top + 0.05))
    ax.axis("off")
    y, text = top, {"ha": "left", "va": "center", "color": INK}
    for layer in layers:
        height, width = 0.42 if len(layer) == 1 else 0.78, 9.3 / len(layer)
        y -= height
        for column, box in enumerate(layer):
            x = 0.6 + column * width
            face = TORCH if box["torch"] else PLAIN
            size = width - 0.1, height - 0.08, "round,pad=0,rounding_size=0.06"
            ax.add_patch(FancyBboxPatch((x, y + 0.04), *size, fc=face, ec=INK, lw=0.6))
            name = {"fontsize": 10, "weight": "bold", "family": "monospace"}
            if len(layer) == 1:
                ax.text(x + 0.1, y + height / 2, box["name"], **name, **text)
                ax.text(x + 1.75, y + height / 2, box["for"], fontsize=8, **text)
            else:
                ax.text(x + 0.1, y + height - 0.17, box["name"], **name, **text)
                words, chars = box["for"], int(width * 14.5)
                if len(wrap(words, chars)) > 2:
                    words = words.partition(":")[0] + "."
                lines = "\n".join(wrap(words, chars)[:2])
                ax.text(x + 0.1, y + 0.27, lines, fontsize=8, linespacing=1.2, **text)
    ax.annotate("", (0.4, 0.05), (0.4, top - 0.05), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})
    ax.text(0.2, top / 2, "an import goes down only", rotation=90, fontsize=8, va="center", ha="center")
    for x, face, words in ((0.6, TORCH, "imports torch"), (2.1, PLAIN, "does not")):
        ax.add_patch(FancyBboxPatch((x, -0.33), 0.24, 0.18, "round,pad=0", fc=face, ec=INK, lw=0.6))
        ax.text(x + 0.34, -0.24, words, fontsize=8, **text)
    page = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "architecture"}):
        figure.savefig(page, format="svg", metadata={"Date": None, "Description": json.dumps(layers)})
    path.write_text(with_dark_palette(page.getvalue().decode()), "utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
