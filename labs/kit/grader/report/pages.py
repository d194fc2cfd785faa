"""feedback/STUDENT.html and index.html: each is one file that asks for nothing, and its policy forbids to.

Feedback is one template for both. In index.html each student's feedback and each run is packed, equal runs
once, and unpacked when it is opened. Templates escape all that they are given.
"""

import re
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from labs.kit.grader.report import words
from labs.kit.grader.report.disclosure import Disclosed
from labs.kit.grader.report.files import Spool, name_of, packed
from labs.kit.grader.report.summary import Summary
from labs.kit.grader.report.templates import ASSETS
from labs.kit.grader.results import MISSING, NOT_WRITTEN, RIGHT, WAITS, WRONG
from mini_engine.show.figures.style import counted
from mini_engine.show.player import component

MARKS = {RIGHT: "right", WRONG: "wrong", NOT_WRITTEN: "unwritten", WAITS: "waits", MISSING: "missing"}


def student(told: Disclosed) -> str:
    """The page that a student gets."""
    packs = [(name, packed(text)) for name, text in sorted(texts_of(told).items())]
    return render("student.html", **told_in(told), packs=packs, **frame())


def keep(told: Disclosed, spool: Spool) -> None:
    """Pack what index.html needs of a student."""
    for name, text in texts_of(told).items():
        spool.add(name, text)
    spool.add(f"s-{told.stem}", render("feedback.html", **told_in(told)))


def index(summary: Summary, spool: Spool) -> Iterator[str]:
    """The instructor's page, piece by piece."""
    yield render("index.html", summary=summary, height=height, part=part_of(summary), tint=tint, **frame())
    for name, data in spool.read():
        yield f'<script type="text/plain" id="{Markup.escape(name)}">{data}</script>\n'
    yield f"<script>{script()}</script>\n</body>\n</html>\n"


def told_in(told: Disclosed) -> dict[str, Any]:
    runs = {lab.id: (name_of(lab.play.yours), name_of(lab.play.expected)) for lab in told.labs if lab.play}
    return {"told": told, "runs": runs, "summed": words.summed(told), "differs": words.differs(told)}


def texts_of(told: Disclosed) -> dict[str, str]:
    """The runs to play, by name."""
    runs = [text for lab in told.labs if lab.play for text in (lab.play.yours, lab.play.expected)]
    return {name_of(text): text for text in runs}


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(marks=MARKS, **values)


@cache
def environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"points": words.points, "spans": spans}
    found.globals["counted"] = counted
    return found


def spans(text: str) -> Markup:
    """Between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(text))))


@cache
def script() -> str:
    """The player, and below it what is the pages' own."""
    host = (ASSETS / "page.js").read_text("utf-8")
    return f'(() => {{\n"use strict";\n{component()}\n{{\n{host}}}\n}})();\n'


@cache
def frame() -> dict[str, Any]:
    style = (ASSETS / "page.css").read_text("utf-8")
    allowed = f"script-src '{hashed(script())}'; style-src '{hashed(style)}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return {"policy": policy, "style": Markup(style), "script": Markup(script())}


def hashed(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def height(number: int, bins: list[int]) -> float:
    """Of a bar, in %; one student can be seen."""
    return max(2.0, round(100 * number / max(bins), 1)) if number else 0.0


class part_of:
    """A number of students as % of the class."""

    def __init__(self, summary: Summary):
        self.all = max(1, len(summary.rows))

    def __call__(self, number: int) -> float:
        return round(100 * number / self.all, 1)


def tint(earned: float | None, tasks: dict[str, float]) -> str:
    """How a lab's cell looks, in five steps."""
    points = sum(tasks.values())
    share = (earned or 0) / points if points else 1
    return "t4" if share >= 1 else "t0" if share <= 0 else f"t{1 + min(2, int(share * 3))}"
