"""The book's dials: sliders over the simulator, each set to its page's question.

`<!-- {dial} batching -->` puts one there with its figures; dial.js asks the simulator again when it is moved.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from labs.kit.browser.race import DEFAULTS, NUM_REQUESTS, TPOT_LIMIT, TTFT_LIMIT, serve

FILE = Path(__file__).parents[1] / "dials.toml"
SLIDERS = {  # words, least, most, step
    "rate": ("requests a second", 2, 30, 1),
    "prompt": ("tokens of a prompt", 64, 1024, 64),
    "output": ("tokens of an answer", 8, 256, 8),
    "budget": ("budget: tokens in a step", 64, 2048, 64),
    "pool": ("pool: blocks of memory", 128, 1024, 32),
    "slots": ("slots: requests at a time", 1, 64, 1),
    "chunk": ("tokens of one prompt in a step (0: no limit)", 0, 512, 32),
    "shared": ("percent of a prompt that others begin with, too", 0, 90, 10),
    "spread": ("how much the lengths differ, in percent", 0, 150, 10),
    "replicas": ("replicas: engines behind the router", 1, 8, 1),
    "burst": ("how much the arrivals crowd together", 0, 9, 1),
}


@dataclass(frozen=True)
class Dial:
    """A question, the sliders and the ways to schedule that answer it, and where the sliders begin."""

    question: str
    sliders: Sequence[str]
    ways: Sequence[str]
    at: dict[str, float]


def dials() -> dict[str, Dial]:
    """Return the dials of dials.toml by name."""
    found = tomllib.loads(FILE.read_text("utf-8"))
    return {name: Dial(**{"ways": ("chunked",), "at": {}} | fields) for name, fields in found.items()}


class DialDirective(SphinxDirective):
    """`<!-- {dial} NAME -->`: a dial of dials.toml, with the figures at which it begins."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        self.env.note_dependency(str(FILE))
        known = dials()
        if name not in known:
            raise ExtensionError(f"dials.toml has no dial {name!r}; it has {', '.join(known)}")
        dial = known[name]
        figures = {way: serve(way, **dial.at) for way in dial.ways}
        data = {"at": dial.at, "figures": figures, "limits": {"ttft": TTFT_LIMIT, "itl": TPOT_LIMIT}}
        up = "../" * self.env.docname.count("/")
        columns = ("way", "p99 TTFT", "p99 ITL", "goodput", "preempted")
        heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
        sliders = "".join(_slider(one, dial) for one in dial.sliders)
        rows = "".join(_row(number, way, dial) for number, way in enumerate(dial.ways))
        question = escape(dial.question)
        note = (
            f"{NUM_REQUESTS} requests in the simulator. Goodput: how many a second had a TTFT of at most "
            f"{TTFT_LIMIT:g} ms and {TPOT_LIMIT:g} ms a token. Red is above that."
        )
        text = (
            f'<link rel="stylesheet" href="{up}_static/dial.css"><form class="dial" aria-label="{question}">'
            f'<p><strong>Turn it:</strong> {question}</p><div class="sliders">{sliders}</div>'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
            f'<p class="note">{note} <span role="status"></span></p>'
            f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script></form>'
            f'<script defer src="{up}_static/dial.js"></script>'
        )
        return [nodes.raw("", text, format="html")]


def _slider(name: str, dial: Dial) -> str:
    words, least, most, step = SLIDERS[name]
    value = dial.at.get(name, DEFAULTS[name])
    return (
        f'<label><span>{escape(words)}</span><input type="range" name="{name}" min="{least}" max="{most}" '
        f'step="{step}" value="{value}" autocomplete="off"><output>{value}</output></label>'
    )


def _row(number: int, way: str, dial: Dial) -> str:
    label = escape(way)
    if len(dial.ways) > 1:
        chosen = " checked" if number == len(dial.ways) - 1 else ""
        label = f'<label><input type="radio" name="way" value="{label}"{chosen}> {label}</label>'
    inside = {"ttft": "", "itl": "", "goodput": "<b></b><i></i>", "preempted": ""}
    cells = "".join(f'<td class="{name}">{parts}</td>' for name, parts in inside.items())
    return f'<tr data-way="{escape(way)}"><th scope="row">{label}</th>{cells}</tr>'


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("dial", DialDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
