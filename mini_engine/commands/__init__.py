"""The command line: mini-engine demo | generate | chat | simulate | bench | models | kernels | trace.

One file a command, which parses and prints. What it needs it imports when it runs, so that --help
answers at once.
"""

import os
import signal
import sys
from io import TextIOWrapper

import typer

from mini_engine.commands import bench, chat, demo, generate, kernels, models, simulate, trace
from mini_engine.commands.common import Commands, say

app = typer.Typer(
    cls=Commands,
    help="A small LLM inference engine that shows what it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo.demo, generate.generate, chat.chat, simulate.simulate):
    app.command()(command)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")
app.add_typer(kernels.app, name="kernels")
app.add_typer(trace.app, name="trace")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A legacy console cannot print every character, and no stream a path that is no UTF-8.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    # As an error: what was half-written is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except OSError as error:  # of --help, into a full disk
        say(error)
        sys.exit(2)
    finally:
        _drop_unwritten()


def _drop_unwritten() -> None:
    """What could not be written by now never will be; Python would try once more, and print a traceback."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
