"""Reads the submissions of a class: a folder or a zip for each student, with a file for each lab.

A lab's file is lab-NN/starter.py at any depth, or lab-NN.py (an underscore may stand for the hyphen). No file
is run or imported. Files that were not read are listed.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from labs.kit.grader import known
from labs.kit.grader.contents import SKIPPED, Found, Refused, contents
from labs.kit.grader.names import safe, shown
from labs.kit.grader.submission import Submission
from labs.kit.judge.manifest import LabError, find_lab

LISTED = 200  # names in `ignored`
NESTED = re.compile(r"(?:.*/)?lab[-_]([0-9]{2})/starter\.py")
FLAT = re.compile(r"(?:.*/)?lab[-_]([0-9]{2})\.py")
LAB_FOLDER = re.compile(r"lab[-_][0-9]{2}(\.py)?")
METADATA = ("submission_metadata.yml", "submission_metadata.json", "metadata.yml")


@dataclass(frozen=True)
class Entry:
    """One student's folder or zip."""

    student: str  # safe as a file name
    path: Path


def entries(submissions: Path) -> tuple[list[Entry], list[str]]:
    """Return the students' entries, sorted, and the names of other files. Raise LabError for no class."""
    if not submissions.is_dir():
        raise LabError(f"{submissions} is not a folder; it should hold a folder or a zip for each student")
    found: dict[str, Entry] = {}
    others = []
    for path in sorted(submissions.iterdir()):
        if LAB_FOLDER.fullmatch(path.name):
            raise LabError(f"{submissions} holds {path.name}; name the folder above it, with all students")
        if path.name.startswith(".") or path.name in (*SKIPPED, *METADATA):
            continue
        is_zip = path.suffix.lower() == ".zip" and not path.is_dir()
        if not is_zip and not path.is_dir() and not path.is_symlink():
            others.append(shown(path.name))
            continue
        entry = Entry(safe(path.stem if is_zip else path.name), path)
        if (other := found.setdefault(entry.student.casefold(), entry)) is not entry:
            raise LabError(
                f"{shown(other.path.name)} and {shown(path.name)} are the same student's: leave one"
            )
    if not found:
        raise LabError(f"{submissions} holds no submissions: a folder or a zip for each student")
    return sorted(found.values(), key=lambda entry: entry.student), others


def read(entry: Entry, labs: Sequence[str], submitted: str = "") -> Submission:
    """Return one student's submission. A problem is reported in it, and stops no other submission."""
    submission = Submission(entry.student, {}, submitted=submitted)
    with ExitStack() as opened:
        try:
            choose(contents(entry.path, opened), labs, submission)
        except Refused as refusal:
            submission.problems = dict.fromkeys(labs, str(refusal))
        except Exception as error:  # a damaged zip may raise anything
            problem = f"the submission cannot be read: {type(error).__name__}"
            submission.problems = dict.fromkeys(labs, problem)
    submission.ignored.sort()
    if (more := len(submission.ignored) - LISTED) > 0:
        submission.ignored[LISTED:] = [f"and {more:,} more"]
    return submission


def choose(found: Iterable[Found], labs: Sequence[str], submission: Submission) -> None:
    """Put the one file of each lab into `submission.files`, and the names of others into `ignored`."""
    candidates: dict[str, list[Found]] = {}
    for one in found:
        match = NESTED.fullmatch(one.name) or FLAT.fullmatch(one.name)
        lab = f"lab-{match[1]}" if match else ""
        if lab in labs:
            candidates.setdefault(lab, []).append(one)
        if lab not in labs or one.refused:
            why = one.refused or (f"{lab} is not graded here" if lab else "")
            submission.ignored.append(shown(one.name) + (f": {why}" if why else ""))
    for lab, files in sorted(candidates.items()):
        try:
            chosen, data = chosen_file(files)
            if why := known.refusal(find_lab(lab), data.decode("utf-8-sig")):
                raise Refused(f"{shown(chosen.name)} is not graded: {why}")
            submission.files[lab] = data
        except Refused as refusal:
            submission.problems[lab] = str(refusal)
            continue
        for one in files:
            if one is not chosen and not one.refused:
                submission.ignored.append(f"{shown(one.name)}: {shown(chosen.name)} is taken for {lab}")


def chosen_file(files: list[Found]) -> tuple[Found, bytes]:
    """Return the file in the fewest folders. Raise Refused if it is not text, or two such files differ."""
    usable = sorted((one for one in files if not one.refused), key=lambda one: one.name)
    if not usable:
        raise Refused(f"{shown(files[0].name)}: {files[0].refused}")
    fewest = min(map(depth, usable))
    first, *others = [one for one in usable if depth(one) == fewest]
    data = first.read()
    for number, other in enumerate(others):
        if number > 8 or other.size != first.size or other.read() != data:
            two = f"{shown(first.name)} and {shown(other.name)}"
            raise Refused(f"there are two files for this lab: {two}; hand in one")
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise Refused(f"{shown(first.name)} is empty")
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"{shown(first.name)} is not UTF-8 text (at byte {error.start:,})") from None
    return first, data


def depth(file: Found) -> int:
    return file.name.count("/") - bool(NESTED.fullmatch(file.name))
