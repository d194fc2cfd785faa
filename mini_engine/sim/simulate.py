"""Schedules at scale without a model: the real scheduler and block manager, a cost model for time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.request import Request
from mini_engine.sim.cost_model import CostModel
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.workloads import Arrival
from mini_engine.trace import Keep, Recorder, Trace, VirtualClock
from mini_engine.trace.metrics import Metrics, Summary

# With the 14 arrivals a second of `workloads.arrivals`, as much as mixed steps can just carry: with room
# to spare all continuous ways are equal. docs/simulate.md reads the table.
DEFAULTS = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=64, num_blocks=640)


@dataclass
class Simulation:
    """A finished run. `trace` has its steps only if they were kept; times are in milliseconds."""

    trace: Trace
    metrics: Metrics
    num_refused: int  # could never have fitted, and were turned away
    why_refused: str = ""  # the first of them

    def summary(self, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
        """Latencies, throughput, and goodput under the limits; throughputs are per millisecond."""
        return self.metrics.summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)


def simulate(
    workload: Iterable[Arrival],
    baseline: str = "mixed",
    config: EngineConfig = DEFAULTS,
    *,
    cost: CostModel | None = None,
    keep: Keep = True,
    **settings: Any,
) -> Simulation:
    """Serve a workload, in order of time, until all is done.

    `settings` are fields of the EngineConfig to be changed. `keep` says what becomes of the steps, as
    a Recorder takes it: for long runs give False, a number, or a path; then memory grows by what the
    percentiles need, 8 bytes an output token, and by the requests that wait. Raises ValueError for an
    unknown baseline and for settings that cannot work.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, but is {baseline!r}")
    backend = BASELINES[baseline].backend
    clock = VirtualClock(unit="ms")
    recorder = baseline_recorder(baseline, replace(config, **settings), clock, backend, keep)
    metrics = Metrics(recorder.header)
    clock.cost = (cost or CostModel()).clock(backend, metrics.fold)
    recorder.consumers.append(metrics)
    try:
        refused = _serve(recorder, clock, workload)
        return Simulation(recorder.close("drained"), metrics, *refused)
    finally:
        recorder.kept.discard()


def compare(
    workload: Callable[[], Iterable[Arrival]],
    baselines: Iterable[str],
    *,
    ttft_limit: float | None = None,
    tpot_limit: float | None = None,
    **options: Any,
) -> dict[str, tuple[Summary, int, str]]:
    """One workload under several policies: of each the summary, how many requests it refused, and why.

    Each runs in a process of its own, as many at a time as there are cores, where `workload` is called: a
    function that can be pickled, say a `functools.partial` of `workloads.workload`. `options` are those
    of `simulate`.
    """
    limits = {"ttft_limit": ttft_limit, "tpot_limit": tpot_limit}
    serve = partial(_summarise, workload, limits, options)
    names = list(baselines)
    if len(names) == 1:
        return {names[0]: serve(names[0])}
    import multiprocessing  # a browser has none, nor processes
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(len(names), os.cpu_count() or 1), initializer=_quiet) as pool:
        try:
            futures = [pool.submit(serve, name) for name in names]
            return {name: future.result() for name, future in zip(names, futures, strict=True)}
        except BrokenProcessPool:
            raise OSError("a policy's process was ended from outside; was there memory enough?") from None
        except BaseException:  # Ctrl-C and SIGTERM, too: what is not finished is not wanted any more
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def _quiet() -> None:
    """In a process of `compare`: signals are for the one that waits for it, which ends it."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _summarise(
    workload: Callable[[], Iterable[Arrival]], limits: dict[str, Any], options: dict[str, Any], baseline: str
) -> tuple[Summary, int, str]:
    done = simulate(workload(), baseline, **options)
    return done.summary(**limits), done.num_refused, done.why_refused


def baseline_recorder(
    baseline: str, config: EngineConfig, clock: VirtualClock, backend: str, keep: Keep = True
) -> Recorder:
    """A policy on a pool of its own, as the named backend would run it."""
    if backend == "padded":  # separate rectangles share nothing
        config = replace(config, enable_prefix_caching=False)
    if config.num_blocks is None:
        raise ValueError("num_blocks must be given: there is no model to size the pool by")
    kv = BlockManager(config.num_blocks, config.block_size, **config.kv_args())
    scheduler = BASELINES[baseline](kv, **config.scheduler_args())
    parts = {} if baseline == "mixed" else {"Scheduler": baseline, "attend_backend": backend}
    return Recorder(scheduler, clock=clock, parts=parts, backend=backend, keep=keep)


def _serve(recorder: Recorder, clock: VirtualClock, workload: Iterable[Arrival]) -> tuple[int, str]:
    """Run until all is done; how many requests were refused, and why the first of them."""
    live: dict[str, Request] = {}
    num_refused, why = 0, ""
    coming = ((arrival.timestamp, arrival.request(i)) for i, arrival in enumerate(workload))
    following = next(coming, None)
    while following or recorder.has_work:
        if following and not recorder.has_work:
            clock.time = max(clock.time, following[0])
        while following and following[0] <= clock.time:
            timestamp, request = following
            # It came while the step ran, not at the step's end.
            now, clock.time = clock.time, timestamp
            try:
                recorder.add(request)
                live[request.request_id] = request
            except ValueError as error:
                num_refused, why = num_refused + 1, why or str(error)
            clock.time = now
            following = next(coming, None)
        if recorder.has_work:
            step(recorder, live, lambda request: 0)
    return num_refused, why


def step(
    recorder: Recorder,
    live: dict[str, Request],
    next_token: Callable[[Request], int],
    stops: Callable[[Request], bool] = lambda request: False,
) -> None:
    """Decide a step and take it back with made-up tokens; those that finish leave `live`."""
    scheduled = recorder.schedule()
    if not scheduled:
        raise RuntimeError(
            f"the scheduler scheduled nothing with {len(recorder.waiting)} requests waiting "
            f"and {len(recorder.running)} running"
        )
    rows = ((live[name], num_tokens) for name, num_tokens in scheduled.items())
    ending = [request for request, num_tokens in rows if num_tokens == request.num_new_tokens]
    sampled = {request.request_id: [next_token(request)] for request in ending}
    stopped = {request.request_id for request in ending if stops(request)}
    for request in recorder.update(scheduled, sampled, stopped):
        del live[request.request_id]
