"""The command line: mini-engine demo | generate | chat | models | trace | simulate | bench.

Every command imports what it needs when it runs, so that --help answers at once.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="A small LLM inference engine that shows what it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="List models, and fetch those that are not embedded.", no_args_is_help=True)
trace_app = typer.Typer(help="Look at a recorded run.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(trace_app, name="trace")

Model = Annotated[
    str, typer.Option("--model", "-m", help="A name from `models list`, a model folder, or a .gguf file.")
]
Device = Annotated[str, typer.Option(help="auto takes a GPU where there is one; else cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
MaxTokens = Annotated[int | None, typer.Option(help="Output tokens at most; without it, to the limit.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


def fail(error: Exception) -> NoReturn:
    """One clear sentence on stderr, exit code 1."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]error:[/] {_plain(error)}")
    raise typer.Exit(1)


def _plain(error: Exception) -> str:
    from rich.markup import escape

    return escape(str(error) or type(error).__name__)


def _load(model: str, dtype: str, device: str):
    """(CausalLM, Tokenizer), or a clear end."""
    from mini_engine.loading.checkpoint import load_model
    from mini_engine.loading.registry import resolve
    from mini_engine.text.tokenizer import Tokenizer

    try:
        path = resolve(model)
        return load_model(path, dtype=dtype, device=device), Tokenizer.from_path(path)
    except (ValueError, OSError) as error:
        fail(error)


@app.command()
def demo(
    model: Model = "shakespeare",
    labs: Annotated[
        str | None,
        typer.Option(help="Run on your own parts: lab-01,lab-03, or auto for every lab whose tests pass."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where trace.jsonl and timeline.png go.")] = Path("out"),
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="0 is greedy; default 0 for chats, 0.7 for plays."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve several requests at once and show every decision."""
    from mini_engine.show import demo as _demo

    console = Console()
    learner = None if labs is None else _learner(labs, console)
    loaded, tokenizer = _load(model, dtype, device)
    engine = None
    try:
        engine, workload = _demo.demo_engine(loaded, tokenizer, **(learner.engine_args if learner else {}))
        if temperature is None:
            temperature = 0.0 if tokenizer.chat_template else 0.7
        _demo.run(engine, workload, console, temperature, learner.check if learner else None)
        paths = _demo.report(engine.trace, console, out)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not (learner or isinstance(error, ValueError | OSError)):
            raise
        fail(learner.explain(error, engine and engine.scheduler.step) if learner else error)
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True)


def _learner(labs: str, console: Console):
    """The learner's parts out of the labs' starter files, and a table of which part is whose."""
    try:
        from labs.kit.learner.parts import LearnerParts
    except ImportError:
        fail(RuntimeError("--labs needs the course's folder labs/; run it from the root of the repository"))
    try:
        learner = LearnerParts.from_labs(labs)
    except ValueError as error:
        fail(error)
    table = Table("part", "whose", header_style="bold")
    for name, owner in learner.table():
        table.add_row(name, owner)
    console.print(table)
    return learner


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="May be given more than once.")],
    model: Model = "shakespeare",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repeating.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text. May be repeated.")] = None,
    seed: Seed = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Complete one or more prompts and print the text."""
    from mini_engine.request import SamplingParams

    try:
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
    except ValueError as error:
        fail(error)
    loaded, tokenizer = _load(model, dtype, device)
    from mini_engine.engine import Engine
    from mini_engine.llm import LLM

    llm = LLM.from_engine(Engine(loaded, tokenizer, record=False))
    try:
        if chat:
            conversations = [[{"role": "user", "content": text}] for text in prompt]
            outputs = llm.chat(conversations, params, progress=len(prompt) > 1)
        else:
            outputs = llm.generate(prompt, params, progress=len(prompt) > 1)
    except ValueError as error:
        fail(error)
    for text, output in zip(prompt, outputs, strict=True):
        completion = output.outputs[0].text
        typer.echo(completion if chat else text + completion)


@app.command()
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
    from mini_engine.engine import Engine
    from mini_engine.request import SamplingParams

    loaded, tokenizer = _load(model, dtype, device)
    if tokenizer.chat_template is None:
        fail(ValueError(f"the model {model!r} has no chat template; try `mini-engine generate`"))
    engine = Engine(loaded, tokenizer, record=False)
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
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
            # The conversation so far is found in the prefix cache: only the new turn is computed.
            for delta in engine.stream(tokenizer.encode_chat(messages), params):
                typer.echo(delta.text, nl=False)
                answer += delta.text
        except ValueError as error:
            fail(error)
        except KeyboardInterrupt:
            pass  # the answer is cut short; the conversation goes on
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


@models_app.command("list")
def models_list() -> None:
    """The models that can be named, and where they are."""
    from mini_engine.loading.registry import list_models

    table = Table("name", "what it is", "size", "where", header_style="bold")
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps a name or a path, and keeps all of it
    for model in list_models():
        where = str(model.path) if model.is_present else f"mini-engine models fetch {model.name}"
        table.add_row(model.name, model.description, f"{model.size / 1e6:.0f} MB", where)
    Console().print(table)


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="A name from `models list`.")]) -> None:
    """Download a model once into the user's cache."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from mini_engine.loading.registry import FetchError, fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task(f"fetching {name}", total=None)
            path = fetch(name, lambda done, total: bar.update(task, completed=done, total=total))
    except (FetchError, ValueError) as error:
        fail(error)
    typer.echo(f"{name} is at {path}")


@trace_app.command("summary")
def trace_summary(path: Annotated[Path, typer.Argument(help="A trace.jsonl.")]) -> None:
    """Print the metrics of a recorded run."""
    from mini_engine.show.demo import metrics_table
    from mini_engine.show.tables import print_table

    print_table(metrics_table(_read(path)))


@trace_app.command("timeline")
def trace_timeline(
    path: Annotated[Path, typer.Argument(help="A trace.jsonl.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The picture to write; default beside the trace.")
    ] = None,
) -> None:
    """Draw a recorded run as a picture."""
    import matplotlib

    from mini_engine.show import figures

    matplotlib.use("Agg")
    trace = _read(path)
    out = out or path.with_suffix(".png")
    try:
        figures.save(figures.timeline(trace), out, alt=figures.alt_text(trace, "timeline"))
    except (ValueError, OSError) as error:
        fail(error)
    typer.echo(f"wrote {out}")


@trace_app.command("play")
def trace_play(
    path: Annotated[Path | None, typer.Argument(help="A trace.jsonl.")] = None,
    other: Annotated[Path | None, typer.Argument(help="A second one, to be shown beside it.")] = None,
    example: Annotated[bool, typer.Option("--example", help="A ready run: 20 blocks, six requests.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("out/player.html"),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
) -> None:
    """Step through a recorded run, decision by decision, in one self-contained HTML page."""
    from mini_engine.show.player import ready_setup, write_player

    if example == (path is not None):
        fail(ValueError("give a trace.jsonl, or --example for a ready one (not both)"))
    try:
        if example:
            page = write_player(out, ready_setup(), names=("20 blocks, six requests",))
        else:
            names = tuple(str(p) for p in (path, other) if p)
            page = write_player(out, _read(path), _read(other) if other else None, names=names)
    except (ValueError, OSError) as error:
        fail(error)
    typer.echo(f"wrote {page}")
    if open_page:
        typer.launch(page.resolve().as_uri())


@trace_app.command("export")
def trace_export(
    path: Annotated[Path, typer.Argument(help="A trace.jsonl.")],
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Chrome trace JSON, for ui.perfetto.dev.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; default beside the trace.")
    ] = None,
) -> None:
    """Turn a recorded run into another tool's format."""
    import json

    from mini_engine.show.perfetto import to_perfetto

    out = out or path.with_suffix(".perfetto.json")
    try:
        out.write_text(json.dumps(to_perfetto(_read(path))), encoding="utf-8")
    except (ValueError, OSError) as error:
        fail(error)
    typer.echo(f"wrote {out}; open it in ui.perfetto.dev or chrome://tracing")


@trace_app.command("fit")
def trace_fit(path: Annotated[Path, typer.Argument(help="A trace.jsonl in wall time.")]) -> None:
    """Fit the simulator's prices (per forward, per token, per KV token read) to a recorded run."""
    from mini_engine.sim.cost_model import fit, step_loads

    trace = _read(path)
    try:
        cost = fit(trace)
    except ValueError as error:
        fail(error)
    scale = 1000 if trace.header["unit"] == "s" else 1
    measured = sum(record["t_end"] - record["t"] for record in trace.steps) * scale
    told = sum(cost.step_time(load) for load in step_loads(trace))
    typer.echo(
        f"step time = {cost.per_forward:.3g} ms + {cost.per_token:.3g} ms * tokens "
        f"+ {cost.per_kv_token:.3g} ms * KV tokens read"
    )
    typer.echo(f"{len(trace.steps)} steps: measured {measured:.0f} ms, by the fit {told:.0f} ms")


@app.command()
def simulate(
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="poisson, bursty, long-tail, shared-prefix, or a .jsonl.")
    ] = "poisson",
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", "-b", help="May be repeated; all of them without it.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many, of a workload that is made up.")] = 500,
    rate: Annotated[float, typer.Option(help="Arrivals a second, of a workload that is made up.")] = 6.0,
    fit: Annotated[Path | None, typer.Option(help="Take the prices from this recorded run.")] = None,
    ttft_limit: Annotated[float | None, typer.Option(help="For goodput, in ms.")] = None,
    tpot_limit: Annotated[float | None, typer.Option(help="For goodput, in ms.")] = None,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the trace here (one baseline only).")] = None,
) -> None:
    """Schedule a workload without a model, under the engine's policy and the slower ones."""
    from mini_engine.show.tables import print_table
    from mini_engine.sim import simulate as _simulate
    from mini_engine.sim.cost_model import CostModel
    from mini_engine.sim.cost_model import fit as fit_cost
    from mini_engine.sim.policies import BASELINES

    names = baseline or list(BASELINES)
    table = Table("baseline", header_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in (
        "output\ntok/s",
        "TTFT\np50",
        "TTFT\np99",
        "TPOT\np50",
        "ITL\nmax",
        "preemp-\ntions",
        "good\nreq/s",
    ):
        table.add_column(name, justify="right")
    try:
        if out and len(names) > 1:
            raise ValueError("--out takes the trace of one baseline; name it with --baseline")
        cost = fit_cost(_read(fit)) if fit else CostModel()
        for name in names:
            if workload.endswith(".jsonl"):
                arrivals = _simulate.read_arrivals(workload)
            else:
                arrivals = _simulate.workload(workload, requests, rate=rate, seed=seed)
            run = _simulate.simulate(arrivals, name, cost=cost, keep_steps=False, path=out)
            table.add_row(name, *_simulated(run.summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)))
    except (ValueError, OSError) as error:
        fail(error)
    limits = {"TTFT": ttft_limit, "TPOT": tpot_limit}
    told = " and ".join(f"{name} up to {limit:g} ms" for name, limit in limits.items() if limit is not None)
    table.caption = f"times in ms; good: finished{told and ' with '}{told}"
    table.caption_justify = "left"
    print_table(table)


def _simulated(told) -> list[str]:
    def number(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    ttft, tpot = told.ttft, told.tpot
    return [
        number(told.output_throughput and told.output_throughput * 1000),
        number(ttft and ttft.p50),
        number(ttft and ttft.p99),
        number(tpot and tpot.p50, 1),
        number(told.max_itl),
        str(told.num_preemptions),
        number(told.goodput and told.goodput * 1000, 1),
    ]


def _read(path: Path):
    from mini_engine.trace import read_trace

    try:
        return read_trace(path)
    except (ValueError, OSError) as error:
        fail(error)


@app.command()
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

    from mini_engine import bench as _bench
    from mini_engine.loading.registry import resolve
    from mini_engine.show.tables import print_table

    torch.set_num_threads(threads)
    try:
        path = resolve(model)
        ours = _bench.mini_engine_contestant(path, dtype, device)
        theirs = _bench.transformers_contestant(path, dtype, device)
    except ImportError:
        fail(RuntimeError("the benchmark needs transformers: pip install 'mini-engine[bench]'"))
    except (ValueError, OSError) as error:
        fail(error)
    load = _bench.Workload.mixed(ours.vocab_size, prompts)
    # A sign of life: a round may take a minute.
    tell = partial(typer.echo, err=True)
    result = _bench.run({"mini-engine": ours, "transformers": theirs}, load, rounds, tell)
    print_table(_bench.table(result))


def main() -> None:
    if sys.platform == "win32":  # legacy consoles cannot print every character of a text
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
