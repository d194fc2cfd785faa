"""Peers as processes: each is started once, and computes only during its turn.

A contestant is a peer, or a variant of it after a slash: "transformers/8" runs static batches of eight.
"""

import json
import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import IO, Any, Self

from mini_engine.bench import environments
from mini_engine.bench.workloads import Workload

OURS, FLOOR = "mini-engine", "mini-engine/floor"
LONGEST = 600  # seconds to load, or for a turn; a process that needs more hangs
WORKER = Path(__file__).parent / "peers" / "worker.py"


def peer_of(name: str) -> str:
    return name.partition("/")[0]


class PeerError(RuntimeError):
    """A peer's failure; the message is one line with the reason."""


class Process:
    """One worker (peers/worker.py); requests and answers are JSON lines."""

    def __init__(self, peer: str, job: dict[str, Any], logs: Path) -> None:
        self.job = job
        python = environments.python(peer)
        if python is None:
            raise PeerError(f"{peer} is not installed; run: {environments.install_command(peer)}")
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{peer}.log"
        threads = str(job["threads"])
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [python, str(WORKER), environments.MODULES[peer]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=os.environ | env | environments.variables(peer),
                start_new_session=True,  # a process group of its own, by which its CPU time is known
            )
        self._send(job)
        self.versions: dict[str, str] = {}
        self.failed: PeerError | None = None

    def load(self) -> None:
        """Wait until the peer is loaded and has sent its versions."""
        if self.failed:
            raise self.failed
        if not self.versions:
            try:
                self.versions = self._receive()["versions"]
            except PeerError as error:
                self.failed = error
                raise

    def ask(self, work: dict[str, Any]) -> dict[str, Any]:
        self.load()
        self._send(work)
        return self._receive()

    def _send(self, what: dict[str, Any]) -> None:
        stdin: IO[str] = self.popen.stdin  # type: ignore[assignment]
        try:
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()
        except OSError:
            raise PeerError(f"the process has ended; {self.log} may say why") from None

    def _receive(self) -> dict[str, Any]:
        limit = Timer(LONGEST, self.popen.kill)
        limit.start()
        try:
            line = self.popen.stdout.readline()  # type: ignore[union-attr]  # a pipe, as __init__ asks
        finally:  # Ctrl-C, too: the timer's thread would keep this process
            limit.cancel()
        if not line:
            raise PeerError(f"the process has ended, or needed over {LONGEST} s; {self.log} may say why")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise PeerError(said["error"])
        return said

    def close(self) -> None:
        """Close the worker's input, at whose end it exits by itself."""
        with suppress(OSError):  # it has ended, with something unread
            self.popen.stdin.close()  # type: ignore[union-attr]
        try:
            self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()  # type: ignore[union-attr]


class Processes:
    """The peers of a race, which the next race may keep."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: dict[str, Process] = {}

    def start(self, names: Iterable[str], job: dict[str, Any]) -> None:
        """Start these contestants' peers with this job, end all others, and wait until they are loaded."""
        wanted = dict.fromkeys(peer_of(name) for name in names)
        for peer in list(self.processes):
            if peer not in wanted or self.processes[peer].job != job:
                self.processes.pop(peer).close()
        for peer in wanted:
            if peer not in self.processes:
                self.processes[peer] = Process(peer, job, self.logs)
        for process in self.processes.values():  # they load side by side
            with suppress(PeerError):  # reported when the peer's turn comes
                process.load()

    def groups(self, name: str) -> set[int]:
        """Return the process groups that may compute during a contestant's turn: its own, and this one's."""
        own = getattr(os, "getpgrp", os.getpid)()  # Windows has no groups, and no /proc to look them up in
        return {own, self.processes[peer_of(name)].popen.pid}

    def serve(self, name: str, load: Workload) -> dict[str, Any]:
        """Return one contestant's seconds, tokens, versions and settings. Raises PeerError."""
        process = self.processes[peer_of(name)]
        said = process.ask({"variant": name.partition("/")[2], **asdict(load)})
        return said | {"versions": process.versions}

    def close(self) -> None:
        self.start([], {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
