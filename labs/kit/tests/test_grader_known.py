"""The course's own files are not graded as a student's, in any form in which a student may have them."""

import ast
import base64
import zlib

import pytest

from labs.kit.author.check import ALTERNATIVES
from labs.kit.author.export import seal, sealed_files
from labs.kit.grader import intake
from labs.kit.grader.grading import grade
from labs.kit.grader.known import refusal
from labs.kit.grader.submission import Settings
from labs.kit.judge.manifest import LABS_DIR, find_lab, lab_ids
from labs.kit.judge.pristine import packed, starter_source
from labs.kit.tests import marks
from labs.kit.tests.files import graded, solution
from mini_engine.tests.soak import SOAK

ROOT = LABS_DIR.parent
SOLUTION = solution("lab-04")
PACKED = base64.b64encode(zlib.compress(SOLUTION.encode())).decode()
NAME = "lab-04's reference"
FORMS = {
    "as it is": SOLUTION,
    "with other spaces": SOLUTION.replace("\n", "\r\n").replace("    ", "\t"),
    "without comments": ast.unparse(ast.parse(SOLUTION)),
    "with other names": SOLUTION.replace("caches", "kv").replace("rows", "them"),
    "beside other code": SOLUTION + "\nmine = 1\n",
    "with statements that do nothing": SOLUTION.replace("    return", "    pass\n    return"),
    "as earlier editions sealed it": f'import zlib, base64\ncode = """{PACKED}"""',
    "in a text": f"exec({SOLUTION!r})",
    "sealed": seal(SOLUTION, NAME),
    "sealed, its text alone": f"text = {packed(SOLUTION, NAME)!r}",
    "the engine's part": (ROOT / "mini_engine/backends/padded.py").read_text("utf-8"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_course_s_own_file_is_not_graded(form, tmp_path):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "lab-04.py").write_text(FORMS[form], "utf-8", newline="")
    submission = intake.read(intake.entries(tmp_path)[0][0], ["lab-04"])
    assert not submission.files
    assert "lab-04.py is not graded: it " in submission.problems["lab-04"]
    lab = grade(submission, Settings(("lab-04",), "s", hidden=1, weak=True)).labs[0]
    assert lab.earned == 0 and "the course's own file" in lab.problem


def test_every_sealed_file_of_the_edition_is_recognised():
    labs = [*map(find_lab, lab_ids())]
    for path, (_, words) in sealed_files().items():
        sealed = seal((ROOT / path).read_text("utf-8"), words)
        found = [refusal(lab, sealed) for lab in labs]
        assert any(path in why for why in found) or "__init__" in path, path


@marks.namespaces
def test_a_sealed_file_cannot_run_where_files_are_graded():
    lab = graded("lab-01", seal(solution("lab-01"), "another description"))
    assert lab.earned == 0 and "does not load" in lab.problem


@pytest.mark.parametrize("lab_id", marks.some(lab_ids(), "lab-01", "lab-02", "lab-04", "lab-05"))
def test_honest_files_are_graded(lab_id):
    """Starters, other right solutions, and known mistakes, which are the reference but for a line: some; in a
    soak, all."""
    lab = find_lab(lab_id)
    honest = [path.read_text("utf-8") for path in ALTERNATIVES.glob(f"{lab_id.replace('-', '_')}*.py")]
    mistakes = [one.apply(solution(lab_id)) for one in lab.mistakes[:: 1 if SOAK else 4]]
    honest += [starter_source(lab), "def broken(:", "(" * 1000, *mistakes]
    assert not [why for source in honest if (why := refusal(lab, source))]
