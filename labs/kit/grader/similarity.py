"""Which files of a class are alike (--similarity): copydetect's report of each lab, without the starter.

It compares all pairs, so its time grows with the square of the class. Its report is for a person to
read, and changes no grade. It runs in a process of its own, where the same files give the same report.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from labs.kit.grader.grading import Submission
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.judge.pristine import starter_source

PATIENCE = 3600  # seconds a lab


def compare(submissions: Iterable[Submission], labs: Sequence[str], report: Path) -> Iterator[str]:
    """Write REPORT/similarity/LAB.html for each lab; a line for each."""
    if not find_spec("copydetect"):
        raise LabError("--similarity needs the package copydetect: pip install '.[grade]'")
    (report / "similarity").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grade-similar-") as folder:
        there = Path(folder)
        for submission in submissions:
            for lab_id, data in submission.files.items():
                file = there / lab_id / f"{submission.student}.py"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(data)
        for lab_id in labs:
            if len(list(there.glob(f"{lab_id}/*.py"))) < 2:
                yield f"{lab_id}: fewer than two files, so there is nothing to compare"
                continue
            starter = there / "starter" / lab_id
            starter.mkdir(parents=True)
            (starter / "starter.py").write_text(starter_source(find_lab(lab_id)), "utf-8")
            target = report / "similarity" / f"{lab_id}.html"
            yield f"{lab_id}: {run(there / lab_id, starter, target)}"


def run(files: Path, starter: Path, target: Path) -> str:
    written = target.with_name(f".{target.name}")
    line = [sys.executable, "-m", __spec__.name, str(files), str(starter), str(written.resolve())]
    # Hashes of texts decide what is compared: with a seed of their own they are the same every time.
    environment = os.environ | {"PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"no report within {PATIENCE / 60:g} minutes"
    if done.returncode or not written.exists():
        return f"copydetect failed: {(done.stderr.strip() or 'without a word').splitlines()[-1]}"
    written.replace(target)
    return f"similarity/{target.name}"


def main(files: str, starter: str, target: str) -> None:
    """In the process of its own; copydetect names files as they are called from where it runs."""
    from copydetect import CopyDetector

    os.chdir(files)
    detector = CopyDetector(
        test_dirs=["."],
        boilerplate_dirs=[os.path.relpath(starter)],
        extensions=["py"],
        autoopen=False,
        silent=True,
        out_file=target,
    )
    detector.run()
    detector.generate_html_report()


if __name__ == "__main__":
    main(*sys.argv[1:])
