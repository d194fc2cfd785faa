"""`python -m labs arena`: your policy against the others, in tables and a chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from labs.kit.arena.board import MEANING, YOURS, Row, by_game, front, known, ranking, row, shipped
from labs.kit.arena.games import GAMES
from labs.kit.judge.manifest import LabError
from labs.kit.learner.screen import columns, pairs, say, width
from mini_engine.commands.common import working, writable

PolicyFile = Annotated[
    Path | None,
    typer.Argument(help="Your policy, a .py file. Without it, the policies there are.", show_default=False),
]
Seed = Annotated[int, typer.Option(min=0, help="Other requests of the same kinds.")]
Out = Annotated[Path, typer.Option(help="The chart.")]
CHART = Path("out/arena.png")


def arena(policy: PolicyFile = None, seed: Seed = 0, out: Out = CHART) -> None:
    """Play your scheduling policy against the course's on eight workloads.

    A policy defines any of schedule_step, policy_key and pick_victim, as in lab-01 and lab-03.
    """
    writable(out, policy)
    raise typer.Exit(show([from_file(policy, seed)] if policy else [], seed, out))


def from_file(path: Path, seed: int) -> Row:
    """Return the row of a policy's file. Raise LabError for one that does not load."""
    try:
        source = path.read_text("utf-8-sig")
        with working(f"{path.name} plays {len(GAMES)} workloads"):
            return row(path.name, source, seed)
    except UnicodeDecodeError:
        raise LabError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LabError(f"{path}: {error}") from None


def show(yours: Sequence[Row], seed: int, out: Path) -> int:
    """Print the tables and write the chart; return the exit code, 1 if one of your policies has no score."""
    from labs.kit.arena.chart import write

    if seed:
        with working("the other policies play, too"):
            rows = [*yours, *known(seed)]
    else:
        rows = [*yours, *known()]
    fouls = [one for one in rows if one.foul]
    for one in fouls:
        say(f"{one.name} has no score. {one.foul}")
    if fouls:
        say()
    typer.echo("\n".join(columns(ranking(rows))))
    table = by_game(rows, next((one for one in yours if one.scores), None)) if len(yours) <= 1 else []
    if table:
        typer.echo("\n" + "\n".join(fitting(table)))
    if not yours:
        say()
        first = {name: source.split("\n")[0].strip('"') for name, source in shipped().items()}
        typer.echo(pairs([(name, line.partition(": ")[2]) for name, line in first.items()]))
    say()
    say(MEANING + (f" TTFT and ITL: the 99th percentiles of {table[0][1]}." if table else ""))
    write(rows, out)
    ahead = [one.name for one in front(rows) if one.kind == YOURS]
    say(f"the chart is in {out}" + (f"; on the front: {', '.join(ahead)}" if ahead else ""))
    return 1 if any(one.kind == YOURS for one in fouls) else 0


def fitting(table: list[tuple[str, ...]]) -> list[str]:
    """Return a table's rows, without the last columns where the terminal is too narrow for them."""
    while max(map(len, lines := columns(table))) > width() and len(table[0]) > 2:
        table = [cells[:-1] for cells in table]
    return lines
