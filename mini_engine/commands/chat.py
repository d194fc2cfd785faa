"""`mini-engine chat`: a conversation in the terminal."""

import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.console import Console

from mini_engine.checks import check_text
from mini_engine.commands.common import (
    Device,
    Dtype,
    MaxTokens,
    Model,
    Seed,
    Speculative,
    Temperature,
    engine_settings,
    errors,
    say,
)
from mini_engine.commands.quick import import_torch
from mini_engine.outputs import Stream
from mini_engine.request import SamplingParams
from mini_engine.text.tokenizer import Tokenizer


def chat(
    model: Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    speculative: Speculative = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation."""
    if system is not None:
        check_text("--system", system)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    settings = engine_settings(speculative)
    import_torch()
    from mini_engine.engine import Engine
    from mini_engine.loading.checkpoint import load

    loaded, tokenizer = load(model, dtype, device)
    if tokenizer.chat_template is None:
        raise ValueError(f"the model {model!r} has no chat template; try `mini-engine generate`")
    engine = Engine(loaded, tokenizer, **settings)
    messages = [{"role": "system", "content": system}] if system else []
    first = len(messages)  # messages from here on may be dropped when the context is full
    console = Console(highlight=False)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that a line that is not UTF-8 is one error
    while text := _read(console):
        messages.append({"role": "user", "content": text})
        answer = ""
        try:
            stream = _begin(lambda prompt: engine.stream(prompt, params), tokenizer, messages, first)
            # The prefix cache has the conversation so far: only the new message is computed.
            for delta in stream:
                typer.echo(delta.text, nl=False)
                answer += delta.text
                if delta.error:
                    raise ValueError(delta.error)
        except ValueError as error:
            say(error)
            messages.pop()
            continue
        except KeyboardInterrupt:
            pass  # ends the answer, not the conversation
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


def _read(console: Console) -> str:
    """Return the next message; empty at the end of the conversation."""
    try:
        return console.input("[bold]you:[/] ").strip() if sys.stdin else ""
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _begin(
    start: Callable[[list[int]], Stream], tokenizer: Tokenizer, messages: list[dict[str, str]], first: int
) -> Stream:
    """Start an answer; while the context is too small, drop the earliest message and its answer.

    Raise ValueError if the latest message alone does not fit.
    """
    dropped = 0
    while True:
        prompt = tokenizer.encode_chat(messages)
        try:
            stream = start(prompt)
        except ValueError:
            if len(messages) <= first + 1:
                raise
            del messages[first : first + 2]
            dropped += 1
            continue
        if dropped:
            said = f"the context is full: the first {dropped} messages and answers are dropped"
            errors.print(f"[dim]({said})[/]")
        return stream
