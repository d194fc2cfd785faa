"""The cost of scheduling: CPU seconds in `schedule` and `update` over a workload without a model.

The contestants are the engine's scheduler, the same under a Recorder that keeps its steps or not, and
nano-vllm's, read from a folder that the user names. They take turns, so that a noisy machine disturbs all.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from types import ModuleType, SimpleNamespace
from typing import Any

from rich.table import Table

from mini_engine.bench.workloads import Workload
from mini_engine.block_manager import BlockManager
from mini_engine.interfaces import SchedulerLike
from mini_engine.request import Request, SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.trace import Recorder, Retention

SLOTS, BUDGET, BLOCK_SIZE, NUM_BLOCKS = 256, 8192, 16, 20_000
TOKEN = 7  # what every row samples: which token it is costs nothing


@dataclass
class Run:
    """One pass over the load: CPU seconds in schedule and update, their calls, the rows they served."""

    seconds: float
    num_steps: int
    num_rows: int


Contestant = Callable[[Workload], Run]


def mini_engine(load: Workload, traced: bool = False, keep: Retention = True) -> Run:
    kv = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    kv.caches_scheduled = True  # as in the engine
    scheduler: SchedulerLike = Scheduler(kv, max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS)
    if traced:
        scheduler = Recorder(scheduler, keep=keep)
    requests: dict[str, Request] = {}
    for i, (prompt, num_outputs) in enumerate(zip(load.prompts, load.num_outputs, strict=True)):
        requests[f"r{i}"] = Request(f"r{i}", prompt, SamplingParams(max_tokens=num_outputs))
        scheduler.add(requests[f"r{i}"])
    run = Run(0.0, 0, 0)
    while scheduler.has_work:
        start = process_time()
        scheduled = scheduler.schedule()
        run.seconds += process_time() - start
        ending = (name for name, n in scheduled.items() if n == requests[name].num_new_tokens)
        sampled = {name: [TOKEN] for name in ending}
        start = process_time()
        scheduler.update(scheduled, sampled)
        run.seconds += process_time() - start
        run.num_steps, run.num_rows = run.num_steps + 1, run.num_rows + len(scheduled)
    return run


def nano_vllm(folder: Path) -> Contestant:
    """Return nano-vllm's scheduler as a contestant. Raises ValueError if the folder is not its source."""
    engine = _nano_vllm_modules(folder)

    def serve(load: Workload) -> Run:
        engine.Sequence.block_size = BLOCK_SIZE
        limits = {"max_num_seqs": SLOTS, "max_num_batched_tokens": BUDGET}
        pool = {"kvcache_block_size": BLOCK_SIZE, "num_kvcache_blocks": NUM_BLOCKS}
        scheduler = engine.Scheduler(SimpleNamespace(eos=-1, **limits, **pool))
        for prompt, num_outputs in zip(load.prompts, load.num_outputs, strict=True):
            scheduler.add(engine.Sequence(prompt, engine.SamplingParams(max_tokens=num_outputs)))
        run = Run(0.0, 0, 0)
        while not scheduler.is_finished():
            start = process_time()
            sequences, is_prefill = scheduler.schedule()
            run.seconds += process_time() - start
            sampled = [TOKEN] * len(sequences)
            start = process_time()
            scheduler.postprocess(sequences, sampled, is_prefill)
            run.seconds += process_time() - start
            run.num_steps, run.num_rows = run.num_steps + 1, run.num_rows + len(sequences)
        return run

    return serve


def _nano_vllm_modules(folder: Path) -> Any:
    """Import nano-vllm's Scheduler, Sequence and SamplingParams, without its package's model."""
    if not (folder / "nanovllm" / "engine" / "scheduler.py").is_file():
        raise ValueError(f"{folder} is not nano-vllm's source: it has no nanovllm/engine/scheduler.py")
    package, config = ModuleType("nanovllm"), ModuleType("nanovllm.config")
    package.__path__ = [str(folder / "nanovllm")]
    config.Config = SimpleNamespace  # type: ignore[attr-defined]  # theirs imports transformers
    sys.modules |= {"nanovllm": package, "nanovllm.config": config}
    try:
        from nanovllm.engine.scheduler import Scheduler
        from nanovllm.engine.sequence import Sequence
        from nanovllm.sampling_params import SamplingParams
    except ModuleNotFoundError as error:
        raise ValueError(f"nano-vllm's scheduler needs {error.name}: pip install {error.name}") from None
    finally:  # another folder may be asked for next
        for name in [name for name in sys.modules if name.partition(".")[0] == "nanovllm"]:
            del sys.modules[name]
    return SimpleNamespace(Scheduler=Scheduler, Sequence=Sequence, SamplingParams=SamplingParams)


def reference_loop() -> float:
    """Return the CPU seconds of a million deque.append and popleft, to compare machines."""
    queue: deque[int] = deque()
    start = process_time()
    for i in range(1_000_000):
        queue.append(i)
        queue.popleft()
    return process_time() - start


def contestants(nano_vllm_folder: Path | None = None) -> dict[str, Contestant]:
    """Return the contestants by name; the others are compared with the last."""
    named: dict[str, Contestant] = {
        "traced, all kept": partial(mini_engine, traced=True),
        "traced, none kept": partial(mini_engine, traced=True, keep=False),
        "mini-engine": mini_engine,
    }
    if nano_vllm_folder:
        named["nano-vllm"] = nano_vllm(nano_vllm_folder)
    return named


def race(
    contestants: dict[str, Contestant], load: Workload, rounds: int, report: Callable[[str], None]
) -> dict[str, list[Run]]:
    """Let the contestants take turns; `report` gets a line per turn."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for number in range(1, rounds + 1):
        for name, serve in contestants.items():
            gc.collect()
            runs[name].append(serve(load))
            report(f"round {number} of {rounds}: {name} {runs[name][-1].seconds:.2f} s")
    return runs


def table(runs: dict[str, list[Run]]) -> Table:
    """Return a table of medians, and of the ratios to the last contestant, taken round by round."""
    *_, baseline = runs
    shown = Table("", "seconds", "steps", "us a step", "us a row", f"time / {baseline}", header_style="bold")
    for name, rounds in runs.items():
        one, seconds = rounds[0], statistics.median(run.seconds for run in rounds)
        ratios = [a.seconds / b.seconds for a, b in zip(rounds, runs[baseline], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        per_step, per_row = 1e6 * seconds / one.num_steps, 1e6 * seconds / one.num_rows
        shown.add_row(name, f"{seconds:.2f}", str(one.num_steps), f"{per_step:.0f}", f"{per_row:.2f}", spread)
    shown.caption = f"a million deque.append and popleft took {reference_loop():.3f} s"
    shown.caption_justify = "left"
    return shown
