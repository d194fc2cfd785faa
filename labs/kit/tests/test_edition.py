"""The student edition: its texts hold, it names nothing that it lacks, and it is brought up to date."""

import ast
import importlib
import inspect
import json
import operator
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from labs.kit.author.export import FIRST_EDITION, LIST, ROOT, STUDENT_FILES, export
from labs.kit.judge import manifest
from labs.kit.judge.manifest import find_lab, functions, lab_ids
from labs.kit.judge.task_status import known
from labs.kit.tests.files import solution
from mini_engine.tests.soak import SOAK

# What only the course's own edition has; `labs/kit`'s code knows both editions, and says neither's names.
ABSENT = re.compile(
    r"solution\.py|mistakes\.toml|LAB_IMPL=.?solution|kit/tests|/alternatives|labs (check|generate|export)\b"
    r"|CONTRIBUTING|CHANGELOG|docs/architecture"
)
TEXTS = {".md", ".py", ".toml", ".ipynb", ".txt", ".ini", ".json", ".js", ".html", ".svg", ""}
COMMANDS = ("status", "test", "watch", "hint", "reset", "solution", "demo", "arena")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edition") / "course"
    assert export(folder) == []
    return folder


def python(folder, *line, **variables):
    """Run `python -m LINE` in the edition, or `python -c CODE`, without this run's own settings."""
    own = {k: v for k, v in os.environ.items() if k not in ("LAB_IMPL", "PYTEST_ADDOPTS")} | variables
    command = [sys.executable, *line] if line[0] == "-c" else [sys.executable, "-m", *line]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, encoding="utf-8")


def invoked(folder, *lines: list[str]) -> list[str]:
    """Return what `python -m labs LINE` says of each line, all in one process of the edition."""
    code = (
        "import json; from typer.testing import CliRunner; from labs.__main__ import every_command as app\n"
    )
    code += f"print(json.dumps([CliRunner().invoke(app(), line).output for line in {lines!r}]))"
    return json.loads(python(folder, "-c", code).stdout.splitlines()[-1])


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


def test_every_path_that_a_text_names_is_there(edition):
    found = {
        f"{name}: {path}"
        for name, text in texts(edition)
        for path in re.findall(r"(?<![\w/.-])(?:docs|labs|mini_engine|notebooks)/[\w./-]*\.[a-z]+\b", text)
        if not (edition / path).exists() and not path.startswith("labs/.state")  # made when a test runs
    }
    assert sorted(found) == []
    assert not [name for name, text in texts(edition) if re.search(r"In\s+the\s+book", text)]


def test_no_help_and_no_message_names_what_is_not_there(edition, monkeypatch):
    lines = [["--help"], *([name, "--help"] for name in COMMANDS), ["status"], ["test"], ["hint", "1"]]
    said = invoked(edition, *lines)
    assert "status" in said[0] and "solution" not in said[0]
    assert "".join(said[1:]).count("usage: ") == len(COMMANDS)
    said.append(python(edition, "pytest", "labs/lab-01", "-p", "no:cacheprovider").stdout)
    assert "testing starter.py, your own" in said[-1]
    assert "lab-01: schedule_step is not written yet" in said[-1]
    assert not [text for text in said if ABSENT.search(text)]
    monkeypatch.setattr(manifest, "LABS_DIR", edition / "labs")
    for impl, why in {"another": "must be starter or engine", "solution": "comes without solutions"}.items():
        monkeypatch.setenv("LAB_IMPL", impl)
        with pytest.raises(manifest.LabError, match=why):  # test_plugin.py has how pytest says so
            manifest.impl_from_environment()


def test_links_of_its_pages_lead_to_files(edition):
    for path in edition.rglob("*.md"):
        prose = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", prose):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


def test_its_readme_has_the_map_of_the_course(edition):
    ours, theirs = ((folder / "README.md").read_text("utf-8") for folder in (ROOT, edition))
    assert theirs == (STUDENT_FILES / "README.md").read_text("utf-8") and theirs != ours
    rows = [line for line in ours.splitlines() if line.startswith("|") and "notebooks/" in line]
    assert len(rows) == len(lab_ids()) + 1
    assert all(row in theirs for row in rows)


def test_models_and_references_run_and_cannot_be_read(edition):
    # A starter may hold earlier labs' code as given.
    code = [text for name, text in texts(edition) if name.endswith(".py")]
    readable = "".join(text for text in code if "Replace each NotImplementedError" not in text)
    for lab in map(find_lab, lab_ids()):
        parts = functions(source := solution(lab.id))
        for task in lab.tasks:
            own = [body for name, body in parts.items() if f"{name}.".startswith(f"{task.name}.")]
            ends = ["\n".join(ast.get_source_segment(source, body).splitlines()[-3:]) for body in own]
            assert ends and not [end for end in ends if len(end) > 120 and end in readable], task.name
        oracle = edition / "labs" / lab.id / "author" / "oracle.py"
        assert "_PACKED" in oracle.read_text("utf-8")
    own = {("lab-11", "oracle"): "World.open"}  # it has no front, only what clients see of one
    loads = [
        f"load({lab.id!r}, {name!r}).{own.get((lab.id, name), lab.tasks[0].name)}"
        for lab in map(find_lab, lab_ids())
        for name in ("solution", "oracle")
    ]
    loaded = python(edition, "-c", f"from labs.kit import load; print(*[{', '.join(loads)}], sep='\\n')")
    assert [line[:9] for line in loaded.stdout.splitlines()] == ["<function"] * len(loads), loaded.stderr


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
    seen = subprocess.run(make, cwd=edition, capture_output=True, text=True).stdout
    assert "none/bin/pytest labs\n" in seen and "none/bin/pytest --nbval notebooks\n" in seen
    assert "export LAB_IMPL := engine" in (edition / "Makefile").read_text("utf-8")


def test_every_lab_passes_there_on_the_engine_s_parts(edition):
    labs = ["labs"] if SOAK else ["labs/lab-01"]
    result = python(edition, "pytest", *labs, "-p", "no:cacheprovider", LAB_IMPL="engine")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "testing mini_engine's own parts" in result.stdout


def test_it_has_no_solutions_mistakes_or_tools_of_authors(edition):
    names = {path.relative_to(edition).as_posix() for path in edition.rglob("*")}
    absent = ("solution", "mistakes.toml", "/tests", "kit/author", "train.py", "player.py", "architecture.py")
    assert not [name for name in names if any(word in name for word in (*absent, ".github", ".ci"))]
    wanted = {f"labs/{lab_id}/{name}" for lab_id in lab_ids() for name in ("starter.py", "test_lab.py")}
    assert {"README.md", *wanted} <= names
    scheduler = (edition / "mini_engine" / "scheduler.py").read_text("utf-8")
    assert "sealed" in scheduler and "kv.admit" not in scheduler


def test_no_twin_can_be_read(edition):
    """However the engine's modules are cut: the last lines of each twin are in no file of the engine."""
    texts = [path.read_text("utf-8") for path in (edition / "mini_engine").rglob("*.py")]
    for task in (task for lab_id in lab_ids() for task in find_lab(lab_id).tasks):
        module, _, part = task.engine.partition(":")
        twin = operator.attrgetter(part)(importlib.import_module(module))
        code = inspect.getsource(twin.fget if isinstance(twin, property) else twin)
        end = "".join(code.splitlines(keepends=True)[-3:])
        assert not [text for text in texts if end in text], task.engine


def test_its_commands_run(edition):
    code = "import mini_engine.scheduler as s; print(s.clamp(9, 4, 0), s.__file__)"
    engine = python(edition, "-c", code).stdout
    assert engine.startswith("4 ") and str(edition) in engine
    lines = [["check"], ["solution", "lab-01", "--spoil"], *[["hint", "lab-01"]] * 3]
    none, refused, *_, last = invoked(edition, *lines)
    assert "No such command 'check'" in none and "comes without solutions" in refused
    assert "that was the last hint" in last and "solution" not in last.splitlines()[-1]


def test_a_failing_run_is_played_beside_the_engine_s(edition):
    starter, lab = edition / "labs" / "lab-01" / "starter.py", find_lab("lab-01")
    pristine = starter.read_text("utf-8")
    mistake = next(mistake for mistake in lab.mistakes if mistake.id == "skip-past-the-head")
    starter.write_text(mistake.apply(solution("lab-01")), "utf-8")
    shown = python(edition, "labs", "test", "lab-01").stdout
    starter.write_text(pristine, "utf-8")
    assert "out/lab-01.html in a browser: yours beside the reference" in shown
    assert "looks like" in shown and mistake.title in shown  # by its fingerprint: mistakes.toml is not there
    assert (edition / "out" / "lab-01.html").is_file()


# ------------------------------------------------------------------------------------------- an update


@pytest.fixture
def earlier(edition, tmp_path):
    """An edition as it was handed out last year: without a list of files, with what has gone since."""
    shutil.copytree(edition, tmp_path / "course")
    (tmp_path / "course" / LIST).unlink()
    for name in FIRST_EDITION.read_text("utf-8").splitlines():
        path = tmp_path / "course" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text("of the course as it was\n", "utf-8")
    return tmp_path / "course"


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_update_clears_what_the_course_no_longer_has_and_keeps_what_it_never_wrote(earlier, edition):
    own = {"labs/lab-01/notes.py", "labs/lab-01/out/run.jsonl", "labs/.state/hints.json", "mine.txt"}
    for name in own:
        (earlier / name).parent.mkdir(exist_ok=True)
        (earlier / name).write_text("mine", "utf-8")
    assert {"labs/lab-01/storm.py", "mini_engine/turn.py", "labs/kit/toys/storms.py"} <= files(earlier)
    assert export(earlier) == []
    assert own <= files(earlier) and files(earlier) ^ files(edition) <= own


@pytest.mark.soak
def test_files_of_an_edition_with_a_list_are_cleared_by_that(edition, tmp_path):
    """And their folders, unless something else is in them; no path leads out of the edition."""
    shutil.copytree(edition, tmp_path / "course")
    gone, kept, outside = ("course/docs/old/page.md", "course/docs/left/page.md", "outside.txt")
    for name in (gone, kept, "course/docs/left/mine.txt", outside):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with (tmp_path / "course" / LIST).open("a") as file:
        file.write("docs/old/page.md\ndocs/left/page.md\n../outside.txt\nlabs/lab-01/starter.py\n")
    assert export(tmp_path / "course") == []
    assert not (tmp_path / "course/docs/old").exists() and (tmp_path / outside).exists()
    assert [path.name for path in (tmp_path / "course/docs/left").iterdir()] == ["mine.txt"]
    assert (tmp_path / "course/labs/lab-01/starter.py").exists()


def test_an_update_keeps_edited_starters_and_says_what_was_renamed(earlier):
    mine, untouched = (earlier / "labs" / lab_id / "starter.py" for lab_id in lab_ids()[:2])
    mine.write_text("mine = 1\n", "utf-8")
    before = untouched.read_text("utf-8")
    assert export(earlier) == []  # the course has not changed
    assert mine.read_text("utf-8") == "mine = 1\n"
    kept = earlier / "labs" / "kit" / "pristine" / "lab-01.py"
    kept.write_text("what was handed out last year\n", "utf-8")
    mine.write_text("def publish(kv):\n    kv.find_prefix(1)\n", "utf-8")
    changed, *lines = export(earlier)
    assert changed == "lab-01: the starter has changed; the edited one is kept, starter.new.py is beside it"
    assert lines == [
        "lab-01: publish is now called cache_blocks; the old name works for one more release",
        "lab-01: find_prefix is now called get_computed_blocks; the old name works for one more release",
    ]
    assert mine.read_text("utf-8").startswith("def publish")
    assert "not written yet" in mine.with_name("starter.new.py").read_text("utf-8")
    assert untouched.read_text("utf-8") == before
