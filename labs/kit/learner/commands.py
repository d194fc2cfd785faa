"""What a learner runs with `python -m labs`: the board, tests, hints, resets, and the engine on their parts.

Nothing here judges anything: tests do (plugin.py, matrix.py), and progress.py remembers what they said.
"""

import queue
import shutil
import sys
import textwrap
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from labs.kit.judge.manifest import LABS_DIR, Lab, find_lab, lab_ids
from mini_engine.commands.common import DemoOut, DemoTemperature, Device, Dtype, Model, working

app = typer.Typer(
    help="Seven labs, from an empty function to an inference engine. Start with: python -m labs status",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)

LabArgument = Annotated[str, typer.Argument(help="lab-01, or just 1", show_default=False)]
OptionalLab = Annotated[str | None, typer.Argument(help="lab-01, or just 1", show_default=False)]


def fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


@app.command()
def status() -> None:
    """The board: every lab and task, what is done, what comes next."""
    from labs.kit.learner.progress import all_progress
    from labs.kit.learner.testing import testing

    table = Table("lab", "task", "tests", "points", "minutes", box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps a name, and keeps all of it
    with testing():
        board = all_progress()
    for progress in board:
        lab = progress.lab
        for number, task in enumerate(lab.tasks):
            passed, total = progress.passed(task), len(task.tests)
            table.add_row(
                f"{lab.id} {lab.title}" if number == 0 else "",
                task.name,
                "done" if progress.done(task) else f"{passed}/{total}",
                f"{task.points if progress.done(task) else 0}/{task.points}",
                str(lab.minutes) if number == 0 else "",
            )
    console.print(table)
    for progress in board:
        if progress.problem:
            typer.echo(progress.problem)
    left = [progress for progress in board if not progress.is_done]
    if not left:
        typer.echo("all labs are done: python -m labs demo auto runs the engine on your own parts")
        return
    lab, hours = left[0].lab, sum(progress.lab.minutes for progress in left) / 60
    task = left[0].next_task or lab.tasks[0]
    typer.echo(f"next: {lab.id} {task.name}, in labs/{lab.id}/starter.py. {lab.question}")
    typer.echo(f"left: about {hours:.3g} hour{'s' * (hours != 1)}; python -m labs test shows where you are")


@app.command()
def test(
    lab_id: OptionalLab = None,
    open_page: Annotated[bool, typer.Option("--open", help="the failing run in the player, too")] = False,
) -> None:
    """Test your starter.py, and show the first failure only: its claim, and where your run departs."""
    from labs.kit.learner.testing import show_test

    raise typer.Exit(0 if show_test(lab_id, open_page) else 1)


@app.command()
def watch(lab_id: OptionalLab = None) -> None:
    """Test again whenever you save starter.py. Keys, each with Enter: h hint, n next lab, q quit."""
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
            typer.echo("")
            show_test(lab.id)
            typer.echo(
                f"watching labs/{lab.id}/starter.py: save to test; h, n or q and Enter: hint, next, quit"
            )


def _read_keys(keys: queue.Queue[str]) -> None:
    for line in sys.stdin:
        keys.put(line.strip().lower()[:1])


@app.command()
def hint(
    lab_id: LabArgument,
    task: Annotated[str | None, typer.Argument(help="the task, where a lab has several")] = None,
) -> None:
    """The next hint for a task: first a nudge, then where to look, then pseudocode."""
    show_hint(find_lab(lab_id), task)


def show_hint(lab: Lab, task_name: str | None) -> None:
    from labs.kit.learner.progress import next_hint, progress

    task = lab.task(task_name) if task_name else (progress(lab).next_task or lab.tasks[0])
    number, text = next_hint(lab, task)
    typer.echo(f"{lab.id} {task.name}, hint {number} of {len(task.hints)}")
    typer.echo("")
    is_last = number == len(task.hints)
    typer.echo(fitted(text, is_code=is_last))
    if is_last:
        left = f"; what is left is python -m labs solution {lab.id} --spoil" if lab.has_solution else ""
        typer.echo(f"\nthat was the last one{left}")


def fitted(text: str, is_code: bool) -> str:
    """A hint on this terminal: paragraphs filled, lines of pseudocode kept and, if too long, hung."""
    width = min(shutil.get_terminal_size().columns, 105)
    if not is_code:
        return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.split("\n\n"))
    hung = ((line, " " * (len(line) - len(line.lstrip()) + 4)) for line in text.splitlines())
    return "\n".join(textwrap.fill(line, width, subsequent_indent=indent) for line, indent in hung)


@app.command()
def reset(
    lab_id: LabArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Back to the starter as it was. Your file is kept in labs/.state/backups."""
    lab = find_lab(lab_id)
    if not yes:
        typer.confirm(f"put labs/{lab.id}/starter.py back to how it was?", abort=True)
    put_back(lab)


def put_back(lab: Lab) -> None:
    from labs.kit.learner.progress import reset

    backup = reset(lab)
    typer.echo(f"labs/{lab.id}/starter.py is as new")
    if backup:
        typer.echo(f"your version is kept in {backup.relative_to(LABS_DIR.parent).as_posix()}")


@app.command()
def solution(
    lab_id: LabArgument,
    spoil: Annotated[
        bool, typer.Option("--spoil", help="show it although your tests do not pass yet")
    ] = False,
) -> None:
    """The reference solution, once your own passes."""
    from labs.kit.learner.progress import progress

    lab = find_lab(lab_id)
    if not lab.has_solution:
        fail(f"{lab.id}: this edition of the course comes without solutions", 1)
    if not spoil:
        now = progress(lab)
        if not now.is_done:
            passed, total = sum(map(now.passed, lab.tasks)), len(lab.tests)
            fail(f"{lab.id}: {passed} of {total} tests pass; finish yours first, or add --spoil", 1)
    source = lab.file("solution.py").read_text(encoding="utf-8")
    typer.echo(source, nl=False)  # as it is: colours suit one background, and rich cuts what is too wide


@app.command()
def demo(
    labs: Annotated[str, typer.Argument(help="lab-01,lab-03, or auto for every lab whose tests pass")],
    model: Model = "shakespeare",
    out: DemoOut = Path("out"),
    temperature: DemoTemperature = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """The engine's demo on your own parts: which part is whose, then every decision as it is made."""
    if labs != "auto":
        labs = ",".join(find_lab(name).id for name in labs.split(","))
    with working(f"loading {model} and {'every lab that passes its tests' if labs == 'auto' else labs}"):
        from labs.kit.learner.parts import LearnerParts
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
    try:
        run_demo(
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
