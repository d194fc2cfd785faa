"""docs/architecture.md and its picture say what the code is."""

import ast
import importlib.util
import json
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8") if (ROOT / "docs").is_dir() else ""
CHANGES = re.findall(r"^\| [^|]+ \| `([\w/.-]+)`(?: \(`(\w+)`\))? \|$", PAGE, re.MULTILINE)


def test_every_module_and_room_has_its_layer():
    """import-linter's contract knows each module at the top of the engine, and no other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["containers"] == ["mini_engine"])
    named = [name.strip() for layer in layers for name in layer.replace("|", ":").split(":")]
    there = {
        path.stem
        for path in (ROOT / "mini_engine").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(named) == sorted(there - {"__init__", "__main__", "tests"})


def imports(folder):
    """{module: the modules of the same folder that it imports}, those for annotations included."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if "tests" not in path.relative_to(ROOT).parts]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths
    }
    graph = {}
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.update(
                    full if (full := f"{node.module}.{alias.name}") in names else node.module
                    for alias in node.names
                )
        graph[name] = found & names - {name}
    return graph


@pytest.mark.parametrize("folder", ["mini_engine", "labs/kit"])
def test_no_circle_of_files(folder):
    """No file imports itself through others, not even for annotations: a reader follows these, too."""
    graph = imports(folder)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_import_goes_up():
    """Each import between two modules or rooms goes to a lower layer, or stays in one that allows it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    assert settings["exclude_type_checking_imports"] is False
    layers = next(c["layers"] for c in settings["contracts"] if c["containers"] == ["mini_engine"])
    height = {
        name.strip(): -i for i, layer in enumerate(layers) for name in layer.replace("|", ":").split(":")
    }
    assert "mini_engine.engine" in imports("mini_engine")["mini_engine"], "under TYPE_CHECKING, and seen"
    up = [
        (module, other)
        for module, others in imports("mini_engine").items()
        for other in others
        if (here := room(module)) != (there := room(other))
        and {here, there} <= set(height)
        and height[here] < height[there]
    ]
    assert not up


def room(module):
    return module.split(".")[1] if "." in module else ""


def test_the_rooms_are_described():
    rooms = {path.parent.name for path in (ROOT / "mini_engine").glob("*/__init__.py")} - {"tests"}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE))


@pytest.mark.parametrize(("path", "name"), CHANGES, ids=[f"{p}:{n}" for p, n in CHANGES])
def test_a_change_s_file_is_there(path, name):
    """Each file that the page sends a contributor to exists, and defines what the page names."""
    if path == "labs/lab-NN/author/mistakes.toml":
        assert list((ROOT / "labs").glob("lab-*/author/mistakes.toml"))
        return
    source = (ROOT / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"^ *(?:def|class) {name}\b|^{name} = ", source, re.MULTILINE)


def test_ten_changes_and_more():
    assert len(CHANGES) >= 10 and len(set(CHANGES)) == len(CHANGES)


def test_the_recipe_names_what_is_there():
    """Each step of the recipe for a trace event names a file, and names that the file has."""
    recipe = PAGE.partition("## A trace event")[2]
    steps = re.findall(r"^\d\. `([\w/.]+)`: (.+?)(?=^\d\.|^$)", recipe, re.MULTILINE | re.DOTALL)
    named = [path.split("/")[-1] for path, _ in steps]
    assert named == ["records.py", "recorder.py", "fold.py", "fold.js", "words.js"]
    for path, text in steps:
        names = [name for name in re.findall(r"`(\w+)`", text) if name != "kinds"]  # view.js has that
        source = (ROOT / path).read_text(encoding="utf-8")
        assert names and all(re.search(rf"\b{name}\b", source) for name in names), (path, names)


def test_the_picture_is_of_this_code():
    """docs/images/architecture.svg is what its script would draw now."""
    script = ROOT / "docs" / "images" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", script)
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    (described,) = re.findall(r"<dc:description>(.*?)</dc:description>", drawing.PICTURE.read_text("utf-8"))
    assert json.loads(unescape(described)) == drawing.boxes(), f"run python {script.relative_to(ROOT)}"
