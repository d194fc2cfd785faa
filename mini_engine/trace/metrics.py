"""Latencies, throughput and utilisation of a run, computed from its trace alone.

`Metrics` takes a trace record by record, so that a run too long to keep can be measured, too. Times are in
the trace's own unit. A value that is undefined or unknown is None, never 0 or NaN.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from mini_engine.trace.fold import Fold
from mini_engine.trace.records import End, Header, RequestView, StepTrace, Trace


@dataclass(frozen=True)
class Stats:
    """A distribution: mean, percentiles by linear interpolation, maximum."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, given: Iterable[float | None]) -> Stats | None:
        """Return the Stats of the values that are not None, or None if there is none."""
        import numpy as np  # only when there is something to count

        values = np.fromiter((value for value in given if value is not None), float)
        if not values.size:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(values.size, values.mean().item(), p50, p90, p99, values.max().item())


@dataclass(frozen=True)
class RequestMetrics:
    """The metrics of one request.

    queue_time    from QUEUED to the first SCHEDULED; queue_steps: the steps that ran meanwhile
    prefill_time  from the first SCHEDULED to the end of the step that gave the first token
    ttft          time to first token, from QUEUED to that same end
    itl           inter-token latencies, the gaps between consecutive output tokens; None if the trace
                  begins between them
    tpot          time per output token, the mean of itl; None for a single output token
    e2e           from QUEUED to the end of the last step; None unless the request was completed

    num_cached_tokens is the prefix-cache hit of the first admission, num_resumed_cached_tokens
    those of the admissions after a preemption. num_draft_tokens were verified, of which num_accepted_tokens
    became output. finish_reason None: the request was not finished.
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
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class Summary:
    """The metrics of a whole trace. Throughputs and goodput are per unit of time, utilisations from 0 to 1.

    duration is the time from the first arrival to the end of the last step. num_computed_tokens counts
    the tokens that the model ran, including rejected drafts and recomputation after a preemption.
    acceptance_rate is the share of accepted drafts, None without drafts. goodput counts the completed
    requests that met every limit given; without limits, all completed requests. If the trace begins in the
    middle of a run, the requests are those that it names, and duration and rates are None.
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
    num_draft_tokens: int
    num_accepted_tokens: int
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
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def max_itl(self) -> float | None:
        return None if self.itl is None else self.itl.max


def request_metrics(trace: Trace) -> dict[str, RequestMetrics]:
    """Return the metrics of every request of a trace by id, in order of arrival."""
    return Metrics.of(trace).requests()


def summary(trace: Trace, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
    """Return the Summary of a trace. The limits, in the trace's unit, concern `goodput` only."""
    return Metrics.of(trace).summary(ttft_limit=ttft_limit, tpot_limit=tpot_limit)


class Metrics:
    """Metrics of a run while it is recorded: `Recorder(..., consumers=[metrics])`, then `summary()`.

    Keeps 8 bytes per output token and no records. Raises ValueError for a record with a request that
    never arrived.
    """

    def __init__(self, header: Header):
        self.unit, self.config = header.unit, header.config
        self.fold = Fold(header)
        self._is_whole = not header.requests  # until the first step turns out to be a later one
        # The time of each output token; for a request from before the trace, also of the last one before it.
        self._times = {
            view.request_id: array("d", () if view.t_last_token is None else (view.t_last_token,))
            for view in header.requests
        }
        self._num_steps = self._num_batched = self._used_blocks = self._max_used_blocks = 0

    @classmethod
    def of(cls, trace: Trace) -> Metrics:
        """Return the Metrics of a complete trace."""
        metrics = cls(trace.header)
        for record in trace.steps:
            metrics.add(record)
        metrics.close(trace.end)
        return metrics

    @classmethod
    def joined(cls, parts: Sequence[Metrics]) -> Metrics:
        """Return the Metrics of several engines with one clock, as of one engine; for `summary`.

        A request that is in two parts was served by one after the other: it was queued, admitted and looked
        up in the prefix cache in the first, and its outputs are those of the second.
        """
        whole = cls(Header("", parts[0].unit, "", {}, parts[0].config))
        views = whole.fold.views
        for part in parts:
            for name, view in part.fold.views.items():
                if name in views:
                    begun = {key: getattr(views[name], key) for key in _BEGINNING}
                    view = replace(view, **begun)
                    view.num_preemptions += views[name].num_preemptions
                views[name] = view
            whole._times |= part._times
            whole._is_whole &= part._is_whole
            whole._num_steps += part._num_steps
            whole._num_batched += part._num_batched
            whole._used_blocks += part._used_blocks
            whole._max_used_blocks = max(whole._max_used_blocks, part._max_used_blocks)
            whole.fold.t = max(whole.fold.t, part.fold.t)
        return whole

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
        """Take the end, which may have events after the last step."""
        self.fold.close(end)
        if end:
            self._arrive(end)

    def _arrive(self, record: StepTrace | End) -> None:
        for event in record.events:
            if event.type == "QUEUED":
                self._times[event.id] = array("d")

    def requests(self) -> dict[str, RequestMetrics]:
        """Return the metrics of every request by id, in order of arrival."""
        return {name: self._request(view, self._gaps(name)) for name, view in self.fold.views.items()}

    def _gaps(self, request_id: str) -> list[float]:
        """Return the times between consecutive output tokens."""
        return [after - before for before, after in pairwise(self._times[request_id])]

    def _request(self, view: RequestView, gaps: list[float] | None = None) -> RequestMetrics:
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
            itl=None if gaps is None or len(gaps) < count - 1 else tuple(gaps),
            e2e=_between(queued, view.t_finished) if completed else None,
            num_prompt_tokens=view.num_prompt_tokens,
            num_output_tokens=count,
            num_preemptions=view.num_preemptions,
            num_cached_tokens=view.num_first_cached_tokens,
            num_resumed_cached_tokens=view.num_resumed_cached_tokens,
            num_draft_tokens=view.num_draft_tokens,
            num_accepted_tokens=view.num_accepted_tokens,
            finish_reason=view.finish_reason,
        )

    def summary(self, *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> Summary:
        """Return the Summary. Goodput as in DistServe (Zhong et al., 2024): requests completed within both
        limits, per unit of time. A request without a TPOT meets any limit on it."""
        views = self.fold.views
        # Without their gaps: a long run has many, and only their distribution is needed.
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
            num_draft_tokens=sum(r.num_draft_tokens for r in requests),
            num_accepted_tokens=sum(r.num_accepted_tokens for r in requests),
            output_throughput=rate(num_output),
            total_throughput=rate(num_prompt + num_output),
            goodput=rate(sum(_is_good(r, ttft_limit, tpot_limit) for r in requests)),
            queue_time=Stats.of(r.queue_time for r in requests),
            ttft=Stats.of(r.ttft for r in requests),
            tpot=Stats.of(r.tpot for r in requests),
            itl=Stats.of(chain.from_iterable(map(self._gaps, views))),
            e2e=Stats.of(r.e2e for r in requests),
            budget_utilisation=self._num_batched / (budget * steps) if budget and steps else None,
            kv_utilisation=self._used_blocks / (num_blocks * steps) if num_blocks and steps else None,
            max_kv_utilisation=self._max_used_blocks / num_blocks if num_blocks and steps else None,
        )


_BEGINNING = ("t_queued", "t_scheduled", "queued_step", "scheduled_step", "num_first_cached_tokens")


def _between(start: Any, end: Any) -> Any:
    return None if start is None or end is None else end - start


def _is_good(request: RequestMetrics, ttft_limit: float | None, tpot_limit: float | None) -> bool:
    within = ((request.ttft, ttft_limit), (request.tpot, tpot_limit))
    return request.e2e is not None and all(
        limit is None or value is None or value <= limit for value, limit in within
    )
