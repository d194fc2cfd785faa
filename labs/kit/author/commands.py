"""The commands of authors and instructors: `python -m labs check`, `generate`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from labs.kit.judge.manifest import find_lab, lab_ids
from labs.kit.learner.commands import put_back

SomeLabs = Annotated[list[str] | None, typer.Argument(help="lab-01 lab-02, or 1 2. Without it, all labs.")]


def chosen(labs: list[str] | None) -> list[str]:
    return list(dict.fromkeys(find_lab(name).id for name in labs)) if labs else lab_ids()


def check(
    labs: SomeLabs = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Count an edited starter as an error (for CI).")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write fingerprints.json.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Run all tests on each known mistake.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run only what must catch each known mistake: no names, no blame.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Folder for outcomes. A lab that has not changed is not run again."),
    ] = None,
) -> None:
    """For authors: prove that starters fail, solutions pass, and every known mistake is caught."""
    from labs.kit.author.check import check_labs, kill_matrix
    from labs.kit.judge.matrix import QUICK, WHOLE

    failed = False
    depth = WHOLE if whole else QUICK if quick else ""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    for verdict in check_labs(chosen(labs), strict=strict, keep=keep, write=write, depth=depth):
        failed |= bool(verdict.problems)
        typer.echo(f"{verdict.lab_id}: {'PROBLEMS' if verdict.problems else 'ok'}")
        if verdict.outcomes and not verdict.outcomes.trouble:
            typer.echo("\n".join(kill_matrix(verdict)))
        for note in verdict.notes:
            typer.echo(f"  note: {note}")
        for problem in verdict.problems:
            typer.echo(f"  problem: {problem}")
    raise typer.Exit(1 if failed else 0)


def generate(labs: SomeLabs = None) -> None:
    """For authors: generate starter.py from solution.py. An edited starter is kept as by reset."""
    for name in chosen(labs):
        put_back(find_lab(name))


def export(
    student: Annotated[Path, typer.Option("--student", help="The folder for the student edition.")],
) -> None:
    """For instructors: write the student edition, without solutions, or update one that was handed out."""
    from labs.kit.author.export import export as write

    for note in write(student):
        typer.echo(note)
    typer.echo(f"the student edition is in {student}")
