"""All that is made from grades: a table, each student's feedback, Gradescope's files, the class's report.

`write_reports` reads the grades once, one after another, and keeps of each a row of numbers. Its files are
the same, byte for byte, for equal grades in any order. What a student must not see ends in disclosure.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from labs.kit.grader.grading import Settings
from labs.kit.grader.report import figure, gradescope, markdown, pages, table
from labs.kit.grader.report.disclosure import tell
from labs.kit.grader.report.files import Spool, write
from labs.kit.grader.report.summary import Summary
from labs.kit.grader.results import Grade


def write_reports(report: Path, grades: Callable[[], Iterator[Grade]], settings: Settings) -> None:
    """Write grades.csv, feedback/, gradescope/, report.md, report.png and index.html below `report`.

    Each file is there whole or not at all. Raises ValueError when two grades are of one student.
    """
    summary = Summary(settings.seed)
    stems = set()
    with Spool() as spool:
        for grade in grades():
            told = tell(grade, settings)
            summary.add(told)
            stems.add(told.stem)
            write(report / "feedback" / f"{told.stem}.md", markdown.feedback(told))
            write(report / "feedback" / f"{told.stem}.html", pages.student(told))
            write(report / "gradescope" / f"{told.stem}.json", gradescope.results(told))
            pages.keep(told, spool)
        for old in [*(report / "feedback").glob("*"), *(report / "gradescope").glob("*.json")]:
            if old.stem not in stems:  # of a submission that is no longer there, or could not be graded
                old.unlink()
        summary.close()
        write(report / "grades.csv", table.grades(summary))
        write(report / "report.png", figure.png(summary))
        write(report / "report.md", markdown.instructor(summary))
        write(report / "index.html", pages.index(summary, spool))
