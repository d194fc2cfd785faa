"""grades.csv: a row a student, a column a lab and task."""

import csv
import io

from labs.kit.grader.report.summary import Row, Summary


def grades(summary: Summary) -> str:
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    columns = [(lab, task) for lab, (_, tasks) in summary.labs.items() for task in [*tasks, ""]]
    names = [f"{lab} {task}".strip() for lab, task in columns]
    out.writerow(["student", *names, "total", "late", "withheld"])
    for row in summary.rows:
        points = [number(row.tasks.get(which) if which[1] else row.labs.get(which[0])) for which in columns]
        out.writerow([safe(row.student), *points, number(row.earned), late(row), number(row.withheld)])
    return file.getvalue()


def number(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2):g}"


def late(row: Row) -> str:
    return safe(row.late)


def safe(text: str) -> str:
    """A spreadsheet takes what begins so for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
