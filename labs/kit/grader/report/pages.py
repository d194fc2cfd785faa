"""feedback/STUDENT.html and index.html. Each is one file that loads nothing, and its policy forbids it to.

Both show feedback with the same template. index.html has each student's feedback and each run packed, equal
runs once, and unpacks them when they are opened. Templates escape all values.
"""

import re
import zlib
from base64 import b64encode
from collections import Counter
from functools import cache
from hashlib import blake2b, sha256
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from labs.kit.grader.report import templates
from labs.kit.grader.report.disclosure import Disclosed
from labs.kit.grader.report.summary import Summary
from labs.kit.grader.results import MISSING, NOT_WRITTEN, RIGHT, WAITS, WRONG
from mini_engine.show.player import component

MARKS = {RIGHT: "right", WRONG: "wrong", NOT_WRITTEN: "unwritten", WAITS: "waits", MISSING: "missing"}


def student(student: Disclosed) -> str:
    """Return the page that a student gets."""
    packs = {name: packed(text) for name, text in runs(student).items()}
    return render("student.html", student=student, packs=packs, **frame())


def packs(student: Disclosed) -> dict[str, str]:
    """Return the packed texts that index.html needs of a student, by id."""
    texts = runs(student) | {f"s-{student.stem}": render("feedback.html", student=student)}
    return {name: packed(text) for name, text in texts.items()}


def index(summary: Summary, packs: dict[str, str]) -> str:
    """Return the instructor's page."""
    return render("index.html", summary=summary, packs=packs, height=height, tint=tint, **frame()) + "\n"


def runs(student: Disclosed) -> dict[str, str]:
    """Return the runs to play, by id."""
    texts = [text for lab in student.labs if lab.play for text in (lab.play.yours, lab.play.expected)]
    return {id_of(text): text for text in texts}


def id_of(text: str) -> str:
    """Return the id of a packed text: equal texts share one."""
    return "p" + blake2b(text.encode("utf-8"), digest_size=10).hexdigest()


def packed(text: str) -> str:
    """Return a text as a page can carry it, and unpack it with DecompressionStream("deflate")."""
    return b64encode(zlib.compress(text.encode("utf-8"), 9)).decode()


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(marks=MARKS, **values)


@cache
def environment() -> Environment:
    made = templates.environment(autoescape=True)
    made.filters |= {"points": templates.points, "spans": spans, "id_of": id_of}
    made.filters["groupby_count"] = lambda names: sorted(Counter(names).items())
    return made


def spans(text: str) -> Markup:
    """Return the text with code for what stands between backticks."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(text))))


@cache
def frame() -> dict[str, Any]:
    """Return the style and script of a page, and the content security policy that allows no others."""
    style, host = ((templates.ASSETS / name).read_text("utf-8") for name in ("page.css", "page.js"))
    script = f'(() => {{\n"use strict";\n{component()}\n{{\n{host}}}\n}})();\n'
    allowed = f"script-src '{hashed(script)}'; style-src '{hashed(style)}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return {"policy": policy, "style": Markup(style), "script": Markup(script)}


def hashed(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def height(number: int, bins: list[int]) -> float:
    """Return a bar's height in %; that of a single student can still be seen."""
    return max(2.0, round(100 * number / max(bins), 1)) if number else 0.0


def tint(earned: float | None, tasks: dict[str, float]) -> str:
    """Return the CSS class of a lab's cell, one of five steps."""
    points = sum(tasks.values())
    share = (earned or 0) / points if points else 1
    return "t4" if share >= 1 else "t0" if share <= 0 else f"t{1 + min(2, int(share * 3))}"
