"""Reads lab.toml and mistakes.toml; anything missing or wrong in them is a LabError."""

import ast
import os
import re
import textwrap
import tomllib
from collections import abc
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from dataclasses import replace as changed
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from labs.kit.toys.words import brief
from mini_engine.renamed import modernized

LABS_DIR = Path(__file__).resolve().parents[2]
IMPLS = ("solution", "starter", "engine")
# The files of a lab that a learner sees; what authors and judges need is in its folder author/.
VISIBLE = ("README.md", "AFTER.md", "starter.py", "starter.new.py", "solution.py", "test_lab.py", "images")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Made = TypeVar("Made")
_parsing = Lock()


class LabError(Exception):
    """Something about a lab is wrong; the message is one clear sentence."""


@dataclass(frozen=True)
class Task:
    """One thing to write: a function, a class, or a method given as Class.method."""

    name: str
    points: int
    engine: str  # its twin, module:name
    tests: Sequence[str]
    hints: Sequence[str]  # nudge, where to look, pseudocode
    torch: bool = False  # needed by its tests, which a web page does not have


@dataclass(frozen=True)
class Mistake:
    """A known mistake, made from solution.py by `find` and `replace`, by `edits` (pairs of these), or
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
    keeps_state: bool = False  # between calls, so that a test's result depends on the tests before it
    or_in: Sequence[str] = ()  # tasks that may be blamed as well, where a class is judged whole
    missed_by_scripts: str = ""  # why the random scripts alone cannot catch it

    def apply(self, source: str) -> str:
        """Return the wrong solution's text. Raise LabError if a snippet does not occur exactly once."""
        for find, replace in (*self.edits, *([(self.find, self.replace)] if self.find else ())):
            if (times := source.count(find)) != 1:
                once = "its snippet must occur exactly once in solution.py, but occurs"
                raise LabError(f"mistake {self.id!r}: {once} {times} times: {find!r}")
            source = source.replace(find, replace)
        return replace_body(source, self.task, self.body) if self.body else source


@dataclass(frozen=True)
class Lab:
    """One lab folder and its lab.toml."""

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
        """Return the path of a file of the lab: beside the learner's, or in author/."""
        return self.path / name if name in VISIBLE else self.path / "author" / name

    def task(self, name: str) -> Task:
        """Find a task by its name or a unique part of it, as in `admit`. Raise LabError with the choices."""
        tasks = {task.name: task for task in self.tasks}
        name = modernized(f".{name}")[1:]
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
        """The tasks that each test judges, by the test's name."""
        names = dict.fromkeys(test for task in self.tasks for test in task.tests)
        return {name: [task for task in self.tasks if name in task.tests] for name in names}

    @property
    def without_torch(self) -> "Lab":
        """The lab as a web page has it: with those of its tasks whose tests need no torch."""
        return changed(self, tasks=[task for task in self.tasks if not task.torch])

    @property
    def has_solution(self) -> bool:
        """Whether this edition of the course has the solution; the student edition does not."""
        return self.file("solution.py").exists()

    @cached_property
    def uses_torch(self) -> bool:
        """Whether its tests use torch, by themselves or through the kit's models."""
        files = (self.file(name) for name in ("test_lab.py", "scenarios.py", "random_scripts.py"))
        texts = (file.read_text(encoding="utf-8") for file in files if file.exists())
        return any(
            re.search(r"^\s*(import|from) (torch|labs\.kit\.tensor_toys)\b", text, re.MULTILINE)
            for text in texts
        )

    @cached_property
    def claims(self) -> dict[str, str]:
        """The claim of each test, by its name: the first line of its docstring, or ""."""
        tree = functions(self.file("test_lab.py").read_text(encoding="utf-8"))
        tests = {name: ast.get_docstring(node) or "" for name, node in tree.items() if name[:5] == "test_"}
        return {name: text.partition("\n")[0] for name, text in tests.items()}

    @cached_property
    def mistakes(self) -> list[Mistake]:
        path = self.file("mistakes.toml")  # the student edition has none
        entries = tables(path, toml(path), "mistakes") if path.exists() else []
        return [made(path, Mistake, entry) for entry in entries]


def lab_ids() -> list[str]:
    return sorted(path.parents[1].name for path in LABS_DIR.glob("lab-*/author/lab.toml"))


def find_lab(lab_id: str) -> Lab:
    """Find a lab by its id; `lab-1`, `01` and `1` are understood. Raise LabError with the ids of all labs."""
    name = lab_id.strip().lower().replace("\\", "/").removesuffix("/").removesuffix("/starter.py")
    match = re.fullmatch(r"(?:\./)?(?:labs/)?(?:lab)?[-_ ]?(\d{1,4})", name)
    name = f"lab-{int(match[1]):02}" if match else lab_id
    path = LABS_DIR / name / "author" / "lab.toml"
    if not match or not path.exists():
        raise LabError(f"there is no lab {brief(lab_id, 30)}; there are {', '.join(lab_ids())}")
    data = toml(path)
    tasks = [made(path, Task, entry) for entry in tables(path, data, "tasks")]
    for number, task in enumerate(tasks):
        if any(task.name == other.name for other in tasks[:number]):
            raise LabError(f"{path}: there are two tasks {task.name!r}; a name says which is meant")
        if task.points < 0:
            raise LabError(f"{path}: {task.name!r}: points must be 0 or more, but is {task.points}")
        if ":" not in task.engine:
            raise LabError(f"{path}: {task.name!r}: engine must be module:name, but is {task.engine!r}")
    tasks = [changed(task, hints=[hint.strip() for hint in task.hints]) for task in tasks]
    ours = {"id": name, "path": path.parents[1], "tasks": tasks}
    if taken := [key for key in ("id", "path") if key in data]:
        raise LabError(f"{path}: {taken[0]!r} must not be given: it is the folder's")
    lab = made(path, Lab, data | ours)
    if lab.timeout <= 0 or lab.minutes < 1:
        times = f"{lab.timeout} and {lab.minutes}"
        raise LabError(f"{path}: timeout and minutes must be above 0, but are {times}")
    return lab


def impl_from_environment() -> str:
    """Return LAB_IMPL, by default solution, in the student edition starter. Raise LabError if wrong."""
    has_solutions = any(LABS_DIR.glob("lab-*/solution.py"))
    impl = os.environ.get("LAB_IMPL") or ("solution" if has_solutions else "starter")
    if impl not in IMPLS:
        choices = "solution, starter or engine" if has_solutions else "starter or engine"
        raise LabError(f"LAB_IMPL must be {choices}, but is {impl!r}")
    if impl == "solution" and not has_solutions:
        raise LabError("LAB_IMPL is solution, but this edition of the course comes without solutions")
    return impl


def parsed(source: str) -> ast.Module:
    """Return a file's syntax tree. Raise SyntaxError, whatever is wrong with the text.

    One thread at a time: before Python 3.11.5 two that parse miscount their depth.
    """
    with _parsing:
        try:
            return ast.parse(source)
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte, before 3.11.4; or too deep
            raise SyntaxError(str(error)) from None


def functions(source: str) -> dict[str, Function]:
    """Return every function and method of a file, by qualified name, with its syntax tree."""
    found: dict[str, Function] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, Function):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(parsed(source).body, "")
    return found


def replace_body(source: str, name: str, body: str) -> str:
    """Return the source with another body for one function; signature and docstring stay."""
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


def toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise LabError if it is not TOML, OSError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path}: {str(error) or 'nested too deep'}") from None


def tables(path: Path, data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tables [[key]] of a TOML file. Raise LabError if there is none."""
    found = data.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(entry, dict) for entry in found):
        raise LabError(f"{path}: it needs sections [[{key}]], one for each, but has {brief(found, 60)}")
    return found


def made(path: Path, kind: type[Made], entry: Mapping[str, Any]) -> Made:
    """Return a table of a TOML file as a dataclass. Raise LabError for an unknown or missing key, and for a
    value of another type."""
    # typing has no name for "any dataclass".
    hints, known = get_type_hints(kind), {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    named = next((entry[key] for key in ("name", "id", "title", "ask", "text") if entry.get(key)), "")
    where = f"{path}: {brief(named, 60)}" if named else f"{path}"
    for key in known:
        needed = known[key].default is MISSING and known[key].default_factory is MISSING
        if needed and key not in entry:
            raise LabError(f"{where}: {key!r} is missing")
    for key, value in entry.items():
        if key not in known:
            raise LabError(f"{where}: {key!r} is not known; there are {', '.join(known)}")
        if not fits(value, hints[key]):
            raise LabError(f"{where}: {key} must be {words(hints[key])}, but is {brief(value, 60)}")
    return kind(**entry)


def fits(value: Any, wanted: Any) -> bool:
    """Return whether a value has a dataclass field's type: a plain one, or a sequence or mapping of such."""
    origin, inside = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if origin is UnionType:
        return any(fits(value, one) for one in inside)
    if origin in (abc.Sequence, list):
        return isinstance(value, list) and all(fits(one, inside[0]) for one in value)
    if origin is tuple:
        if inside[-1] is ...:
            inside = inside[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, list | tuple) and len(value) == len(inside) and all(map(fits, value, inside))
    if origin in (abc.Mapping, dict):
        return isinstance(value, dict) and all(fits(one, inside[1]) for one in value.values())
    if wanted is float:
        return type(value) in (int, float) and -1e300 < value < 1e300  # so that a float can hold it
    return isinstance(value, wanted) and (wanted is bool) == (type(value) is bool)


def words(wanted: Any) -> str:
    """Return a type in words."""
    plain = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    origin = get_origin(wanted)
    if origin in (abc.Sequence, tuple):
        return f"a list of {words(get_args(wanted)[0]).removeprefix('a ')}"
    return "a table" if origin is abc.Mapping else plain.get(wanted, "another")
