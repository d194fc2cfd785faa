"""`python -m labs hint`: the next hint for a task."""

import typer

from labs.kit.judge.manifest import Lab, LabError, Task
from labs.kit.learner.progress import Progress, last_hint, next_hint, progress
from labs.kit.learner.screen import WIDEST, filled, paragraphs, say
from labs.kit.learner.testing import testing


def short_names(lab: Lab) -> list[str]:
    """Return the names of its tasks, as short as they may be typed: whole where two methods share a name."""
    names = [task.name for task in lab.tasks]
    short = [name.split(".")[-1].strip("_") for name in names]
    return [one if short.count(one) == 1 else name for one, name in zip(short, names, strict=True)]


def show_hint(lab: Lab, task_name: str | None, number: int | None = None) -> None:
    """Print hint `number` of a task again, or its next hint. Without a name: of the task to do next."""
    task, own = lab.task(task_name) if task_name else None, ""
    if not task or number is None:
        with testing():
            status = progress(lab, report=True)
        if status.problem and not task:
            say(status.problem)
            if len(lab.tasks) > 1:  # no test has run that would say which is next
                return say(f"name the task that you want a hint for: {', '.join(short_names(lab))}")
        task = task or status.next_task
        own = hint_of_failure(status, task)
    if not task:
        again = f"python -m labs hint {lab.id} {short_names(lab)[0]}"
        return say(f"{lab.id} is done; its hints can still be read: {again}")
    title = f"{lab.id} {task.name}, hint"
    if number is None:
        number = next_hint(lab, task)
    elif not 1 <= number <= last_hint(lab, task):
        raise LabError(f"{title} {number} has not been shown yet; without --again the next one is")
    if own:
        say(own)
        say()
    text, is_last = task.hints[number - 1], number == len(task.hints)
    say(f"{title} {number} of {len(task.hints)}")
    say()
    typer.echo(filled(text, WIDEST, hang=4) if is_last else paragraphs(text))  # the last is pseudocode
    if is_last:
        solution = f"; the solution: python -m labs solution {lab.id} --spoil" if lab.has_solution else ""
        say()
        say(f"that was the last hint{solution}")


def hint_of_failure(status: Progress, task: Task | None) -> str:
    """Return the hint of the known mistake that a task shows, or of the failure that is reported."""
    if task and (name := status.name(task)):
        return f"it looks like: {name.title}. {name.hint.strip()}"
    return f"your failure: {status.hint}" if task and task is status.next_task and status.hint else ""
