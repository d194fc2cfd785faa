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
    out.writerow(["student", *names, "total", "late", "withheld", "problems"])
    for row in summary.rows:
        earned = [row.tasks.get((lab, task)) if task else row.labs.get(lab) for lab, task in columns]
        cells = ["" if value is None else points(value) for value in earned]
        total, withheld = points(row.earned), points(row.withheld)
        problems = "; ".join(
            filter(None, [row.problems, row.broken, row.ignored and f"not read: {row.ignored}"])
        )
        ends = [total, no_formula(row.late), withheld, no_formula(problems)]
        out.writerow([no_formula(row.student), *cells, *ends])
    for name, why in sorted(summary.others.items()):
        out.writerow([no_formula(name), *[""] * (len(columns) + 3), f"not read: {why}"])
    return file.getvalue()


def no_formula(text: str) -> str:
    """Return the text with a quote in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
