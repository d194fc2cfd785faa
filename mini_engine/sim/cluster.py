"""A cluster on the virtual clock: simulated engines behind a router, and the price of moving blocks.

Either each engine serves whole requests, or some only prefill: they compute a prompt, and its blocks are
moved to an engine that decodes. The engines are those of simulate.py, each with a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.request import Request
from mini_engine.sim.cost_model import CostModel
from mini_engine.sim.routers import ROUTERS
from mini_engine.sim.simulate import DEFAULTS, measured, step
from mini_engine.sim.workloads import Arrival, workload
from mini_engine.trace import Retention, Trace
from mini_engine.trace.metrics import Metrics, Summary

MAX_REPLICAS = 256


@dataclass(frozen=True)
class Transfer:
    """Milliseconds until a prompt's blocks have moved: per_transfer + per_block * blocks that are missing.

    The defaults are computed, not measured, as those of CostModel: 16 tokens of the same model are 2 MiB,
    which a link of 200 Gbit/s moves in 0.084 ms. Transfers do not slow each other down.
    """

    per_transfer: float = 1.0
    per_block: float = 0.084

    def __post_init__(self) -> None:
        for name in ("per_transfer", "per_block"):
            if not 0 <= getattr(self, name) < float("inf"):  # NaN, too
                raise ValueError(f"{name} must be 0 or more, in ms, but is {getattr(self, name)}")


@dataclass(frozen=True)
class Move:
    """A prompt's blocks on their way: when they left, when they were there, and how many were moved."""

    source: str
    target: str
    t_start: float
    t_end: float
    num_blocks: int


class ReceivingPool(BlockManager):
    """A pool to which blocks are moved: the prompt of a request in `moved` is admitted as computed.

    All but its last token, as in vLLM: this one the decode engine computes, and samples the first output.
    A request that is preempted later has to be computed here.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.moved: set[str] = set()

    def admit(self, request: Request) -> bool:
        if not super().admit(request):
            return False
        request.num_external_computed_tokens = 0
        if request.request_id in self.moved:
            self.moved.remove(request.request_id)
            request.num_external_computed_tokens = request.num_tokens - 1 - request.num_computed_tokens
            request.num_computed_tokens = request.num_cached_tokens = request.num_tokens - 1
            self.cache_blocks(request)
        return True


class SimulatedEngine:
    """One engine of a cluster. `load` counts the requests that the router gave it and has not had back."""

    def __init__(self, name: str, config: EngineConfig, cost: CostModel, keep: Retention):
        self.name, self.load = name, 0
        self.recorder, self.clock, self.metrics = measured("mixed", config, cost, keep, ReceivingPool)
        self._live: dict[str, Request] = {}

    @property
    def pool(self) -> ReceivingPool:
        return self.recorder.scheduler.kv  # type: ignore[return-value]  # the simulator makes no other

    def add(self, request: Request, t: float) -> None:
        """Let a request join the queue at time `t`, even if a step that began before is still running."""
        if not self.recorder.has_work:
            self.clock.time = max(self.clock.time, t)
        now, self.clock.time = self.clock.time, t
        try:
            self.recorder.add(request)
            self._live[request.request_id] = request
        finally:
            self.clock.time = now

    def step(self) -> list[Request]:
        """Compute a step, from `clock.time` on; return the requests that end with it."""
        return step(self.recorder, self._live)


@dataclass
class Cluster:
    """A finished run. Its engines have `name`, `metrics`, and a trace in `traces` if steps were kept."""

    engines: list[SimulatedEngine]
    traces: list[Trace] = field(default_factory=list)
    routed: dict[str, list[str]] = field(default_factory=dict)  # the engines of each request, in order
    moves: dict[str, Move] = field(default_factory=dict)
    num_refused: int = 0
    why_refused: str = ""

    def summaries(
        self, *, ttft_limit: float | None = None, tpot_limit: float | None = None
    ) -> dict[str, Summary]:
        """Return the Summary of each engine by name, and that of the cluster as `together`."""
        parts = {engine.name: engine.metrics for engine in self.engines}
        parts["together"] = Metrics.joined(list(parts.values()))
        return {name: m.summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit) for name, m in parts.items()}


def simulate_cluster(
    arrivals: Iterable[Arrival],
    replicas: int = 2,
    router: str = "prefix",
    config: EngineConfig = DEFAULTS,
    *,
    prefill: int = 0,
    cost: CostModel | None = None,
    transfer: Transfer | None = None,
    seed: int = 0,
    keep: bool | Path = True,
    **settings: Any,
) -> Cluster:
    """Serve arrivals, in order of time, by `replicas` engines until every request is done.

    Each engine has the whole `config`, changed by `settings`. With `prefill` so many of the replicas only
    prefill, and the others only decode; `transfer` is the price between them. `seed` is of the router's
    draws. A path as `keep` is a folder, which gets one trace a replica. Raise ValueError for an unknown
    router and for numbers of engines that cannot serve.
    """
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, but is {router!r}")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ValueError(f"replicas must be 1 to {MAX_REPLICAS}, but is {replicas}")
    if not 0 <= prefill < replicas:
        limits = f"0 to {replicas - 1} with {replicas} replicas, so that one is left to decode"
        raise ValueError(f"prefill must be {limits}, but is {prefill}")
    config = replace(config, **settings)
    names = [f"prefill-{i}" for i in range(prefill)]
    names += [f"{'decode' if prefill else 'engine'}-{i}" for i in range(replicas - prefill)]
    engines: list[SimulatedEngine] = []
    try:
        for name in names:
            kept = keep if isinstance(keep, bool) else keep / f"{name}.jsonl"
            engines.append(SimulatedEngine(name, config, cost or CostModel(), kept))
        run = _Run(engines, prefill, router, transfer or Transfer(), seed)
        run.serve(arrivals)
        run.cluster.traces = [engine.recorder.close("drained") for engine in engines]
        return run.cluster
    finally:
        for engine in engines:
            engine.recorder.store.discard()


class _Run:
    """The events of a run in order of time: arrivals, ends of requests and of moves; between them, steps."""

    def __init__(
        self, engines: list[SimulatedEngine], prefill: int, router: str, transfer: Transfer, seed: int
    ):
        self.cluster, self.transfer = Cluster(engines), transfer
        self.front, self.decoding = engines[:prefill] or engines, engines[prefill:] if prefill else []
        self._router = ROUTERS[router](self.front, seed)
        self._second = ROUTERS[router](self.decoding, seed + 1)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()  # events of one time keep their order
        self._whole: dict[str, Request] = {}  # while another engine computes its prompt

    def serve(self, arrivals: Iterable[Arrival]) -> None:
        coming = enumerate(arrivals)
        self._expect(coming)
        while True:
            busy = [engine for engine in self.cluster.engines if engine.recorder.has_work]
            engine = min(busy, key=lambda engine: engine.clock.time, default=None)
            if self._events and (engine is None or self._events[0][0] <= engine.clock.time):
                t, _, happen = heappop(self._events)
                happen(t)
            elif engine is not None:
                for request in engine.step():
                    self._at(engine.clock.time, partial(self._done, engine, request))
            else:
                return

    def _at(self, t: float, happen: Callable[[float], None]) -> None:
        heappush(self._events, (t, next(self._numbers), happen))

    def _expect(self, coming: Iterator[tuple[int, Arrival]]) -> None:
        for number, arrival in coming:
            self._at(arrival.timestamp, partial(self._arrive, coming, number, arrival))
            return

    def _arrive(self, coming: Iterator[tuple[int, Arrival]], number: int, arrival: Arrival, t: float) -> None:
        self._expect(coming)
        request, pool = arrival.request(number), self.front[0].pool
        if self.decoding:  # the first engine computes the prompt; its one token is dropped
            room, needs = pool.num_blocks * pool.block_size, arrival.input_length + arrival.output_length - 1
            if needs > room:
                return self._refuse(f"request r{number} needs KV room for {needs} tokens of a pool's {room}")
            self._whole[request.request_id] = request
            request = replace(arrival, output_length=1).request(number)
        engine = self.front[self._router.choose(request)]
        self._send(engine, request)
        try:
            engine.add(request, t)
        except ValueError as error:
            engine.load -= 1
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        self.cluster.num_refused += 1
        self.cluster.why_refused = self.cluster.why_refused or why

    def _send(self, engine: SimulatedEngine, request: Request) -> None:
        engine.load += 1
        self.cluster.routed.setdefault(request.request_id, []).append(engine.name)

    def _done(self, engine: SimulatedEngine, request: Request, t: float) -> None:
        """The router hears of an end after the step; then a prompt's blocks leave for another engine."""
        engine.load -= 1
        whole = self._whole.pop(request.request_id, None)
        if whole is None:
            return
        target = self.decoding[self._second.choose(whole)]
        self._send(target, whole)
        pool = target.pool
        missing = -(-whole.num_tokens // pool.block_size) - len(pool.get_computed_blocks(whole))
        t_end = t + self.transfer.per_transfer + self.transfer.per_block * missing
        self.cluster.moves[whole.request_id] = Move(engine.name, target.name, t, t_end, missing)
        self._at(t_end, partial(self._moved, target, whole))

    def _moved(self, target: SimulatedEngine, request: Request, t: float) -> None:
        target.pool.moved.add(request.request_id)
        target.add(request, t)


def figures(
    *,
    replicas: int = 4,
    router: str = "prefix",
    rate: float = 40.0,
    requests: int = 400,
    prefill: int = 0,
    kind: str = "shared-prefix",
    seed: int = 0,
    ttft_limit: float = 1000,
    tpot_limit: float = 50,
    **options: Any,
) -> dict[str, Any]:
    """Return a cluster's figures as plain numbers, for a page with dials.

    `kind` is a workload's name, `rate` its arrivals per second over all engines. `options` are those of
    `simulate_cluster`, `num_blocks` for example. Times are in ms, goodput and output_throughput per second;
    None where there is nothing to count. `load` has the requests of each engine by its name.
    """
    arrivals = workload(kind, requests, rate=rate, seed=seed)
    run = simulate_cluster(arrivals, replicas, router, prefill=prefill, seed=seed, keep=False, **options)
    each = run.summaries(ttft_limit=ttft_limit, tpot_limit=tpot_limit)
    whole = each.pop("together")
    of_each = {"ttft": whole.ttft, "itl": whole.itl}
    times = {f"{n}_{p}": getattr(of, p, None) for n, of in of_each.items() for p in ("p50", "p99")}
    return times | {
        "goodput": whole.goodput and whole.goodput * 1000,
        "output_throughput": whole.output_throughput and whole.output_throughput * 1000,
        "cached_tokens": whole.num_cached_tokens,
        "prompt_tokens": whole.num_prompt_tokens,
        "moved_blocks": sum(move.num_blocks for move in run.moves.values()),
        "refused": run.num_refused,
        "load": {name: part.num_requests for name, part in each.items()},
    }
