"""`mini-engine kernels build`."""

import typer

from mini_engine.commands.common import fail, working

app = typer.Typer(help="The optional C++ kernels, which are faster on a CPU.", no_args_is_help=True)


@app.callback()
def kernels() -> None:
    """Make `build` a subcommand, although it is the only one."""


@app.command()
def build() -> None:
    """Build the kernels for this machine in the user's cache. Needs g++ or clang++."""
    from mini_engine.fast import kernels

    try:
        with working("building the kernels"):
            path = kernels.build()
    except kernels.BuildError as error:
        fail(error)
    typer.echo(f"the kernels are at {path}; engines on this machine's CPU use them from now on")
