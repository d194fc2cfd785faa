"""How long requests waited and how well the engine was used, computed from a trace and nothing else.

`Metrics` takes a trace record by record, so it also serves as the `sink` of a run that is too long
to keep. Times are in the trace's own unit; a value that is not defined is None, never 0 or NaN.
"""

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestMetrics:
    """One request in the field's terms.

    queue_time    QUEUED to the first SCHEDULED; queue_steps, the steps that ran meanwhile
    prefill_time  first SCHEDULED to the end of the step that gave the first token
    ttft          QUEUED to that same end: time to first token
    itl           inter-token latencies: the gaps between output tokens that follow each other
    tpot          their mean, time per output token; a single output token has none
    e2e           QUEUED to the end of the last step; only a completed request has one

    num_cached_tokens is the prefix-cache hit of the first admission, num_resumed_cached_tokens
    those of the admissions after a preemption. finish_reason None: it was still there at the end.
    """

    id: str
    priority: int
    queue_time: float | None
    queue_steps: int | None
    prefill_time: float | None
    ttft: float | None
    tpot: float | None
    itl: tuple[float, ...]
    e2e: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_cached_tokens: int
    num_resumed_cached_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class Stats:
    """A latency over those that have one: mean, percentiles by linear interpolation, maximum."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values) -> "Stats | None":
        """None when there is no value: the average of nothing is not 0."""
        import numpy as np

        return cls.of_arrays([np.array([value for value in values if value is not None], dtype=float)])

    @classmethod
    def of_arrays(cls, arrays) -> "Stats | None":
        """The same over numpy arrays that hold values only."""
        import numpy as np

        values = np.concatenate(arrays) if arrays else np.array([])
        if not values.size:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(values.size, values.mean().item(), p50, p90, p99, values.max().item())


@dataclass(frozen=True)
class Summary:
    """A whole trace. Throughputs and goodput are per unit of time, utilisations between 0 and 1.

    duration runs from the first arrival to the end of the last step. num_computed_tokens counts the
    tokens that the model ran, recomputation after a preemption included. goodput counts the
    completed requests that met every limit given; without limits that is all of them.
    """

    unit: str
    num_requests: int
    num_completed: int
    num_steps: int
    duration: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    output_throughput: float | None
    total_throughput: float | None
    goodput: float | None
    queue_time: Stats | None
    ttft: Stats | None
    tpot: Stats | None
    itl: Stats | None
    e2e: Stats | None
    budget_utilisation: float | None
    kv_utilisation: float | None
    max_kv_utilisation: float | None

    @property
    def max_itl(self) -> float | None:
        return None if self.itl is None else self.itl.max


def request_metrics(trace) -> dict[str, RequestMetrics]:
    """The metrics of every request of a trace, by id, in order of arrival."""
    return Metrics.of(trace).requests()


def summary(trace, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
    """A whole trace in one Summary; the limits, in the trace's unit, concern `goodput` only."""
    return Metrics.of(trace).summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)


@dataclass(slots=True)
class _Times:
    """The moments of one request's life, as they come in."""

    queued: float
    queued_step: int
    num_prompt_tokens: int
    priority: int
    scheduled: float | None = None
    queue_steps: int | None = None
    tokens: array = field(default_factory=lambda: array("d"))  # when each output token was there
    finished: float | None = None
    finish_reason: str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_resumed_cached_tokens: int = 0


class Metrics:
    """Folds records as they come: `Recorder(..., sink=metrics.add)`, then `summary()`.

    Keeps 8 bytes an output token and nothing of the records themselves. Raises ValueError for a
    record that speaks of a request which never arrived.
    """

    def __init__(self, header: dict):
        self.unit = header.get("unit", "step")
        self.config = header.get("config", {})
        self._times: dict[str, _Times] = {}
        self._num_steps = self._num_batched = self._used_blocks = self._max_used_blocks = 0
        self._end = None

    @classmethod
    def of(cls, trace) -> "Metrics":
        metrics = cls(trace.header)
        for record in trace.steps:
            metrics.add(record)
        metrics.close(trace.end)
        return metrics

    def add(self, record: dict) -> None:
        """Take the next step's record."""
        end = record["t_end"]
        for event in record["events"]:
            # An abort is recorded with the step that follows it, in which the request has no part.
            ran = event["type"] == "FINISHED" and event["id"] in record["scheduled"]
            self._take(event, record["step"], end if ran else record["t"])
        for request_id in record["new_tokens"]:
            self._known(request_id, record["step"]).tokens.append(end)
        self._num_steps += 1
        self._num_batched += record["num_batched_tokens"]
        used = self.config.get("num_blocks", 0) - record["num_free_blocks"]
        self._used_blocks += used
        self._max_used_blocks = max(self._max_used_blocks, used)
        self._end = end

    def close(self, end: dict | None) -> None:
        """Take the closing line, which may hold what came after the last step."""
        for event in (end or {}).get("events", ()):
            self._take(event, self._num_steps, self._end)

    def _known(self, request_id: str, step: int) -> _Times:
        if request_id not in self._times:
            raise ValueError(f"step {step} of the trace names request {request_id!r}, which was never QUEUED")
        return self._times[request_id]

    def _take(self, event: dict, step: int, t: float) -> None:
        kind, request_id = event["type"], event["id"]
        if kind == "QUEUED":
            self._times[request_id] = _Times(
                event.get("t", t), step, event["num_prompt_tokens"], event.get("priority", 0)
            )
            return
        times = self._known(request_id, step)
        if kind == "SCHEDULED" and times.scheduled is None:
            times.scheduled, times.queue_steps = t, step - times.queued_step
            times.num_cached_tokens = event.get("num_cached_tokens", 0)
        elif kind == "SCHEDULED":
            times.num_resumed_cached_tokens += event.get("num_cached_tokens", 0)
        elif kind == "PREEMPTED":
            times.num_preemptions += 1
        elif kind == "FINISHED":
            times.finished, times.finish_reason = t, event.get("reason")

    def requests(self) -> dict[str, RequestMetrics]:
        return {request_id: _request_metrics(request_id, times) for request_id, times in self._times.items()}

    def summary(self, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
        """Goodput as DistServe counts it (Zhong et al., 2024): completed within both limits, per
        unit of time. A request without a TPOT has none to exceed."""
        # Without their gaps: of a long run these are many, and only their distribution is asked for.
        requests = [_request_metrics(i, times, gaps=False) for i, times in self._times.items()]
        steps, budget = self._num_steps, self.config.get("max_num_batched_tokens")
        num_blocks = self.config.get("num_blocks")
        start = min((times.queued for times in self._times.values()), default=self._end)
        duration = 0.0 if self._end is None else self._end - start

        def rate(amount: int) -> float | None:
            return amount / duration if duration else None

        num_prompt = sum(r.num_prompt_tokens for r in requests)
        num_output = sum(r.num_output_tokens for r in requests)
        return Summary(
            unit=self.unit,
            num_requests=len(requests),
            num_completed=sum(r.e2e is not None for r in requests),
            num_steps=steps,
            duration=duration,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_computed_tokens=self._num_batched,
            num_cached_tokens=sum(r.num_cached_tokens for r in requests),
            num_preemptions=sum(r.num_preemptions for r in requests),
            output_throughput=rate(num_output),
            total_throughput=rate(num_prompt + num_output),
            goodput=rate(sum(_is_good(r, ttft_limit, tpot_limit) for r in requests)),
            queue_time=Stats.of(r.queue_time for r in requests),
            ttft=Stats.of(r.ttft for r in requests),
            tpot=Stats.of(r.tpot for r in requests),
            itl=Stats.of_arrays([_gaps(times) for times in self._times.values()]),
            e2e=Stats.of(r.e2e for r in requests),
            budget_utilisation=self._num_batched / (budget * steps) if budget and steps else None,
            kv_utilisation=self._used_blocks / (num_blocks * steps) if num_blocks and steps else None,
            max_kv_utilisation=self._max_used_blocks / num_blocks if num_blocks and steps else None,
        )


def _gaps(times: _Times):
    """The distances between output tokens that follow each other, as a numpy array."""
    import numpy as np

    return np.diff(np.frombuffer(times.tokens))


def _request_metrics(request_id: str, times: _Times, gaps: bool = True) -> RequestMetrics:
    first = times.tokens[0] if times.tokens else None
    completed = times.finish_reason in ("stop", "length")
    count = len(times.tokens)
    return RequestMetrics(
        id=request_id,
        priority=times.priority,
        queue_time=None if times.scheduled is None else times.scheduled - times.queued,
        queue_steps=times.queue_steps,
        prefill_time=None if None in (first, times.scheduled) else first - times.scheduled,
        ttft=None if first is None else first - times.queued,
        tpot=(times.tokens[-1] - first) / (count - 1) if count > 1 else None,
        itl=tuple(_gaps(times).tolist()) if gaps else (),
        e2e=times.finished - times.queued if completed else None,
        num_prompt_tokens=times.num_prompt_tokens,
        num_output_tokens=count,
        num_preemptions=times.num_preemptions,
        num_cached_tokens=times.num_cached_tokens,
        num_resumed_cached_tokens=times.num_resumed_cached_tokens,
        finish_reason=times.finish_reason,
    )


def _is_good(request: RequestMetrics, ttft_limit: float | None, tpot_limit: float | None) -> bool:
    within = ((request.ttft, ttft_limit), (request.tpot, tpot_limit))
    return request.e2e is not None and all(
        limit is None or value is None or value <= limit for value, limit in within
    )
