"""Two traces of one workload, one above the other, with the first step that differs."""

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.show.figures.timeline import (
    BAR,
    POINTS,
    draw_rows,
    legend_rows,
    refuse_unreadable,
    timeline_data,
)
from mini_engine.trace import Trace, decisions, first_difference


def compare_data(trace: Trace, reference: Trace) -> style.Data:
    """Return the first step that differs (an index, None if there is none) and its differing fields.

    `fields` maps each differing part of the decision to (ours, theirs); a step that only one of the
    two has counts as {} for the other.
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
    *,
    labels: tuple[str, str] = ("yours", "reference"),
    steps: tuple[int, int] | None = None,
) -> tuple[Axes, ...]:
    """Draw two traces of one workload, one above the other, with the first differing step marked.

    Of long traces it shows the steps around it (or `steps`, first and last): as many as leave
    each cell room for its token count. Return two Axes.
    """
    from matplotlib.patches import Patch, Rectangle

    index, fields = compare_data(trace, reference).values()
    longest = max(len(trace.steps), len(reference.steps))
    if steps is None:
        most = max(r.num_batched_tokens for r in [*trace.steps, *reference.steps]) if longest else 0
        room = int(450 / (len(str(most)) * POINTS + 2))  # 450 points of the page remain for the cells
        first = max(0, min((index or 0) - room // 3, longest - room))
        steps = (first, min(longest, first + room) - 1)
    both = [timeline_data(t, steps) for t in (trace, reference)]
    for data in both:
        refuse_unreadable(data)
    start = both[0]["steps"][0] - steps[0]  # a trace may begin in the middle of a run
    rows = [0.29 * max(len(data["ids"]), 2) for data in both]
    axes = style.panels(2, 1, sum(rows) + 1.7, height_ratios=rows)
    for ax, data, label in zip(axes, both, labels, strict=True):
        draw_rows(ax, data, ylabel=label, columns=steps[1] - steps[0] + 1)
        ax.tick_params(labelbottom=True)
    if index is None:
        legend_rows(axes[0], both)
        axes[1].set_xlabel("engine step (the two are the same)", fontsize=9, color=style.INK)
        return tuple(axes)
    at, (words, *others) = start + index, fields
    look: style.Data = {"color": style.YELLOW, "alpha": 0.45, "linewidth": 0}
    mine, other = (dict(part or ()) for part in fields.get("scheduled", ((), ())))
    differing = [rid for rid in {**mine, **other} if mine.get(rid) != other.get(rid)]
    for ax, data in zip(axes, both, strict=True):
        ax.axvspan(at - 0.5, at + 0.5, zorder=0, **look)
        for row in (data["ids"].index(rid) + BAR for rid in differing if rid in data["ids"]):
            ax.add_patch(Rectangle((at - 0.5, row - 0.36), 1, 0.72, fill=False, ec=style.INK, lw=1.6))
    legend_rows(axes[0], both, Patch(label="first difference", **look))
    if differing:
        rid = differing[0]
        words = f"scheduled ({rid} computes {mine.get(rid, 0)} above, {other.get(rid, 0)} below)"
    words += f" and {len(others)} more" if others[1:] else "".join(f", {name}" for name in others)
    axes[1].set_xlabel(f"engine step (first differ at step {at}: {words})", fontsize=9, color=style.INK)
    return tuple(axes)
