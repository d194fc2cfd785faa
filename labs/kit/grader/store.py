"""The grades in a report: grades/STUDENT.json; of several attempts also grades/attempt-N/STUDENT.json."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from labs.kit.grader.results import Grade
from mini_engine.trace.file import write_whole


def path(folder: Path, student: str, attempt: int = 0) -> Path:
    return (folder / f"attempt-{attempt}" if attempt else folder) / f"{student}.json"


def save(folder: Path, grade: Grade) -> None:
    write_whole(path(folder, grade.student, grade.attempt), grade.to_json())


def load(folder: Path, student: str, attempt: int = 0) -> Grade | None:
    """Return a student's grade, or None if there is no file or it is not a grade."""
    try:
        return Grade.from_json(path(folder, student, attempt).read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Grades:
    """The grades of these students. Each pass over them reads them one by one."""

    def __init__(self, folder: Path, students: Iterable[str]):
        self.folder, self.students = folder, sorted(students)

    def __iter__(self) -> Iterator[Grade]:
        for student in self.students:
            yield Grade.from_json(path(self.folder, student).read_text("utf-8"))

    def __len__(self) -> int:
        return len(self.students)
