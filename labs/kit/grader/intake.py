"""Reads what students handed in: a folder or a zip each, of which only the labs' files are looked at.

A lab's file is lab-NN/starter.py at any depth, or lab-NN.py (an underline does for the hyphen). A zip is
read in memory, never unpacked. No symbolic link is followed, nothing is run or imported, and all that is
read has a limit. What is not looked at is listed.
"""

import codecs
import hashlib
import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path, PurePosixPath

from labs.kit.grader.grading import Submission
from labs.kit.judge.manifest import LabError

FILE, UNPACKED, DIRECTORY = (
    1 << 20,
    50 << 20,
    4 << 20,
)  # bytes of a file, of a zip's files, of its list of them
ENTRIES, DEPTH, LISTED = 10_000, 12, 200  # files a submission, folders in one another, lines of `ignored`
NESTED = re.compile(r"(?:.*/)?lab[-_]([0-9]{2})/starter\.py")
FLAT = re.compile(r"(?:.*/)?lab[-_]([0-9]{2})\.py")
LAB_FOLDER = re.compile(r"lab[-_][0-9]{2}(\.py)?")
PASSED_BY = ("__MACOSX", "__pycache__")  # and all whose name begins with a dot
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of others Python cannot limit what it unpacks
METADATA = ("submission_metadata.yml", "submission_metadata.json", "metadata.yml")
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class Refused(Exception):
    """Why a whole submission, or one file of it, is not looked at."""


@dataclass(frozen=True)
class Entry:
    """One student's folder or zip."""

    student: str  # safe as a file's name
    path: Path


@dataclass(frozen=True)
class Found:
    """A file of a submission, not read yet."""

    name: str  # within the submission, with /
    size: int
    read: Callable[[], bytes]
    refused: str = ""


def entries(submissions: Path) -> tuple[list[Entry], list[str]]:
    """The students, by name, and what else lies there. Raises LabError where it is unclear who is who."""
    if not submissions.is_dir():
        raise LabError(f"{submissions} is no folder; it should hold a folder or a zip for each student")
    found: dict[str, Entry] = {}
    others = []
    for path in sorted(submissions.iterdir()):
        if LAB_FOLDER.fullmatch(path.name):
            raise LabError(
                f"{submissions} holds {path.name} itself; name the folder above it, of all students"
            )
        if path.name.startswith(".") or path.name in (*PASSED_BY, *METADATA):
            continue
        is_zip = path.suffix.lower() == ".zip" and not path.is_dir()
        if not is_zip and not path.is_dir() and not path.is_symlink():
            others.append(shown(path.name))
            continue
        entry = Entry(safe(path.stem if is_zip else path.name), path)
        if other := found.get(entry.student.casefold()):
            raise LabError(
                f"{shown(other.path.name)} and {shown(path.name)} are one student's: leave one there"
            )
        found[entry.student.casefold()] = entry
    if not found:
        raise LabError(f"{submissions} holds no submissions: a folder or a zip for each student")
    return sorted(found.values(), key=lambda entry: entry.student), others


def read(entry: Entry, labs: Sequence[str], submitted: str = "") -> Submission:
    """One student's submission. What is wrong with it is said in words; it stops no other one."""
    submission = Submission(entry.student, {}, submitted=submitted)
    with ExitStack() as opened:
        try:
            pick(contents(entry.path, opened), labs, submission)
        except Refused as refusal:
            submission.problems = dict.fromkeys(labs, str(refusal))
        except Exception as error:  # whatever a damaged zip may raise
            problem = f"the submission cannot be read: {type(error).__name__}"
            submission.problems = dict.fromkeys(labs, problem)
    submission.ignored.sort()
    more = len(submission.ignored) - LISTED
    if more > 0:
        submission.ignored[LISTED:] = [f"and {more:,} more"]
    return submission


# ------------------------------------------------------------------------------------------------- choosing


def pick(found: Iterable[Found], labs: Sequence[str], submission: Submission) -> None:
    """Of all that was found, the one file of each lab; the rest goes to `ignored`."""
    candidates: dict[str, list[Found]] = {}
    for one in found:
        match = NESTED.fullmatch(one.name) or FLAT.fullmatch(one.name)
        lab = f"lab-{match[1]}" if match else ""
        if lab in labs:
            candidates.setdefault(lab, []).append(one)
        if lab not in labs or one.refused:
            why = one.refused or (f"{lab} is not graded here" if lab else "")
            submission.ignored.append(shown(one.name) + (f": {why}" if why else ""))
    for lab, those in sorted(candidates.items()):
        try:
            taken, data = choose(those)
            if not data.removeprefix(codecs.BOM_UTF8).strip():
                raise Refused(f"{shown(taken.name)} is empty")
            decoded(taken, data)
            submission.files[lab] = data
        except Refused as refusal:
            submission.problems[lab] = str(refusal)
            continue
        for one in those:
            if one is not taken and not one.refused:
                submission.ignored.append(f"{shown(one.name)}: {shown(taken.name)} is taken for {lab}")


def choose(found: list[Found]) -> tuple[Found, bytes]:
    """The file in the fewest folders. Raises Refused where two that differ lie equally deep."""
    usable = sorted((one for one in found if not one.refused), key=lambda one: one.name)
    if not usable:
        raise Refused(f"{shown(found[0].name)}: {found[0].refused}")
    fewest = min(map(depth, usable))
    first, *others = [one for one in usable if depth(one) == fewest]
    data = read_whole(first)
    for number, other in enumerate(others):
        if number > 8 or other.size != first.size or read_whole(other) != data:
            two = f"{shown(first.name)} and {shown(other.name)}"
            raise Refused(f"there are two files for this lab: {two}; hand in one")
    return first, data


def depth(found: Found) -> int:
    return found.name.count("/") - bool(NESTED.fullmatch(found.name))


def read_whole(found: Found) -> bytes:
    too_big = f"{shown(found.name)} is larger than {FILE >> 20} MB"
    if found.size > FILE:
        raise Refused(too_big)
    try:
        data = found.read()
    except Exception as error:
        raise Refused(f"{shown(found.name)} cannot be read: {type(error).__name__}") from None
    if len(data) > FILE:
        raise Refused(too_big)
    return data


def decoded(found: Found, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"{shown(found.name)} is not UTF-8 text (at byte {error.start:,})") from None


# ------------------------------------------------------------------------------------- folders, and zips


def contents(path: Path, opened: ExitStack) -> Iterator[Found]:
    """All files of a submission. Raises Refused for one that is not looked at as a whole."""
    if path.is_symlink():
        raise Refused("the submission is a symbolic link, which is not followed")
    if not path.is_dir():
        yield from in_zip(path, opened)
        return
    zips = []
    for one in in_folder(path):
        if one.name.lower().endswith(".zip") and "/" not in one.name and not one.refused:
            zips.append(one)  # as Moodle keeps it: a folder with the zip that was handed in
        else:
            yield one
    if len(zips) == 1:
        for one in in_zip(path / zips[0].name, opened):
            yield Found(f"{zips[0].name}/{one.name}", one.size, one.read, one.refused)
    else:
        yield from zips


def in_folder(top: Path) -> Iterator[Found]:
    folders, count = [top], 0
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as there:
            listed = sorted(islice(there, ENTRIES + 1), key=lambda one: one.name)
        count += len(listed)
        if count > ENTRIES:
            raise Refused(f"the submission holds more than {ENTRIES:,} files; hand in the labs' files only")
        for one in listed:
            path = Path(one.path)
            name = path.relative_to(top).as_posix()
            if why := wrong_name(name):
                yield refused(name, why)
            elif one.is_symlink():
                yield refused(name, "a symbolic link, which is not followed")
            elif one.is_dir(follow_symlinks=False):
                if passed_by(one.name) or name.count("/") + 1 >= DEPTH:
                    yield refused(f"{name}/", "a folder that is not looked into")
                else:
                    folders.append(path)
            elif one.is_file(follow_symlinks=False):
                yield Found(name, one.stat(follow_symlinks=False).st_size, partial(of_file, path))
            else:
                yield refused(name, "no file")


def of_file(path: Path) -> bytes:
    descriptor = open_plain(path)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(FILE + 1)


def open_plain(path: Path) -> int:
    """A descriptor of a plain file, which is never one that a link leads to, nor one that blocks."""
    wanted = (
        os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    descriptor = os.open(path, wanted)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("no plain file")
    return descriptor


class Limited(FileIO):
    """A zip's file: it gives no more at once than a list of ENTRIES files takes."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = size if size is not None and size >= 0 else DIRECTORY + 1
        data = super().read(min(wanted, DIRECTORY + 1)) or b""
        if len(data) > DIRECTORY:
            raise Refused(f"the zip lists more than {ENTRIES:,} files; hand in the labs' files only")
        return data


def in_zip(path: Path, opened: ExitStack) -> Iterator[Found]:
    too_big = f"the zip holds more than {UNPACKED >> 20} MB; hand in the labs' files only"
    file = opened.enter_context(Limited(open_plain(path)))
    if os.fstat(file.fileno()).st_size > UNPACKED:
        raise Refused(too_big)
    try:
        packed = opened.enter_context(zipfile.ZipFile(file))
    except zipfile.BadZipFile:
        raise Refused("the file is no zip, or a damaged one") from None
    members = packed.infolist()
    if len(members) > ENTRIES:
        raise Refused(f"the zip holds more than {ENTRIES:,} files; hand in the labs' files only")
    if sum(member.file_size for member in members) > UNPACKED:
        raise Refused(too_big)
    folders = set()
    for member in members:
        name = member.orig_filename.replace("\\", "/")  # the name as it was written: Python cuts it at a NUL
        if why := wrong_name(name) or not_unpacked(member):
            yield refused(name, why)
        elif name.endswith("/"):
            continue
        elif hidden := [folder for folder in PurePosixPath(name).parents if passed_by(folder.name)]:
            folders.add(f"{hidden[-1]}/")
        else:
            yield Found(name, member.file_size, partial(of_member, packed, member))
    for folder in sorted(folders):
        yield refused(folder, "a folder that is not looked into")


def of_member(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with packed.open(member) as file:  # which gives no more than the size that the zip says
        return file.read(FILE + 1)


def not_unpacked(member: zipfile.ZipInfo) -> str:
    if stat.S_ISLNK(member.external_attr >> 16):
        return "a symbolic link, which is not followed"
    if member.flag_bits & 1:
        return "locked with a password"
    if member.compress_type not in PACKED:
        return "packed in a way that is not unpacked here; use an ordinary zip"
    return ""


def refused(name: str, why: str) -> Found:
    return Found(name, 0, bytes, why)


# ---------------------------------------------------------------------------------------------------- names


def wrong_name(name: str) -> str:
    """Why a file of this name is not looked at; "" if it may be."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "a name with a line end, a NUL or another control character"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in name.split("/"):
        return "a name that leads out of the submission"
    return ""


def passed_by(folder: str) -> bool:
    return folder.startswith(".") or folder in PASSED_BY


def shown(name: str) -> str:
    """A name as a report may show it: one line, not too long, what does not print written out."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return text if len(text) <= 120 else f"{text[:70]}...{text[-45:]}"


def safe(name: str) -> str:
    """A student's name as a file can be called anywhere; where that changes it, a digest keeps it unique."""
    text = unicodedata.normalize("NFC", name)
    clean = re.sub(r"[^\w@+., -]", "_", text).strip(" .")
    clean = re.sub(r"^\W+", "_", clean).encode()[:150].decode(errors="ignore").rstrip(" .")
    if clean and clean == text and not RESERVED.fullmatch(clean):
        return clean
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean.strip('_') or 'student'}-{digest}"
