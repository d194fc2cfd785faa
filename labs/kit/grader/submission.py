"""A student's submission, and the settings that it is graded with."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Everything that a grade depends on beside the submission and the course."""

    labs: tuple[str, ...]
    seed: str  # the hidden cases follow from it
    hidden: int = 60  # hidden cases per lab
    seconds: float = 20.0  # time limit of a batch of cases
    own: Path | None = None  # folder of an instructor's own cases: lab-NN/NAME.json
    weak: bool = False  # grade without namespaces, too
    reveal: bool = False  # show hidden cases to students
    as_root: bool = False  # grade as the superuser, too


@dataclass
class Submission:
    """The files that a student handed in, one for each lab."""

    student: str
    files: dict[str, bytes]  # by lab
    ignored: list[str] = field(default_factory=list)  # names of files that were not read
    problems: dict[str, str] = field(default_factory=dict)  # by lab: why there is no file
    submitted: str = ""  # ISO 8601, where known
