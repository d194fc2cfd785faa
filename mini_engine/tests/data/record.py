"""Records the run that test_simulate.py repeats: python mini_engine/tests/data/record.py recording.jsonl"""

import random
from pathlib import Path

import typer

from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.registry import resolve
from mini_engine.request import SamplingParams
from mini_engine.trace import write_trace


def record(path: Path, model: str = "smollm2", num_requests: int = 24, seed: int = 0) -> None:
    """Serve a small workload with a real model in wall time and write its trace.

    The pool is too small for all, so that there is preemption; the requests come in while others
    run, at steps that do not depend on the machine's speed.
    """
    rng = random.Random(seed)
    net = load_model(resolve(model), dtype="float32", device="cpu")
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 32}
    engine = Engine(net, record=True, seed=seed, **limits)
    steps = sorted(rng.randrange(120) for _ in range(num_requests))
    while steps or engine.has_work:
        while steps and (steps[0] <= engine.scheduler.step or not engine.has_work):
            steps.pop(0)
            prompt = [rng.randrange(net.config.vocab_size) for _ in range(rng.randint(8, 96))]
            params = SamplingParams(temperature=0, max_tokens=rng.randint(16, 80), ignore_eos=True)
            engine.add_request(prompt, params)
        engine.step()
    write_trace(path, engine.trace)


if __name__ == "__main__":
    typer.run(record)
