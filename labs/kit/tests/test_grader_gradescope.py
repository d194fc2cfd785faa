"""Gradescope's upload and Classroom's workflow, run in empty folder trees; and what the guide shows."""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from labs.kit.author import export
from labs.kit.grader import gradescope
from labs.kit.grader.commands import gradescope as gradescope_command
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab, lab_ids
from labs.kit.judge.pristine import starter_source
from labs.kit.tests import marks

pytestmark = marks.namespaces

ROOT = LABS_DIR.parent
EXAMPLES = ROOT / "docs" / "examples"
GUIDE = (ROOT / "docs" / "instructors.md").read_text("utf-8")
DEADLINES = """
times = "submission_metadata.json"
fraction_per_day = 0.1
[lab-02]
due = 2026-10-12T23:59:00+02:00
[students."ada@example.org"]
lab-02 = 2026-10-13T23:59:00+02:00
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)


# The tests' machine is thrown away, so root may grade on it.
PYTHON = f"""[ "$3" = grade ] && set -- "$@" --as-root
exec {shlex.quote(sys.executable)} "$@\""""


def run(line, folder, programs=None, **variables):
    """A command with nothing of this run's wishes, and `programs` before all others."""
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LAB_IMPL", "PYTEST_ADDOPTS")}
    own["PATH"] = os.pathsep.join([*([str(programs)] if programs else []), os.environ["PATH"]])
    own |= {"COLUMNS": "300", "PYTHONUTF8": "1"} | variables
    return subprocess.run(line, cwd=folder, env=own, capture_output=True, encoding="utf-8")


def unpacked(upload, folder):
    """Unpack like unzip: executable files stay executable."""
    with zipfile.ZipFile(upload) as archive:
        for entry in archive.infolist():
            os.chmod(archive.extract(entry, folder), entry.external_attr >> 16 & 0o777)


class Autograder:
    """/autograder, as Gradescope lays it out, in another place, with the course of the upload."""

    def __init__(self, root: Path, course: Path, **wishes):
        self.root = root / "autograder"
        for name in ("source", "submission", "results"):
            (self.root / name).mkdir(parents=True)
        wished = {"labs": ("lab-01", "lab-02"), "seed": "spring", "deadlines": None, "hidden": None}
        with pytest.MonkeyPatch.context() as patch:  # packing the course takes seconds
            patch.setattr(gradescope, "course", lambda: ())
            gradescope.build(root / "asked.zip", **wished | {"reveal": False} | wishes)
        unpacked(root / "asked.zip", self.root / "source")
        (self.root / "source" / "course").symlink_to(course)
        shutil.copy(self.root / "source" / "run_autograder", self.root)
        program(self.root / "venv" / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')

    def hand_in(self, student, created):
        shutil.copytree(EXAMPLES / "submissions" / student, self.root / "submission", dirs_exist_ok=True)
        users = [{"email": "ada@example.org", "id": 1, "name": "Ada"}]
        metadata = {"created_at": created, "users": users, "assignment": {"id": 2}}
        (self.root / "submission_metadata.json").write_text(json.dumps(metadata), "utf-8")

    def grade(self, programs=None):
        self.found = run([str(self.root / "run_autograder")], self.root, programs, AUTOGRADER=str(self.root))
        results = self.root / "results"
        assert {path.name for path in results.iterdir()} <= {"results.json"}
        file = results / "results.json"
        return json.loads(file.read_text("utf-8")) if file.exists() else None


@pytest.fixture(scope="module")
def upload(tmp_path_factory):
    path = tmp_path_factory.mktemp("upload") / "autograder.zip"
    gradescope.build(path, tuple(lab_ids()), "spring", None, None, False)
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def course(upload, tmp_path_factory):
    """The upload's course. What one test has compiled, the next ones find."""
    folder = tmp_path_factory.mktemp("unpacked")
    unpacked(Path(upload.filename), folder)
    return folder / "course"


def test_the_upload_has_what_grading_needs_and_nothing_else(upload):
    names = set(upload.namelist())
    assert {"setup.sh", "run_autograder", "course/pyproject.toml", "course/constraints.txt"} <= names
    for lab in map(find_lab, lab_ids()):
        for name in ("solution.py", "author/oracle.py", "author/random_scripts.py", "author/lab.toml"):
            assert f"course/labs/{lab.id}/{name}" in names
        assert upload.read(f"course/labs/{lab.id}/starter.py").decode() == starter_source(lab)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {".git", ".venv", "out", "tests", "__pycache__", ".state", "docs", "notebooks"}
    for name in ("setup.sh", "run_autograder"):
        assert upload.getinfo(name).external_attr >> 16 & stat.S_IXUSR
        assert b"\r" not in upload.read(name)


def test_the_command_builds_it_and_the_same_wishes_give_the_same_upload(upload, tmp_path, capsys):
    gradescope_command(tmp_path / "again.zip", labs="", seed="spring")
    assert "again.zip," in (said := capsys.readouterr().out) and "seed spring" in said
    assert (tmp_path / "again.zip").read_bytes() == Path(upload.filename).read_bytes()


def test_setup_installs_the_pinned_course_and_bubblewrap(course, tmp_path):
    """With programs in place of apt-get and Python that write down how they are called."""
    there, stubs, log = Autograder(tmp_path, course), tmp_path / "stubs", tmp_path / "log"
    shutil.rmtree(there.root / "venv")
    said = f'echo "$(basename "$0") $*" >> {log}'
    program(stubs / "apt-get", said)
    old = '[ "$1" = -c ] && exit 1'
    for name in ("python3", "python3.14", "python3.13", "python3.11"):  # too old, or not there
        program(stubs / name, old)
    copied = 'mkdir -p "$3/bin" && cp "$0" "$3/bin/python"'
    new = f'{said}\n[ "$2" = venv ] && {copied}\nexit 0'
    program(stubs / "apt-get", f'{said}\ncase "$*" in *python3.12*) mv {stubs}/new {stubs}/python3.12;; esac')
    program(stubs / "python3.12", old)
    program(stubs / "new", new)
    found = run(["bash", str(there.root / "source" / "setup.sh")], "/", stubs, AUTOGRADER=str(there.root))
    assert found.returncode == 0, found.stderr
    lines = log.read_text("utf-8").splitlines()
    assert any(line.startswith("apt-get install") and "bubblewrap" in line for line in lines)
    (pip,) = (line.split() for line in lines if line.startswith("python -m pip install"))
    installed, constraints = pip[pip.index("--editable") + 1], pip[pip.index("--constraint") + 1]
    assert installed == f"{there.root}/source/course[grade]" and Path(constraints).is_file()
    assert (there.root / "venv" / "bin" / "python").exists()


def test_a_submission_is_graded_as_by_the_command_and_the_metadata_say_when_it_came(course, tmp_path):
    there = Autograder(tmp_path, course, deadlines=deadlines(tmp_path), hidden=EXAMPLES / "hidden")
    there.hand_in("student-02", "2026-10-15T03:00:00-07:00")
    os.mkfifo(there.root / "submission" / "pipe")
    (there.root / "submission" / "link").symlink_to("/etc/passwd")
    result = there.grade()
    assert result, there.found.stderr
    documented(result)
    assert result["extra_data"] == {"isolation": "namespaces", "withheld": 11.0}
    assert "spring" not in json.dumps(result)
    assert {test["name"]: test["score"] for test in result["tests"]} == {
        "lab-01: schedule_step": 0,
        "lab-02: clamp": 35,
        "lab-02: next_chunk": 0,
        "lab-02: prefill_budget": 20,
    }
    assert result["score"] == 44 and "2 days late" in str(result)  # and 3 without the extension
    assert "Weak isolation" not in result["output"]
    assert "one slot too many" in result["tests"][0]["output"]
    assert "hidden cases: " in str(result) and "of 61 depart" in str(result)  # one of them --hidden
    assert "student-02" not in there.found.stdout + str(result)  # nothing of the class goes in
    for wrong in (DEADLINES.replace(".json", ".csv"), DEADLINES.replace("due", "do"), "times = "):
        with pytest.raises(LabError, match="deadlines.toml"):
            gradescope.checked(deadlines(tmp_path, wrong))


def documented(result):
    """Check a result against the autograder specification, "Output format", of Gradescope's documentation."""
    formats = {"text", "html", "simple_format", "md", "ansi"}
    shown = {"visible", "hidden", "after_due_date", "after_published"}
    common = {"score", "output", "output_format", "visibility", "extra_data"}
    whole = {"execution_time", "test_output_format", "test_name_format", "stdout_visibility", "leaderboard"}
    single = common | {"max_score", "status", "name", "name_format", "number", "tags"}
    assert result.keys() <= common | whole | {"tests"}
    for one in (result, *result["tests"]):
        assert isinstance(one["score"], int | float) and isinstance(one.get("output", ""), str)
        assert one.get("output_format", "text") in formats
        assert one.get("visibility", "visible") in shown
    for test in result["tests"]:
        assert test.keys() <= single and 0 <= test["score"] <= test["max_score"]
        assert test.get("status", "passed") in ("passed", "failed")


def deadlines(folder, text=DEADLINES):
    (folder / "deadlines.toml").write_text(text, "utf-8")
    return folder / "deadlines.toml"


def test_a_file_alone_without_namespaces_and_a_grader_that_fails(course, tmp_path):
    """A result says first what isolation it had; a grader that fails leaves none, not even an old one."""
    there, stubs = Autograder(tmp_path, course, labs=("lab-02",)), tmp_path / "stubs"
    program(stubs / "bwrap", "echo refused >&2; exit 1")
    shutil.copy(EXAMPLES / "submissions/student-01/lab-02/starter.py", there.root / "submission")
    result = there.grade(stubs)
    assert result, there.found.stderr
    assert result["output"].startswith("Weak isolation") and result["extra_data"]["isolation"] == "limits"
    assert result["score"] == 100 and "student" not in there.found.stderr  # there was no metadata
    scripts = there.root / "source/course/labs/lab-02/author/random_scripts.py"
    away = scripts.rename(tmp_path / "away.py")
    assert there.grade() is None
    away.rename(scripts)
    assert there.found.returncode != 0 and "NOT GRADED" in there.found.stderr


# ------------------------------------------------------------------------------------------- GitHub Classroom


WORKFLOW = (EXAMPLES / "classroom.yml").read_text("utf-8")


def test_the_guide_shows_the_classroom_workflow():
    workflow = yaml.safe_load(WORKFLOW)
    assert f"```yaml\n{WORKFLOW}```" in GUIDE
    assert {*workflow[True]["workflow_dispatch"]["inputs"]} == {"assignment", "labs"}  # YAML reads on as True
    commands = [step["run"] for step in workflow["jobs"]["grade"]["steps"] if "run" in step]
    assert not any("${{" in command for command in commands)  # what somebody types is no part of a script
    assert "python -m labs grade handed-in/*-submissions --out report" in commands[-1]


@pytest.mark.soak
def test_the_classroom_workflow_grades_what_it_clones(course, tmp_path):
    (job,) = yaml.safe_load(WORKFLOW)["jobs"].values()
    checkout, repository = tmp_path / "course", tmp_path / "repository"
    checkout.symlink_to(course)
    for student in (EXAMPLES / "submissions").iterdir():  # as repositories of the student edition are
        shutil.copytree(student, repository / f"labs-{student.name}" / "labs")
    stubs, log = tmp_path / "stubs", tmp_path / "log"
    for name in ("pip", "sudo"):
        program(stubs / name, f'echo "{name} $*" >> {log}')
    program(stubs / "python", PYTHON)
    clone = f'[ "$1 $2" = "classroom clone" ] && mkdir "$7" && cp -R {repository} "$7/labs-submissions"'
    program(stubs / "gh", f'echo "gh $*" >> {log}\n[ "$1" = extension ] || {{ {clone}; }}')
    wished = {"ASSIGNMENT": "1234", "LABS": "1,2", "SEED": "spring", "GH_TOKEN": "none"}
    for step in (step for step in job["steps"] if "run" in step):
        found = run(["bash", "-e", "-c", step["run"]], checkout, stubs, **wished)
        assert found.returncode == 0, found.stderr
    assert "mean 138.0 of 200 points" in found.stdout and (checkout / "report" / "index.html").exists()
    said = log.read_text("utf-8")
    assert "pip install -e .[grade] -c constraints.txt" in said and "install -y bubblewrap" in said
    assert "--assignment-id 1234" in said


# ------------------------------------------------------------------------------------------------- the guide


@pytest.mark.soak
def test_what_the_guide_shows_is_what_its_commands_print(tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    programs = tmp_path / "programs"
    program(programs / "python", PYTHON)
    shown = "".join(re.findall(r"^```console\n(.*?)^```", GUIDE, re.M | re.S))
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.M)
    assert len(commands) == 9
    for line, output in commands:
        found = run(["bash", "-c", line], tmp_path, programs, PYTHONPATH=str(ROOT))
        assert found.stdout == output, f"{line}\n{found.stderr}"


def test_its_case_is_the_one_there():
    case = (EXAMPLES / "hidden/lab-02/overdrawn.json").read_text("utf-8")
    assert f"```json\n{case}```" in GUIDE
    assert "(docs/instructors.md)" in (ROOT / "README.md").read_text("utf-8")


def test_students_get_neither_the_guide_nor_its_examples():
    for path in ("docs/instructors.md", "docs/examples", "labs/kit/grader"):
        assert (ROOT / path).exists() and export._is_left_out(ROOT / path)
