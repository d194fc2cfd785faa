"""mini-engine demo | generate | chat | serve | prefill | simulate | bench | models | kernels | trace.

Each command has a file, which parses and prints. A command imports what it needs when it runs, so that
--help is quick.
"""

import typer

from mini_engine.commands import bench, chat, demo, generate, kernels, models, prefill, serve, simulate, trace
from mini_engine.commands.common import Commands, say
from mini_engine.commands.process import run

app = typer.Typer(
    cls=Commands,
    help="A small LLM inference engine that shows what it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo.demo, generate.generate, chat.chat, serve.serve, prefill.prefill, simulate.simulate):
    app.command()(command)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")
app.add_typer(kernels.app, name="kernels")
app.add_typer(trace.app, name="trace")


def main() -> None:
    run(app, say)
