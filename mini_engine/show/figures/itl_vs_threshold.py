"""The chunk threshold: smaller chunks shorten the gaps between tokens and delay the first token."""

from collections.abc import Iterable, Sequence
from typing import Any

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace
from mini_engine.trace.metrics import summary


def itl_vs_threshold_data(traces: Iterable[Trace]) -> list[style.Data]:
    """Return ITL and TTFT of each trace, by long_prefill_token_threshold, 0 (off) last; None if undefined."""
    rows = []
    for trace in traces:
        run, row = summary(trace), {"threshold": trace.header.config["long_prefill_token_threshold"]}
        for name in ("itl_mean", "itl_p99", "itl_max", "ttft_mean", "ttft_max"):
            latency, number = name.split("_")
            row[name] = getattr(getattr(run, latency), number, None)
        rows.append(row)
    return sorted(rows, key=lambda row: row["threshold"] or float("inf"))


def itl_vs_threshold(traces: Sequence[Trace]) -> tuple[Axes, ...]:
    """Draw ITL and TTFT against the chunk threshold: smaller chunks shorten the gaps and delay first tokens.

    `traces`: one workload under several thresholds, on a clock with a cost model; on a clock that counts
    steps every gap is 1. Return the two Axes.
    """
    rows = itl_vs_threshold_data(traces)
    unit = style.plural(traces[0].header.unit)
    axes = style.panels(1, 2, 2.9, gridspec_kw={"wspace": 0.1})
    labels = [str(row["threshold"] or "off") for row in rows]
    looks: dict[str, dict[str, Any]] = {
        "p99": {"color": style.GREY, "marker": "s", "markersize": 9, "markerfacecolor": "none", "ls": "--"},
        "max": {"color": style.VERMILLION, "marker": "^", "markersize": 5},
        "mean": {"color": style.BLUE, "marker": "o", "markersize": 5},
    }
    names = {"itl": "Gap between tokens", "ttft": "Time to first token"}
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        for what, look in looks.items():
            if f"{name}_{what}" in rows[0]:
                ax.plot(labels, [row[f"{name}_{what}"] for row in rows], label=what, **look)
        style.frame(ax, xlabel="chunk threshold (tokens)", ylabel=f"{name.upper()} ({unit})", title=title)
        ax.margins(y=0.15)
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=8, frameon=False, labelcolor=style.INK)
    return tuple(axes)
