"""`mini-engine simulate`: the engine's policy and slower ones on one workload, without a model."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mini_engine.trace import read_trace


def simulate(
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="poisson, bursty, long-tail, shared-prefix, or a .jsonl.")
    ] = "poisson",
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", "-b", help="May be repeated; all of them without it.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many, of a workload that is made up.")] = 500,
    rate: Annotated[float, typer.Option(help="Arrivals a second, of a workload that is made up.")] = 14.0,
    fit: Annotated[Path | None, typer.Option(help="Take the prices from this recorded run.")] = None,
    ttft_limit: Annotated[float, typer.Option(help="For goodput, in ms; inf: none.")] = 1000,
    tpot_limit: Annotated[float, typer.Option(help="For goodput, in ms; inf: none.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the trace here (one baseline only).")] = None,
) -> None:
    """Schedule a workload without a model, under the engine's policy and the slower ones.

    As given, it is a load that mixed steps just carry and the slower ways do
    not: prompts of 256 and answers of 96 tokens (medians), 64 slots, a budget
    of 2,048 tokens, a pool of 640 blocks of 16. docs/simulate.md reads the table.
    """
    from mini_engine.show.tables import comparison_table, print_table
    from mini_engine.sim import cost_model, workloads
    from mini_engine.sim.policies import BASELINES
    from mini_engine.sim.simulate import compare

    names = baseline or list(BASELINES)
    if out and len(names) > 1:
        raise ValueError("--out takes the trace of one baseline; name it with --baseline")
    cost = cost_model.fit(read_trace(fit)) if fit else cost_model.CostModel()
    arrivals = partial(workloads.workload, workload, requests, rate=rate, seed=seed)
    if workload.endswith(".jsonl"):
        arrivals = partial(workloads.read_arrivals, workload)
    limits = {"ttft_limit": ttft_limit, "tpot_limit": tpot_limit}
    done = compare(arrivals, names, **limits, cost=cost, keep=out or False)
    summaries = {name: summary for name, (summary, _) in done.items()}
    print_table(comparison_table(summaries, ttft_limit, tpot_limit))
    for name, (_, num_refused) in done.items():
        if num_refused:
            typer.echo(f"{name} refused {num_refused} of the requests: it could never have served them")
