"""Reads lab.toml and bugs.toml, and complains in words when something is missing from them."""

import ast
import os
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from labs.kit.toys.words import brief

LABS_DIR = Path(__file__).resolve().parents[2]
IMPLS = ("solution", "starter", "engine")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Made = TypeVar("Made")


class LabError(Exception):
    """Something about a lab is wrong; the message is one clear sentence for whoever reads it."""


@dataclass(frozen=True)
class Task:
    """One thing to write: a function, a class, or a method given as Class.method."""

    name: str
    points: int
    engine: str  # its twin, module:name
    tests: Sequence[str]
    hints: Sequence[str]  # nudge, where to look, pseudocode


@dataclass(frozen=True)
class Bug:
    """A named wrong solution, made from solution.py by `find` and `replace`, by `edits` (pairs of these) or
    by giving the function `task` another `body`."""

    id: str
    title: str
    misconception: str
    hint: str
    caught_by: str
    edits: Sequence[tuple[str, str]] = ()
    task: str = ""
    body: str = ""
    find: str = ""
    replace: str = ""
    storm: str = ""  # why the lab's storm alone cannot catch it

    def apply(self, source: str) -> str:
        """The wrong solution's text. Raises LabError when a snippet does not occur exactly once."""
        for find, replace in (*self.edits, *([(self.find, self.replace)] if self.find else ())):
            if (times := source.count(find)) != 1:
                once = "its snippet must occur exactly once in solution.py, but occurs"
                raise LabError(f"bug {self.id!r}: {once} {times} times: {find!r}")
            source = source.replace(find, replace)
        return replace_body(source, self.task, self.body) if self.body else source


@dataclass(frozen=True)
class Lab:
    """One lab folder and what its lab.toml says."""

    id: str
    path: Path
    title: str
    question: str
    minutes: int
    prerequisites: Sequence[str]
    tasks: Sequence[Task]
    given: Mapping[str, str] = field(default_factory=dict)  # name: engine twin, or ""
    pointers: Sequence[Mapping[str, str]] = ()
    timeout: float = 10.0  # seconds a test may take

    def file(self, name: str) -> Path:
        return self.path / name

    def task(self, name: str) -> Task:
        """By name, or by a part of it that says which: `admit`, `next`. Raises LabError with the choices."""
        tasks = {task.name: task for task in self.tasks}
        if name in tasks:
            return tasks[name]
        short = name.removesuffix("()").strip("_").lower()
        found = [full for full in tasks if short in (part.strip("_").lower() for part in full.split("."))]
        if len(found) > 1:
            raise LabError(f"{self.id}: {name!r} may be {', '.join(found[:-1])} or {found[-1]}; which one?")
        if not found:
            raise LabError(f"{self.id} has no task {brief(name)}; its tasks are {', '.join(tasks)}")
        return tasks[found[0]]

    @cached_property
    def tests(self) -> dict[str, list[Task]]:
        """Test name to the tasks that it judges."""
        names = dict.fromkeys(test for task in self.tasks for test in task.tests)
        return {name: [task for task in self.tasks if name in task.tests] for name in names}

    @property
    def has_solution(self) -> bool:
        """Whether this edition of the course shows it; that for students does not."""
        return self.file("solution.py").exists()

    @cached_property
    def uses_torch(self) -> bool:
        """Whether its tests do."""
        files = (self.file(name) for name in ("test_lab.py", "scenarios.py", "storm.py"))
        texts = (file.read_text(encoding="utf-8") for file in files if file.exists())
        return any(re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE) for text in texts)

    @cached_property
    def bugs(self) -> list[Bug]:
        path = self.file("bugs.toml")  # the student edition has none
        return [_made(path, Bug, entry) for entry in _toml(path)["bugs"]] if path.exists() else []


def lab_ids() -> list[str]:
    return sorted(path.parent.name for path in LABS_DIR.glob("lab-*/lab.toml"))


def find_lab(lab_id: str) -> Lab:
    """By id; `lab-1`, `01` and `1` are understood. Raises LabError naming the labs there are."""
    name = lab_id.strip().lower().replace("\\", "/").removesuffix("/").removesuffix("/starter.py")
    match = re.fullmatch(r"(?:\./)?(?:labs/)?(?:lab)?[-_ ]?(\d{1,4})", name)
    name = f"lab-{int(match[1]):02}" if match else lab_id
    path = LABS_DIR / name / "lab.toml"
    if not match or not path.exists():
        raise LabError(f"there is no lab {brief(lab_id, 30)}; there are {', '.join(lab_ids())}")
    data = _toml(path)
    for task in data.get("tasks", ()):
        task["hints"] = [hint.strip() for hint in task.get("hints", ())]
    tasks = [_made(path, Task, task) for task in data.pop("tasks", ())]
    return _made(path, Lab, {"id": name, "path": path.parent, "tasks": tasks} | data)


def impl_from_environment() -> str:
    """LAB_IMPL, or solution (in the student edition starter).

    Raises LabError for a value that is not one of the three.
    """
    has_solutions = any(LABS_DIR.glob("lab-*/solution.py"))
    impl = os.environ.get("LAB_IMPL") or ("solution" if has_solutions else "starter")
    if impl not in IMPLS:
        choices = "solution, starter or engine" if has_solutions else "starter or engine"
        raise LabError(f"LAB_IMPL must be {choices}, but is {impl!r}")
    if impl == "solution" and not has_solutions:
        raise LabError("LAB_IMPL is solution, but this edition of the course comes without solutions")
    return impl


def functions(source: str) -> dict[str, Function]:
    """Every function and method of a file, by qualified name, with its syntax tree."""
    found: dict[str, Function] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, Function):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(source).body, "")
    return found


def replace_body(source: str, name: str, body: str) -> str:
    """The source with another body for one function; signature and docstring stay."""
    node = functions(source).get(name)
    if node is None:
        raise LabError(f"there is no function {name!r} in the file")
    lines, first = source.splitlines(keepends=True), node.body[0]
    if lines[first.lineno - 1][: first.col_offset].strip():
        raise LabError(f"{name}: put its body on a line of its own")
    if ast.get_docstring(node, clean=False) is not None:
        start = first.end_lineno or first.lineno
    else:  # leading comments go with the body
        start = first.lineno - 1
        while start > node.lineno and lines[start - 1].lstrip().startswith("#"):
            start -= 1
    new = textwrap.indent(textwrap.dedent(body).strip("\n") + "\n", " " * first.col_offset)
    return "".join([*lines[:start], new, *lines[node.body[-1].end_lineno :]])


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"{path}: {error}") from None


def _made(path: Path, kind: type[Made], entry: dict[str, Any]) -> Made:
    """What a table of a TOML file says, as a dataclass. Raises LabError for a key too many or too few."""
    try:
        return kind(**entry)
    except TypeError as error:
        raise LabError(f"{path}: {entry.get('name') or entry.get('id')!r}: {error}") from None
