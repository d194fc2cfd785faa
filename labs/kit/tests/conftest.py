"""A copy of the course to break: the kit with lab-01, and with it as lab-02, in a folder."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO, StringIO, TextIOWrapper
from math import prod
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from rich.console import Console

from labs.__main__ import main
from labs.kit.judge import loading, manifest, pristine, processes, random_scripts
from labs.kit.learner import commands, progress
from labs.kit.tests import forked
from mini_engine.tests.browser import browser  # noqa: F401
from mini_engine.tests.soak import SOAK

ROOT = manifest.LABS_DIR.parent

# In the background of a shell Ctrl-C is ignored, by all that is started there too; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


UNPAID = ("        budget -= num_tokens\n\n    return", "\n    return")  # of the solution, and what breaks it


def num_tests(lab_id: str) -> int:
    """Return how many tests pytest counts in a lab: each case of a test is one."""
    path = manifest.find_lab(lab_id).file("test_lab.py")
    module = loading.execute(path.read_text("utf-8"), f"{lab_id}_counted", path)
    tests = [test for name, test in vars(module).items() if name.startswith("test_")]
    marks = [
        [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"] for test in tests
    ]
    return sum(prod(len([*mark.args[1]]) for mark in own) for own in marks)


class Course:
    """A copy of the course with lab-01 in it, used as a learner uses it; `variables` are its environment."""

    def __init__(self, root: Path):
        self.root, self.labs = root, root / "labs"
        self.variables = {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "PYTHONUTF8": "1"}
        # What Python has compiled comes along; what pytest has, names the files that it was made from.
        others = "lab-*", ".state", "*-pytest-*.pyc", "tests", "pristine", "browser", "grader"
        ignored = shutil.ignore_patterns(*others)
        shutil.copytree(ROOT / "labs", self.labs, ignore=ignored)
        self.add("lab-01")
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)

    def add(self, lab_id: str) -> None:
        """lab-01's files as another lab."""
        shutil.copytree(ROOT / "labs" / "lab-01", self.labs / lab_id, ignore=shutil.ignore_patterns("__pyc*"))
        test_file = self.labs / lab_id / "test_lab.py"
        test_file.write_text(test_file.read_text("utf-8").replace('"lab-01"', f'"{lab_id}"'), "utf-8")

    def file(self, name: str, lab_id: str = "lab-01") -> Path:
        beside = name in manifest.VISIBLE or name.startswith("../")
        return self.labs / lab_id / name if beside else self.labs / lab_id / "author" / name

    def edit(self, name: str, old: str, new: str, lab_id: str = "lab-01") -> None:
        path = self.file(name, lab_id)
        text = path.read_text("utf-8")
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new), "utf-8")

    def write(self, body: str, lab_id: str = "lab-01") -> None:
        """The learner's schedule_step, by its body."""
        source = manifest.replace_body(
            self.file("starter.py", lab_id).read_text("utf-8"), "schedule_step", body
        )
        self.file("starter.py", lab_id).write_text("from mini_engine.request import *\n" + source, "utf-8")

    def solve(self, old: str = "", new: str = "", lab_id: str = "lab-01") -> None:
        """The reference as the learner's file, with one thing changed."""
        source = self.file("solution.py", lab_id).read_text("utf-8")
        assert old in source, f"{old!r} is not in solution.py"
        self.file("starter.py", lab_id).write_text(source.replace(old, new) if old else source, "utf-8")

    def solve_meanwhile(self) -> None:
        """A wrong file, which is saved anew, with the solution, while it is tested."""
        self.solve(*UNPAID)
        with self.file("starter.py").open("a", encoding="utf-8") as file:
            file.write("\nimport shutil, pathlib\nhere = pathlib.Path(__file__)\n")
            file.write("shutil.copy(here.with_name('solution.py'), here)\n")

    def environment(self) -> dict[str, str]:
        """This process's, with the copied labs in front of the real ones."""
        return {k: v for k, v in os.environ.items() if k != "LAB_IMPL"} | self.variables

    def command(self, *line: str, stdin: str = "") -> subprocess.CompletedProcess:
        """`python -m labs LINE` in this process, which is quicker. Labs that are loaded stay loaded."""
        out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment().items():
                patch.setenv(name, value)
            patch.delenv("LAB_IMPL", raising=False)
            for module in (manifest, processes, pristine, commands, progress):
                patch.setattr(module, "LABS_DIR", self.labs)
            patch.setattr(progress, "STATE", self.labs / ".state")
            forking = SimpleNamespace(Popen=forked.Popen, DEVNULL=subprocess.DEVNULL)
            patch.setattr(processes, "subprocess", forking)
            patch.setattr(commands, "console", Console(highlight=False))
            patch.chdir(self.root)
            patch.setattr(sys, "argv", ["labs", *line])
            patch.setattr(sys, "stdin", StringIO(stdin))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as end:
                main()
        said = (stream.buffer.getvalue().decode() for stream in (out, err))
        return subprocess.CompletedProcess(line, end.value.code or 0, *said)

    def run(
        self, *line: str, impl: str | None = None, stdin: str = "", **kwargs
    ) -> subprocess.CompletedProcess:
        """`python -m LINE` in the course's folder, as text."""
        environment = self.environment() | ({"LAB_IMPL": impl} if impl else {})
        command = [sys.executable, "-m", *line]
        return forked.run(command, cwd=self.root, env=environment, input=stdin, **kwargs)

    def pytest(self, *line: str, impl: str | None = "starter") -> subprocess.CompletedProcess:
        return self.run("pytest", "-p", "no:cacheprovider", *(line or ("labs",)), impl=impl)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> tuple[Path, dict[Path, bytes]]:
    """The folder of each test's course, one after the other, and what pytest has compiled there."""
    return tmp_path_factory.mktemp("courses") / "course", {}


@pytest.fixture
def course(compiled) -> Iterator[Course]:
    folder, files = compiled
    folder.mkdir()
    course = Course(folder)
    for path, code in files.items():
        if path.parents[1].exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(code)
    yield course
    files |= {path: path.read_bytes() for path in folder.glob("**/__pycache__/*-pytest-*.pyc")}
    shutil.rmtree(folder)


@pytest.fixture
def copied_lab(course, monkeypatch):
    """lab-01 of the copied course as a Lab of this process, read again with every call."""
    monkeypatch.setattr(manifest, "LABS_DIR", course.labs)
    return lambda: manifest.find_lab("lab-01")


@contextmanager
def fewer_cases():
    """Give each lab 16 of its public cases, for tests that grade many right files; a soak has them all."""
    every = random_scripts.count
    with pytest.MonkeyPatch.context() as patch:
        if not SOAK:
            patch.setattr(random_scripts, "count", lambda lab_id: min(16, every(lab_id)))
        yield


@pytest.fixture
def few_cases():
    with fewer_cases():
        yield


@pytest.fixture(scope="session")
def spinning():
    """with spinning(6): six processes beside this one compute without end, and end with the block.

    On Linux they share its first processor, unless they ask for `everywhere`.
    """
    pin = "import os, sys\nif sys.argv[1:]:\n    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    line = [sys.executable, "-c", pin + "print(flush=True)\nwhile True:\n    pass"]

    @contextmanager
    def spin(count: int, everywhere: bool = False):
        pinned = [] if everywhere or not hasattr(os, "sched_setaffinity") else ["pinned"]
        running = [subprocess.Popen([*line, *pinned], stdout=subprocess.PIPE) for _ in range(count)]
        try:
            for process in running:
                process.stdout.readline()
            yield
        finally:
            for process in running:
                process.kill()
                process.communicate()

    return spin


# ----------------------------------------------------------------- the book and the labs' pages, in a browser


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The whole site as `make docs` leaves it: in SITE, built by make test beforehand, or built here."""
    if os.environ.get("SITE"):
        return Path(os.environ["SITE"]).absolute()
    for package in ("sphinx_book_theme", "myst_nb"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    out = tmp_path_factory.mktemp("book")
    line = [*"-m sphinx -W --keep-going -q -c docs -d".split(), str(out / "trees"), ".", str(out / "site")]
    for command in (line, ["-m", "labs.kit.browser.site", str(out / "site")]):
        run = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stderr[-4000:]
    return out / "site"


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> Path:
    """The labs' pages; they need npm."""
    from labs.kit.browser.build import build, npm

    try:
        npm()
    except ValueError as error:
        pytest.skip(f"THE PAGES ARE NOT TESTED: {error}")
    if os.environ.get("SITE"):
        return Path(os.environ["SITE"]).absolute() / "write"
    folder = tmp_path_factory.mktemp("pages") / "site"
    build(folder)
    return folder


@pytest.fixture(scope="session")
def serving():
    """serving(folder): the address at which a folder is served, with the headers that it asks for."""
    from labs.kit.browser.serve import server

    with ExitStack() as running:

        def serve(folder: Path) -> str:
            one = running.enter_context(server(folder))
            Thread(target=one.serve_forever, daemon=True).start()
            running.callback(one.shutdown)
            return f"http://127.0.0.1:{one.server_port}"

        yield serve


LANDMARKS = ("region", "landmark-unique")  # what a page is divided into, for those that hear it


@pytest.fixture(scope="session")
def serious():
    """Find the serious and critical violations that axe-core reports in a page or frame, and of landmarks."""
    from labs.kit.browser.build import npm

    try:
        axe = (npm() / "axe-core" / "axe.min.js").read_text("utf-8")
    except ValueError as error:
        pytest.skip(f"NOT LOOKED AT WITH AXE: {error}")

    def find(frame) -> list[str]:
        frame.evaluate(axe)
        # A colour on its way from one to another is neither; what moves on purpose goes on.
        frame.evaluate(
            "document.getAnimations().forEach(one => one instanceof CSSTransition && one.finish())"
        )
        found = frame.evaluate(
            "axe.run(document, {resultTypes: ['violations'], iframes: false, preload: false})"
        )
        return [
            f"{one['id']}: {one['help']}: {node['html'][:160]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical") or one["id"] in LANDMARKS
            for node in one["nodes"]
        ]

    return find
