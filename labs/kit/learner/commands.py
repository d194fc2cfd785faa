"""The learner's commands of `python -m labs`: the board, tests, hints, resets, and the engine on their parts.

Nothing here judges: tests do (plugin.py, matrix.py), and progress.py keeps their results.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from labs.kit.judge.manifest import LABS_DIR, Lab, find_lab
from labs.kit.learner.screen import App, complain, filled, say, show
from mini_engine.commands.common import DemoOut, DemoTemperature, Device, Dtype, Model, check_folder, working

app = App(
    help="Eleven labs, from an empty function to an inference engine. Start with: python -m labs status",
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
    from labs.kit.learner.board import board, coloured, so_far
    from labs.kit.learner.progress import all_progress
    from labs.kit.learner.testing import testing

    with testing():
        labs = all_progress()
    show(coloured(board(labs)))
    say()
    say(so_far(labs), "bold")
    for problem in filter(None, (status.problem for status in labs)):
        say(problem)
    left = [status for status in labs if not status.is_done]
    if not left:
        return say("all labs are done: python -m labs demo auto runs the engine on your own parts")
    lab, hours = left[0].lab, sum(status.lab.minutes for status in left) / 60
    task = left[0].next_task or lab.tasks[0]
    say(f"next: {lab.id} {task.name}, in labs/{lab.id}/starter.py. {lab.question}")
    say(f"left: about {hours:.3g} hour{'s' * (hours != 1)}; python -m labs test shows where you are")


@app.command()
def test(
    lab_id: OptionalLab = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Also show the failing run in the player.")
    ] = False,
) -> None:
    """Run the tests on your starter.py: the state of each task, and the most informative failure."""
    from labs.kit.learner.testing import show_test

    raise typer.Exit(0 if show_test(lab_id, open_page) else 1)


@app.command()
def watch(lab_id: OptionalLab = None) -> None:
    """Run the tests again whenever you save starter.py.

    Type h for a hint, n for the next lab or q to quit, each followed by Enter.
    """
    from labs.kit.learner.watch import watch

    watch(lab_id)


@app.command()
def hint(
    lab_id: OptionalLab = None,
    task: Annotated[
        str | None,
        typer.Argument(
            help="The task: BlockManager.admit, or just admit. Without it, the one to do next.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[
        int | None, typer.Option(metavar="N", help="Show hint N again, without moving on.")
    ] = None,
) -> None:
    """Show the next hint for a task: first a nudge, then where to look, then pseudocode."""
    from labs.kit.learner.hints import show_hint
    from labs.kit.learner.progress import first_open
    from labs.kit.learner.testing import testing

    if lab_id:
        return show_hint(find_lab(lab_id), task, again)
    with testing():
        status = first_open()
    if status:
        show_hint(status.lab, task, again)
    else:
        say("all labs are done: no task is left for a hint")


@app.command()
def quiz(
    topic: Annotated[
        str | None, typer.Argument(help="A topic. Without it, the topics are listed.", show_default=False)
    ] = None,
) -> None:
    """Answer the book's questions on a topic. Wrong answers are explained."""
    from labs.kit.learner.quiz import ask, find_topic, list_topics

    if topic is None:
        list_topics()
    else:
        ask(find_topic(topic))


@app.command()
def reset(
    lab_id: LabArgument, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
) -> None:
    """Restore starter.py to its original text. Your version is kept in labs/.state/backups."""
    lab = find_lab(lab_id)
    if not yes:
        typer.confirm(filled(f"restore labs/{lab.id}/starter.py to its original text?"), abort=True)
    put_back(lab)


def put_back(lab: Lab) -> None:
    from labs.kit.learner.progress import reset

    backup = reset(lab)
    say(f"labs/{lab.id}/starter.py is restored")
    if backup:
        say(f"your version is kept in {backup.relative_to(LABS_DIR.parent).as_posix()}")


@app.command(hidden=not any(LABS_DIR.glob("lab-*/solution.py")))  # as in the student edition
def solution(
    lab_id: LabArgument,
    spoil: Annotated[
        bool, typer.Option("--spoil", help="Show it even if your tests do not pass yet.")
    ] = False,
) -> None:
    """Show the reference solution, once your own passes the tests."""
    from labs.kit.learner.progress import progress

    lab = find_lab(lab_id)
    if not lab.has_solution:
        fail(f"{lab.id}: this edition of the course comes without solutions", 1)
    if not spoil:
        status = progress(lab)
        if not status.is_done:
            passed, total = sum(result.passed for result in status.results), len(status.results)
            there = f"{passed} of {total} tests pass" if total else "no test passes"
            fail(f"{lab.id}: {there}; finish yours first, or add --spoil", 1)
    source = lab.file("solution.py").read_text(encoding="utf-8")
    typer.echo(source, nl=False)  # no colours, which suit one background; rich would cut wide lines


@app.command()
def demo(
    labs: Annotated[str, typer.Argument(help="lab-01,lab-03, or auto for every lab whose tests pass.")],
    model: Model = "shakespeare",
    out: DemoOut = Path("out"),
    temperature: DemoTemperature = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve OpenAI's clients with lab-11's front, until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve: the port; 0 is any.")] = 8000,
) -> None:
    """Run the engine's demo on your own parts, and compare its texts with those of the engine's parts."""
    check_folder(out)
    if labs != "auto":
        labs = ",".join(find_lab(name).id for name in labs.split(","))
    with working(f"loading {model} and {'every lab that passes its tests' if labs == 'auto' else labs}"):
        from labs.kit.learner import front, shapes, texts
        from labs.kit.learner.parts import LearnerParts
        from mini_engine.loading.checkpoint import load
        from mini_engine.show.demo import run_demo

        try:
            learner = LearnerParts.from_labs(labs)
            loaded, tokenizer = load(model, dtype, device)
        except (ValueError, OSError) as error:
            fail(str(error), 1)
    if serve and not learner.front:
        fail("--serve needs lab-11's front: python -m labs demo lab-11 --serve", 1)
    table = Table("part", "from", header_style="bold")
    for row in learner.table():
        table.add_row(*row)
    console.print(table)
    if learner.unused:
        say("not used:")
    for reason in learner.unused:
        typer.echo(filled(f"  {reason}", hang=2))
    if serve:
        return front.served(learner, model, loaded, tokenizer, port)
    settings = {"after_step": learner.check, "explain": learner.explain, **learner.engine_args}
    try:
        answers = run_demo(loaded, tokenizer, console, out, temperature, **settings)
    except RuntimeError as error:
        fail(str(error), 1)
    right, plays = True, (loaded, tokenizer)
    same_texts = partial(texts.compared, learner, answers, *plays, temperature)
    compared: list[tuple[str, Callable[[], tuple[bool, list[str]]]]]
    compared = [("comparing with the engine's own parts", same_texts)]
    if "grammar" in learner.names:
        compared.append(("writing texts of a given shape", partial(shapes.compared, learner, *plays)))
    if learner.front:
        compared.append(("reading through your front", partial(front.compared, learner, *plays)))
    for what, compare in compared:
        with working(what):
            is_right, lines = compare()
        right = right and is_right
        say()
        say("\n".join(lines))
    raise typer.Exit(0 if right else 1)
