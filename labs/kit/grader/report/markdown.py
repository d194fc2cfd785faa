"""feedback/STUDENT.md and report.md. All values from outside are escaped to plain text."""

import re
from functools import cache

from jinja2 import Environment

from labs.kit.grader.report import templates
from labs.kit.grader.report.disclosure import Disclosed
from labs.kit.grader.report.summary import Summary


class Raw(str):
    """Markdown of our own, which is not escaped."""


def escaped(value: object) -> object:
    if isinstance(value, Raw) or not isinstance(value, str):
        return value
    text = re.sub(r"([\\`*_{}\[\]()#+!|~<>&$@:-])", r"\\\1", " ".join(value.split()))
    return text.replace("\\-", "-").replace("\\(", "(").replace("\\)", ")").replace("\\:", ":")


def code(text: str) -> Raw:
    """Return a span of code, with a longer fence than any in it."""
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
    made = templates.environment(autoescape=False, finalize=escaped, keep_trailing_newline=True)
    made.filters |= {"code": code, "block": block, "unescaped": Raw}
    made.filters["points"] = lambda number: Raw(templates.points(number))
    return made


def feedback(student: Disclosed) -> str:
    return environment().get_template("feedback.md").render(student=student)


def instructor(summary: Summary) -> str:
    return environment().get_template("report.md").render(summary=summary)
