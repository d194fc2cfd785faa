"""How long requests waited and how well the engine was used, computed from a trace and nothing else.

`Metrics` takes a trace record by record, so a run that is too long to keep can be measured, too. Times
are in the trace's own unit; a value that is not defined, or not known, is None, never 0 or NaN.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mini_engine.trace.fold import Fold
from mini_engine.trace.records import End, Header, RequestView, StepTrace, Trace
from mini_engine.trace.stats import Stats

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True)
class RequestMetrics:
    """One request in the field's terms.

    queue_time    QUEUED to the first SCHEDULED; queue_steps, the steps that ran meanwhile
    prefill_time  first SCHEDULED to the end of the step that gave the first token
    ttft          QUEUED to that same end: time to first token
    itl           inter-token latencies: the gaps between output tokens that follow each other; None
                  if the trace begins between them
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
    itl: tuple[float, ...] | None
    e2e: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_cached_tokens: int
    num_resumed_cached_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class Summary:
    """A whole trace. Throughputs and goodput are per unit of time, utilisations between 0 and 1.

    duration runs from the first arrival to the end of the last step. num_computed_tokens counts the
    tokens that the model ran, recomputation after a preemption included. goodput counts the
    completed requests that met every limit given; without limits that is all of them. Of a trace that
    begins in the middle of a run the requests are those that it names, and rates are not known.
    """

    unit: str
    num_requests: int
    num_completed: int
    num_steps: int
    duration: float | None
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


def request_metrics(trace: Trace) -> dict[str, RequestMetrics]:
    """The metrics of every request of a trace, by id, in order of arrival."""
    return Metrics.of(trace).requests()


def summary(trace: Trace, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
    """A whole trace in one Summary; the limits, in the trace's unit, concern `goodput` only."""
    return Metrics.of(trace).summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)


class Metrics:
    """Folds records as they come: `Recorder(..., consumers=[metrics])`, then `summary()`.

    Keeps 8 bytes an output token and nothing of the records themselves. Raises ValueError for a
    record that speaks of a request which never arrived.
    """

    def __init__(self, header: Header):
        self.unit, self.config = header.unit, header.config
        self.fold = Fold(header)
        self._is_whole = not header.requests  # so far: the first step may be a later one
        # When each output token was there; of a request that is older, from the last one before.
        self._times = {
            view.request_id: array("d", () if view.t_last_token is None else (view.t_last_token,))
            for view in header.requests
        }
        self._num_steps = self._num_batched = self._used_blocks = self._max_used_blocks = 0

    @classmethod
    def of(cls, trace: Trace) -> Metrics:
        """Of a trace that is there already."""
        metrics = cls(trace.header)
        for record in trace.steps:
            metrics.add(record)
        metrics.close(trace.end)
        return metrics

    def add(self, record: StepTrace) -> None:
        """Take the next step's record."""
        if not self._num_steps:
            self._is_whole &= record.step == 0
        self.fold.add(record)
        self._arrive(record)
        for request_id, token_ids in record.new_tokens.items():
            for _ in token_ids:
                self._times[request_id].append(record.t_end)
        self.fold.settle()
        self._num_steps += 1
        self._num_batched += record.num_batched_tokens
        used = self.config.get("num_blocks", 0) - record.num_free_blocks
        self._used_blocks += used
        self._max_used_blocks = max(self._max_used_blocks, used)

    def close(self, end: End | None) -> None:
        """Take the closing line, which may hold what came after the last step."""
        self.fold.close(end)
        if end:
            self._arrive(end)

    def _arrive(self, record: StepTrace | End) -> None:
        for event in record.events:
            if event.type == "QUEUED":
                self._times[event.id] = array("d")

    def requests(self) -> dict[str, RequestMetrics]:
        """The metrics of every request, by id, in order of arrival."""
        return {name: self._request(view, self._gaps(name)) for name, view in self.fold.views.items()}

    def _gaps(self, request_id: str) -> ndarray[Any, Any]:
        """The distances between output tokens that follow each other, as a numpy array."""
        import numpy as np

        return np.diff(np.frombuffer(self._times[request_id]))

    def _request(self, view: RequestView, gaps: ndarray[Any, Any] | None = None) -> RequestMetrics:
        count, queued, first = view.num_output_tokens, view.t_queued, view.t_first_token
        completed = view.finish_reason in ("stop", "length")
        spread = _between(first, view.t_last_token)
        return RequestMetrics(
            id=view.request_id,
            priority=view.priority,
            queue_time=_between(queued, view.t_scheduled),
            queue_steps=_between(view.queued_step, view.scheduled_step),
            prefill_time=_between(view.t_scheduled, first),
            ttft=_between(queued, first),
            tpot=spread / (count - 1) if count > 1 and spread is not None else None,
            itl=None if gaps is None or len(gaps) < count - 1 else tuple(gaps.tolist()),
            e2e=_between(queued, view.t_finished) if completed else None,
            num_prompt_tokens=view.num_prompt_tokens,
            num_output_tokens=count,
            num_preemptions=view.num_preemptions,
            num_cached_tokens=view.num_first_cached_tokens,
            num_resumed_cached_tokens=view.num_resumed_cached_tokens,
            finish_reason=view.finish_reason,
        )

    def summary(self, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
        """Goodput as DistServe counts it (Zhong et al., 2024): completed within both limits, per
        unit of time. A request without a TPOT has none to exceed."""
        views = self.fold.views
        # Without their gaps: of a long run these are many, and only their distribution is asked for.
        requests = [self._request(view) for view in views.values()]
        steps, budget = self._num_steps, self.config.get("max_num_batched_tokens")
        num_blocks = self.config.get("num_blocks")
        arrivals = [view.t_queued for view in views.values() if view.t_queued is not None]
        start = min(arrivals, default=self.fold.t) if steps else self.fold.t
        duration = self.fold.t - start if self._is_whole else None

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
            itl=Stats.of_arrays([self._gaps(name) for name in views]),
            e2e=Stats.of(r.e2e for r in requests),
            budget_utilisation=self._num_batched / (budget * steps) if budget and steps else None,
            kv_utilisation=self._used_blocks / (num_blocks * steps) if num_blocks and steps else None,
            max_kv_utilisation=self._max_used_blocks / num_blocks if num_blocks and steps else None,
        )


def _between(start: Any, end: Any) -> Any:
    return None if start is None or end is None else end - start


def _is_good(request: RequestMetrics, ttft_limit: float | None, tpot_limit: float | None) -> bool:
    within = ((request.ttft, ttft_limit), (request.tpot, tpot_limit))
    return request.e2e is not None and all(
        limit is None or value is None or value <= limit for value, limit in within
    )
