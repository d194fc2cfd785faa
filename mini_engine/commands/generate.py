"""`mini-engine generate`: completions of one or more prompts."""

from pathlib import Path
from typing import Annotated

import typer

from mini_engine.commands.common import (
    Device,
    Dtype,
    MaxTokens,
    Model,
    Seed,
    Speculative,
    Temperature,
    TensorParallel,
    engine_settings,
    loaded,
    say,
)
from mini_engine.commands.quick import import_torch
from mini_engine.sampling_params import SamplingParams, StructuredOutputsParams


def generate(
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="A prompt; may be repeated.")],
    model: Model = "shakespeare",
    n: Annotated[int, typer.Option("-n", help="Answers to each prompt; answer i has the seed + i.")] = 1,
    max_tokens: MaxTokens = 64,
    min_tokens: Annotated[int, typer.Option(help="The fewest output tokens.")] = 0,
    temperature: Temperature = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 or -1: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repeating.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0 discourages words of the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time they occur.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never write this; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ignore the end of sequence.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Print the log probability of each token, and of so many others.")
    ] = None,
    seed: Seed = None,
    regex: Annotated[str | None, typer.Option(help="Write what this regular expression matches.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="Write JSON of the schema in this file; needs llguidance.")
    ] = None,
    speculative: Speculative = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    tensor_parallel: TensorParallel = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Complete one or more prompts and print the text."""
    from mini_engine.checks import check_text

    for text in prompt:
        check_text("--prompt", text)
    schema = None if json_schema is None else json_schema.read_text("utf-8")
    wants_shape = regex is not None or schema is not None
    shape = StructuredOutputsParams(regex=regex, json=schema) if wants_shape else None
    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        bad_words=tuple(bad_word or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        seed=seed,
        structured_outputs=shape,
    )
    settings = engine_settings(speculative)
    import_torch()
    from mini_engine.engine import Engine
    from mini_engine.llm import LLM

    with loaded(model, dtype, device, tensor_parallel) as (lm, tokenizer, others):
        llm = LLM.from_engine(Engine(lm, tokenizer, **settings, **others))
        if chat:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
        else:
            outputs = llm.generate(prompt, params)
    answers = [answer for output in outputs for answer in output.outputs]
    for text, answer in zip([text for text in prompt for _ in range(n)], answers, strict=True):
        typer.echo(("" if chat else text) + answer.text)
        for token_id, likely in zip(answer.token_ids, answer.logprobs or (), strict=False):
            words = [f"{of.logprob:7.3f} {of.decoded_token!r}" for of in likely.values()]
            typer.echo(f"{token_id:>6} " + "  ".join(words))
        if answer.is_complete is False and not answer.error:
            say(f"the text was cut short ({answer.finish_reason}), and has not the shape that was asked for")
    if broken := [answer.error for answer in answers if answer.error]:
        raise ValueError("; ".join(broken))
