"""`mini-engine bench`: a race with transformers; what races, and how, is in mini_engine/bench/."""

from functools import partial
from typing import Annotated

import typer

from mini_engine.commands.common import Device, Model, fail


def bench(
    model: Model = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, after one to warm up.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="How many requests.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for both.")] = 2,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Race the engine against transformers on mixed prompts, and compare their tokens."""
    import torch

    from mini_engine.bench import contestants, race
    from mini_engine.loading.registry import resolve
    from mini_engine.show.tables import print_table

    torch.set_num_threads(threads)
    try:
        path = resolve(model)
        ours = contestants.MiniEngine(path, dtype, device)
        theirs = contestants.Transformers(path, dtype, device)
    except ImportError:
        fail(RuntimeError("the benchmark needs transformers: pip install 'mini-engine[bench]'"))
    load = race.Workload.mixed(ours.vocab_size, prompts)
    report = partial(typer.echo, err=True)  # a sign of life: a round may take a minute
    print_table(race.table(race.run({"mini-engine": ours, "transformers": theirs}, load, rounds, report)))
