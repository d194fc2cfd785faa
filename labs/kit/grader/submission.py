"""A student's submission, and the settings that it is graded with."""

import hashlib
import json
from dataclasses import dataclass, field, replace
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
    own_seeds: bool = False  # draw other hidden cases for each student and attempt

    def of(self, student: str, attempt: int) -> "Settings":
        """Return the settings for one attempt of a student: with --own-seeds it has a seed of its own."""
        if not self.own_seeds:
            return self
        text = json.dumps([self.seed, student, attempt]).encode()
        return replace(self, seed=hashlib.blake2b(text, digest_size=16).hexdigest())


@dataclass
class Submission:
    """The files that a student handed in, one for each lab."""

    student: str
    files: dict[str, bytes]  # by lab
    ignored: list[str] = field(default_factory=list)  # names of files that were not read
    problems: dict[str, str] = field(default_factory=dict)  # by lab: why there is no file
    submitted: str = ""  # ISO 8601, where known
    attempt: int = 0  # 0: the only one

    @property
    def name(self) -> str:
        return named(self.student, self.attempt)


def named(student: str, attempt: int) -> str:
    """Return the student, and which attempt it is of several."""
    return f"{student}, attempt {attempt}" if attempt else student
