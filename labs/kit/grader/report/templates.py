"""The reports' templates, and the words that several reports share."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from labs.kit.grader.report.disclosure import Disclosed
from mini_engine.show.figures.style import counted

ASSETS = Path(__file__).with_name("assets")

WHY = """`python -m labs test` and this grade use the same judge. `labs test` plays the public cases, which
are the same for everyone, and runs the lab's other tests, which explain more and give no points. A grade
depends on the public cases and on hidden ones{drawn}. These are drawn from a seed that is secret until the
grades are out, so that answers to the public cases alone earn nothing. So the two can differ in hidden cases
only. `labs test` also shortens a case that departs to the calls that it needs; here it is shown as it was
played."""

ONLY_HIDDEN = """In {id} they do differ: all {public[1]} public cases pass, and {hidden[0]} of {hidden[1]}
hidden ones depart. Your own `labs test` cannot show these; read the docstrings again for what no public case
asks."""

ALIKE = "In this submission no lab is right in the public cases and wrong in hidden ones."


def environment(**options: Any) -> Environment:
    """Return an environment for the templates; `options` say how it escapes values."""
    options |= {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    made = Environment(loader=FileSystemLoader(ASSETS), **options)
    made.globals |= {"counted": counted, "sum_of": sum_of, "added": added, "differs": differs}
    return made


def points(value: float) -> str:
    return f"{round(value, 2):g}"


def sum_of(student: Disclosed) -> str:
    return f"{points(student.earned)} of {points(student.points)} points{added(student)}"


def added(student: Disclosed) -> str:
    """Return what is in a student's points beside the tasks', or ""."""
    late = f", after {points(student.withheld)} withheld for lateness" if student.withheld else ""
    return late + (f", with {student.manual:+g} by the instructor" if student.manual else "")


def differs(student: Disclosed) -> list[str]:
    """Return paragraphs on where this grade and the student's own `labs test` differ, and why."""
    why = WHY.format(drawn=f" ({student.num_hidden} per lab)" if student.num_hidden else "")
    passing = (lab for lab in student.labs if not lab.public[0])  # the student's own `labs test` passes it
    here = [ONLY_HIDDEN.format_map(vars(lab)) for lab in passing if lab.hidden[0]]
    return [" ".join(text.split()) for text in (why, *(here or [ALIKE]))]
