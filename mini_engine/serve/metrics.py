"""The numbers of a server for Prometheus, under vLLM's names, so that its dashboards work."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mini_engine.outputs import Delta
from mini_engine.serve.answers import Answer

State = Callable[[], tuple[dict[str, float], dict[str, float]]]  # gauges and counters, by name
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Histogram:
    """Counts of seconds. prometheus_client's takes locks for every token; these belong to the event loop."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def family(self, model: str) -> HistogramMetricFamily:
        """Return it as Prometheus has it: how many are not longer than each bucket's bound."""
        found = HistogramMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name"])
        bounds = [*map(str, map(float, SECONDS)), "+Inf"]
        found.add_metric([model], list(zip(bounds, accumulate(self.counts), strict=True)), self.sum)
        return found


class ServerMetrics:
    """Counts what is served; the engine's own state is read when Prometheus asks."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, state: State, model: str):
        self.registry = CollectorRegistry()
        self.state, self.model = state, model
        self.registry.register(self)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.num_generated = 0
        self.success = self._counter("request_success", "Answers by finish_reason.", "finished_reason")
        self.refused = self._counter("request_refused", "Requests that were refused, by status.", "status")
        self.ttft = Histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.itl = Histogram("inter_token_latency_seconds", "Between two tokens of an answer.")
        self.e2e = Histogram("e2e_request_latency_seconds", "From the request to its end.")

    def _counter(self, name: str, text: str, label: str | None = None) -> Counter:
        labels = ("model_name", *([label] if label else []))
        counter = Counter(f"vllm:{name}", text, labels, registry=self.registry)
        return counter if label else counter.labels(self.model)

    def take(self, delta: Delta, began: float, last: dict[int, float]) -> None:
        """Measure a Delta of a request that came at `began`; `last` has the time of each answer's last."""
        now, before = time.monotonic(), last.get(delta.index)
        if delta.token_ids:
            if before is None:
                self.ttft.observe(now - began)
            else:
                self.itl.observe((now - before) / len(delta.token_ids))
            last[delta.index] = now
            self.num_generated += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.e2e.observe(now - began)

    def count(self, answer: Answer) -> None:
        """Count a request that has ended, or that its client has left."""
        self.prompt_tokens.inc(sum(map(len, answer.prompts)))
        for choice in answer.choices:
            self.success.labels(self.model, choice.finish_reason or "abort").inc()

    def text(self) -> bytes:
        """Return all numbers in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the state of the engine; prometheus_client calls this."""
        gauges, counters = self.state()
        labels = ["model_name"]
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=labels)
            gauge.add_metric([self.model], value)
            yield gauge
        for histogram in (self.ttft, self.itl, self.e2e):
            yield histogram.family(self.model)
        for name, value in (counters | {"generation_tokens": self.num_generated}).items():
            counter = CounterMetricFamily(f"vllm:{name}", f"{name} in tokens", labels=labels)
            counter.add_metric([self.model], value)
            yield counter
