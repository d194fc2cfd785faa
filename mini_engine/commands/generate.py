"""`mini-engine generate`: completions of one or more prompts."""

from typing import Annotated

import typer

from mini_engine.commands.common import Device, Dtype, MaxTokens, Model, Seed, Temperature


def generate(
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="A prompt; may be repeated.")],
    model: Model = "shakespeare",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 or -1: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repeating.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    seed: Seed = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Complete one or more prompts and print the text."""
    from mini_engine.request import SamplingParams, check_text

    for text in prompt:
        check_text("--prompt", text)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        seed=seed,
    )
    from mini_engine.llm import LLM

    llm, progress = LLM(model, dtype=dtype, device=device), len(prompt) > 1
    if chat:
        conversations = [[{"role": "user", "content": text}] for text in prompt]
        outputs = llm.chat(conversations, params, progress=progress)
    else:
        outputs = llm.generate(prompt, params, progress=progress)
    for text, output in zip(prompt, outputs, strict=True):
        typer.echo(("" if chat else text) + output.outputs[0].text)
    if broken := [o.outputs[0].error for o in outputs if o.outputs[0].error]:
        raise ValueError("; ".join(broken))
