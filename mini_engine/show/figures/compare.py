"""Two traces of one workload, one above the other, and where they part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mini_engine.show.figures import style
from mini_engine.show.figures.timeline import draw_rows, refuse_unreadable, timeline_data
from mini_engine.trace import Trace, decisions, first_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def compare_data(trace: Trace, reference: Trace) -> style.Data:
    """The first departing step (an index, None if there is none) and what differs in it.

    `fields` maps each differing part of the decision to (ours, theirs); a step that only one of the
    two has differs as a whole, and counts as {} for the other.
    """
    index = first_difference(trace, reference)
    if index is None:
        return {"first_difference": None, "fields": {}}
    ours, theirs = (decisions(t.steps[index]) if index < len(t.steps) else {} for t in (trace, reference))
    both = {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs}}
    fields = {key: (mine, other) for key, (mine, other) in both.items() if mine != other}
    return {"first_difference": index, "fields": fields}


def compare(
    trace: Trace,
    reference: Trace,
    axes: Iterable[Axes] | None = None,
    *,
    labels: tuple[str, str] = ("yours", "reference"),
    steps: tuple[int, int] | None = None,
) -> tuple[Axes, ...]:
    """Two traces of one workload, one above the other, the first departing step marked.

    Shows the steps around it (or `steps`, first and last) where the traces are long. Returns two Axes.
    """
    index, fields = compare_data(trace, reference).values()
    longest = max(len(trace.steps), len(reference.steps))
    if steps is None:
        first = max(0, (index or 0) - 20) if longest > 80 else 0
        steps = (first, min(longest, first + 80) - 1)
    both = [timeline_data(t, steps) for t in (trace, reference)]
    for data in both:
        refuse_unreadable(data)
    start = both[0]["steps"][0] - steps[0]  # a trace may begin in the middle of a run
    rows = [0.29 * max(len(data["ids"]), 2) for data in both]
    axes = style.panels(axes, 2, 1, sum(rows) + 1.7, height_ratios=rows)
    for ax, data, label in zip(axes, both, labels, strict=True):
        draw_rows(ax, data, legend=ax is axes[0])
        ax.set_xlim(start + steps[0] - 0.5, start + steps[1] + 0.5)
        ax.tick_params(labelbottom=True)
        ax.set_ylabel(label, fontsize=9)
        if index is not None:
            at = start + index
            ax.axvspan(at - 0.5, at + 0.5, color=style.YELLOW, alpha=0.45, linewidth=0, zorder=0)
            ax.axvline(at - 0.5, color=style.INK, linewidth=1, linestyle=":")
    words = "the two are the same"
    if index is not None:
        words = f"first differ at step {start + index}: {', '.join(fields)}"
    axes[1].set_xlabel(f"engine step ({words})", fontsize=9)
    return tuple(axes)
