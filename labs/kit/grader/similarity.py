"""Reports which files of a class are alike (--similarity): copydetect's report of each lab, less the starter.

They are compared with each other, and with the reference, the engine's parts and the known mistakes.

It compares all pairs, so its time grows with the square of the class. A person has to judge its report, which
changes no grade. It runs in a process of its own, where the same files give the same report.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from labs.kit.grader.known import twins
from labs.kit.grader.submission import Submission
from labs.kit.judge.manifest import LabError, find_lab
from labs.kit.judge.pristine import starter_source

PATIENCE = 3600  # seconds for each lab
REFERENCE = "the reference"


def compare(
    submissions: Iterable[Submission], labs: Sequence[str], report: Path
) -> tuple[list[str], list[str]]:
    """Write REPORT/similarity/LAB.html for each lab; return a line for each, and the pairs that are alike."""
    if not find_spec("copydetect"):
        raise LabError("--similarity needs the package copydetect: pip install '.[grade]'")
    (report / "similarity").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="grade-similar-") as folder:
        scratch = Path(folder)
        for submission in submissions:
            for lab_id, data in submission.files.items():
                file = scratch / lab_id / f"{submission.name}.py"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(data)
        for lab_id in labs:
            if not (scratch / lab_id).is_dir():
                lines.append(f"{lab_id}: no files, so there is nothing to compare")
                continue
            starter, ours = scratch / "starter" / lab_id, scratch / "course" / lab_id
            for path, text in [(starter / "starter.py", starter_source(find_lab(lab_id))), *own_files(ours)]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            target = report / "similarity" / f"{lab_id}.html"
            said, pairs = run(scratch / lab_id, starter, ours, target)
            lines.append(f"{lab_id}: {said}")
            found += [f"{lab_id}: {pair}" for pair in pairs]
    return lines, found


def student_of(file: str) -> str:
    return Path(file).stem.partition(", attempt ")[0]


def own_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield what a lab's files are compared with beside each other, each with its text."""
    lab = find_lab(folder.name)
    yield folder / f"{REFERENCE}.py", lab.file("solution.py").read_text("utf-8")
    for path in {path for path, _ in twins(lab)}:
        yield folder / f"the engine's {path.name}", path.read_text("utf-8")
    for mistake in lab.mistakes:
        with suppress(LabError):  # it is none of the solution's text
            text = mistake.apply(lab.file("solution.py").read_text("utf-8"))
            yield folder / f"the known mistake {mistake.id}.py", text


DETECT = """
import json, sys
from copydetect import CopyDetector
starter, ours, target = sys.argv[1:]
found = CopyDetector(test_dirs=["."], ref_dirs=[".", ours], boilerplate_dirs=[starter], extensions=["py"],
                     autoopen=False, silent=True, out_file=target)
found.run()
found.generate_html_report()
print(json.dumps([[str(part) for part in pair[2:4]] + [pair[0]] for pair in found.get_copied_code_list()]))
"""


def run(files: Path, starter: Path, ours: Path, target: Path) -> tuple[str, list[str]]:
    """Run copydetect in `files`, which its report names as they are called from there.

    Return the report's name, or why there is none, and the pairs that are alike.
    """
    part = target.with_name(f".{target.name}").resolve()
    folders = [os.path.relpath(folder, files) for folder in (starter, ours)]
    # With -P Python imports nothing from the folder that it runs in, which holds submissions.
    line = [sys.executable, "-P", "-c", DETECT, *folders, str(part)]
    # Hashes of texts decide what is compared: with a fixed seed they are the same every time.
    environment = os.environ | {"PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(
            line, env=environment, cwd=files, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"no report within {PATIENCE / 60:g} minutes", []
    if done.returncode or not part.exists():
        return f"copydetect failed: {(done.stderr.strip() or 'without a message').splitlines()[-1]}", []
    part.replace(target)
    return f"similarity/{target.name}", named(json.loads(done.stdout.splitlines()[-1]))


def named(pairs: Iterable[tuple[str, str, float]]) -> list[str]:
    """Return the pairs in words, the most alike first; of the course's files each file's nearest alone."""
    lines, compared = [], set()
    for one, other, share in sorted(pairs, key=lambda pair: (-pair[2], REFERENCE not in pair[1], *pair[:2])):
        is_ours = os.sep in os.path.normpath(other)
        if student_of(one) == student_of(other):
            continue
        if not (is_ours and one in compared):
            lines.append(f"{Path(one).stem} and {Path(other).stem}, {share:.0%}")
        compared |= {one} if is_ours else set()
    return lines
