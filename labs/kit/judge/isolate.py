"""Isolation of one task: the reference's code stands for all others, so a failure is this task's own.

The other tasks' functions and methods are replaced by the reference's, which run in the file's own module.
A class with other attributes than the reference's is left whole: their methods do not fit together.
"""

import ast
import dis
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from labs.kit.judge import loading
from labs.kit.judge.manifest import Lab, LabError, Mistake, Task, functions
from labs.kit.judge.pristine import pristine_source


def isolated(lab: Lab, task: Task, source: str, path: Path) -> ModuleType:
    """Return a module of `source` in which every task but `task` is the reference's."""
    module = loading.execute(source, f"{lab.id}_{path.stem}".replace("-", "_"), path)
    reference = loading.load(lab.id, "solution")
    return filled_in(lab, [task], module, reference, unwritten(lab, source), made(lab, reference))


def filled_in(
    lab: Lab,
    tasks: Sequence[Task],
    module: ModuleType,
    reference: ModuleType,
    left: Sequence[str],
    expected: Mapping[str, Sequence[str]],
    two_sets: bool = False,
) -> ModuleType:
    """Replace every task of the module but `tasks` by the reference's, and return the module.

    `left` are the tasks that the file lacks, `expected` the attributes that the reference's classes set. With
    `two_sets` of helpers (functions that are not tasks) the reference's code calls its own helpers, and the
    rest calls the file's.
    """
    for key, value in vars(reference).items():
        module.__dict__.setdefault(key, value)  # imports, and helpers of the reference
    replaced, kept = {}, {name for task in tasks for name in (task.name, class_of(task))}
    whole = with_other_attributes(lab, module, expected, left)
    for name in dict.fromkeys(class_of(t) if class_of(t) in whole else t.name for t in lab.tasks):
        if name not in kept:
            old, new = transplanted(reference, module, name)
            replaced[id(old)] = new
    if two_sets:
        for name in helpers(lab, reference, whole):
            by_caller(reference, module, name)
    for function in defined_in(module):  # a default such as hash_block=hash_block was bound before
        function.__defaults__ = tuple(replaced.get(id(v), v) for v in function.__defaults__ or ()) or None
        defaults = (function.__kwdefaults__ or {}).items()
        function.__kwdefaults__ = {key: replaced.get(id(value), value) for key, value in defaults}
    return module


def tasks_of(lab: Lab, mistake: Mistake) -> list[str]:
    """The tasks whose code a mistake changes; none if it cannot be made."""
    source = lab.file("solution.py").read_text(encoding="utf-8")
    try:
        texts = (source, mistake.apply(source))
    except LabError:
        return []
    right_one, wrong_one = ({k: ast.dump(node) for k, node in functions(text).items()} for text in texts)
    changed = [name for name in {*right_one, *wrong_one} if right_one.get(name) != wrong_one.get(name)]
    return [t.name for t in lab.tasks if any(f"{name}.".startswith(f"{t.name}.") for name in changed)]


def class_of(task: Task) -> str:
    return task.name.partition(".")[0]


def of_ones_own(lab: Lab) -> set[str]:
    """Return the classes whose __init__ is a task: their attributes may have any names."""
    return {class_of(task) for task in lab.tasks if task.name.endswith(".__init__")}


def made(lab: Lab, reference: ModuleType) -> dict[str, list[str]]:
    """Return, by class that has tasks, the attributes that its __init__ sets."""
    names = {class_of(task) for task in lab.tasks if "." in task.name}
    return {name: sorted(attributes(getattr(reference, name).__init__)) for name in names}


def with_other_attributes(
    lab: Lab, module: ModuleType | loading.Broken, expected: Mapping[str, Sequence[str]], left: Sequence[str]
) -> set[str]:
    """Return the classes whose __init__ sets other attributes than the reference's; `left` is not written."""
    tasks, found = {task.name for task in lab.tasks}, set()
    for name, theirs in expected.items():
        yours = getattr(module, name)
        anywhere = {attribute for member in vars(yours).values() for attribute in attributes(member)}
        # An __init__ that is given, and that the learner added to, stays when one method is judged.
        more = attributes(yours.__init__) - {*theirs} if f"{name}.__init__" in tasks else set()
        if f"{name}.__init__" not in left and (more or {*theirs} - anywhere):
            found.add(name)
    return found


def attributes(member: Any) -> set[str]:
    """Return the attributes that a method assigns to, read from its code: the source may be packed."""
    names, codes = set(), [getattr(member, "__code__", None)]
    while codes:
        if isinstance(code := codes.pop(), CodeType):
            codes += code.co_consts
            names |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return names


def transplanted(reference: ModuleType, module: ModuleType, name: str) -> tuple[Any, Any]:
    """Put the reference's function, class or method into the module. Return the old and the new one."""
    owner, donor = module, reference
    *outer, last = name.split(".")
    for part in outer:
        owner, donor = getattr(owner, part), getattr(donor, part)
    old, new = vars(owner).get(last), rebound(vars(donor)[last], module)
    setattr(owner, last, new)
    return old, new


def helpers(lab: Lab, reference: ModuleType, whole: set[str]) -> list[str]:
    """Return the reference's functions, methods and properties that are not tasks.

    `whole` are the classes that are not mixed with the reference's.
    """
    tasks = {task.name for task in lab.tasks}
    classes = {class_of(task) for task in lab.tasks if "." in task.name} - whole
    names = [key for key, value in vars(reference).items() if isinstance(value, FunctionType)]
    for owner in sorted(classes):
        members = vars(getattr(reference, owner)).items()
        names += [f"{owner}.{key}" for key, v in members if isinstance(v, FunctionType | property)]
    return [name for name in names if name not in tasks and not name.endswith("__")]


def by_caller(reference: ModuleType, module: ModuleType, name: str) -> None:
    """Make a helper of the module call the reference's, where the reference's code calls it."""
    yours, theirs = transplanted(reference, module, name)
    *outer, last = name.split(".")
    owner = getattr(module, outer[0]) if outer else module
    if isinstance(yours, property) and isinstance(theirs, property):
        setattr(owner, last, property(either(yours.fget, theirs.fget)))
    elif isinstance(yours, FunctionType) and isinstance(theirs, FunctionType):
        setattr(owner, last, either(yours, theirs))


def either(yours: Any, theirs: Any) -> Callable[..., Any]:
    def helper(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        return (theirs if caller == theirs.__code__.co_filename else yours)(*args, **kwargs)

    return helper


def rebound(value: Any, module: ModuleType) -> Any:
    """Return a copy of a function, property or class whose code finds its global names in `module`."""
    if isinstance(value, FunctionType):
        copy = FunctionType(
            value.__code__, vars(module), value.__name__, value.__defaults__, value.__closure__
        )
        copy.__kwdefaults__, copy.__doc__ = value.__kwdefaults__, value.__doc__
        return copy
    if isinstance(value, property):
        return property(*(rebound(part, module) for part in (value.fget, value.fset, value.fdel)))
    if isinstance(value, staticmethod | classmethod):
        return type(value)(rebound(value.__func__, module))
    if isinstance(value, type):
        own = {k: v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__")}
        members = {k: rebound(v, module) for k, v in own.items()}
        return type(value)(value.__name__, value.__bases__, members)
    return value


def defined_in(module: ModuleType) -> list[FunctionType]:
    """Return the functions and methods whose global names are the module's."""
    values = [*vars(module).values()]
    values += [part for value in values if isinstance(value, type) for part in vars(value).values()]
    values = [value.fget if isinstance(value, property) else value for value in values]
    return [v for v in values if isinstance(v, FunctionType) and v.__globals__ is module.__dict__]


def unwritten(lab: Lab, source: str) -> list[str]:
    """Return the names of the tasks that are unchanged in a file; none if it is no Python, or too deep."""

    def untouched(name: str) -> bool:
        parts = [part for part in pristine if f"{part}.".startswith(f"{name}.")]
        return all(part in yours and _body(yours[part]) == _body(pristine[part]) for part in parts)

    try:
        yours, pristine = functions(source), functions(pristine_source(lab))
        return [task.name for task in lab.tasks if untouched(task.name)]
    except (SyntaxError, RecursionError):
        return []


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the code after the docstring, which another edition may word in another way."""
    return "".join(map(ast.dump, node.body[ast.get_docstring(node) is not None :]))
