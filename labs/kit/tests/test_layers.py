"""Imports in labs/kit go down: no circle of modules, and no arrow up the rooms.

Every import counts, also one inside a function or below TYPE_CHECKING: a reader follows those, too.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from labs.kit.judge.manifest import LABS_DIR

ROOMS = ("toys", "judge", "learner", "grader", "author", "browser")  # each may import those before it


def imports_of(package: Path, name: str) -> dict[str, set[str]]:
    """Return, for each module of a package, the modules of the package that it imports. `name` is dotted."""
    paths = {
        ".".join([name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
        if "tests" not in path.relative_to(package).parts
    }
    found: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        home = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(
                    [*(home[: len(home) + 1 - node.level] if node.level else []), node.module or ""]
                )
                base = base.strip(".")
                full = [f"{base}.{alias.name}" for alias in node.names]
                names = [one if one in paths else base for one in full]
            found[module] |= {one for one in names if one in paths and one != module}
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle, or []."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def arrows_up(imports: dict[str, set[str]], name: str) -> list[str]:
    """Return the imports from a room of a room above it."""

    def height(module: str) -> int:
        room = module.removeprefix(f"{name}.").partition(".")[0]
        return ROOMS.index(room) if room in ROOMS else -1

    pairs = ((module, other) for module, others in imports.items() for other in sorted(others))
    return [f"{module} -> {other}" for module, other in pairs if 0 <= height(module) < height(other)]


def test_the_kit_has_no_circle_and_no_arrow_up():
    kit = imports_of(LABS_DIR / "kit", "labs.kit")
    assert {f"labs.kit.{room}" for room in ROOMS} <= kit.keys() and kit["labs.kit.grader.cases"]
    assert circle(kit) == [] and arrows_up(kit, "labs.kit") == []


@pytest.mark.parametrize(
    "line",
    ["import p.judge.b", "from p.judge import b", "from ..judge import b", "from p.judge.b import x",
     "if TYPE_CHECKING:\n    from p.judge.b import x", "def f():\n    import p.judge.b as other"],
)  # fmt: skip
def test_a_circle_and_an_arrow_up_are_found_in_any_form(tmp_path, line):
    texts = {"toys/a.py": line, "judge/b.py": "from p.toys.a import x", "judge/c.py": "from p.toys import a"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = imports_of(tmp_path, "p")
    assert found["p.toys.a"] == {"p.judge.b"} and found["p.judge.c"] == {"p.toys.a"}
    assert {*circle(found)} == {"p.toys.a", "p.judge.b"}
    assert arrows_up(found, "p") == ["p.toys.a -> p.judge.b"]
