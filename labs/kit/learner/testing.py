"""`python -m labs test`: the state of each task, and the most informative failure."""

import sys
import webbrowser
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from labs.kit.judge import page
from labs.kit.judge.manifest import find_lab
from labs.kit.learner import screen
from labs.kit.learner.progress import Progress, first_open, progress, starter_text
from labs.kit.learner.screen import filled, say
from mini_engine.renamed import old_names

STYLES = {"E ": "red", "> ": "red"}  # the error, and the rows that differ


def testing() -> AbstractContextManager[Status | None]:
    """Show on a terminal that tests are running: all labs together may take a minute."""
    return Console(stderr=True).status("running the tests") if sys.stderr.isatty() else nullcontext()


def show_first(running: Status | None, shown: list[str], text: str) -> None:
    """Print the first failure, under which the tests are still running, and add it to `shown`."""
    shown.append(text)
    if running:  # it draws over what is printed
        running.stop()
    say("the first failure, while the other tests run:")
    show(text)
    say()
    if running:
        running.start()


def show(report: str) -> None:
    """Print the report of a failure, or a part of it."""
    for number, line in enumerate(report.splitlines()):
        hang = 4 if line.startswith((" ", "E")) else 0
        is_title = line.startswith("--- ") or (number == 0 and line.startswith("test_"))
        style = "bold" if is_title else STYLES.get(line[:2], "")
        screen.show(Text(filled(line, hang=hang), style))


def show_test(lab_id: str | None, open_page: bool = False) -> bool:
    """Print the state of a lab and its most informative failure; return True if nothing fails.

    With `open_page` the failing run opens in the player, or a sentence says why there is none.
    """
    shown: list[str] = []
    with testing() as running:
        first = partial(show_first, running, shown)
        status = progress(find_lab(lab_id), True, first) if lab_id else first_open(True, first)
    is_done, no_run = show_status(status, "".join(shown))
    if status and not no_run and not open_page:
        say(f"see your run in the player: python -m labs test {status.lab.id} --open")
    elif status and not no_run:
        path = page.path_of(status.lab)
        if not webbrowser.open(path.as_uri()):
            say(f"no browser was found; open {path}")
    elif open_page:
        say(f"no run to show in the player: {no_run}")
    return is_done


def show_status(status: Progress | None, shown: str) -> tuple[bool, str]:
    """Return whether nothing fails, and why there is no run to show, or ""."""
    if status is None:
        say("all labs are done")
        return True, "nothing fails"
    lab = status.lab
    if not status.started:
        say(f"{lab.id}: {lab.tasks[0].name} is not written yet: labs/{lab.id}/starter.py")
        say(f"a hint: python -m labs hint {lab.id}")
        return False, "nothing is written yet"
    if status.problem:
        say(status.problem)
        return False, "starter.py could not be tested"
    for old, new in old_names(starter_text(lab)).items():
        say(f"{lab.id}: {old} is now called {new}; the old name works for one more release")
    for task in lab.tasks:
        typer.echo(filled(f"{lab.id} {task.name}: {status.describe(task)}", hang=2))
    if status.is_done:
        reference = f" The reference: python -m labs solution {lab.id}" if lab.has_solution else ""
        say(f"{lab.id} is done: {status.points} points.{reference}")
        return True, "nothing fails"
    if not status.report:
        task = status.next_task or lab.tasks[0]
        say(f"next: {task.name}, in labs/{lab.id}/starter.py; a hint: python -m labs hint {lab.id}")
        return False, f"{task.name} is not written yet"
    say()
    more = status.report.removeprefix(shown)
    again = more != status.report
    say("more on the first failure, the most informative one:" if again else "the most informative failure:")
    show(more.strip("\n"))
    without = "this test calls single functions, or it failed before the first step"
    return False, "" if page.path_of(lab).exists() else without
