"""feedback/STUDENT.md and report.md. Whatever comes from outside stands in them as plain text."""

import re
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from labs.kit.grader.report import words
from labs.kit.grader.report.disclosure import STATES, Disclosed
from labs.kit.grader.report.figure import alt
from labs.kit.grader.report.summary import Summary
from labs.kit.grader.report.templates import ASSETS
from mini_engine.show.figures.style import counted


class Raw(str):
    """Markdown of our own."""


def escaped(value: object) -> object:
    """Of a template's values, all but our own Markdown."""
    if isinstance(value, Raw) or not isinstance(value, str):
        return value
    text = re.sub(r"([\\`*_{}\[\]()#+!|~<>&$@:-])", r"\\\1", " ".join(value.split()))
    return text.replace("\\-", "-").replace("\\(", "(").replace("\\)", ")").replace("\\:", ":")


def code(text: str) -> Raw:
    """A span of code; a longer fence than any in it."""
    text = " ".join(text.split()).replace("|", "¦")  # a bar would end a table's cell
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return Raw(f"{ticks}{space}{text}{space}{ticks}" if text else "")


def block(lines: tuple[str, ...]) -> Raw:
    longest = max((len(run) for one in lines for run in re.findall("`+", one)), default=0)
    fence = "`" * max(3, longest + 1)
    return Raw("\n".join([f"{fence}text", *lines, fence]))


@cache
def environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=False,  # it is Markdown, and `finalize` escapes
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"code": code, "block": block, "points": points}
    return found


def points(value: float) -> Raw:
    return Raw(words.points(value))


def feedback(told: Disclosed) -> str:
    differs = map(Raw, words.differs(told))  # our own words
    text = environment().get_template("feedback.md")
    return text.render(told=told, summed=words.summed(told), differs=differs, states=STATES)


def instructor(summary: Summary) -> str:
    text = environment().get_template("report.md")
    return text.render(summary=summary, counted=counted, alt=Raw(alt(summary)))
