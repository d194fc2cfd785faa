"""The report: a table, each student's feedback, Gradescope's files, and the class's report.

Its files are the same, byte for byte, for equal grades in any order. All that a student must not see ends in
disclosure.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labs.kit.grader.names import printable
from labs.kit.grader.report import gradebook, gradescope, markdown, pages, table
from labs.kit.grader.report.disclosure import disclose
from labs.kit.grader.report.summary import Summary
from labs.kit.grader.results import Grade
from labs.kit.grader.submission import Settings
from mini_engine.trace.file import write_whole


@dataclass(frozen=True)
class Around:
    """Facts that a report shows beside the grades."""

    others: Mapping[str, str] = field(default_factory=dict)  # files that are no student's, with reasons
    absent: Sequence[Mapping[str, str]] = ()  # members of the roster without a submission
    has_roster: bool = False
    alike: Sequence[str] | None = None  # pairs of files; None: not looked for


def write_reports(
    report: Path, grades: Iterable[Grade], settings: Settings, around: Around | None = None
) -> None:
    """Write grades.csv, gradebook/, feedback/, gradescope/, report.md and index.html in `report`.

    Each file is complete or not there. Raise ValueError if two grades are of one student.
    """
    around = around or Around()
    summary = Summary(
        settings.seed,
        others={printable(name): printable(why) for name, why in around.others.items()},
        absent=[{key: printable(value) for key, value in one.items()} for one in around.absent],
        has_roster=around.has_roster,
        alike=None if around.alike is None else [printable(pair) for pair in around.alike],
    )
    packs: dict[str, str] = {}
    for grade in grades:
        student = disclose(grade, settings)
        summary.add(student)
        write_whole(report / "feedback" / f"{student.stem}.md", markdown.feedback(student))
        write_whole(report / "feedback" / f"{student.stem}.html", pages.student(student))
        write_whole(report / "gradescope" / f"{student.stem}.json", gradescope.results(student))
        packs |= pages.packs(student)
    stems = {row.stem for row in summary.rows}
    for old in [*(report / "feedback").glob("*"), *(report / "gradescope").glob("*.json")]:
        if old.stem not in stems:  # its submission is gone, or could not be graded
            old.unlink()
    summary.close()
    write_whole(report / "grades.csv", table.grades(summary))
    for name, text in gradebook.files(summary).items():
        write_whole(report / "gradebook" / name, text)
    write_whole(report / "report.md", markdown.instructor(summary))
    write_whole(report / "index.html", pages.index(summary, packs))
