"""The report: a table, each student's feedback, Gradescope's files, and the class's report.

Its files are the same, byte for byte, for equal grades in any order. All that a student must not see ends in
disclosure.py.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from labs.kit.grader.files import write
from labs.kit.grader.names import printable
from labs.kit.grader.report import figure, gradescope, markdown, pages, table
from labs.kit.grader.report.disclosure import disclose
from labs.kit.grader.report.summary import Summary
from labs.kit.grader.results import Grade
from labs.kit.grader.submission import Settings


def write_reports(
    report: Path, grades: Iterable[Grade], settings: Settings, others: Mapping[str, str] | None = None
) -> None:
    """Write grades.csv, feedback/, gradescope/, report.md, report.png and index.html below `report`.

    `others` are files of the class that are no student's, with reasons. Each file is complete or not there.
    Raise ValueError if two grades are of one student.
    """
    summary = Summary(settings.seed, others={printable(name): why for name, why in (others or {}).items()})
    packs: dict[str, str] = {}
    for grade in grades:
        student = disclose(grade, settings)
        summary.add(student)
        write(report / "feedback" / f"{student.stem}.md", markdown.feedback(student))
        write(report / "feedback" / f"{student.stem}.html", pages.student(student))
        write(report / "gradescope" / f"{student.stem}.json", gradescope.results(student))
        packs |= pages.packs(student)
    stems = {row.stem for row in summary.rows}
    for old in [*(report / "feedback").glob("*"), *(report / "gradescope").glob("*.json")]:
        if old.stem not in stems:  # its submission is gone, or could not be graded
            old.unlink()
    summary.close()
    write(report / "grades.csv", table.grades(summary))
    write(report / "report.png", figure.png(summary))
    write(report / "report.md", markdown.instructor(summary))
    write(report / "index.html", pages.index(summary, packs))
