"""Draws docs/images/report.svg: the report on a wrong lab-01, as the README shows it.

python docs/images/report.py [OUT.svg]      a known mistake is the learner's file, in a copy of the course
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from labs.kit.judge.manifest import find_lab

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".svg")
LINE, COLUMNS = ["labs", "test", "lab-01"], 92


def report(mistake_id: str = "skip-past-the-head") -> str:
    """The terminal's text, colours included, without what changes from run to run."""
    lab = find_lab("lab-01")
    mistake = next(mistake for mistake in lab.mistakes if mistake.id == mistake_id)
    with tempfile.TemporaryDirectory() as folder:
        course = Path(folder)
        left_out = shutil.ignore_patterns("lab-0[2-9]", ".state", "__pycache__", "tests")
        shutil.copytree(ROOT / "labs", course / "labs", ignore=left_out)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, course / name)
        wrong = mistake.apply(lab.file("solution.py").read_text("utf-8"))
        (course / "labs" / "lab-01" / "starter.py").write_text(wrong, "utf-8")
        own = {"PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "PYTHONUTF8": "1"}
        options = {"cwd": course, "env": os.environ | own, "capture_output": True, "text": True}
        ran = subprocess.run([sys.executable, "-m", *LINE], **options)
    return re.sub(r" in \d+\.\d+s", "", ran.stdout)


def draw(out: Path = PICTURE) -> None:
    """The report in a terminal window; its letters are the reader's own, so that no font is fetched."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ python -m {' '.join(LINE)}"), Text.from_ansi(report()), sep="\n")
    svg = console.export_svg(title="lab-01", unique_id="report")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.S)
    Path(out).write_text(re.sub(r"Fira Code, ?", "", svg), "utf-8")


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
