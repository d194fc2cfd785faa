"""Shared parts of the commands: options, errors, progress."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from mini_engine.config import SpeculativeConfig
from mini_engine.trace.file import check_plain

if TYPE_CHECKING:  # --help loads no torch
    from mini_engine.model import CausalLM
    from mini_engine.text.tokenizer import Tokenizer

Model = Annotated[
    str, typer.Option("--model", "-m", help="A name from `models list`, a model folder, or a .gguf file.")
]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float64, or q4: weights in 4 bits.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")]
MaxTokens = Annotated[int, typer.Option(help="The most output tokens.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Speculative = Annotated[
    str | None,
    typer.Option(help="Draft 4 tokens a step: ngram:4 by prompt lookup, draft:MODEL:4 by a model."),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        "--tensor-parallel-size",
        min=1,
        help="Share each layer among so many processes, which torchrun starts; for models that do not fit.",
    ),
]
DemoOut = Annotated[Path, typer.Option("--out", help="Folder for trace.jsonl, texts.json and timeline.png.")]
DemoTemperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0: greedy; default: 0 for chats, 0.7 for plays.")
]
TracePath = Annotated[Path, typer.Argument(help="A trace.jsonl.")]

errors = Console(stderr=True, soft_wrap=True, highlight=False)


class BadOutput(ValueError):
    """A command cannot write its output to the given path."""


class Commands(TyperGroup):
    """Commands that print a ValueError or OSError as one line on stderr and exit with code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output has gone: typer ends the command
            raise
        except (ValueError, OSError) as error:
            fail(error, 2)


def fail(error: Exception, code: int = 1) -> NoReturn:
    """Print an error as one line on stderr and exit."""
    say(error)
    raise typer.Exit(code)


def say(error: Exception | str) -> None:
    errors.print(f"[red]error:[/] {escape(' '.join((str(error) or type(error).__name__).splitlines()))}")


def engine_settings(speculative: str | None) -> dict[str, Any]:
    """Return the settings of an engine that options name. Raises ValueError for an option that is none."""
    return {"speculative_config": None if speculative is None else SpeculativeConfig.parse(speculative)}


@contextmanager
def loaded(
    model: str, dtype: str, device: str, tensor_parallel: int
) -> "Iterator[tuple[CausalLM, Tokenizer, dict[str, Any]]]":
    """Yield a model, its tokenizer and the settings of its engine; if it is shared, on rank 0 only. Other
    ranks compute their share, and the command ends when rank 0's does. An error of any rank ends it."""
    if tensor_parallel == 1:
        from mini_engine.loading.checkpoint import load

        yield *load(model, dtype, device), {}
        return
    from mini_engine.distributed.ranks import ParallelError, Ranks
    from mini_engine.distributed.tensor_parallel import Worker, load_share, parallel_backend
    from mini_engine.parts import Parts

    try:
        with Ranks(tensor_parallel) as ranks:
            share, tokenizer = load_share(ranks, model, dtype, device)
            if ranks.rank:
                for signum in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(signum, signal.SIG_IGN)  # rank 0 ends in good order, and then this one
                Worker(share).work(ranks)
            else:
                yield share, tokenizer, {"parts": Parts(attend_backend=parallel_backend(ranks))}
                errors.print(ranks.cost(share.config.num_hidden_layers), highlight=False)
    except ParallelError as error:
        fail(error)
    if ranks.rank:
        raise typer.Exit()  # there is nothing left to do


def is_worker(tensor_parallel: int) -> bool:
    """Return whether this process only computes for rank 0's."""
    return tensor_parallel > 1 and os.environ.get("RANK", "0") != "0"


def writable(out: Path, *read: Path | None) -> Path:
    """Return `out` and create its folder. Raise BadOutput if it is a folder, a device, or a file that the
    command reads."""
    if out.is_dir():
        raise BadOutput(f"{out} is a folder; name the file to write in it")
    try:
        check_plain(out)
    except ValueError as error:
        raise BadOutput(str(error)) from None
    if out.exists() and any(path and path.exists() and out.samefile(path) for path in read):
        raise BadOutput(f"{out} is also the input; name another file with --out")
    check_folder(out.parent)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def check_folder(out: Path) -> None:
    """Raise BadOutput, before a long run, if the folder `out` cannot be created or written to."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise BadOutput(f"{out}: {there} is not a writable folder; name another with --out")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something takes seconds: a spinner on a terminal, a line in a pipe."""
    if errors.is_terminal:
        with errors.status(escape(what)):
            yield
    else:
        errors.print(escape(what))
        yield
