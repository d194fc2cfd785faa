"""The READMEs hold: numbers come from the labs, links lead to files, pictures are there."""

import re
import tomllib

import pytest

from labs.kit.judge.manifest import LABS_DIR, find_lab, lab_ids
from labs.kit.tests.conftest import num_tests
from mini_engine import __version__

ROOT = LABS_DIR.parent
README = (ROOT / "README.md").read_text("utf-8")
LABS = [find_lab(lab_id) for lab_id in lab_ids()]


def test_hours_tests_and_mistakes_are_those_of_the_labs():
    hours = sum(lab.minutes for lab in LABS) / 60
    tests, mistakes = sum(num_tests(lab.id) for lab in LABS), sum(len(lab.mistakes) for lab in LABS)
    assert f"about {hours:g} hours" in README
    assert f"{len(LABS)} labs, {tests} tests" in README
    assert f"one of the {mistakes} known ones" in " ".join(README.split())


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.id)
def test_the_map_and_the_lab_lead_to_each_other_to_the_notebook_and_to_the_player(lab):
    (row,) = (line for line in README.splitlines() if f"(labs/{lab.id}/README.md) |" in line)
    notebook = re.search(r"notebooks/[\w-]+\.ipynb", row)[0]
    assert lab.question in row and f"| {lab.minutes} |" in row
    own = lab.file("README.md").read_text("utf-8")
    assert f"(../../{notebook})" in own
    assert f"python -m labs test {lab.id} --open" in own and "player" in own


@pytest.mark.parametrize("path", ["README.md", *(f"labs/{lab.id}/AFTER.md" for lab in LABS)])
def test_references_have_addresses(path):
    listed = (ROOT / path).read_text("utf-8").partition("\n## References\n\n")[2].partition("\n\n")[0]
    references = re.split(r"\n(?=- )", listed)
    assert references and all("](https://" in reference for reference in references)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.id)
def test_a_lab_s_page_is_short_has_pictures_and_leads_on(lab):
    """It is read before writing: the question, two or three figures, what to write, how to be stuck."""
    text = lab.file("README.md").read_text("utf-8")
    assert len(text.split()) <= 2200
    assert 2 <= len(re.findall(r"!\[[^\]]{20,}\]\(images/[\w-]+\.svg\)", text)) <= 3
    assert "(AFTER.md)" in text and f"python -m labs hint {lab.id}" in text
    for said in ("solution.py", "mistakes.toml", "kit/tests"):  # the student edition has none of these
        assert said not in text + lab.file("AFTER.md").read_text("utf-8")


def test_pictures_are_small_and_stand_before_the_first_heading():
    first_screen = README.partition("\n## ")[0]
    for needed in ("player", "animation.gif", "report.svg", "**For**", "**You need**", "**It takes**"):
        assert needed in first_screen
    for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README):
        assert (ROOT / picture).stat().st_size < 1_000_000


def test_every_file_gives_the_version_of_the_package():
    """`mini_engine.__version__` is the source; pyproject.toml and the book read it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mini_engine.__version__"}
    assert "import __version__" in (ROOT / "docs" / "conf.py").read_text("utf-8")
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text("utf-8")
