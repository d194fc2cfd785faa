"""grades.csv: a row for each student, a column for each task and lab; and a row for what is no student's."""

import csv
import io

from labs.kit.grader.report.summary import Summary
from labs.kit.grader.report.templates import points


def grades(summary: Summary) -> str:
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    columns = [(lab, task) for lab, (_, tasks) in summary.labs.items() for task in [*tasks, ""]]
    names = [f"{lab} {task}".strip() for lab, task in columns]
    roster = ["id", "name", "section"] if summary.has_roster else []
    more = ["late", "withheld", "manual", "comments", "attempts", "problems"]
    out.writerow(["student", *names, "total", *more, *roster])
    for row in summary.rows:
        earned = [row.tasks.get((lab, task)) if task else row.labs.get(lab) for lab, task in columns]
        cells = ["" if value is None else points(value) for value in earned]
        total, withheld = points(row.earned), points(row.withheld)
        problems = "; ".join(
            filter(None, [row.problems, row.broken, row.ignored and f"not read: {row.ignored}"])
        )
        manual = points(row.manual)
        notes = [row.comments, row.attempts, problems]
        member = [row.member.get(key, "") for key in roster]
        if roster and not row.member:
            notes[-1] = "; ".join(filter(None, ["not in the roster", problems]))
        ends = [no_formula(row.late), withheld, manual, *map(no_formula, [*notes, *member])]
        out.writerow([no_formula(row.student), *cells, total, *ends])
    gap = [""] * (len(columns) + len(more))
    for one in summary.absent:
        who = one["student"] or one["name"] or one["id"] or one["email"]
        absent = [no_formula(one[key]) for key in roster]
        zero = [*[""] * len(columns), "0", *[""] * (len(more) - 1)]
        out.writerow([no_formula(who), *zero, "nothing was handed in", *absent])
    for name, why in sorted(summary.others.items()):
        out.writerow([no_formula(name), *gap, f"not read: {why}", *[""] * len(roster)])
    return file.getvalue()


def no_formula(text: str) -> str:
    """Return the text with a quote in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
