"""The simulator's cluster beside two real replicas: `python -m mini_engine.tests.outside.cluster`.

One engine serves the same workload first, and its recorded steps give the simulator its prices. The replicas
need Ray: pip install -e '.[serve,ray]' -c constraints.txt
"""

import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mini_engine import SamplingParams
from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import load

MODEL, OUT = "shakespeare", Path("out/cluster-check")
NUM, RATE, PREFIX, TOKENS, GROUPS = 60, 3.0, 192, 96, 8
POOL = {"num_blocks": 640, "max_num_batched_tokens": 2048}  # the simulator's


def workload() -> list[dict]:
    """The requests as the simulator reads them: 192 tokens that an eighth of them share, 32 to 96 more."""
    rng, now, found = random.Random(1), 0.0, []
    for _ in range(NUM):
        now += 1000 * rng.expovariate(RATE)
        lengths = {"input_length": PREFIX + rng.randrange(32, 97), "output_length": TOKENS}
        group = {"prefix_group": rng.randrange(GROUPS), "prefix_length": PREFIX}
        found.append({"timestamp": round(now), **lengths, **group})
    return found


def prompt(number: int, asked: dict) -> list[int]:
    """The token ids of a request."""
    shared, own = random.Random(asked["prefix_group"]), random.Random(1000 + number)
    lengths = (shared, PREFIX), (own, asked["input_length"] - PREFIX)
    return [rng.randrange(1, 67) for rng, length in lengths for _ in range(length)]


def record(asked: list[dict]) -> None:
    """Serve the workload with one engine here, each request at its time, and keep the trace."""
    engine = Engine(*load(MODEL), record=OUT / "run.jsonl", **POOL)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    began, waiting = time.monotonic(), list(enumerate(asked))
    while waiting or engine.has_work:
        while waiting and 1000 * (time.monotonic() - began) >= waiting[0][1]["timestamp"]:
            engine.add_request(prompt(*waiting.pop(0)), params)
        if engine.has_work:
            engine.step()
        else:
            time.sleep(0.005)
    engine.close()


@contextmanager
def served() -> Iterator[str]:
    """The address of two replicas."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in POOL.items()]
    command = [sys.executable, "-m", "mini_engine", "serve", "--model", MODEL, "--port", "0", *options]
    log = OUT / "serve.log"
    with log.open("w") as out, subprocess.Popen([*command, "--ray", "--replicas", "2"], stderr=out) as server:
        try:
            while not (at := re.search(r"served at (http://\S+)/v1", log.read_text())):
                if server.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.5)
            yield at[1]
        finally:
            server.terminate()


def cached(address: str) -> tuple[float, float]:
    """The tokens that both prefix caches have found so far, and those that were looked up."""
    with urllib.request.urlopen(address + "/metrics") as page:
        text = page.read().decode()
    found = (re.search(rf"vllm:prefix_cache_{name}_total{{\S+ (\S+)", text) for name in ("hits", "queries"))
    hits, queries = (float(one[1]) for one in found)
    return hits, queries


def ask(address: str, began: float, number: int, asked: dict) -> list[float]:
    """Send a request at its time. Return the seconds from then to each of its tokens."""
    time.sleep(max(0, began + asked["timestamp"] / 1000 - time.monotonic()))
    body = {"prompt": prompt(number, asked), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    sent, came = time.monotonic(), []
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(address + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                came.append(time.monotonic() - sent)
    assert len(came) == TOKENS, f"{len(came)} tokens of {TOKENS}"
    return came


def at(values: list[float], share: float) -> float:
    return 1000 * sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    asked, arrivals = workload(), OUT / "workload.jsonl"
    arrivals.write_text("".join(json.dumps(one) + "\n" for one in asked))
    record(asked)
    with served() as address, ThreadPoolExecutor(NUM) as pool:
        began = time.monotonic()
        reads = [pool.submit(ask, address, began, *one) for one in enumerate(asked)]
        times = [read.result() for read in reads]
        hits, queries = cached(address)
    first = [one[0] for one in times]
    gaps = [b - a for one in times for a, b in zip(one, one[1:], strict=False)]
    print(f"two replicas: {hits / queries:.0%} cached")
    for name, values in (("TTFT", first), ("ITL", gaps)):
        print(f"{name} p50 {at(values, 0.5):.0f} ms, p99 {at(values, 0.99):.0f} ms")
    simulate = [sys.executable, "-m", "mini_engine", "simulate", "--replicas", "2", "--router", "prefix"]
    subprocess.run([*simulate, "-w", arrivals, "--fit", OUT / "run.jsonl"], check=True)


if __name__ == "__main__":
    main()
