"""`mini-engine kernels build`."""

import typer

from mini_engine.commands.common import fail, working

app = typer.Typer(help="The C++ kernels: optional, and quicker on a CPU.", no_args_is_help=True)


@app.callback()
def kernels() -> None:
    """Makes `build` a subcommand, though it is the only one."""


@app.command()
def build() -> None:
    """Build the kernels once for this machine, into the user's cache. Needs g++ or clang++."""
    from mini_engine.fast import kernels

    try:
        with working("building the kernels"):
            path = kernels.build()
    except kernels.BuildError as error:
        fail(error)
    typer.echo(f"the kernels are at {path}; every engine on this machine's CPU uses them from now on")
