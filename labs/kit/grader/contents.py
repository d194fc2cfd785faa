"""The files in a student's folder or zip.

No symbolic link is followed, a zip is read in memory and never unpacked, and all that is read has a limit.
"""

import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path, PurePosixPath

from labs.kit.grader.names import shown

FILE, UNPACKED, LIST = 8 << 20, 50 << 20, 4 << 20  # bytes of a file, of a zip's files, of its list of files
ENTRIES, DEPTH = 10_000, 12  # files in a submission, folders in one another
SKIPPED = ("__MACOSX", "__pycache__")  # folders; those that begin with a dot are skipped, too
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # Python cannot limit the output of others
LINK, UNREAD = "a symbolic link, which is not followed", "a folder that is not read"
TOO_MANY = "the {} more than {:,} files; hand in the labs' files only"


class Refused(Exception):
    """The reason why a submission, or one file of it, is not read."""


@dataclass(frozen=True)
class Found:
    """A file of a submission that was not read yet."""

    name: str  # within the submission, with /
    size: int = 0
    open: Callable[[], bytes] = bytes
    refused: str = ""

    def read(self) -> bytes:
        """Return the file's bytes. Raise Refused if it is too big or cannot be read."""
        too_big = Refused(f"{shown(self.name)} is larger than {FILE >> 20} MB")
        if self.size > FILE:
            raise too_big
        try:
            data = self.open()
        except Exception as error:
            raise Refused(f"{shown(self.name)} cannot be read: {type(error).__name__}") from None
        if len(data) > FILE:
            raise too_big
        return data


def contents(path: Path, opened: ExitStack) -> Iterator[Found]:
    """Yield all files of a submission. Raise Refused if it is refused as a whole."""
    if path.is_symlink():
        raise Refused(f"the submission is {LINK}")
    if not path.is_dir():
        yield from in_zip(path, opened)
        return
    zips = []
    for one in in_folder(path):
        if one.name.lower().endswith(".zip") and "/" not in one.name and not one.refused:
            zips.append(one)  # Moodle keeps each submission in a folder with the zip that was handed in
        else:
            yield one
    if len(zips) == 1:
        for one in in_zip(path / zips[0].name, opened):
            yield replace(one, name=f"{zips[0].name}/{one.name}")
    else:
        yield from zips


def in_folder(top: Path) -> Iterator[Found]:
    folders, count = [top], 0
    while folders:
        with os.scandir(folders.pop()) as entries:
            listed = sorted(islice(entries, ENTRIES + 1), key=lambda one: one.name)
        count += len(listed)
        if count > ENTRIES:
            raise Refused(TOO_MANY.format("submission holds", ENTRIES))
        for one in listed:
            path = Path(one.path)
            name = path.relative_to(top).as_posix()
            if why := wrong_name(name):
                yield Found(name, refused=why)
            elif one.is_symlink():
                yield Found(name, refused=LINK)
            elif one.is_dir(follow_symlinks=False):
                if is_skipped(one.name) or name.count("/") + 1 >= DEPTH:
                    yield Found(f"{name}/", refused=UNREAD)
                else:
                    folders.append(path)
            elif one.is_file(follow_symlinks=False):
                yield Found(name, one.stat(follow_symlinks=False).st_size, partial(read_file, path))
            else:
                yield Found(name, refused="not a file")


def read_file(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(FILE + 1)


def open_regular(path: Path) -> int:
    """Return a descriptor of a regular file; a link is not followed, and a pipe does not block."""
    flags = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    descriptor = os.open(path, os.O_RDONLY | sum(flags))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor


class Limited(FileIO):
    """A zip's file that returns no more bytes at once than a list of ENTRIES files takes."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = size if size is not None and size >= 0 else LIST + 1
        data = super().read(min(wanted, LIST + 1)) or b""
        if len(data) > LIST:
            raise Refused(TOO_MANY.format("zip holds", ENTRIES))
        return data


def in_zip(path: Path, opened: ExitStack) -> Iterator[Found]:
    too_big = Refused(f"the zip holds more than {UNPACKED >> 20} MB; hand in the labs' files only")
    file = opened.enter_context(Limited(open_regular(path)))
    if os.fstat(file.fileno()).st_size > UNPACKED:
        raise too_big
    try:
        archive = opened.enter_context(zipfile.ZipFile(file))
    except zipfile.BadZipFile:
        raise Refused("the file is not a zip, or it is damaged") from None
    members = archive.infolist()
    if len(members) > ENTRIES:
        raise Refused(TOO_MANY.format("zip holds", ENTRIES))
    if sum(member.file_size for member in members) > UNPACKED:
        raise too_big
    skipped = set()
    for member in members:
        name = member.orig_filename.replace("\\", "/")  # as it was written: Python cuts `filename` at a NUL
        if why := wrong_name(name) or not_unpacked(member):
            yield Found(name, refused=why)
        elif name.endswith("/"):
            continue
        elif folders := [folder for folder in PurePosixPath(name).parents if is_skipped(folder.name)]:
            skipped.add(f"{folders[-1]}/")
        else:
            yield Found(name, member.file_size, partial(read_member, archive, member))
    for folder in sorted(skipped):
        yield Found(folder, refused=UNREAD)


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as file:  # returns no more than the size in the zip's list
        return file.read(FILE + 1)


def not_unpacked(member: zipfile.ZipInfo) -> str:
    if stat.S_ISLNK(member.external_attr >> 16):
        return LINK
    if member.flag_bits & 1:
        return "locked with a password"
    if member.compress_type not in METHODS:
        return "packed with a method that is not supported; use an ordinary zip"
    return ""


def wrong_name(name: str) -> str:
    """Return why a file of this name is not read, or ""."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "a name with a line end, a NUL or another control character"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in name.split("/"):
        return "a name that leads out of the submission"
    return ""


def is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in SKIPPED
