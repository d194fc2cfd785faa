"""docs/architecture.md and its picture say what the code is."""

import importlib.util
import json
import re
import tomllib
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


def test_the_picture_is_of_this_code():
    """What docs/images/architecture.png shows is what its script would draw now."""
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with matplotlib")
    script = ROOT / "docs" / "images" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", script)
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    with image.open(drawing.PICTURE) as picture:
        assert json.loads(picture.info["Description"]) == drawing.boxes(), (
            f"run python {script.relative_to(ROOT)}"
        )
