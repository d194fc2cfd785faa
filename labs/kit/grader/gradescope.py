"""Builds Gradescope's upload, a zip of the course with two scripts, and grades in its container.

Gradescope unpacks the zip into /autograder/source and runs setup.sh once. For each submission it starts a
container, puts the files into /autograder/submission, runs run_autograder, and reads results/results.json.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any

from labs.kit.grader import grading, late
from labs.kit.grader.names import safe
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab, lab_ids
from labs.kit.judge.pristine import starter_source
from labs.kit.learner.screen import complain
from mini_engine.trace.file import write_whole

ROOT = LABS_DIR.parent
COURSE = ("labs", "mini_engine", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
LEFT_OUT = (".*", "__pycache__", "*.pyc", "*.egg-info", "tests", "images", "starter.py", "starter.new.py")
ASSETS, SCRIPTS = Path(__file__).with_name("assets"), ("setup.sh", "run_autograder")
ASKED, DEADLINES, HIDDEN, METADATA = "grade.json", "deadlines.toml", "hidden", "submission_metadata.json"


def build(
    out: Path,
    labs: tuple[str, ...],
    seed: str,
    deadlines: Path | None,
    hidden: Path | None,
    reveal: bool,
    own_seeds: bool = False,
) -> None:
    """Write the zip. The same course and the same arguments give the same bytes."""
    files = {name: (ASSETS / name).read_bytes() for name in SCRIPTS}
    asked = {"labs": labs, "seed": seed, "reveal": reveal, "own_seeds": own_seeds}
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
            entry = zipfile.ZipInfo(name)  # dated 1980, whenever it is built
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, so that permissions count
            entry.external_attr = (0o100755 if name in SCRIPTS else 0o100644) << 16
            archive.writestr(entry, data)
    write_whole(out, packed.getvalue())


def course() -> Iterator[tuple[str, bytes]]:
    """Yield the files that grading needs, with solutions, and with the starters as they are handed out."""
    for top in COURSE:
        if (ROOT / top).is_file():
            yield top, (ROOT / top).read_bytes()
        for folder, inside, names in os.walk(ROOT / top):
            inside[:] = [name for name in inside if not is_left_out(name)]
            for path in (Path(folder, name) for name in names if not is_left_out(name)):
                yield path.relative_to(ROOT).as_posix(), path.read_bytes()
    for lab in map(find_lab, lab_ids()):
        yield f"labs/{lab.id}/starter.py", starter_source(lab).encode()


def is_left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def checked(deadlines: Path) -> bytes:
    """Return a file of deadlines. Raise LabError if it cannot be used in Gradescope's container."""
    if late.read_rules(deadlines).source != METADATA:
        raise LabError(f'{deadlines}: for Gradescope it should say times = "{METADATA}"')
    return deadlines.read_bytes()


def grade(root: Path) -> int:
    """Grade /autograder/submission; return the exit code. If the grader fails, there is no results.json."""
    results = root / "results" / "results.json"
    results.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gradescope-") as scratch:
        work = Path(scratch)
        code = subprocess.run([sys.executable, "-m", "labs", *arguments(root, work)], cwd=ROOT).returncode
        found = list((work / "report" / "gradescope").glob("*.json"))
        if code or len(found) != 1:
            complain("the submission was NOT GRADED")
            return code or 1
        write_whole(results, found[0].read_bytes())
    return 0


def arguments(root: Path, work: Path) -> list[str]:
    """Return the arguments of `python -m labs`; the files that they name are copied into `work`."""
    source = root / "source"
    asked = json.loads((source / ASKED).read_text("utf-8"))
    metadata = json.loads((root / METADATA).read_text("utf-8")) if (root / METADATA).exists() else {}
    folder = work / "submissions" / student(metadata)
    if asked["own_seeds"]:
        folder /= f"attempt-{1 + len(metadata.get('previous_submissions', ()))}"
    copy_submission(root / "submission", folder, asked["labs"])
    options = ["--labs", ",".join(asked["labs"]), "--seed", asked["seed"], "--jobs", "1", "--as-root"]
    options += ["--reveal"] if asked["reveal"] else []
    options += ["--own-seeds", "--attempts", "last"] if asked["own_seeds"] else []
    options += ["--hidden", str(source / HIDDEN)] if (source / HIDDEN).is_dir() else []
    options += ["--allow-weak-isolation"] if grading.isolation() != "namespaces" else []
    if (source / DEADLINES).exists():
        for file in (source / DEADLINES, root / METADATA):
            shutil.copy(file, work)
        options += ["--late", str(work / DEADLINES)]
    return ["grade", str(work / "submissions"), "--out", str(work / "report"), *options]


def student(metadata: dict[str, Any]) -> str:
    """Return a student's name, as deadlines use it: the e-mail address, of a group the first one."""
    addresses = sorted(str(user["email"]) for user in metadata.get("users", []) if user.get("email"))
    return safe(addresses[0]) if addresses else "student"


def copy_submission(submission: Path, folder: Path, labs: list[str]) -> None:
    """Copy a submission into the folder of a student; links stay links, and sparse files sparse."""
    if len(labs) == 1 and (submission / "starter.py").is_file():
        folder = folder / labs[0]  # for one lab, the file alone may be handed in
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-RP", "--sparse=always", f"{submission}/.", str(folder)], check=False)


if __name__ == "__main__":
    sys.exit(grade(Path(sys.argv[1])))
