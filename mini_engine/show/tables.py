"""Tables for a terminal of any width: the requests of a run, and a comparison of baselines."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mini_engine.trace import Trace
from mini_engine.trace.metrics import Summary, request_metrics


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

    table = _table(f"prompt, its cached part and output in tokens; queue, prefill, TTFT and TPOT in {shown}")
    columns = "prio prompt cached output queue\nsteps queue prefill TTFT TPOT preemp-\ntions".split(" ")
    metrics = request_metrics(trace).values()
    drafts = any(m.num_draft_tokens for m in metrics)
    table.add_column("id")
    for name in columns + ["accepted\ndrafts"] * drafts:
        table.add_column(name, justify="right")
    table.add_column("end")
    for m in metrics:
        table.add_row(
            Text(m.id),
            str(m.priority),
            str(m.num_prompt_tokens),
            str(m.num_cached_tokens),
            str(m.num_output_tokens),
            "-" if m.queue_steps is None else str(m.queue_steps),
            *(time(value) for value in (m.queue_time, m.prefill_time, m.ttft, m.tpot)),
            str(m.num_preemptions),
            *[f"{m.num_accepted_tokens}/{m.num_draft_tokens}"] * drafts,
            Text(m.finish_reason or "-"),
        )
    return table


def comparison_table(
    summaries: dict[str, Summary], ttft_limit: float | None = None, tpot_limit: float | None = None
) -> Table:
    """Return a table with one row per baseline, from summaries in ms; the caption has goodput's limits."""
    columns = "output\ntok/s TTFT\np50 TTFT\np99 TPOT\np50 ITL\nmax preemp-\ntions good\nreq/s".split(" ")
    table = _limits_table("baseline", columns, ttft_limit, tpot_limit)
    for name, run in summaries.items():
        table.add_row(
            name,
            _number(run.output_throughput and run.output_throughput * 1000),
            _number(run.ttft.p50 if run.ttft else None),
            _number(run.ttft.p99 if run.ttft else None),
            _number(run.tpot.p50 if run.tpot else None, 1),
            _number(run.max_itl),
            str(run.num_preemptions),
            _number(run.goodput and run.goodput * 1000, 1),
        )
    return table


def cluster_table(
    first: str,
    summaries: dict[str, Summary],
    ttft_limit: float | None = None,
    tpot_limit: float | None = None,
) -> Table:
    """Return a table with one row per engine of a cluster, or per router; `first` names that column."""
    columns = "requests prompt\ntokens cached TTFT\np50 TTFT\np99 ITL\np50 ITL\np99 good\nreq/s".split(" ")
    table = _limits_table(first, columns, ttft_limit, tpot_limit)
    for name, run in summaries.items():
        cached = run.num_cached_tokens / run.num_prompt_tokens if run.num_prompt_tokens else 0
        table.add_row(
            name,
            str(run.num_requests),
            _number(run.num_prompt_tokens),
            f"{cached:.0%}",
            _number(run.ttft.p50 if run.ttft else None),
            _number(run.ttft.p99 if run.ttft else None),
            _number(run.itl.p50 if run.itl else None, 1),
            _number(run.itl.p99 if run.itl else None, 1),
            _number(run.goodput and run.goodput * 1000, 1),
        )
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _limits_table(
    first: str, columns: list[str], ttft_limit: float | None, tpot_limit: float | None
) -> Table:
    limits = {"TTFT": ttft_limit, "TPOT": tpot_limit}
    within = " and ".join(f"{name} up to {ms:g} ms" for name, ms in limits.items() if ms is not None)
    table = _table(f"times in ms; good: finished{within and ' with '}{within}")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _table(caption: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        caption=caption,
        caption_justify="left",
        header_style="bold",
        pad_edge=False,
        padding=0,
    )
