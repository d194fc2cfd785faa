"""One task of a file among the reference's others: what fails then is the fault of this task alone.

The other tasks' functions and methods are replaced by the reference's, which run in the file's own module.
"""

import ast
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from labs.kit.judge import loading
from labs.kit.judge.manifest import Lab, Task, functions
from labs.kit.judge.pristine import pristine_source


def isolated(lab: Lab, task: Task, source: str, path: Path) -> ModuleType:
    """A module of `source` in which every task but `task` is the reference's."""
    module = loading.execute(source, f"{lab.id}_{path.stem}".replace("-", "_"), path)
    reference = loading.load(lab.id, "solution")
    for key, value in vars(reference).items():
        module.__dict__.setdefault(key, value)  # imports, and what the reference defines for itself
    replaced = {}
    for other in lab.tasks:
        if other.name != task.name:
            old, new = transplanted(reference, module, other.name)
            replaced[id(old)] = new
    for function in defined_in(module):  # hash_block=hash_block, say, was bound before
        function.__defaults__ = tuple(replaced.get(id(v), v) for v in function.__defaults__ or ()) or None
        defaults = (function.__kwdefaults__ or {}).items()
        function.__kwdefaults__ = {key: replaced.get(id(value), value) for key, value in defaults}
    return module


def transplanted(reference: ModuleType, module: ModuleType, name: str) -> tuple[Any, Any]:
    """Put the reference's function, class or method of this name into the module; the old and the new."""
    owner, donor = module, reference
    *outer, last = name.split(".")
    for one in outer:
        owner, donor = getattr(owner, one), getattr(donor, one)
    old, new = vars(owner).get(last), rebound(vars(donor)[last], module)
    setattr(owner, last, new)
    return old, new


def rebound(value: Any, module: ModuleType) -> Any:
    """A function, property or class whose code finds its global names in `module`."""
    if isinstance(value, FunctionType):
        copy = FunctionType(
            value.__code__, module.__dict__, value.__name__, value.__defaults__, value.__closure__
        )
        copy.__kwdefaults__, copy.__doc__ = value.__kwdefaults__, value.__doc__
        return copy
    if isinstance(value, property):
        return property(*(rebound(part, module) for part in (value.fget, value.fset, value.fdel)))
    if isinstance(value, staticmethod | classmethod):
        return type(value)(rebound(value.__func__, module))
    if isinstance(value, type):
        members = {k: v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__")}
        return type(value)(
            value.__name__, value.__bases__, {k: rebound(v, module) for k, v in members.items()}
        )
    return value


def defined_in(module: ModuleType) -> list[FunctionType]:
    """The functions and methods whose global names are the module's."""
    values = [*vars(module).values()]
    values += [part for value in values if isinstance(value, type) for part in vars(value).values()]
    values = [value.fget if isinstance(value, property) else value for value in values]
    return [v for v in values if isinstance(v, FunctionType) and v.__globals__ is module.__dict__]


def unwritten(lab: Lab, source: str) -> list[str]:
    """The names of the tasks that are as they came, in a file that parses."""
    try:
        yours, pristine = functions(source), functions(pristine_source(lab))
    except SyntaxError:
        return []

    def untouched(name: str) -> bool:
        parts = [part for part in pristine if f"{part}.".startswith(f"{name}.")]
        return all(part in yours and _body(yours[part]) == _body(pristine[part]) for part in parts)

    return [task.name for task in lab.tasks if untouched(task.name)]


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "".join(map(ast.dump, node.body))
