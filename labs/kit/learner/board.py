"""The board of `python -m labs status`: every lab and task, and how far the whole course is."""

import re
from collections.abc import Sequence

from rich.text import Text

from labs.kit.learner.progress import Progress
from labs.kit.learner.screen import bar, columns, filled, width

# The column of the state is the first of its kind: two spaces lead to it.
STATE = re.compile(r"  (?:(?P<green>done)|(?P<yellow>waits|[1-9]\d*/\d+)|(?P<red>\?)|0/\d+|-) ")


def board(labs: Sequence[Progress]) -> list[str]:
    """Return a row for each task; for a narrow terminal a line for each lab and a short one for each task."""
    rows, short = [("lab", "task", "tests", "points", "minutes")], []
    for status in labs:
        lab = status.lab
        short.append(("", filled(f"{lab.id} {lab.title}, {lab.minutes} minutes", hang=2)))
        for number, task in enumerate(lab.tasks):
            done, passed, total = status.done(task), status.passed(task), len(status.judged(task))
            tests = "done" if done else "?" if status.problem else f"{passed}/{total}" if total else "-"
            if not done and passed == total > 0:
                tests = "waits"  # for another task of the lab: by itself it is right
            title, minutes = (f"{lab.id} {lab.title}", str(lab.minutes)) if number == 0 else ("", "")
            rows.append((title, task.name, tests, f"{task.points if done else 0}/{task.points}", minutes))
            short.append((f"  {tests:<5}", task.name))
    wide = columns(rows)
    if max(map(len, wide)) <= width():
        return wide
    fits = max(len(tests + " " + name) for tests, name in short if tests) <= width()
    lines = [f"{tests} {name if fits else name.split('.')[-1]}" if tests else name for tests, name in short]
    return "\n".join(lines).split("\n")  # a long title takes two


def coloured(lines: Sequence[str]) -> Text:
    """Return the board with the state of each task in its colour, and what begins a part in bold."""
    shown = []
    for line in lines:
        one = Text(line, "bold" if line.startswith("lab ") else "")
        if line.startswith("lab-"):
            one.stylize("bold", 0, len("lab-01"))
        if (found := STATE.search(line)) and found.lastgroup:
            one.stylize(found.lastgroup, *found.span(found.lastgroup))
        shown.append(one)
    return Text("\n").join(shown)


def so_far(labs: Sequence[Progress]) -> str:
    """Return a bar of the points that are earned, with the labs that are done."""
    earned, most = sum(status.points for status in labs), sum(t.points for s in labs for t in s.lab.tasks)
    done = sum(status.is_done for status in labs)
    return f"{bar(earned, most)} {done} of {len(labs)} labs done, {earned:,} of {most:,} points"
