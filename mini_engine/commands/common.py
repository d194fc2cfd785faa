"""What the commands share: options, one way to fail, a sign of life."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from mini_engine.trace.file import check_plain

Model = Annotated[
    str, typer.Option("--model", "-m", help="A name from `models list`, a model folder, or a .gguf file.")
]
Device = Annotated[str, typer.Option(help="auto takes a GPU where there is one; else cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
DemoOut = Annotated[Path, typer.Option("--out", help="Where trace.jsonl, texts.json and timeline.png go.")]
DemoTemperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy; default 0 for chats, 0.7 for plays.")
]
TracePath = Annotated[Path, typer.Argument(help="A trace.jsonl.")]

errors = Console(stderr=True, soft_wrap=True, highlight=False)


class BadOutput(ValueError):
    """What a command is to write cannot go where the user wants it."""


class Commands(TyperGroup):
    """Commands whose ValueError or OSError ends them with one clear sentence on stderr, exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has gone: typer ends the command
            raise
        except (ValueError, OSError) as error:
            fail(error, 2)


def fail(error: Exception, code: int = 1) -> NoReturn:
    """One clear sentence on stderr."""
    say(error)
    raise typer.Exit(code)


def say(error: Exception | str) -> None:
    errors.print(f"[red]error:[/] {escape(' '.join((str(error) or type(error).__name__).splitlines()))}")


def writable(out: Path, *read: Path | None) -> Path:
    """`out`, its folder made. Raises BadOutput where it is a folder, a device, or a file that the command
    reads."""
    if out.is_dir():
        raise BadOutput(f"{out} is a folder; name the file to write in it")
    try:
        check_plain(out)
    except ValueError as error:
        raise BadOutput(str(error)) from None
    if out.exists() and any(path and path.exists() and out.samefile(path) for path in read):
        raise BadOutput(f"{out} is what is read; name another file with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def check_folder(out: Path) -> None:
    """Raises BadOutput, before a run that takes long, where the folder `out` cannot be written to or made."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise BadOutput(f"--out {out}: {there} is no folder that can be written to; name another")


@contextmanager
def working(what: str) -> Iterator[None]:
    """A sign of life while something takes seconds: a terminal sees it move, a pipe gets a line."""
    if errors.is_terminal:
        with errors.status(escape(what)):
            yield
    else:
        errors.print(escape(what))
        yield
