"""What the student edition says is so there, and nothing is named that it has not."""

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from labs.kit.author.export import OWN, ROOT, export
from labs.kit.judge.manifest import find_lab, functions, lab_ids
from labs.kit.judge.task_status import known

# What only the course's own edition has; `labs/kit`'s code knows both editions, and says neither's names.
ABSENT = re.compile(
    r"solution\.py|mistakes\.toml|LAB_IMPL=.?solution|kit/tests|/alternatives|labs (check|generate|export)\b"
    r"|CONTRIBUTING|CHANGELOG|docs/architecture"
)
TEXTS = {".md", ".py", ".toml", ".ipynb", ".txt", ".ini", ".json", ".js", ".html", ".svg", ""}
COMMANDS = ("status", "test", "watch", "hint", "reset", "solution", "demo")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edition") / "course"
    assert export(folder) == []
    return folder


def python(folder, *line, **variables):
    """A command of the edition, with none of this run's wishes."""
    own = {k: v for k, v in os.environ.items() if k not in ("LAB_IMPL", "PYTEST_ADDOPTS")} | variables
    command = [sys.executable, "-m", *line]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, encoding="utf-8")


def texts(edition):
    """The files that a learner may read, with what is in them."""
    for path in edition.rglob("*"):
        if path.is_file() and path.suffix in TEXTS:
            yield path.relative_to(edition).as_posix(), path.read_text("utf-8")


def test_no_text_names_what_is_not_there(edition):
    found = {
        f"{name}: {match[0]}"
        for name, text in texts(edition)
        for match in ABSENT.finditer(text)
        if not re.match(r"labs/kit/(judge|learner)/.*\.py", name)
    }
    assert sorted(found) == []


def test_no_help_and_no_message_names_what_is_not_there(edition):
    said = [python(edition, "labs", "--help").stdout]
    assert "status" in said[0] and "solution" not in said[0]
    said += [python(edition, "labs", command, "--help").stdout for command in COMMANDS]
    said += [python(edition, "labs", *line).stdout for line in (["status"], ["test"], ["hint", "1"])]
    pytest_line = ("pytest", "labs/lab-01", "-p", "no:cacheprovider")
    said.append(python(edition, *pytest_line).stdout)
    refused = python(edition, *pytest_line, LAB_IMPL="another").stderr
    assert "LAB_IMPL must be starter or engine, but is 'another'" in refused
    assert not [text for text in said if ABSENT.search(text)]
    assert "comes without solutions" in python(edition, *pytest_line, LAB_IMPL="solution").stderr


def test_links_of_its_pages_lead_to_files(edition):
    for path in edition.rglob("*.md"):
        prose = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", prose):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


def test_its_readme_has_the_map_of_the_course(edition):
    ours, theirs = ((folder / "README.md").read_text("utf-8") for folder in (ROOT, edition))
    assert theirs == (OWN / "README.md").read_text("utf-8") and theirs != ours
    rows = [line for line in ours.splitlines() if line.startswith("|") and "notebooks/" in line]
    assert len(rows) == len(lab_ids()) + 1
    assert all(row in theirs for row in rows)


def test_models_and_references_run_and_cannot_be_read(edition):
    # A starter may hold earlier labs' code as given.
    code = [text for name, text in texts(edition) if name.endswith(".py")]
    readable = "".join(text for text in code if "Replace each NotImplementedError" not in text)
    for lab in map(find_lab, lab_ids()):
        source = lab.file("solution.py").read_text("utf-8")
        for task in lab.tasks:
            bodies = [
                body for name, body in functions(source).items() if f"{name}.".startswith(f"{task.name}.")
            ]
            ends = ["\n".join(ast.get_source_segment(source, body).splitlines()[-3:]) for body in bodies]
            assert ends and not [end for end in ends if len(end) > 120 and end in readable], task.name
        for name in ("solution", "oracle"):
            if lab.file(f"{name}.py").exists():
                code = f"from labs.kit import load; print(load({lab.id!r}, {name!r}).{lab.tasks[0].name})"
                told = subprocess.run(
                    [sys.executable, "-c", code], cwd=edition, capture_output=True, text=True
                )
                assert told.stdout.startswith("<function"), told.stderr
        oracle = edition / "labs" / lab.id / "author" / "oracle.py"
        assert not oracle.exists() or "_PACKED" in oracle.read_text("utf-8")


def test_what_judges_comes_along(edition):
    for lab in map(find_lab, lab_ids()):
        for name in ("random_scripts.py", "AFTER.md", "test_lab.py", "lab.toml"):
            if lab.file(name).exists():
                kept = (edition / lab.file(name).relative_to(ROOT)).read_bytes()
                assert kept == lab.file(name).read_bytes(), f"{lab.id}/{name}"
        of_students = replace(lab, path=edition / "labs" / lab.id)
        assert not of_students.mistakes and known(of_students) == known(lab) != {}
        assert {path.name for path in lab.file("images").iterdir()} == {
            path.name for path in (edition / "labs" / lab.id / "images").iterdir()
        }


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_its_make_test_is_about_the_course_and_not_about_what_is_written(edition):
    make = ["make", "-n", "test", "VENV=none"]
    told = subprocess.run(make, cwd=edition, capture_output=True, text=True).stdout
    assert "none/bin/pytest labs\n" in told and "none/bin/pytest --nbval notebooks\n" in told
    assert "export LAB_IMPL := engine" in (edition / "Makefile").read_text("utf-8")


def test_every_lab_passes_there_on_the_engine_s_parts(edition):
    result = python(edition, "pytest", "labs", "-p", "no:cacheprovider", LAB_IMPL="engine")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "testing mini_engine's own parts" in result.stdout
