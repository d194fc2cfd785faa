"""Gradescope's upload, a zip of the course with two scripts; and what grades in its container.

Gradescope unpacks the zip into /autograder/source and runs setup.sh once. For each submission it starts a
container, lays the files into /autograder/submission, runs run_autograder, and reads results/results.json.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any

from labs.kit.grader import grading, intake, late
from labs.kit.grader.report.files import write
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab, lab_ids
from labs.kit.judge.pristine import starter_source
from labs.kit.learner.screen import complain

ROOT = LABS_DIR.parent
KEPT = ("labs", "mini_engine", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
LEFT_OUT = (".*", "__pycache__", "*.pyc", "*.egg-info", "tests", "images", "starter.py", "starter.new.py")
ASKED, DEADLINES, HIDDEN, METADATA = "grade.json", "deadlines.toml", "hidden", "submission_metadata.json"

SETUP = """\
#!/usr/bin/env bash
# Once, when the image is made: a Python that is new enough, the course's packages, and bubblewrap.
set -euo pipefail
root="${AUTOGRADER:-/autograder}"
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

apt-get update
apt-get install -y --no-install-recommends bubblewrap python3 python3-venv

python=""
look() {
    for one in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$one" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            python="$one"
            return
        fi
    done
}
look
if [ -z "$python" ]; then
    apt-get install -y --no-install-recommends python3.12 python3.12-venv \\
        || apt-get install -y --no-install-recommends python3.11 python3.11-venv
    look
fi
if [ -z "$python" ]; then
    echo "the course needs Python 3.11 or newer: choose a newer Ubuntu as base image" >&2
    exit 1
fi

"$python" -m venv "$root/venv"
# The CPU build of PyTorch spares several GB.
"$root/venv/bin/python" -m pip install --extra-index-url https://download.pytorch.org/whl/cpu \\
    --editable "$root/source/course[grade]" --constraint "$root/source/course/constraints.txt"
"""

RUN = """\
#!/usr/bin/env bash
# For each submission: `python -m labs grade`, and its result where Gradescope looks for it.
set -euo pipefail
root="${AUTOGRADER:-/autograder}"
cd "$root/source/course"
exec "$root/venv/bin/python" -m labs.kit.grader.gradescope "$root"
"""


# ------------------------------------------------------------------------------------------------ the upload


def build(
    out: Path, labs: tuple[str, ...], seed: str, deadlines: Path | None, hidden: Path | None, reveal: bool
) -> None:
    """Write the zip. The same course and the same wishes give the same bytes."""
    asked = {"labs": labs, "seed": seed, "reveal": reveal}
    files = {"setup.sh": SETUP.encode(), "run_autograder": RUN.encode()}
    files[ASKED] = (json.dumps(asked, indent=1, sort_keys=True) + "\n").encode()
    if deadlines:
        files[DEADLINES] = checked(deadlines)
    for lab_id in labs:
        for path in sorted((hidden / lab_id).glob("*.json")) if hidden else ():
            files[f"{HIDDEN}/{lab_id}/{path.name}"] = path.read_bytes()
    files |= {f"course/{name}": data for name, data in course()}
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # of 1980: no time of today goes in
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, which knows what may be run
            entry.external_attr = (0o100755 if name in ("setup.sh", "run_autograder") else 0o100644) << 16
            archive.writestr(entry, data)
    write(out, packed.getvalue())


def course() -> Iterator[tuple[str, bytes]]:
    """The files that grading needs, with solutions; starters as they are handed out."""
    for top in KEPT:
        if (ROOT / top).is_file():
            yield top, (ROOT / top).read_bytes()
        for folder, inside, names in os.walk(ROOT / top):
            inside[:] = [name for name in inside if not left_out(name)]
            for path in (Path(folder, name) for name in names if not left_out(name)):
                yield path.relative_to(ROOT).as_posix(), path.read_bytes()
    for lab in map(find_lab, lab_ids()):
        yield f"labs/{lab.id}/starter.py", starter_source(lab).encode()


def left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def checked(deadlines: Path) -> bytes:
    """A file of deadlines that will be understood there. Raises LabError for one that will not."""
    data = deadlines.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        copy, metadata = Path(folder, deadlines.name), Path(folder, METADATA)
        copy.write_bytes(data)
        metadata.write_text('{"created_at": "2026-01-01T00:00:00Z"}', "utf-8")
        try:
            times = tomllib.loads(data.decode("utf-8-sig")).get("times")
        except ValueError as error:
            raise LabError(f"{deadlines}: {error}") from None
        if times != METADATA:
            raise LabError(f'{deadlines}: for Gradescope it should say times = "{METADATA}"')
        late.read(copy, 1)
    return data


# -------------------------------------------------------------------------------------------- the container


def grade(root: Path) -> int:
    """Grade /autograder/submission. If the grader fails there are no results, and Gradescope says so."""
    results = root / "results" / "results.json"
    results.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gradescope-") as scratch:
        work = Path(scratch)
        code = subprocess.run([sys.executable, "-m", "labs", *line(root, work)], cwd=ROOT).returncode
        found = list((work / "report" / "gradescope").glob("*.json"))
        if code or len(found) != 1:
            complain("the submission was NOT GRADED")
            return code or 1
        write(results, found[0].read_bytes())
    return 0


def line(root: Path, work: Path) -> list[str]:
    """The arguments of `python -m labs`, with what they name laid out in `work`."""
    source = root / "source"
    asked = json.loads((source / ASKED).read_text("utf-8"))
    metadata = json.loads((root / METADATA).read_text("utf-8")) if (root / METADATA).exists() else {}
    laid_out(root / "submission", work / "submissions" / student(metadata), asked["labs"])
    options = ["--labs", ",".join(asked["labs"]), "--seed", asked["seed"], "--jobs", "1"]
    options += ["--reveal"] if asked["reveal"] else []
    if (source / HIDDEN).is_dir():
        options += ["--hidden", str(source / HIDDEN)]
    if (source / DEADLINES).exists():
        shutil.copy(source / DEADLINES, work / DEADLINES)
        shutil.copy(root / METADATA, work / METADATA)
        options += ["--late", str(work / DEADLINES)]
    if grading.isolation() != "namespaces":
        options += ["--allow-weak-isolation"]
    return ["grade", str(work / "submissions"), "--out", str(work / "report"), *options]


def student(metadata: dict[str, Any]) -> str:
    """As deadlines name them: by the address that Gradescope knows; of a group, the first."""
    addresses = sorted(str(user["email"]) for user in metadata.get("users", []) if user.get("email"))
    return intake.safe(addresses[0]) if addresses else "student"


def laid_out(submission: Path, folder: Path, labs: list[str]) -> None:
    """Copy what was handed in, as it is, into a folder of students; links stay links, and holes holes."""
    if len(labs) == 1 and (submission / "starter.py").is_file():
        folder = folder / labs[0]  # of one lab, one file is handed in, without its folder
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-RP", "--sparse=always", f"{submission}/.", str(folder)], check=False)


if __name__ == "__main__":
    sys.exit(grade(Path(sys.argv[1])))
