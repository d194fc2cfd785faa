"""Serves one workload in the simulator, for the book's dials, in a page and as the book is built."""

import json
from statistics import quantiles
from typing import Any

from mini_engine.sim.cluster import simulate_cluster
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import Arrival, arrivals
from mini_engine.trace.metrics import Metrics

NUM_REQUESTS = 60
TTFT_LIMIT, TPOT_LIMIT = 1000.0, 60.0  # ms; a request within both is good
WHOLE, SHARING = {"enable_prefix_caching": False}, {"enable_prefix_caching": True}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # as a page names them: the baseline, and its settings
    "one at a time": ("one-at-a-time", WHOLE),
    "static": ("static", WHOLE),
    "continuous": ("prefill-first", WHOLE),
    "two calls": ("two-pass", WHOLE),
    "padded": ("padded", WHOLE),
    "chunked": ("mixed", WHOLE),
    "with prefix cache": ("mixed", SHARING),
}
ROUTED = {"at random": "random", "least loaded": "least-loaded", "prefix-aware": "prefix"}
DEFAULTS = {
    "rate": 14, "prompt": 512, "output": 64, "budget": 512, "pool": 640, "slots": 64, "chunk": 0,
    "shared": 50, "spread": 60, "burst": 0, "replicas": 1,
}  # fmt: skip


def serve(way: str, **changes: float) -> dict[str, float]:
    """Return the p99 of TTFT and ITL in ms, the goodput in requests a second, and two counts.

    `changes` differ from DEFAULTS: requests a second, tokens of prompt, output and budget, blocks of the
    pool, slots, tokens of a chunk (0: no limit), percent of a prompt that is shared, and of the
    spread of lengths; `burst` is from 0, arrivals at random, to 9. A way in
    ROUTED is a router's, in front of as many engines as `replicas` says.
    """
    given = DEFAULTS | changes
    prefix = round(given["prompt"] * given["shared"] / 100)
    workload = list(
        arrivals(
            NUM_REQUESTS,
            rate=given["rate"],
            burstiness=1 / (1 + given["burst"]) ** 2,
            input_length=max(1, int(given["prompt"]) - prefix),
            output_length=int(given["output"]),
            spread=given["spread"] / 100,
            num_prefix_groups=4,
            prefix_length=prefix,
        )
    )
    metrics, num_refused = _run(way, given, workload)
    requests = list(metrics.requests().values())
    good = [r for r in requests if r.ttft and r.ttft <= TTFT_LIMIT and (r.tpot or 0) <= TPOT_LIMIT]
    seconds = (metrics.fold.t - workload[0].timestamp) / 1000
    return {
        "ttft": p99([r.ttft for r in requests if r.ttft is not None]),
        "itl": p99([gap for r in requests for gap in r.itl or ()]),
        "goodput": len(good) / seconds,
        "preempted": sum(r.num_preemptions for r in requests),
        "refused": num_refused,
    }


def _run(way: str, given: dict[str, Any], workload: list[Arrival]) -> tuple[Metrics, int]:
    baseline, settings = WAYS.get(way, ("mixed", SHARING))
    budget = int(given["budget"])
    if baseline == "prefill-first":  # it cuts no prompt, so that its budget has room for the longest
        budget = max(budget, *(one.input_length + one.output_length for one in workload))
    limits: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(int(given["slots"]), budget),
        "num_blocks": int(given["pool"]),
        "long_prefill_token_threshold": int(given["chunk"]),
    }
    if way in ROUTED:
        run = simulate_cluster(workload, int(given["replicas"]), ROUTED[way], keep=False, **limits)
        return Metrics.joined([engine.metrics for engine in run.engines]), run.num_refused
    done = simulate(workload, baseline, keep=False, **limits, **settings)
    return done.metrics, done.num_refused


def p99(values: list[float]) -> float:
    """Return the 99th percentile by linear interpolation, as numpy has it; a page has no numpy."""
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else sum(values)


def answer(question: str) -> str:
    """Return the figures of `serve` for {"way": ..., "settings": {...}}, all as JSON."""
    asked: dict[str, Any] = json.loads(question)
    return json.dumps(serve(asked["way"], **asked["settings"]))
