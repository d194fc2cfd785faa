"""Text for a terminal: filled to its width, and never broken inside a word.

In a pipe a line stays one line.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])

WIDEST = 100  # columns of prose, however wide the terminal is
NARROWEST = 24  # columns beside another column; with less room the text goes below it
COMMAND = re.compile(r"python -m labs( [a-z]+( (lab-\d\d|--?[a-z]+|auto\b))*)?")
GLUE = "\0"


def width() -> int:
    """Return the columns of the terminal; a pipe is as good as endless."""
    return shutil.get_terminal_size(fallback=(10_000, 24)).columns


def filled(text: str, most: int = 10_000, hang: int = 0) -> str:
    """Wrap every line of the text; continuation lines are indented by `hang` more columns."""
    lines = []
    for line in text.splitlines():
        inset = " " * (len(line) - len(line.lstrip()) + hang)
        lines += _fill(line, inset, min(width(), most)) or [""]
    return "\n".join(lines)


def paragraphs(text: str) -> str:
    """Wrap a text in which only an empty line ends a paragraph."""
    parts = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    return "\n\n".join(filled(part, WIDEST) for part in parts)


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Format rows of a name and its meaning; in a narrow terminal the meaning goes below the name."""
    beside, most = 4 + max(len(name) for name, _ in rows), min(width(), WIDEST)
    lines = []
    for name, text in rows:
        if most - beside < NARROWEST:
            lines += ["  " + name, *_fill(" " * 6 + text, " " * 6, most)]
        else:
            lines += _fill(f"  {name}".ljust(beside) + text, " " * beside, most)
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's rows, each cell as wide as the widest of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def bar(done: int, of: int) -> str:
    """Return a bar of plain characters, filled as far as something is done: `[######--------------]`."""
    room = 20 if width() >= 60 else 10
    full = done * room // of if of else 0
    return f"[{'#' * full}{'-' * (room - full)}]"


def say(text: str = "", style: str = "") -> None:
    """Print lines; on a terminal in a style of rich, such as "green"."""
    if style:
        show(Text(filled(text), style))
    else:
        typer.echo(filled(text))


def show(text: Text) -> None:
    """Print a text whose lines are filled; in colours on a terminal only, and not where NO_COLOR is set."""
    Console(highlight=False, soft_wrap=True).print(text)


def complain(text: str) -> None:
    """Print on stderr."""
    typer.echo(filled(text) if sys.stderr.isatty() else text, err=True)


def _fill(line: str, inset: str, most: int) -> list[str]:
    # No break at a hyphen: lab-01 and --spoil are words. A command stays on one line, to be copied.
    room = most - len(inset)
    line = COMMAND.sub(lambda found: found[0].replace(" ", GLUE) if len(found[0]) <= room else found[0], line)
    lines = textwrap.wrap(line, most, subsequent_indent=inset, break_long_words=False, break_on_hyphens=False)
    return [one.replace(GLUE, " ") for one in lines]


# ----------------------------------------------------------------------------------- python -m labs --help


class Command(TyperCommand):
    """A command whose --help is plain text for any width."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx))


class Group(TyperGroup):
    """The group of all commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in commands if command and not command.hidden]
        rows = [(name, " ".join((command.help or "").split())) for name, command in shown]
        formatter.write(f"{_help(self, ctx)}\n\ncommands:\n{pairs(rows)}")


class App(typer.Typer):
    """A typer application with plain help texts."""

    def __init__(self, **settings: Any):
        super().__init__(cls=Group, **settings)

    def command(self, *args: Any, **settings: Any) -> Callable[[Function], Function]:
        return super().command(*args, cls=Command, **settings)


def _help(command: Any, ctx: Any) -> str:
    records = [(param.param_type_name, param.get_help_record(ctx)) for param in command.get_params(ctx)]
    text = [filled(f"usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", WIDEST, 4)]
    text.append(paragraphs(command.help or ""))
    for kind in ("argument", "option"):
        if rows := [record for this, record in records if this == kind and record]:
            text.append(f"{kind}s:\n{pairs(rows)}")
    return "\n\n".join(text)
