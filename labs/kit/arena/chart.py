"""The arena's chart: goodput against fairness, and the front of the best."""

from collections.abc import Sequence
from pathlib import Path

from labs.kit.arena.board import OF_COURSE, SHIPPED, YOURS, Row, front, percent
from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes


def chart(rows: Sequence[Row]) -> Axes:
    """Draw each policy as a point, yours as stars; names stand in a column, joined to their points."""
    scored, best = sorted((row for row in rows if row.scores), key=lambda row: -row.goodput), front(rows)
    (ax,) = style.panels(1, 1, max(4.2, 0.6 + 0.17 * len(scored)))
    xs = [100 * row.fairness for row in scored]
    left, right = min(xs) - 0.4, max(xs) + 0.4
    beside = right + (right - left) * 0.04
    line = [(left, best[-1].goodput), *((100 * row.fairness, row.goodput) for row in reversed(best))]
    ax.step(*zip(*((x, 100 * y) for x, y in line), strict=True), color=style.INK, linewidth=1, where="pre")
    ax.plot([100 * best[0].fairness] * 2, [100 * best[0].goodput, 0], color=style.INK, linewidth=1)
    for row, room in zip(scored, spread([100 * row.goodput for row in scored]), strict=True):
        x, y = 100 * row.fairness, 100 * row.goodput
        marker, colour, size = MARKS[row.kind]
        ax.scatter([x], [y], marker=marker, color=colour, s=size, zorder=3)
        ax.plot([x, beside], [y, room], color=style.PALE, linewidth=0.8, zorder=1, clip_on=False)
        weight = "bold" if row.kind == YOURS else "normal"
        ax.text(beside, room, f" {row.name}", fontsize=8, va="center", color=style.INK, weight=weight)
    style.frame(ax, xlabel="fairness, %", ylabel="goodput, %", grid="both")
    ax.set_xlim(left, right)
    ax.set_ylim(0, 104)
    ax.set_title("above and to the right is better; the line is the front", fontsize=9, color=style.INK)
    return ax


def spread(heights: Sequence[float]) -> list[float]:
    """Return heights for names, in the same order, the highest first: near their points, and apart."""
    apart = min(6.0, 100 / len(heights))
    places: list[float] = []
    for height in heights:
        places.append(min(height, places[-1] - apart if places else 101))
    for at in reversed(range(len(places))):
        least = places[at + 1] + apart if at + 1 < len(places) else 1.0
        places[at] = max(places[at], least)
    return places


MARKS = {YOURS: ("*", style.VERMILLION, 130), SHIPPED: ("o", style.BLUE, 34)}
MARKS[OF_COURSE] = ("s", style.GREY, 28)


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the chart, with the points as its alternative text."""
    points = (f"{row.name} {percent(row.goodput)}, {percent(row.fairness)}" for row in rows if row.scores)
    style.save(chart(rows), path, alt=f"goodput and fairness: {'; '.join(points)}")
