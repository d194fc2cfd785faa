"""The simulator: the real scheduler and block manager, no model, and a cost model for the time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.request import Request
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.cost_model import CostModel
from mini_engine.sim.workloads import Arrival
from mini_engine.trace import Recorder, Retention, Trace, VirtualClock
from mini_engine.trace.metrics import Metrics, Summary

# With the 14 arrivals per second of `workloads.arrivals`, mixed steps just keep up; with less load all
# continuous baselines are equal. docs/simulate.md explains the table.
DEFAULTS = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=64, num_blocks=640)


@dataclass
class Simulation:
    """A finished run in milliseconds. `trace` has its steps only if they were kept."""

    trace: Trace
    metrics: Metrics
    num_refused: int  # requests that could never have fitted
    why_refused: str = ""  # the error of the first one

    def summary(self, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
        """Return the latencies, throughputs per millisecond, and the goodput under the limits."""
        return self.metrics.summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)


def simulate(
    workload: Iterable[Arrival],
    baseline: str = "mixed",
    config: EngineConfig = DEFAULTS,
    *,
    cost: CostModel | None = None,
    keep: Retention = True,
    **settings: Any,
) -> Simulation:
    """Serve a workload, in order of time, until every request is done.

    `settings` are changed fields of the EngineConfig. `keep` is what a Recorder keeps of the steps: for long
    runs False, a number, or a path. Memory then grows by 8 bytes per output token, for the percentiles, and
    by the requests that wait. Raise ValueError for an unknown baseline and for settings that cannot work.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, but is {baseline!r}")
    recorder, clock, metrics = measured(baseline, replace(config, **settings), cost or CostModel(), keep)
    try:
        refused = serve(recorder, clock, workload)
        return Simulation(recorder.close("drained"), metrics, *refused)
    finally:
        recorder.store.discard()


def compare(
    workload: Callable[[], Iterable[Arrival]],
    baselines: Iterable[str],
    *,
    ttft_limit: float | None = None,
    tpot_limit: float | None = None,
    **options: Any,
) -> dict[str, tuple[Summary, int, str]]:
    """Return (summary, number of refused requests, reason) for one workload under each baseline.

    Each baseline runs in a process of its own, as many at a time as there are cores. `workload` is called
    there, so it must be picklable, for example a `functools.partial` of `workloads.workload`. `options` are
    those of `simulate`.
    """
    limits = {"ttft_limit": ttft_limit, "tpot_limit": tpot_limit}
    serve = partial(_summarise, workload, limits, options)
    names = list(baselines)
    if len(names) == 1:
        return {names[0]: serve(names[0])}
    import multiprocessing  # not available in a browser
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(len(names), os.cpu_count() or 1), initializer=_quiet) as pool:
        try:
            futures = [pool.submit(serve, name) for name in names]
            return {name: future.result() for name, future in zip(names, futures, strict=True)}
        except BrokenProcessPool:
            raise OSError("the process of a baseline was killed; was there enough memory?") from None
        except BaseException:  # Ctrl-C and SIGTERM, too: the other runs are not needed any more
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def _quiet() -> None:
    """Let the process that called `compare` handle the signals; it ends its children."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _summarise(
    workload: Callable[[], Iterable[Arrival]], limits: dict[str, Any], options: dict[str, Any], baseline: str
) -> tuple[Summary, int, str]:
    done = simulate(workload(), baseline, **options)
    return done.summary(**limits), done.num_refused, done.why_refused


def measured(
    baseline: str,
    config: EngineConfig,
    cost: CostModel,
    keep: Retention = True,
    pool: type[BlockManager] = BlockManager,
) -> tuple[Recorder, VirtualClock, Metrics]:
    """Return a simulated engine: its Recorder, its clock in milliseconds, and the Metrics of its run."""
    backend, clock = BASELINES[baseline].backend, VirtualClock(unit="ms")
    recorder = baseline_recorder(baseline, config, clock, backend, keep, pool)
    metrics = Metrics(recorder.header)
    clock.cost = cost.clock(backend, metrics.fold)
    recorder.consumers.append(metrics)
    return recorder, clock, metrics


def baseline_recorder(
    baseline: str,
    config: EngineConfig,
    clock: VirtualClock,
    backend: str,
    keep: Retention = True,
    pool: type[BlockManager] = BlockManager,
) -> Recorder:
    """Return a Recorder in front of a baseline with a new pool, set up for the named backend."""
    if backend == "padded":  # padded batches cannot share blocks
        config = replace(config, enable_prefix_caching=False)
    if config.num_blocks is None:
        raise ValueError("num_blocks must be given: there is no model to size the pool by")
    kv = pool(config.num_blocks, config.block_size, **config.kv_args())
    kv.caches_scheduled = True  # as in an engine with these backends
    scheduler = BASELINES[baseline](kv, **config.scheduler_args())
    parts = {} if baseline == "mixed" else {"Scheduler": baseline, "attend_backend": backend}
    return Recorder(scheduler, clock=clock, parts=parts, backend=backend, keep=keep)


def serve(recorder: Recorder, clock: VirtualClock, workload: Iterable[Arrival]) -> tuple[int, str]:
    """Run until every request is done; return the number of refused requests, and the first reason."""
    live: dict[str, Request] = {}
    num_refused, why = 0, ""
    coming = ((arrival.timestamp, arrival.request(i)) for i, arrival in enumerate(workload))
    following = next(coming, None)
    while following or recorder.has_work:
        if following and not recorder.has_work:
            clock.time = max(clock.time, following[0])
        while following and following[0] <= clock.time:
            timestamp, request = following
            # It arrived while the step ran, not at the step's end.
            now, clock.time = clock.time, timestamp
            try:
                recorder.add(request)
                live[request.request_id] = request
            except ValueError as error:
                num_refused, why = num_refused + 1, why or str(error)
            clock.time = now
            following = next(coming, None)
        if recorder.has_work:
            step(recorder, live)
    return num_refused, why


def step(
    recorder: Recorder,
    live: dict[str, Request],
    tokens: Mapping[str, Sequence[int]] | None = None,
    stopping: Collection[str] = (),
) -> list[Request]:
    """Schedule a step and update it without a model; finished requests are returned, and removed from `live`.

    `tokens` are the outputs of each request, by id; after them, or without them, it gets token 0. The
    requests `stopping` stop with the last of their tokens.
    """
    scheduled = recorder.schedule()
    if not scheduled:
        raise RuntimeError(
            f"the scheduler scheduled nothing with {len(recorder.waiting)} requests waiting "
            f"and {len(recorder.running)} running"
        )
    rows = ((live[name], num) for name, num in scheduled.items())
    counts = {r.request_id: len(r.output_token_ids) for r, num in rows if num == r.num_new_tokens}
    given = {name: (tokens or {}).get(name, ()) for name in counts}
    sampled = {name: [given[name][n] if n < len(given[name]) else 0] for name, n in counts.items()}
    stopped = {name for name, n in counts.items() if name in stopping and n + 1 == len(given[name])}
    finished = recorder.update(scheduled, sampled, stopped)
    for request in finished:
        del live[request.request_id]
    return finished
