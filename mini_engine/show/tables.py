"""Tables for a terminal of any width: the requests of a run, and a comparison of baselines."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mini_engine.trace import Trace
from mini_engine.trace.metrics import Stats, Summary, request_metrics

LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD, "caption_justify": "left", "header_style": "bold",
    "pad_edge": False, "padding": 0,
}  # fmt: skip


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table as wide as its numbers, which rich would cut to "1…"; a narrow terminal wraps lines."""
    console = console or Console()
    table.width = Measurement.get(console, console.options.update(width=200), table).maximum
    console.print(table, crop=False)


def metrics_table(trace: Trace) -> Table:
    """Return a table of a run's metrics, one row per request."""
    unit = trace.header.unit
    scale, shown = (1e3, "ms") if unit == "s" else (1, escape(unit))

    def time(value: float | None) -> str:
        return "-" if value is None else f"{value * scale:.0f}" if scale > 1 else f"{value:g}"

    times_in = f"queue, prefill, TTFT and TPOT in {shown}"
    table = Table(caption=f"prompt, its cached part and output in tokens; {times_in}", **LOOK)
    columns = "prio prompt cached output queue\nsteps queue prefill TTFT TPOT preemp-\ntions".split(" ")
    metrics = request_metrics(trace).values()
    drafts = any(m.num_draft_tokens for m in metrics)
    table.add_column("id")
    for name in columns + ["accepted\ndrafts"] * drafts:
        table.add_column(name, justify="right")
    table.add_column("end")
    for m in metrics:
        counts = map(str, (m.priority, m.num_prompt_tokens, m.num_cached_tokens, m.num_output_tokens))
        steps = "-" if m.queue_steps is None else str(m.queue_steps)
        times = map(time, (m.queue_time, m.prefill_time, m.ttft, m.tpot))
        accepted = [f"{m.num_accepted_tokens}/{m.num_draft_tokens}"] * drafts
        end = Text(m.finish_reason or "-")
        table.add_row(Text(m.id), *counts, steps, *times, str(m.num_preemptions), *accepted, end)
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percentile(stats: Stats | None, name: str, digits: int = 0) -> str:
    return _number(getattr(stats, name, None), digits)


CELLS: dict[str, Callable[[Summary], str]] = {  # by the column's head
    "requests": lambda run: str(run.num_requests),
    "prompt\ntokens": lambda run: _number(run.num_prompt_tokens),
    "cached": lambda run: f"{run.num_cached_tokens / max(1, run.num_prompt_tokens):.0%}",
    "output\ntok/s": lambda run: _number(run.output_throughput and run.output_throughput * 1000),
    "TTFT\np50": lambda run: _percentile(run.ttft, "p50"),
    "TTFT\np99": lambda run: _percentile(run.ttft, "p99"),
    "TPOT\np50": lambda run: _percentile(run.tpot, "p50", 1),
    "ITL\np50": lambda run: _percentile(run.itl, "p50", 1),
    "ITL\np99": lambda run: _percentile(run.itl, "p99", 1),
    "ITL\nmax": lambda run: _number(run.max_itl),
    "preemp-\ntions": lambda run: str(run.num_preemptions),
    "good\nreq/s": lambda run: _number(run.goodput and run.goodput * 1000, 1),
}


def comparison_table(
    summaries: dict[str, Summary], ttft_limit: float | None = None, tpot_limit: float | None = None
) -> Table:
    """Return a table with one row per baseline, from summaries in ms; the caption has goodput's limits."""
    heads = "output\ntok/s TTFT\np50 TTFT\np99 TPOT\np50 ITL\nmax preemp-\ntions good\nreq/s"
    return _summaries_table("baseline", heads, summaries, ttft_limit, tpot_limit)


def cluster_table(
    first: str,
    summaries: dict[str, Summary],
    ttft_limit: float | None = None,
    tpot_limit: float | None = None,
) -> Table:
    """Return a table with one row per engine of a cluster, or per router; `first` names that column."""
    heads = "requests prompt\ntokens cached TTFT\np50 TTFT\np99 ITL\np50 ITL\np99 good\nreq/s"
    return _summaries_table(first, heads, summaries, ttft_limit, tpot_limit)


def _summaries_table(
    first: str, heads: str, summaries: dict[str, Summary], ttft_limit: float | None, tpot_limit: float | None
) -> Table:
    limits = {"TTFT": ttft_limit, "TPOT": tpot_limit}
    within = " and ".join(f"{name} up to {ms:g} ms" for name, ms in limits.items() if ms is not None)
    table = Table(caption=f"times in ms; good: finished{within and ' with '}{within}", **LOOK)
    table.add_column(first)
    for head in heads.split(" "):
        table.add_column(head, justify="right")
    for name, run in summaries.items():
        table.add_row(name, *(CELLS[head](run) for head in heads.split(" ")))
    return table
