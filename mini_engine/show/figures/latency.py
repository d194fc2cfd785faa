"""Latencies: the cumulative distribution of TTFT, TPOT and ITL, one line per trace."""

from itertools import cycle

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace
from mini_engine.trace.metrics import request_metrics

LINES = (
    (style.BLUE, "-"),
    (style.VERMILLION, style.DASH),
    (style.INK, style.DOT),
    (style.GREEN, (0, (6, 1.5, 1, 1.5))),
    (style.PURPLE, "-"),
)


def latency_data(traces: dict[str, Trace]) -> dict[str, dict[str, list[float]]]:
    """Return {label: {"ttft": sorted values, "tpot": ..., "itl": ...}} of {label: trace}."""
    data = {}
    for label, trace in traces.items():
        requests = request_metrics(trace).values()
        data[label] = {
            "ttft": sorted(r.ttft for r in requests if r.ttft is not None),
            "tpot": sorted(r.tpot for r in requests if r.tpot is not None),
            "itl": sorted(gap for r in requests for gap in r.itl or ()),
        }
    return data


def latency(traces: dict[str, Trace]) -> tuple[Axes, ...]:
    """Draw the cumulative distribution of TTFT, TPOT and ITL, one line per trace. Return three Axes."""
    data = latency_data(traces)
    unit = style.plural(next(iter(traces.values())).header.unit)
    axes = style.panels(1, 3, 2.7, sharey=True, gridspec_kw={"wspace": 0.06})
    titles = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency"}
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        for (label, values), (colour, dash) in zip(data.items(), cycle(LINES), strict=False):
            if values[name]:
                ax.ecdf(values[name], color=colour, linestyle=dash, linewidth=1.6, label=label)
        style.frame(ax, xlabel=f"{name.upper()} ({unit})", title=title, grid="both")
        ax.set(xlim=(0, None), ylim=(0, 1.04))
    axes[0].set_ylabel("share of values", fontsize=9, color=style.INK)
    axes[0].yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    style.add_legend(axes[0].figure, axes[0].get_legend_handles_labels()[0])
    return tuple(axes)
