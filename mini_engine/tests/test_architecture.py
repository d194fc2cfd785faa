"""docs/architecture.md and its picture say what the code is."""

import ast
import importlib.util
import json
import re
from graphlib import CycleError, TopologicalSorter
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8") if (ROOT / "docs").is_dir() else ""
CHANGES = re.findall(r"^\| [^|]+ \| `([\w/.-]+)`(?: \(`(\w+)`\))? \|$", PAGE, re.MULTILINE)


def imports(folder):
    """{module: the modules of the same folder that it imports}, those for annotations included."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if "tests" not in path.relative_to(ROOT).parts]
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    names = {".".join(parts[path]).removesuffix(".__init__"): path for path in paths}
    graph = {}
    for name, path in names.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.update(
                    full if (full := f"{node.module}.{alias.name}") in names else node.module
                    for alias in node.names
                )
        graph[name] = found & names.keys() - {name}
    return graph


@pytest.mark.parametrize("folder", ["mini_engine", "labs/kit"])
def test_no_circle_of_files(folder):
    """No file imports itself through others, not even for annotations: a reader follows these, too. That none
    imports from a higher layer is `make lint`'s to see."""
    graph = imports(folder)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


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
