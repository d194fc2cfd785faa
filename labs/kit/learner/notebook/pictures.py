"""Figures in a notebook, with alternative text."""

import io
import logging
from base64 import b64encode

from mini_engine.show import figures
from mini_engine.show.figures.style import Axes

# Before a machine's first picture matplotlib reports on stderr that it looks for fonts.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def show(axes: Axes | tuple[Axes, ...], alt: str) -> None:
    """Show a figure once, with `alt` as its alternative text, by which saved notebooks are compared."""
    from IPython.display import display

    picture = io.BytesIO()
    figures.save(axes, picture, dpi=130)
    data = {"image/png": b64encode(picture.getvalue()).decode(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt, "width": 780}})
