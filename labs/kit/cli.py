"""`python -m labs`: the board, the hints and the tests for learners; check and generate for authors."""

from typing import Annotated

import typer

from labs.kit.manifest import LabError, find_lab, lab_ids

app = typer.Typer(
    help="Seven labs, from an empty function to an inference engine. Start with: python -m labs status",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LabArgument = Annotated[str | None, typer.Argument(help="lab-01 (or just 1); all labs without it")]


def chosen(lab_id: str | None) -> list[str]:
    """The labs that an optional argument means; an unknown one ends the program in one line."""
    return [lab(lab_id).id] if lab_id else lab_ids()


def lab(lab_id: str):
    try:
        return find_lab(lab_id)
    except LabError as error:
        fail(str(error))


def fail(message: str):
    typer.echo(message, err=True)
    raise typer.Exit(2)


@app.command()
def check(
    lab_id: LabArgument = None,
    strict: Annotated[bool, typer.Option("--strict", help="an edited starter is an error (for CI)")] = False,
):
    """For authors: prove that starters fail, solutions pass, and every bug of the zoo is caught."""
    from labs.kit.check import check_labs, kill_matrix

    failed = False
    for verdict in check_labs(chosen(lab_id), strict=strict):
        failed |= bool(verdict.problems)
        typer.echo(f"{verdict.lab_id}: {'PROBLEMS' if verdict.problems else 'ok'}")
        if verdict.outcomes and not verdict.outcomes.trouble:
            typer.echo("\n".join(kill_matrix(verdict)))
        for note in verdict.notes:
            typer.echo(f"  note: {note}")
        for problem in verdict.problems:
            typer.echo(f"  problem: {problem}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def generate(lab_id: LabArgument = None):
    """For authors: write starter.py anew from solution.py (your edits to starter.py are lost)."""
    from labs.kit.generate import starter_source

    for name in chosen(lab_id):
        one = lab(name)
        try:
            one.file("starter.py").write_text(starter_source(one), encoding="utf-8")
        except LabError as error:
            fail(str(error))
        typer.echo(f"wrote labs/{name}/starter.py")
