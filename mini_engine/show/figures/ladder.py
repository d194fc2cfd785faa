"""The ladder: output throughput and longest gap of each way to run the same workload."""

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace
from mini_engine.trace.metrics import summary


def ladder_data(traces: dict[str, Trace]) -> list[tuple[str, float, float, float]]:
    """Return (label, output tokens per second or step, ratio to the first, longest gap) per {label: trace}.

    The gap, in the trace's unit, is the longest time between two tokens of one request.
    """
    runs = {label: summary(trace) for label, trace in traces.items()}
    scale = {"ms": 1000}
    rates = {label: (run.output_throughput or 0.0) * scale.get(run.unit, 1) for label, run in runs.items()}
    first = next(iter(rates.values()))
    ratios = {label: rate / first if first else float("nan") for label, rate in rates.items()}
    return [(label, rates[label], ratios[label], run.max_itl or 0.0) for label, run in runs.items()]


def ladder(traces: dict[str, Trace]) -> tuple[Axes, ...]:
    """Draw output throughput and longest gap of each trace, in the order given. Return two Axes."""
    names, rates, ratios, gaps = zip(*ladder_data(traces), strict=True)
    unit = next(iter(traces.values())).header.unit
    axes = style.panels(1, 2, 0.3 * len(names) + 0.5, sharey=True, gridspec_kw={"wspace": 0.06})
    times = [f"  (\N{MULTIPLICATION SIGN}{ratio:.2g})" for ratio in ratios]
    per, gap = (
        f"Output tokens a {'step' if unit == 'step' else 'second'}",
        f"Longest gap ({style.plural(unit)})",
    )
    panels = (
        (per, rates, times, style.LIGHT_BLUE, style.BLUE),
        (gap, gaps, [""] * len(gaps), style.LIGHT_ORANGE, style.VERMILLION),
    )
    for ax, (title, values, notes, colour, last) in zip(axes, panels, strict=True):
        bars = ax.barh(names, values, color=[colour] * (len(names) - 1) + [last], height=0.62)
        texts = [f"{value:,.{int(value < 10)}f}{note}" for value, note in zip(values, notes, strict=True)]
        ax.bar_label(bars, texts, fontsize=8, padding=4, color=style.INK)
        style.frame(ax, title=title, grid="")
        ax.margins(x=0.3)
        ax.tick_params(axis="y", length=0)
        ax.tick_params(axis="x", bottom=False, labelbottom=False)  # each bar has a label
        ax.spines["bottom"].set_visible(False)
    axes[0].invert_yaxis()
    return tuple(axes)
