"""`mini-engine simulate`: one workload under the engine's scheduler and the baselines, without a model."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mini_engine.commands.common import writable
from mini_engine.trace import read_trace

MOST = 1_000_000  # with a slow baseline nearly all requests wait, in memory


def simulate(
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            help="poisson, bursty, long-tail, shared-prefix (default with --replicas), or a .jsonl.",
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", "-b", help="One way to schedule, may be repeated; default: all."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=MOST, help="Number of requests of a generated workload.")
    ] = 500,
    rate: Annotated[
        float | None,
        typer.Option(help="Arrivals per second of a generated workload; default: 14 for each engine."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Simulate a cluster of so many engines behind a router.")
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(help="random, least-loaded or prefix, may be repeated; default: all. Needs --replicas."),
    ] = None,
    prefill: Annotated[
        int, typer.Option(help="So many of the replicas only prefill, and the others only decode.")
    ] = 0,
    transfer: Annotated[
        float | None, typer.Option(help="Price of moving one block to a decoding engine, in ms.")
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Fit the prices to this recorded run.")] = None,
    ttft_limit: Annotated[float, typer.Option(help="TTFT limit for goodput, in ms; inf: none.")] = 1000,
    tpot_limit: Annotated[float, typer.Option(help="TPOT limit for goodput, in ms; inf: none.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a generated workload.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the trace here (one baseline only); of a cluster, a folder.")
    ] = None,
) -> None:
    """Schedule a workload without a model, with the engine's scheduler and six slower ones.

    By default mixed steps can just serve the load, and the slower ways cannot:
    prompts of 256 and answers of 96 tokens (medians), 64 slots, a budget of
    2,048 tokens, a pool of 640 blocks of 16. docs/simulate.md explains the table.
    """
    from mini_engine.show.tables import cluster_table, comparison_table, print_table
    from mini_engine.sim import cost_model, workloads
    from mini_engine.sim.baselines import BASELINES
    from mini_engine.sim.cluster import Transfer, simulate_cluster
    from mini_engine.sim.routers import ROUTERS
    from mini_engine.sim.simulate import compare

    if replicas is None and (router or prefill or transfer is not None):
        raise ValueError("--router, --prefill and --transfer are a cluster's; give --replicas, too")
    if replicas is not None and baseline:
        raise ValueError("--baseline is of one engine; the engines of a cluster all schedule as mixed does")
    names = baseline or list(BASELINES) if replicas is None else router or list(ROUTERS)
    workload = workload or ("poisson" if replicas is None else "shared-prefix")
    file = Path(workload) if workload.endswith(".jsonl") else None
    if out and len(names) > 1:
        kind = "baseline" if replicas is None else "router"
        raise ValueError(f"--out needs exactly one {kind}; name it with --{kind}")
    if out:
        writable(out if replicas is None else out / "trace.jsonl", fit, file)
    cost = cost_model.fit(read_trace(fit)) if fit else cost_model.CostModel()
    if file:
        arrivals = partial(workloads.read_arrivals, file)
    else:
        rate = 14.0 * (replicas or 1) if rate is None else rate
        arrivals = partial(workloads.workload, workload, requests, rate=rate, seed=seed)
    limits = {"ttft_limit": ttft_limit, "tpot_limit": tpot_limit}
    for name, limit in limits.items():
        if not limit > 0:  # NaN too
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, in ms, but is {limit}")
    if replicas is None:
        done = compare(arrivals, names, **limits, cost=cost, keep=out or False)
        summaries = {name: summary for name, (summary, _, _) in done.items()}
        print_table(comparison_table(summaries, ttft_limit, tpot_limit))
        _say_refused({name: (number, why) for name, (_, number, why) in done.items()})
        return
    move = Transfer() if transfer is None else Transfer(per_block=transfer)
    options: dict[str, Any] = {"prefill": prefill, "cost": cost, "transfer": move, "seed": seed}
    options["keep"] = out or False
    runs = {name: simulate_cluster(arrivals(), replicas, name, **options) for name in names}
    each = {name: run.summaries(**limits) for name, run in runs.items()}
    rows = each[names[0]] if len(names) == 1 else {name: rows["together"] for name, rows in each.items()}
    print_table(cluster_table("engine" if len(names) == 1 else "router", rows, ttft_limit, tpot_limit))
    _say_refused({name: (run.num_refused, run.why_refused) for name, run in runs.items()})


def _say_refused(refused: dict[str, tuple[int, str]]) -> None:
    from mini_engine.show.figures import counted

    for name, (number, why) in refused.items():
        if number:
            what = counted(number, "request")
            typer.echo(f"{name} refused {what} that it can never serve; the first: {why}")
