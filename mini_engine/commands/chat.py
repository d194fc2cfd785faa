"""`mini-engine chat`: a conversation in the terminal."""

from typing import Annotated

import typer
from rich.console import Console

from mini_engine.commands.common import Device, Dtype, MaxTokens, Model, Seed, Temperature


def chat(
    model: Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation."""
    from mini_engine.request import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    from mini_engine.engine import Engine
    from mini_engine.loading.checkpoint import load

    loaded, tokenizer = load(model, dtype, device)
    if tokenizer.chat_template is None:
        raise ValueError(f"the model {model!r} has no chat template; try `mini-engine generate`")
    engine = Engine(loaded, tokenizer)
    messages = [{"role": "system", "content": system}] if system else []
    console = Console(highlight=False)
    while True:
        try:
            text = console.input("[bold]you:[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            return
        messages.append({"role": "user", "content": text})
        answer = ""
        try:
            # The conversation so far is found in the prefix cache: only the new turn is computed.
            for delta in engine.stream(tokenizer.encode_chat(messages), params):
                typer.echo(delta.text, nl=False)
                answer += delta.text
        except KeyboardInterrupt:
            pass  # the answer is cut short; the conversation goes on
        typer.echo()
        messages.append({"role": "assistant", "content": answer})
