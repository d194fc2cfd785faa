"""Reports which files of a class are alike (--similarity): copydetect's report of each lab, less the starter.

It compares all pairs, so its time grows with the square of the class. A person has to judge its report, which
changes no grade. It runs in a process of its own, where the same files give the same report.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from labs.kit.grader.submission import Submission
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.judge.pristine import starter_source

PATIENCE = 3600  # seconds for each lab


def compare(submissions: Iterable[Submission], labs: Sequence[str], report: Path) -> Iterator[str]:
    """Write REPORT/similarity/LAB.html for each lab, and yield a line for each."""
    if not find_spec("copydetect"):
        raise LabError("--similarity needs the package copydetect: pip install '.[grade]'")
    (report / "similarity").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grade-similar-") as folder:
        scratch = Path(folder)
        for submission in submissions:
            for lab_id, data in submission.files.items():
                file = scratch / lab_id / f"{submission.student}.py"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(data)
        for lab_id in labs:
            if len(list(scratch.glob(f"{lab_id}/*.py"))) < 2:
                yield f"{lab_id}: fewer than two files, so there is nothing to compare"
                continue
            starter = scratch / "starter" / lab_id
            starter.mkdir(parents=True)
            (starter / "starter.py").write_text(starter_source(find_lab(lab_id)), "utf-8")
            target = report / "similarity" / f"{lab_id}.html"
            yield f"{lab_id}: {run(scratch / lab_id, starter, target)}"


def run(files: Path, starter: Path, target: Path) -> str:
    """Run copydetect in `files`, which its report names as they are called from there."""
    part = target.with_name(f".{target.name}").resolve()
    options = [
        "--extensions",
        "py",
        "--disable-autoopen",
        "--boilerplate-dirs",
        os.path.relpath(starter, files),
    ]
    # With -P Python imports nothing from the folder that it runs in, which holds submissions.
    line = [sys.executable, "-P", "-m", "copydetect", "--test-dirs", ".", "--out-file", str(part), *options]
    # Hashes of texts decide what is compared: with a fixed seed they are the same every time.
    environment = os.environ | {"PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(
            line, env=environment, cwd=files, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"no report within {PATIENCE / 60:g} minutes"
    if done.returncode or not part.exists():
        return f"copydetect failed: {(done.stderr.strip() or 'without a message').splitlines()[-1]}"
    part.replace(target)
    return f"similarity/{target.name}"
