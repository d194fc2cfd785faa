"""The ladder: output throughput of each way to run the same workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_engine.show.figures import style
from mini_engine.trace import Trace
from mini_engine.trace.metrics import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ladder_data(traces: dict[str, Trace]) -> list[tuple[str, float, float]]:
    """(label, output tokens per unit of time, multiple of the first one's) of {label: trace}."""
    rates = {label: summary(trace).output_throughput or 0.0 for label, trace in traces.items()}
    first = next(iter(rates.values()))
    return [(label, rate, rate / first if first else float("nan")) for label, rate in rates.items()]


def ladder(traces: dict[str, Trace], ax: Axes | None = None) -> Axes:
    """Output throughput of each way to run the same workload, in the order given. Returns the Axes."""
    rows = ladder_data(traces)
    unit = next(iter(traces.values())).header.unit
    ax = style.one_panel(ax, height=0.34 * len(rows) + 0.9)
    colours = [style.LIGHT_BLUE] * (len(rows) - 1) + [style.BLUE]
    bars = ax.barh([row[0] for row in rows], [row[1] for row in rows], color=colours, height=0.66)
    texts = [f"{rate:.3g}  (\N{MULTIPLICATION SIGN}{ratio:.2g})" for _, rate, ratio in rows]
    ax.bar_label(bars, texts, fontsize=8, padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.16)
    style.frame(ax, xlabel=f"output tokens per {unit}", grid="x")
    ax.tick_params(axis="y", length=0)
    return ax
