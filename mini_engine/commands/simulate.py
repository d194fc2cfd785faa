"""`mini-engine simulate`: one workload under the engine's scheduler and the baselines, without a model."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mini_engine.commands.common import writable
from mini_engine.trace import read_trace

MOST = 1_000_000  # with a slow baseline nearly all requests wait, in memory


def simulate(
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="poisson, bursty, long-tail, shared-prefix, or a .jsonl.")
    ] = "poisson",
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", "-b", help="One way to schedule, may be repeated; default: all."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=MOST, help="Number of requests of a generated workload.")
    ] = 500,
    rate: Annotated[float, typer.Option(help="Arrivals per second of a generated workload.")] = 14.0,
    fit: Annotated[Path | None, typer.Option(help="Fit the prices to this recorded run.")] = None,
    ttft_limit: Annotated[float, typer.Option(help="TTFT limit for goodput, in ms; inf: none.")] = 1000,
    tpot_limit: Annotated[float, typer.Option(help="TPOT limit for goodput, in ms; inf: none.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a generated workload.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the trace here (one baseline only).")] = None,
) -> None:
    """Schedule a workload without a model, with the engine's scheduler and six slower ones.

    By default mixed steps can just serve the load, and the slower ways cannot:
    prompts of 256 and answers of 96 tokens (medians), 64 slots, a budget of
    2,048 tokens, a pool of 640 blocks of 16. docs/simulate.md explains the table.
    """
    from mini_engine.show.figures import counted
    from mini_engine.show.tables import comparison_table, print_table
    from mini_engine.sim import cost_model, workloads
    from mini_engine.sim.baselines import BASELINES
    from mini_engine.sim.simulate import compare

    names = baseline or list(BASELINES)
    file = Path(workload) if workload.endswith(".jsonl") else None
    if out and len(names) > 1:
        raise ValueError("--out needs exactly one baseline; name it with --baseline")
    if out:
        writable(out, fit, file)
    cost = cost_model.fit(read_trace(fit)) if fit else cost_model.CostModel()
    if file:
        arrivals = partial(workloads.read_arrivals, file)
    else:
        arrivals = partial(workloads.workload, workload, requests, rate=rate, seed=seed)
    limits = {"ttft_limit": ttft_limit, "tpot_limit": tpot_limit}
    for name, limit in limits.items():
        if not limit > 0:  # NaN too
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, in ms, but is {limit}")
    done = compare(arrivals, names, **limits, cost=cost, keep=out or False)
    summaries = {name: summary for name, (summary, _, _) in done.items()}
    print_table(comparison_table(summaries, ttft_limit, tpot_limit))
    for name, (_, num_refused, why) in done.items():
        if num_refused:
            refused = counted(num_refused, "request")
            typer.echo(f"{name} refused {refused} that it can never serve; the first: {why}")
