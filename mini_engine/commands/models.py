"""`mini-engine models list | fetch`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mini_engine.commands.common import fail

app = typer.Typer(help="List the models, and download those that are not embedded.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the known models and their places."""
    from mini_engine.loading.registry import MODELS

    table = Table("name", "what it is", "size", "where", header_style="bold")
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps a long name, and cuts nothing
    for model in MODELS.values():
        where = str(model.path) if model.is_present else f"mini-engine models fetch {model.name}"
        table.add_row(model.name, model.description, f"{model.size / 1e6:.0f} MB", where)
    Console().print(table)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A name from `models list`.")]) -> None:
    """Download a model into the user's cache."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from mini_engine.loading import registry

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task(f"fetching {name}", total=None)
            path = registry.fetch(name, lambda done, total: bar.update(task, completed=done, total=total))
    except registry.FetchError as error:
        fail(error)
    typer.echo(f"{name} is at {path}")
