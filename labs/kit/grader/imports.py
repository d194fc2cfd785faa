"""The imports that a graded file may have: a list a lab, made outside, and enforced where the code runs.

It makes the simple attempts fail with a clear error. The sandbox itself is bubblewrap's and the kernel's.
"""

import ast
import builtins
import importlib
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from labs.kit.judge.manifest import LABS_DIR, Lab, find_lab
from labs.kit.judge.pristine import pristine_source
from labs.kit.toys.scripts import BUILTINS

HARMLESS = """__future__ abc array bisect cmath collections collections.abc contextlib copy dataclasses
    datetime decimal enum fractions functools graphlib hashlib heapq itertools json math numbers numpy
    operator queue random re reprlib statistics string struct textwrap time types typing typing_extensions
    unicodedata warnings weakref""".split()
EVERYWHERE = ("mini_engine", "mini_engine.interfaces", "mini_engine.request")
WHOLE = ("numpy", "torch")  # given as they are, with all that they contain
NOT_CALLED = ("breakpoint", "compile", "eval", "exec", "input", "open")
KIT = str(LABS_DIR / "kit")
READERS = ("inspect.py", "traceback.py")  # of the standard library: they look at frames for others
FRAMES = ("f_code", "tb_frame", "gi_frame", "gi_code", "cr_frame", "cr_code", "ag_frame", "ag_code")
REFERENCE = "others.py"


def allowed(lab: Lab) -> list[str]:
    """Return the modules that a lab's file may import: harmless ones, and its solution's and starter's.

    Those of the starters that it builds on are there, too: a learner goes on with their functions.
    """
    own = {*imported(lab.file("solution.py").read_text("utf-8")), *imported(pristine_source(lab))}
    for before in map(find_lab, lab.prerequisites):
        if lab.uses_torch or not before.uses_torch:
            own |= {*imported(pristine_source(before))}
    return sorted({*HARMLESS, *EVERYWHERE, *own, *(["torch"] if lab.uses_torch else [])})


def imported(source: str) -> Iterator[str]:
    """Yield the names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def needed(lab: Lab) -> list[str]:
    """Return the modules that a lab's scripts import, some of them in a call only."""
    files = (lab.file(name) for name in ("random_scripts.py", "scenarios.py"))
    trees = [ast.parse(file.read_text("utf-8")) for file in files if file.exists()]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return sorted({f"{node.module}.{alias.name}" for node in nodes for alias in node.names})


def enclosed(lab_id: str, names: Collection[str]) -> dict[str, Any]:
    """Return the builtins of a graded file, whose imports are those of the list."""
    views: dict[str, ModuleType] = {}

    def view(name: str) -> ModuleType:
        """Return a copy of a module without the modules in it that are not on the list."""
        if name.partition(".")[0] in WHOLE:
            return sys.modules[name]
        if name not in views:
            copy = views[name] = ModuleType(name)
            for key, value in list(vars(sys.modules[name]).items()):
                if not isinstance(value, ModuleType):
                    copy.__dict__[key] = value
                elif value.__name__ in names:
                    copy.__dict__[key] = view(value.__name__)
            for lazy in ("__getattr__", "__builtins__", "__loader__", "__spec__"):
                copy.__dict__.pop(lazy, None)
        return views[name]

    def guarded(
        name: str, where: Any = None, local: Any = None, wanted: Any = (), level: int = 0
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not (name in names or (top in WHOLE and top in names)):
            raise ImportError(
                f"a graded file may not import {'.' * level + name}: {lab_id} needs no more than what "
                "its starter imports, and harmless modules of the standard library"
            )
        for module in (name, *(f"{name}.{part}" for part in wanted or ())):
            if module in names and module not in sys.modules:
                importlib.import_module(module)
                views.clear()  # it may be a part of what was seen before
        return view(name if wanted else top)

    found = vars(builtins) | {name: refused(f"{name}()") for name in NOT_CALLED} | {"__import__": guarded}
    BUILTINS.append(found)
    return found


def refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(f"a graded file may not call {name}")

    return refuse


def hide_the_reference() -> None:
    """Refuse a graded file the reference's code objects, the frames of calls, and the collector's objects.

    Python's audit events tell of each, and a hook cannot be removed.
    """
    looking = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal looking
        if looking or not (event == "object.__getattr__" or event in WATCHED):
            return
        looking = True
        try:
            caller = sys._getframe(1).f_code.co_filename
            private = event != "object.__getattr__" or args[1] in FRAMES
            if isinstance(args[0] if args else None, FunctionType):
                private = args[0].__code__.co_filename == REFERENCE
            if private and not trusted(caller, event):
                what = args[1] if event == "object.__getattr__" else event
                raise PermissionError(f"a graded file may not look at {what}")
        finally:
            looking = False

    sys.addaudithook(hook)


WATCHED = (
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
    "sys._getframe",
    "sys.settrace",
    "sys.setprofile",
    "code.__new__",  # a copy of its own code could name a trusted file
)


def trusted(caller: str, event: str) -> bool:
    """Whether code of this file may see frames. A module of the library that names its caller may see one."""
    path = Path(caller)
    if caller.startswith(KIT) or "site-packages" in path.parts:
        return True
    return path.is_absolute() and (event in ("sys._getframe", "code.__new__") or path.name in READERS)
