"""Reads the submissions of a class: a folder or a zip for each student, with a file for each lab.

A lab's file is lab-NN/starter.py at any depth, or lab-NN.py; lab1, Lab_01 and the like are understood, and so
are a notebook in its place, a lone starter.py where one lab is graded, and the names that Canvas and Moodle
give. No file is run or imported. What was not read is listed, with a reason.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from labs.kit.grader import known
from labs.kit.grader.contents import ENTRIES, LINK, SKIPPED, Found, Refused, contents, read_file
from labs.kit.grader.names import safe, shown
from labs.kit.grader.submission import Submission
from labs.kit.grader.text import cells, text_of
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.judge.pristine import pristine_source

LISTED = 200  # names in `ignored`
CODE = 256 << 10  # letters; a notebook's file, with its pictures, may be larger
LAB = r"lab[-_ ]?([0-9]{1,3})"
FILE = r"(?:-[0-9]{1,2}| ?\([0-9]{1,2}\))?\.(?:py|ipynb)"  # Canvas and browsers number what comes again
NESTED = re.compile(rf"(?:.*/)?{LAB}/starter{FILE}", re.IGNORECASE)
# A web page names what it saves lab-NN-starter.py.
FLAT = re.compile(rf"(?:.*/)?{LAB}(?:[-_ ]starter)?{FILE}", re.IGNORECASE)
LONE = re.compile(rf"(?:.*/)?starter{FILE}", re.IGNORECASE)
LAB_FOLDER = re.compile(rf"{LAB}((?:[-_ ]starter)?{FILE})?", re.IGNORECASE)
ATTEMPT = re.compile(r"attempt[-_ ]?([1-9][0-9]{0,2})(?:\.zip)?", re.IGNORECASE)
METADATA = ("submission_metadata.yml", "submission_metadata.json", "metadata.yml")
MOODLE = re.compile(r"(.+)_([0-9]+)_assignsubmission_(?:file|onlinetext)_?(.*)")
CANVAS = re.compile(r"(.+?)_(?:LATE_)?([0-9]+)_[0-9]+_(.+)")  # a loose file: NAME_ID_NUMBER_FILE
NO_CLASS = "neither a folder, nor a zip, nor a file with a name that Canvas or Moodle gives"
NO_LAB = "its name is not a lab's; call it lab-NN.py"
UNSAID = "its name does not say the lab; call it lab-NN.py, or grade one lab alone with --labs"


@dataclass(frozen=True)
class Entry:
    """A student's submission: a folder, a zip, or loose files with their names."""

    student: str  # safe as a file name
    parts: tuple[tuple[str, Path], ...]  # a name and a path; "" for a folder or a zip
    number: str = ""  # the id that Canvas or Moodle writes into the name
    attempt: int = 0  # 0: the only one


def entries(submissions: Path, with_attempts: bool = False) -> tuple[list[Entry], dict[str, str]]:
    """Return the students' entries, sorted, and other files with reasons. Raise LabError for no class.

    `with_attempts` gives one for each attempt: STUDENT/attempt-N, folders or zips.
    """
    if not submissions.is_dir():
        raise LabError(f"{submissions} is not a folder; it should hold a folder or a zip for each student")
    found: dict[tuple[str, str], list[tuple[str, Path]]] = {}  # by name, and id where there is one
    others = {}
    for path in sorted(submissions.iterdir()):
        if LAB_FOLDER.fullmatch(path.name):
            raise LabError(f"{submissions} holds {path.name}; name the folder above it, with all students")
        if path.name.startswith(".") or path.name in (*SKIPPED, *METADATA):
            continue
        name, number, file = named(path)
        if not name:
            others[shown(path.name)] = NO_CLASS
            continue
        parts = found.setdefault((name, number), [])
        if parts and not number:
            two = f"{shown(parts[0][1].name)} and {shown(path.name)}"
            raise LabError(f"{two} are the same student's: leave one")
        parts.append((file, path))
    if not found:
        raise LabError(f"{submissions} holds no submissions: a folder or a zip for each student")
    each = [one for entry in with_students(found) for one in (attempts(entry) if with_attempts else [entry])]
    return sorted(each, key=lambda entry: (entry.student, entry.attempt)), others


def named(path: Path) -> tuple[str, str, str]:
    """Return the name and the id of the student, and the name of a loose file; "" for what there is not."""
    is_zip = path.suffix.lower() == ".zip" and not path.is_dir()
    is_folder = path.is_dir()
    match = MOODLE.fullmatch(path.name) or (None if is_folder else CANVAS.fullmatch(path.name))
    if match:
        return match[1], match[2], "" if is_folder or is_zip else match[3]
    is_entry = is_folder or path.is_symlink()
    return (path.stem if is_zip else path.name if is_entry else ""), "", ""


def with_students(found: dict[tuple[str, str], list[tuple[str, Path]]]) -> Iterator[Entry]:
    """Yield the entries under names of which no two are equal, or differ in case only."""
    names = [name for name, _ in found]
    taken: set[str] = set()
    for (name, number), parts in found.items():
        student = safe(f"{name}_{number}" if names.count(name) > 1 and number else name)
        if student.casefold() in taken:  # a report on another system could not hold both
            student += f"-{hashlib.sha256(student.encode()).hexdigest()[:8]}"
        taken.add(student.casefold())
        yield Entry(student, tuple(parts), number)


def attempts(entry: Entry) -> list[Entry]:
    """Return an entry for each attempt-N, if a student's folder holds nothing else; else the entry."""
    name, folder = entry.parts[0]
    if name or not folder.is_dir() or folder.is_symlink():
        return [entry]
    with os.scandir(folder) as inside:
        names = sorted(one.name for one in islice(inside, ENTRIES) if not one.name.startswith("."))
    found = {int(match[1]): name for name in names if (match := ATTEMPT.fullmatch(name))}
    if not names or len(found) < len(names):
        return [entry]
    return [replace(entry, attempt=n, parts=(("", folder / name),)) for n, name in sorted(found.items())]


def found_in(entry: Entry, opened: ExitStack) -> Iterator[Found]:
    """Yield all files of a student's entry. Raise Refused if it is refused as a whole."""
    for name, path in entry.parts:
        if not name:
            yield from contents(path, opened)
        elif path.is_symlink() or not path.is_file():
            yield Found(name, refused=LINK if path.is_symlink() else "not a file")
        else:
            yield Found(name, path.stat().st_size, partial(read_file, path))


def read(entry: Entry, labs: Sequence[str], submitted: str = "") -> Submission:
    """Return one student's submission. A problem is reported in it, and stops no other submission."""
    submission = Submission(entry.student, {}, submitted=submitted, attempt=entry.attempt)
    with ExitStack() as opened:
        try:
            choose(found_in(entry, opened), labs, submission)
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
    lone: list[Found] = []
    for one in found:
        match = NESTED.fullmatch(one.name) or FLAT.fullmatch(one.name)
        lab = f"lab-{int(match[1]):02}" if match else ""
        if not lab and not one.refused and LONE.fullmatch(one.name) and len(labs) == 1:
            lone.append(one)
            continue
        if lab in labs:
            candidates.setdefault(lab, []).append(one)
        if lab not in labs or one.refused:
            why = one.refused or (f"{lab} is not graded here" if lab else unread(one.name))
            submission.ignored.append(shown(one.name) + (f": {why}" if why else ""))
    if lone and labs[0] not in candidates:
        candidates[labs[0]] = lone
    else:
        submission.ignored += [f"{shown(one.name)}: a file that names {labs[0]} is there" for one in lone]
    for lab, files in sorted(candidates.items()):
        try:
            chosen, data = chosen_file(files)
            submission.files[lab] = source(lab, chosen.name, data)
        except Refused as refusal:
            submission.problems[lab] = str(refusal)
            continue
        for one in files:
            if one is not chosen and not one.refused:
                submission.ignored.append(f"{shown(one.name)}: {shown(chosen.name)} is taken for {lab}")


def unread(name: str) -> str:
    """Return why a file is not read whose name is understood as no lab's, or "" for what is no code."""
    if LONE.fullmatch(name):
        return UNSAID
    return NO_LAB if name.lower().endswith((".py", ".ipynb")) else ""


def source(lab_id: str, name: str, data: bytes) -> bytes:
    """Return a file's code in UTF-8. Raise Refused if it has none, or is the course's own."""
    lab, text = find_lab(lab_id), text_of(name, data)
    if is_notebook := name.lower().endswith(".ipynb"):
        text = cells(lab, name, text)
    if len(text) > CODE:
        raise Refused(f"{shown(name)} has more than {CODE >> 10} kB of code")
    if why := known.refusal(lab, text):
        raise Refused(f"{shown(name)} is not graded: {why}")
    return (f"{pristine_source(lab)}\n\n{text}" if is_notebook else text).encode()


def chosen_file(files: list[Found]) -> tuple[Found, bytes]:
    """Return the file in the fewest folders. Raise Refused if two such files differ."""
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
    return first, data


def depth(file: Found) -> int:
    return file.name.count("/") - bool(NESTED.fullmatch(file.name))
