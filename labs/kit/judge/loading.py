"""Loads a lab's files by path, for the `lab` fixture of the tests.

A starter that cannot be loaded becomes a `Broken` lab, which raises the reason as soon as a test uses it.
So the collection never fails, and the other labs go on.
"""

import importlib
import sys
import traceback
import types
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from labs.kit.judge.guard import PrintFlood, TimeUp, deadline, kept_alive, late, silence
from labs.kit.judge.manifest import Lab, LabError, Mistake, find_lab
from labs.kit.judge.pristine import pristine_source, with_given
from labs.kit.toys.words import describe
from mini_engine.renamed import modernized


class LoadProblem(Exception):
    """The reason why an implementation cannot be tested, in words for the learner."""


class Broken:
    """Stands for an implementation that did not load; raises its LoadProblem when it is used."""

    def __init__(self, problem: LoadProblem):
        self._problem = problem

    def __getattr__(self, name: str) -> NoReturn:
        raise self._problem


def execute(source: str, module_name: str, path: Path | str) -> types.ModuleType:
    """Run source as a new module, with the new names of the API; dataclasses look for it in sys.modules."""
    source = modernized(source)
    module = types.ModuleType(module_name)
    module.__file__ = str(path)
    module.__dict__["__source__"] = source  # for tests of the import itself
    sys.modules[module_name] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@cache
def load(lab_id: str, name: str) -> types.ModuleType:
    """Return a lab's file as a module: load("lab-01", "scenarios")."""
    lab = find_lab(lab_id)
    path = lab.file(f"{name}.py")
    if name == "solution" and not path.exists():  # the student edition has it packed
        path = lab.path.parent / "kit" / "pristine" / f"{lab.id}-reference.py"
    if not path.exists():
        raise LabError(f"{lab.id} has no file {name}.py")
    return execute(path.read_text(encoding="utf-8"), _module_name(lab, name), path)


@cache
def namespace(lab_id: str, impl: str) -> types.ModuleType | Broken:
    """Return the implementation under test: starter.py, solution.py, or the engine's own parts."""
    lab = find_lab(lab_id)
    try:
        if impl == "engine":
            return _engine(lab)
        return load(lab_id, "solution") if impl == "solution" else _starter(lab)
    except LoadProblem as problem:
        return Broken(problem)


def pristine_starter(lab: Lab) -> types.ModuleType:
    """Return the starter as generated, whatever starter.py has become."""
    return execute(pristine_source(lab), _module_name(lab, "pristine"), lab.file("starter.py"))


def fresh(lab: Lab) -> types.ModuleType | Broken:
    """Return the learner's file, loaded once more without any state; not as it was saved since."""
    try:
        return _starter(lab, "again", vars(namespace(lab.id, "starter")).get("__source__"))
    except LoadProblem as problem:
        return Broken(problem)


def mistaken(lab: Lab, mistake: Mistake) -> types.ModuleType:
    """Return the solution with a known mistake in it, made in memory."""
    source = mistake.apply(lab.file("solution.py").read_text(encoding="utf-8"))
    return execute(source, _module_name(lab, f"mistake_{mistake.id}"), f"<{lab.id}: {mistake.id}>")


def _module_name(lab: Lab, name: str) -> str:
    return f"{lab.id}_{name}".replace("-", "_")


def _engine(lab: Lab) -> types.ModuleType:
    parts = types.ModuleType(f"{lab.id}_engine")
    twins = {task.name: task.engine for task in lab.tasks} | {k: v for k, v in lab.given.items() if v}
    for name, twin in twins.items():
        module_name, _, qualified = twin.partition(":")
        try:
            part = getattr(importlib.import_module(module_name), qualified.split(".")[0])
        except (ImportError, AttributeError) as error:
            raise LoadProblem(f"{lab.id}: the engine's {name} is not at {twin}: {error}") from error
        setattr(parts, name.split(".")[0], part)
    return parts


def _starter(lab: Lab, name: str = "starter", source: str | None = None) -> types.ModuleType:
    path = lab.file("starter.py")
    source = source or read(lab, path)
    try:
        with deadline(lab.timeout), silence(), kept_alive():
            module = execute(source, _module_name(lab, name), path)
    except TimeUp as error:
        problem = f"importing starter.py: {late(error, lab.timeout)}"
    except PrintFlood as error:
        problem = f"importing starter.py floods the screen: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            problem = f"starter.py does not parse, line {error.lineno}: {error.msg}"
        else:
            where = f", line {line}" if (line := line_in_starter(error)) else ""
            problem = f"starter.py fails at import{where}: {describe(error)}"
    else:
        missing = ", ".join(task.name for task in lab.tasks if not _has(module, task.name))
        if not missing:
            return module
        again = f"put the name back, or start over with: python -m labs reset {lab.id}"
        problem = f"starter.py no longer has {missing}; {again}"
    raise LoadProblem(f"{lab.id}: {problem}")


def line_in_starter(error: BaseException) -> int | None:
    """Return the last line of a starter.py that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if Path(f.filename).name == "starter.py"), None)


def read(lab: Lab, path: Path) -> str:
    """Return the text of the learner's file, without a byte order mark. Raise LoadProblem."""
    try:
        source = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        problem = f"is missing; restore it with: python -m labs reset {lab.id}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        problem = f"is not UTF-8 text (byte {error.start} is {byte:#x}); save it as UTF-8"
    else:
        if "\0" not in source:
            return with_given(lab, modernized(source))
        problem = f"has a null byte in line {source[: source.index(chr(0))].count(chr(10)) + 1}; delete it"
    raise LoadProblem(f"{lab.id}: starter.py {problem}")


def _has(module: types.ModuleType, qualified: str) -> bool:
    value: Any = module
    for name in qualified.split("."):
        value = getattr(value, name, None)
    return callable(value) or isinstance(value, property)
