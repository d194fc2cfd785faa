"""Files as students hand them in, and their grades."""

from labs.kit.author.check import ALTERNATIVES
from labs.kit.grader.grading import grade
from labs.kit.grader.results import LabGrade
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import find_lab


def solution(lab_id: str) -> str:
    return find_lab(lab_id).file("solution.py").read_text("utf-8")


def another(lab_id: str) -> str:
    """Return a right solution that is not the reference."""
    return (ALTERNATIVES / f"{lab_id.replace('-', '_')}_a.py").read_text("utf-8")


def mistaken(lab_id: str, mistake_id: str) -> str:
    """Return the solution with a known mistake."""
    (mistake,) = (one for one in find_lab(lab_id).mistakes if one.id == mistake_id)
    return mistake.apply(solution(lab_id))


def graded(lab_id: str, source: str | bytes, **settings) -> LabGrade:
    """Return the grade of a file, by few hidden cases."""
    given = Settings((lab_id,), "a seed", **{"hidden": 2, "seconds": 5.0} | settings)
    data = source.encode() if isinstance(source, str) else source
    return grade(Submission("mallory", {lab_id: data}), given).labs[0]
