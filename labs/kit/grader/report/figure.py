"""report.png: the distribution of the points, and the tasks most missed."""

import io

from labs.kit.grader.report.summary import BINS, Summary
from labs.kit.grader.report.templates import points
from mini_engine.show.figures.style import BLUE, INK, VERMILLION, counted, frame, panels, save

MANY = 10  # tasks that are drawn


def png(summary: Summary) -> bytes:
    from matplotlib.ticker import MaxNLocator

    missed = summary.missed[:MANY]
    left, right = panels(1, 2, 1.3 + 0.2 * MANY, width=9.5, width_ratios=(1, 1))
    edges = [100 * number / BINS for number in range(BINS)]
    left.bar(edges, summary.bins, width=100 / BINS * 0.92, align="edge", color=BLUE)
    if summary.points and summary.rows:
        left.axvline(100 * summary.median / summary.points, color=INK, linestyle="--", linewidth=1)
    left.set_xlim(0, 100)
    left.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    title = (
        f"Points of {counted(len(summary.rows), 'student')}; the line is the median, {points(summary.median)}"
    )
    frame(left, title=title, xlabel=f"% of {points(summary.points)} points", ylabel="students")
    names = [f"{one.lab} {one.task}" for one in missed]
    right.barh(names, [one.students for one in missed], color=VERMILLION, height=0.7)
    right.invert_yaxis()
    right.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    frame(right, title="Tasks most missed", xlabel="students without all of its points", grid="x")
    file = io.BytesIO()
    save((left, right), file, alt=alt(summary))
    return file.getvalue()


def alt(summary: Summary) -> str:
    text = f"Points of {counted(len(summary.rows), 'student')}: median {points(summary.median)}"
    text += f" of {points(summary.points)}."
    if summary.missed:
        first = summary.missed[0]
        text += f" The task most missed is {first.task} of {first.lab}, by {first.students}."
    return text
