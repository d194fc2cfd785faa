"""Sentences that several reports say."""

from labs.kit.grader.report.disclosure import Disclosed


def points(value: float) -> str:
    return f"{round(value, 2):g}"


def summed(told: Disclosed) -> str:
    text = f"{points(told.earned)} of {points(told.points)} points"
    return f"{text}, after {points(told.withheld)} withheld for lateness" if told.withheld else text


WHY = """The same judge is at work in `python -m labs test` and here. `labs test` plays the public cases,
which are the same for everyone, and runs the lab's other tests, which explain more and give no points. A
grade goes by the public cases and by hidden ones{drawn}, which come from a seed that is not given out before,
so that answers to the public cases alone earn nothing. So the two can differ in hidden cases alone. `labs
test` also cuts a case that departs to the calls that it needs; here it is as it was played."""

ONLY_HIDDEN = """In {id} they do differ: all {public[1]} public cases pass, and {hidden[0]} of {hidden[1]}
hidden ones depart. Your own `labs test` cannot show these; read the docstrings once more for what no public
case asks."""

ALIKE = "In this submission no lab is right in the public cases and wrong in hidden ones."


def differs(told: Disclosed) -> list[str]:
    """Where this grade and the student's own `labs test` differ, and why: a paragraph each."""
    why = WHY.format(drawn=f" ({told.num_hidden} a lab)" if told.num_hidden else "")
    here = [ONLY_HIDDEN.format_map(vars(lab)) for lab in told.labs if lab.only_hidden]
    return [" ".join(text.split()) for text in (why, *(here or [ALIKE]))]
