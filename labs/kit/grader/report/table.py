"""grades.csv: a row for each student, a column for each task and lab; and a row for what is no student's."""

import csv
import io
from collections.abc import Iterable, Sequence

from labs.kit.grader.report.summary import Summary
from labs.kit.grader.report.templates import points


def grades(summary: Summary) -> str:
    columns = [(lab, task) for lab, (_, tasks) in summary.labs.items() for task in [*tasks, ""]]
    names = [f"{lab} {task}".strip() for lab, task in columns]
    roster = ["id", "name", "section"] if summary.has_roster else []
    more = ["late", "withheld", "manual", "comments", "attempts", "problems"]
    lines = [["student", *names, "total", *more, *roster]]
    for row in summary.rows:
        earned = [row.tasks.get((lab, task)) if task else row.labs.get(lab) for lab, task in columns]
        cells = ["" if value is None else points(value) for value in earned]
        stranger = "not in the roster" if roster and not row.member else ""
        unread = row.ignored and f"not read: {row.ignored}"
        problems = "; ".join(filter(None, [stranger, row.problems, row.broken, unread]))
        texts = [row.comments, row.attempts, problems, *(row.member.get(key, "") for key in roster)]
        ends = [no_formula(row.late), points(row.withheld), points(row.manual), *map(no_formula, texts)]
        lines.append([no_formula(row.student), *cells, points(row.earned), *ends])
    gap = [""] * (len(columns) + len(more))
    for one in summary.absent:
        who = one["student"] or one["name"] or one["id"] or one["email"]
        absent = [no_formula(one[key]) for key in roster]
        zero = [*[""] * len(columns), "0", *[""] * (len(more) - 1)]
        lines.append([no_formula(who), *zero, "nothing was handed in", *absent])
    for name, why in sorted(summary.others.items()):
        lines.append([no_formula(name), *gap, f"not read: {why}", *[""] * len(roster)])
    return written(lines)


def written(lines: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def no_formula(text: str) -> str:
    """Return the text with a quote in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
