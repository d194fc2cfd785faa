"""A wheel ships the engine, its model, its player and its types; no tests, labs or authors' scripts."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import mini_engine

ROOT = Path(mini_engine.__file__).parents[1]


def test_the_wheel_ships_the_engine_and_nothing_else(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    left = shutil.ignore_patterns("__pycache__")
    for name in ("mini_engine", "labs"):
        shutil.copytree(ROOT / name, source / name, ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out.mkdir()
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    built = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        shipped = {Path(name) for name in archive.namelist() if ".dist-info" not in name}
    package = ROOT / "mini_engine"
    rooms = {path.parent for path in package.rglob("__init__.py")}
    code = {path.relative_to(ROOT) for room in rooms for path in room.glob("*.py")}
    page = {path.relative_to(ROOT) for ext in ("html", "css", "js") for path in package.rglob(f"*.{ext}")}
    model = Path("mini_engine/loading/shakespeare")
    weights = {model / name for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert code | page | weights | {Path("mini_engine/py.typed")} <= shipped
    assert not [path for path in shipped if "tests" in path.parts or path.name in ("train.py", "player.py")]
    assert {path.parts[0] for path in shipped} == {"mini_engine"}
