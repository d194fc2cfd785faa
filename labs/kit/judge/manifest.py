"""Reads lab.toml and bugs.toml, and complains in words when something is missing from them."""

import ast
import os
import re
import textwrap
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

LABS_DIR = Path(__file__).resolve().parents[2]
IMPLS = ("solution", "starter", "engine")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class LabError(Exception):
    """Something about a lab is wrong; the message is one clear sentence for whoever reads it."""


@dataclass(frozen=True)
class Task:
    """One thing to write: a function, a class, or a method given as Class.method."""

    name: str
    points: int
    engine: str  # its twin, module:name
    tests: tuple[str, ...]
    hints: tuple[str, ...]  # nudge, where to look, pseudocode


@dataclass(frozen=True)
class Bug:
    """A named wrong solution, made from solution.py by `edits` (pairs of find and replace) or by
    giving the function `task` another `body`."""

    id: str
    title: str
    misconception: str
    hint: str
    caught_by: str
    edits: tuple[tuple[str, str], ...] = ()
    task: str = ""
    body: str = ""

    def apply(self, source: str) -> str:
        """The wrong solution's text. Raises LabError when a snippet does not occur exactly once."""
        for find, replace in self.edits:
            if source.count(find) != 1:
                raise LabError(
                    f"bug {self.id!r}: its snippet must occur exactly once in solution.py, "
                    f"but occurs {source.count(find)} times: {find!r}"
                )
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
    prerequisites: tuple[str, ...]
    tasks: tuple[Task, ...]
    given: dict[str, str] = field(default_factory=dict)  # name: engine twin, or ""
    pointers: tuple[dict[str, str], ...] = ()
    timeout: float = 10.0  # seconds a test may take

    def file(self, name: str) -> Path:
        return self.path / name

    def task(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        raise LabError(
            f"{self.id} has no task {name!r}; its tasks are {', '.join(t.name for t in self.tasks)}"
        )

    @cached_property
    def tests(self) -> dict[str, Task]:
        """Test name to the task it belongs to."""
        return {test: task for task in self.tasks for test in task.tests}

    @cached_property
    def bugs(self) -> tuple[Bug, ...]:
        path = self.file("bugs.toml")
        if not path.exists():  # the student edition has none
            return ()
        bugs = []
        for entry in _toml(path).get("bugs", ()):
            entry = dict(entry)
            edits = [tuple(pair) for pair in entry.pop("edits", ())]
            if "find" in entry:
                edits.append((entry.pop("find"), entry.pop("replace", "")))
            try:
                bugs.append(Bug(**entry, edits=tuple(edits)))
            except TypeError as error:
                raise LabError(f"{path}: bug {entry.get('id')!r}: {error}") from None
        return tuple(bugs)


def lab_ids() -> list[str]:
    return sorted(path.parent.name for path in LABS_DIR.glob("lab-*/lab.toml"))


def find_lab(lab_id: str) -> Lab:
    """By id; `lab-1`, `01` and `1` are understood. Raises LabError naming the labs there are."""
    name = lab_id.strip().lower().replace("\\", "/").removesuffix("/").removesuffix("/starter.py")
    match = re.fullmatch(r"(?:\./)?(?:labs/)?(?:lab)?[-_ ]?(\d{1,4})", name)
    name = f"lab-{int(match[1]):02}" if match else lab_id
    path = LABS_DIR / name / "lab.toml"
    if not match or not path.exists():
        raise LabError(f"there is no lab {lab_id!r}; there are {', '.join(lab_ids())}")
    data = _toml(path)
    try:
        tasks = tuple(
            Task(
                name=task["name"],
                points=task["points"],
                engine=task["engine"],
                tests=tuple(task["tests"]),
                hints=tuple(hint.strip() for hint in task["hints"]),
            )
            for task in data["tasks"]
        )
        return Lab(
            id=name,
            path=path.parent,
            title=data["title"],
            question=data["question"],
            minutes=data["minutes"],
            prerequisites=tuple(data["prerequisites"]),
            tasks=tasks,
            given=dict(data.get("given", {})),
            pointers=tuple(data.get("pointers", ())),
            timeout=float(data.get("timeout", 10.0)),
        )
    except KeyError as error:
        raise LabError(f"{path}: the key {error} is missing") from None


def impl_from_environment() -> str:
    """LAB_IMPL, or solution (in the student edition starter).

    Raises LabError for a value that is not one of the three.
    """
    has_solutions = any(LABS_DIR.glob("lab-*/solution.py"))
    impl = os.environ.get("LAB_IMPL") or ("solution" if has_solutions else "starter")
    if impl not in IMPLS:
        raise LabError(f"LAB_IMPL must be solution, starter or engine, but is {impl!r}")
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
    lines = source.splitlines(keepends=True)
    if lines[node.body[0].lineno - 1][: node.body[0].col_offset].strip():
        raise LabError(f"{name}: put its body on a line of its own")
    has_docstring = ast.get_docstring(node, clean=False) is not None
    first, rest = node.body[0], node.body[1:]
    start = first.end_lineno if has_docstring else _above(source, node, first.lineno)
    indent = " " * first.col_offset
    end = rest[-1].end_lineno if rest else first.end_lineno
    new = textwrap.indent(textwrap.dedent(body).strip("\n") + "\n", indent)
    return "".join([*lines[:start], new, *lines[end:]])


def _above(source: str, node: Function, first_line: int) -> int:
    """The last line before a body without docstring, so that its leading comments go with it."""
    lines = source.splitlines()
    above = first_line - 1
    while above > node.lineno and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    return above


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"{path}: {error}") from None
