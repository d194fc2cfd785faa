"""Schedules at scale without a model: the real scheduler and block manager, a cost model for time.

`workload` makes arrivals up, `read_arrivals` takes them from a file, `simulate` serves them under
any of the BASELINES. `resimulate` repeats a recorded run, to see whether simulated and real agree.
"""

import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from mini_engine.block_manager import BlockManager
from mini_engine.request import Request, SamplingParams
from mini_engine.sim.cost_model import CostModel
from mini_engine.sim.policies import BASELINES
from mini_engine.trace import Recorder, Trace, VirtualClock, line_writer
from mini_engine.trace.metrics import Metrics, Summary

HASH_ID_TOKENS = 512  # what one of Mooncake's hash_ids stands for


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload: lengths instead of text.

    `timestamp` is in milliseconds. Prompts of one `prefix_group` begin with the same
    `prefix_length` tokens (None: as far as both go); `hash_ids` instead name the prompt's content
    block by block, as Mooncake's traces do.
    """

    timestamp: float
    input_length: int
    output_length: int
    priority: int = 0
    prefix_group: str | int | None = None
    prefix_length: int | None = None
    hash_ids: tuple[int, ...] = ()

    def request(self, number: int) -> Request:
        """The request, r<number>, with made-up tokens that are equal where content is."""
        length = self.input_length
        own = range(number << 32, (number << 32) + length)
        if self.hash_ids:
            blocks = (range(-(h + 1) << 32, (-(h + 1) << 32) + HASH_ID_TOKENS) for h in self.hash_ids)
            tokens = [token for block in blocks for token in block]
            tokens = tokens[:length] + list(own[len(tokens) :])
        elif self.prefix_group is not None:
            shared = length if self.prefix_length is None else min(self.prefix_length, length)
            start = -(zlib.crc32(str(self.prefix_group).encode()) + 1) << 24
            tokens = [*range(start, start + shared), *own[shared:]]
        else:
            tokens = list(own)
        sampling = SamplingParams(temperature=0, max_tokens=self.output_length)
        return Request(f"r{number}", tokens, sampling, self.priority)


# -------------------------------------------------------------------------------------- workloads

# Changes to the defaults of `workload`.
WORKLOADS = {
    "poisson": {},
    "bursty": {"burstiness": 0.1},
    "long-tail": {"spread": 1.2},
    "shared-prefix": {"num_prefix_groups": 8, "prefix_length": 512},
}


def workload(
    name: str = "poisson", num_requests: int = 1000, *, seed: int = 0, **changes
) -> Iterator[Arrival]:
    """Arrivals of a named workload, with any option of `arrivals` changed.

    Raises ValueError for an unknown name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, but is {name!r}")
    return arrivals(num_requests, seed=seed, **{**WORKLOADS[name], **changes})


def arrivals(
    num_requests: int,
    *,
    rate: float = 6.0,
    burstiness: float = 1.0,
    input_length: int = 256,
    output_length: int = 96,
    spread: float = 0.6,
    longest: int = 1024,
    num_prefix_groups: int = 0,
    prefix_length: int = 0,
    priorities: tuple[int, ...] = (0,),
    seed: int = 0,
) -> Iterator[Arrival]:
    """`num_requests` arrivals, `rate` a second on average.

    The gaps are gamma-distributed of shape `burstiness`: 1 is a Poisson process, less comes in
    bursts. Lengths are log-normal: medians as given, sigma `spread` (0: all equal), from 1 to
    `longest`. With prefix groups, each prompt is preceded by one of that many shared prefixes.
    """
    for option, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < float("inf"):  # NaN too: time would stand still
            raise ValueError(f"{option} must be above 0 and finite, but is {value}")
    rng = random.Random(seed)

    def length(median: int) -> int:
        return max(1, min(round(median * rng.lognormvariate(0, spread)), longest))

    time = 0.0
    for _ in range(num_requests):
        time += 1000 * rng.gammavariate(burstiness, 1 / (rate * burstiness))
        group = rng.randrange(num_prefix_groups) if num_prefix_groups else None
        yield Arrival(
            time,
            length(input_length) + (prefix_length if num_prefix_groups else 0),
            length(output_length),
            rng.choice(priorities),
            group,
            prefix_length,
        )


def read_arrivals(path: str | os.PathLike) -> Iterator[Arrival]:
    """Arrivals from JSON Lines: the fields of Arrival, the first three required, in order of time.

    The names are those of the public Mooncake traces, which can be read as they are. Raises
    ValueError naming file and line.
    """
    last = float("-inf")
    with Path(path).open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
                arrival = Arrival(**{**fields, "hash_ids": tuple(fields.get("hash_ids", ()))})
                if type(arrival.timestamp) not in (int, float) or not isfinite(arrival.timestamp):
                    raise ValueError("timestamp must be a number of milliseconds")
                lengths = (arrival.input_length, arrival.output_length)
                if not all(type(n) is int and n >= 1 for n in lengths):
                    raise ValueError("lengths must be whole numbers, at least 1")
                if not all(type(n) is int for n in arrival.hash_ids):
                    raise ValueError("hash_ids must be whole numbers")
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not an arrival ({error})") from None
            if arrival.timestamp < last:
                raise ValueError(f"{path}, line {number}: earlier than the line before; sort by timestamp")
            last = arrival.timestamp
            yield arrival


# ------------------------------------------------------------------------------------- simulating


@dataclass
class Simulation:
    """A finished run. `trace` has its steps only if they were kept; times are in milliseconds."""

    trace: Trace
    metrics: Metrics
    num_refused: int  # could never have fitted, and were turned away

    def summary(self, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
        """Latencies, throughput, and goodput under the limits; throughputs are per millisecond."""
        return self.metrics.summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)


def simulate(
    workload: Iterable[Arrival],
    baseline: str = "mixed",
    *,
    cost: CostModel | None = None,
    num_blocks: int = 4096,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    watermark: int | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
    keep_steps: bool = True,
    path: str | os.PathLike | None = None,
    **settings,
) -> Simulation:
    """Serve a workload, in order of time, until all is done.

    `settings` go to the scheduler (policy, long_prefill_token_threshold). For long runs give
    keep_steps=False: then memory grows by what the percentiles need, 8 bytes an output token, and
    by the requests that wait. `path` takes the trace as it comes. Raises ValueError for an unknown baseline.
    """
    caching = enable_prefix_caching and baseline != "padded"  # separate rectangles share nothing
    recorder = _recorder(
        baseline,
        BlockManager(num_blocks, block_size, enable_prefix_caching=caching, watermark=watermark),
        cost,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        **settings,
    )
    trace = recorder.trace
    metrics = Metrics(trace.header)
    sinks = [metrics.add]
    if keep_steps:
        sinks.append(trace.steps.append)
    with line_writer(path) if path else nullcontext() as write:
        if path:
            sinks.append(write)
            write(trace.header)

        def sink(record: dict) -> None:
            for take in sinks:
                take(record)

        recorder.sink = sink
        num_refused = _serve(recorder, workload)
        recorder.close("drained")
        if path:
            write(trace.end)
    return Simulation(trace, metrics, num_refused)


def _recorder(baseline: str, kv: BlockManager, cost: CostModel | None, **settings) -> Recorder:
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, but is {baseline!r}")
    chosen = BASELINES[baseline]
    parts = {} if baseline == "mixed" else {"Scheduler": baseline, "attend_backend": chosen.backend}
    clock = VirtualClock((cost or CostModel()).clock(chosen.backend))
    return Recorder(chosen(kv, **settings), clock=clock, parts=parts, sink=lambda record: None)


def _serve(recorder: Recorder, workload: Iterable[Arrival]) -> int:
    """Run until all is done; how many requests were refused."""
    clock, live, num_refused = recorder.clock, {}, 0
    coming = ((arrival.timestamp, arrival.request(i)) for i, arrival in enumerate(workload))
    following = next(coming, None)
    while following or recorder.has_work:
        if not recorder.has_work:
            clock.time = max(clock.time, following[0])
        while following and following[0] <= clock.time:
            timestamp, request = following
            # It came while the step ran, not at the step's end.
            now, clock.time = clock.time, timestamp
            try:
                recorder.add(request)
                live[request.request_id] = request
            except ValueError:
                num_refused += 1
            clock.time = now
            following = next(coming, None)
        if recorder.has_work:
            _step(recorder, live, lambda request: 0)
    return num_refused


def _step(recorder: Recorder, live: dict[str, Request], next_token: Callable[[Request], int]) -> None:
    scheduled = recorder.schedule()
    if not scheduled:
        raise RuntimeError(
            f"the scheduler scheduled nothing with {len(recorder.waiting)} requests waiting "
            f"and {len(recorder.running)} running"
        )
    ending = [live[i] for i, n in scheduled.items() if n == live[i].num_new_tokens]
    sampled = {request.request_id: next_token(request) for request in ending}
    for request in recorder.update(scheduled, sampled):
        del live[request.request_id]


# ------------------------------------------------------------------------- simulated against real


@dataclass
class Replayed:
    """A request of a recorded run: when it was added, and what became of it."""

    step: int
    request: Request
    output_token_ids: list[int]
    finish_reason: str | None = None


def replay_workload(trace: Trace) -> list[Replayed]:
    """The requests of a recorded run, in order of arrival; `step` is the one that first saw each.

    Prompts have the recorded lengths and made-up tokens. Raises ValueError for a run in which
    requests shared a prefix: a trace does not tell whose.
    """
    replayed: list[Replayed] = []
    latest: dict[str, Replayed] = {}
    admitted: set[str] = set()
    for record in trace.steps:
        for event in record["events"]:
            name, kind = event["id"], event["type"]
            if kind == "QUEUED":
                prompt = Arrival(0, event["num_prompt_tokens"], event["max_tokens"], event["priority"])
                request = prompt.request(len(replayed))
                request.request_id = name
                latest[name] = Replayed(record["step"], request, [])
                replayed.append(latest[name])
                admitted.discard(name)
            elif kind == "SCHEDULED":
                if event["num_cached_tokens"] and name not in admitted:
                    raise ValueError(
                        f"request {name!r} began with a cached prefix; a trace cannot tell whose"
                    )
                admitted.add(name)
            elif kind == "FINISHED":
                latest[name].finish_reason = event["reason"]
        for name, token in record["new_tokens"].items():
            latest[name].output_token_ids.append(token)
    return replayed


def resimulate(trace: Trace, cost: CostModel | None = None) -> Trace:
    """The same arrivals and aborts, step by step, through the simulator: its trace, in virtual time.

    `first_difference(resimulate(trace), trace)` is None if the simulator decides as the recorded
    engine did.
    """
    config = dict(trace.header["config"])
    kv = BlockManager(
        config.pop("num_blocks"),
        config.pop("block_size"),
        enable_prefix_caching=config.pop("prefix_caching"),
        watermark=config.pop("watermark"),
    )
    scheduler = trace.header.get("parts", {}).get("Scheduler")
    recorder = _recorder(scheduler if scheduler in BASELINES else "mixed", kv, cost, **config)
    recorder.sink = recorder.trace.steps.append
    coming = iter(replay_workload(trace))
    plans: dict[str, Replayed] = {}
    live: dict[str, Request] = {}

    def next_token(request: Request) -> int:
        plan, n = plans[request.request_id], len(request.output_token_ids)
        if n == len(plan.output_token_ids) - 1 and plan.finish_reason == "stop":
            request.stop_string = ""
        return plan.output_token_ids[n] if n < len(plan.output_token_ids) else 0

    for record in trace.steps:
        for event in record["events"]:
            name = event["id"]
            if event["type"] == "QUEUED":
                plans[name] = next(coming)
                live[name] = plans[name].request
                recorder.add(live[name])
            elif event["type"] == "FINISHED" and event["reason"] == "abort":
                recorder.abort(name)
                live.pop(name, None)
        if not recorder.has_work:
            break
        _step(recorder, live, next_token)
    return recorder.close("max_steps" if recorder.has_work else "drained")


def record(path: Path, model: str = "smollm2", num_requests: int = 24, seed: int = 0) -> None:
    """Serve a small workload with a real model in wall time and write its trace.

    The pool is too small for all, so that there is preemption; the requests come in while others
    run, at steps that do not depend on the machine's speed.
    """
    from mini_engine.engine import Engine
    from mini_engine.loading.checkpoint import load_model
    from mini_engine.loading.registry import resolve
    from mini_engine.trace import write_trace

    rng = random.Random(seed)
    net = load_model(resolve(model), dtype="float32", device="cpu")
    engine = Engine(net, max_num_batched_tokens=64, max_num_seqs=8, num_blocks=32, seed=seed)
    steps = sorted(rng.randrange(120) for _ in range(num_requests))
    while steps or engine.has_work:
        while steps and (steps[0] <= engine.scheduler.step or not engine.has_work):
            steps.pop(0)
            prompt = [rng.randrange(net.config.vocab_size) for _ in range(rng.randint(8, 96))]
            params = SamplingParams(temperature=0, max_tokens=rng.randint(16, 80), ignore_eos=True)
            engine.add_request(prompt, params)
        engine.step()
    write_trace(path, engine.trace)


if __name__ == "__main__":  # python -m mini_engine.sim.simulate recording.jsonl
    import typer

    typer.run(record)
