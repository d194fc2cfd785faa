"""What a learner runs with `python -m labs`: the board, tests, hints, resets, and the engine on their parts.

Nothing here judges anything: tests do (plugin.py, matrix.py), and progress.py remembers what they said.
"""

import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, find_lab, lab_ids
from labs.kit.learner.screen import WIDEST, App, columns, complain, filled, paragraphs, say, width
from mini_engine.commands.common import (
    DemoOut,
    DemoTemperature,
    Device,
    Dtype,
    Model,
    check_folder,
    working,
)

if TYPE_CHECKING:
    from labs.kit.learner.progress import Progress

app = App(
    help="Seven labs, from an empty function to an inference engine. Start with: python -m labs status",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)

LabArgument = Annotated[str, typer.Argument(help="lab-01, or just 1.", show_default=False)]
OptionalLab = Annotated[
    str | None,
    typer.Argument(help="lab-01, or just 1. Without it, the first that is not done.", show_default=False),
]


def fail(message: str, code: int = 2) -> NoReturn:
    complain(message)
    raise typer.Exit(code)


@app.command()
def status() -> None:
    """Show the board: every lab and task, what is done, and what comes next."""
    from labs.kit.learner.progress import all_progress
    from labs.kit.learner.testing import testing

    with testing():
        progress = all_progress()
    typer.echo("\n".join(board(progress)))
    for problem in filter(None, (one.problem for one in progress)):
        say(problem)
    left = [one for one in progress if not one.is_done]
    if not left:
        say("all labs are done: python -m labs demo auto runs the engine on your own parts")
        return
    lab, hours = left[0].lab, sum(one.lab.minutes for one in left) / 60
    task = left[0].next_task or lab.tasks[0]
    say(f"next: {lab.id} {task.name}, in labs/{lab.id}/starter.py. {lab.question}")
    say(f"left: about {hours:.3g} hour{'s' * (hours != 1)}; python -m labs test shows where you are")


def board(progress: "Sequence[Progress]") -> list[str]:
    """A row a task; on a terminal that is too narrow for that, a line a lab and a short one a task."""
    rows, short = [("lab", "task", "tests", "points", "minutes")], []
    for one in progress:
        lab = one.lab
        short.append(("", filled(f"{lab.id} {lab.title}, {lab.minutes} minutes", hang=2)))
        for number, task in enumerate(lab.tasks):
            done = one.done(task)
            tests = "done" if done else "?" if one.problem else f"{one.passed(task)}/{len(task.tests)}"
            if not done and one.passed(task) == len(task.tests):
                tests = "waits"  # for another task of the lab: by itself it is right
            title, minutes = (f"{lab.id} {lab.title}", str(lab.minutes)) if number == 0 else ("", "")
            rows.append((title, task.name, tests, f"{task.points if done else 0}/{task.points}", minutes))
            short.append((f"  {tests:<5}", task.name))
    wide = columns(rows)
    if max(map(len, wide)) <= width():
        return wide
    fits = max(len(tests + " " + name) for tests, name in short if tests) <= width()
    return [f"{tests} {name if fits else name.split('.')[-1]}" if tests else name for tests, name in short]


@app.command()
def test(
    lab_id: OptionalLab = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the failing run in the player, too.")
    ] = False,
) -> None:
    """Test your starter.py: how each task stands, and of the failures the one that says most."""
    from labs.kit.learner.testing import show_test

    raise typer.Exit(0 if show_test(lab_id, open_page) else 1)


@app.command()
def watch(lab_id: OptionalLab = None) -> None:
    """Test again whenever you save starter.py.

    Type h for a hint, n for the next lab or q to quit, each followed by Enter.
    """
    try:
        from watchfiles import watch as changes
    except ImportError:
        fail("watch needs the package watchfiles: pip install watchfiles")

    from labs.kit.learner.progress import first_open, starter_text
    from labs.kit.learner.testing import show_test

    if lab_id:
        lab = find_lab(lab_id)
    else:
        now = first_open()
        lab = now.lab if now else find_lab(lab_ids()[0])
    keys: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_keys, args=(keys,), daemon=True).start()
    tested = None
    # What has changed is asked of the file: an event may come before anybody listens, or twice.
    for _ in changes(LABS_DIR, debounce=300, rust_timeout=200, yield_on_timeout=True):
        while not keys.empty():
            key = keys.get()
            if key == "q":
                return
            if key == "h":
                show_hint(lab, None)
            if key == "n":
                ids = lab_ids()
                lab = find_lab(ids[(ids.index(lab.id) + 1) % len(ids)])
        if (lab.id, starter_text(lab)) != tested:
            tested = (lab.id, starter_text(lab))
            say()
            show_test(lab.id)
            say(f"watching labs/{lab.id}/starter.py: save to test; h, n or q and Enter: hint, next, quit")


def _read_keys(keys: queue.Queue[str]) -> None:
    for line in sys.stdin:
        keys.put(line.strip().lower()[:1])


@app.command()
def hint(
    lab_id: OptionalLab = None,
    task: Annotated[
        str | None,
        typer.Argument(
            help="The task, as in BlockManager.admit or just admit. Without it, the one to do next.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[
        int | None, typer.Option(metavar="N", help="Show hint N once more, and do not move on.")
    ] = None,
) -> None:
    """Show the next hint for a task: first a nudge, then where to look, then pseudocode."""
    from labs.kit.learner.progress import first_open
    from labs.kit.learner.testing import testing

    if lab_id:
        return show_hint(find_lab(lab_id), task, again)
    with testing():
        now = first_open()
    if now:
        show_hint(now.lab, task, again)
    else:
        say("all labs are done: no task is left for a hint")


def show_hint(lab: Lab, task_name: str | None, again: int | None = None) -> None:
    from labs.kit.learner.progress import last_hint, next_hint, progress
    from labs.kit.learner.testing import testing

    task = lab.task(task_name) if task_name else None
    if not task:
        with testing():
            now = progress(lab)
        if now.problem:
            say(now.problem)
        if now.problem and len(lab.tasks) > 1:  # no test has run that would say which is next
            return say(f"name the task that you want a hint for: {', '.join(names(lab))}")
        task = now.next_task
    if not task:
        return say(
            f"{lab.id} is done; the hints are still there: python -m labs hint {lab.id} {names(lab)[0]}"
        )
    hint = f"{lab.id} {task.name}, hint"
    if again is None:
        again = next_hint(lab, task)
    elif not 1 <= again <= last_hint(lab, task):
        raise LabError(f"{hint} {again} has not been shown yet; without --again the next one is")
    text, is_last = task.hints[again - 1], again == len(task.hints)
    say(f"{hint} {again} of {len(task.hints)}")
    say()
    typer.echo(filled(text, WIDEST, hang=4) if is_last else paragraphs(text))  # the last is pseudocode
    if is_last:
        left = f"; what is left is python -m labs solution {lab.id} --spoil" if lab.has_solution else ""
        say()
        say(f"that was the last one{left}")


@app.command()
def quiz(
    topic: Annotated[
        str | None, typer.Argument(help="One of the topics. Without it, they are listed.", show_default=False)
    ] = None,
) -> None:
    """Answer the book's questions on a topic; a wrong answer is explained."""
    from labs.kit.learner.quiz import ask, find_topic, list_topics

    if topic is None:
        list_topics()
    else:
        ask(find_topic(topic))


def names(lab: Lab) -> list[str]:
    """Its tasks, as short as they may be typed."""
    return [task.name.split(".")[-1].strip("_") for task in lab.tasks]


@app.command()
def reset(
    lab_id: LabArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Put starter.py back to how it was. Your version is kept in labs/.state/backups."""
    lab = find_lab(lab_id)
    if not yes:
        typer.confirm(filled(f"put labs/{lab.id}/starter.py back to how it was?"), abort=True)
    put_back(lab)


def put_back(lab: Lab) -> None:
    from labs.kit.learner.progress import reset

    backup = reset(lab)
    say(f"labs/{lab.id}/starter.py is as new")
    if backup:
        say(f"your version is kept in {backup.relative_to(LABS_DIR.parent).as_posix()}")


@app.command(hidden=not any(LABS_DIR.glob("lab-*/solution.py")))  # as in the student edition
def solution(
    lab_id: LabArgument,
    spoil: Annotated[
        bool, typer.Option("--spoil", help="Show it although your tests do not pass yet.")
    ] = False,
) -> None:
    """Show the reference solution, once your own passes its tests."""
    from labs.kit.learner.progress import progress

    lab = find_lab(lab_id)
    if not lab.has_solution:
        fail(f"{lab.id}: this edition of the course comes without solutions", 1)
    if not spoil:
        now = progress(lab)
        if not now.is_done:
            failed = {result.function for result in now.results if not result.passed}
            passed = len({result.function for result in now.results} - failed)
            fail(f"{lab.id}: {passed} of {len(lab.tests)} tests pass; finish yours first, or add --spoil", 1)
    source = lab.file("solution.py").read_text(encoding="utf-8")
    typer.echo(source, nl=False)  # as it is: colours suit one background, and rich cuts what is too wide


@app.command()
def demo(
    labs: Annotated[str, typer.Argument(help="lab-01,lab-03, or auto for every lab whose tests pass.")],
    model: Model = "shakespeare",
    out: DemoOut = Path("out"),
    temperature: DemoTemperature = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Run the engine's demo on your own parts, and compare its texts with those of the engine's own parts."""
    check_folder(out)
    if labs != "auto":
        labs = ",".join(find_lab(name).id for name in labs.split(","))
    with working(f"loading {model} and {'every lab that passes its tests' if labs == 'auto' else labs}"):
        from labs.kit.learner.parts import LearnerParts
        from labs.kit.learner.texts import compared
        from mini_engine.loading.checkpoint import load
        from mini_engine.show.demo import run_demo

        try:
            learner = LearnerParts.from_labs(labs)
            loaded, tokenizer = load(model, dtype, device)
        except (ValueError, OSError) as error:
            fail(str(error), 1)
    table = Table("part", "whose", header_style="bold")
    for row in learner.table():
        table.add_row(*row)
    console.print(table)
    if learner.unused:
        say("not used:")
    for reason in learner.unused:
        typer.echo(filled(f"  {reason}", hang=2))
    try:
        answers = run_demo(
            loaded,
            tokenizer,
            console,
            out,
            temperature,
            after_step=learner.check,
            explain=learner.explain,
            **learner.engine_args,
        )
    except RuntimeError as error:
        fail(str(error), 1)
    with working("comparing with the engine's own parts"):
        right, lines = compared(learner, answers, loaded, tokenizer, temperature)
    say()
    say("\n".join(lines))
    raise typer.Exit(0 if right else 1)
