"""The runs that the book plays. `<!-- {play} NAME -->` shows one; it is made when the book is built.

The engine's own Scheduler or a lab's solution decides, as the page says; no run is written by hand.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from labs.kit import FakeKV, drive
from labs.kit.judge import compare, loading
from labs.kit.learner.notebook.traces import in_milliseconds
from mini_engine.block_manager import BlockManager
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.scheduler import Scheduler
from mini_engine.show.player import Playable, Texts, cluster_payload, payload
from mini_engine.show.player.cluster import with_idle
from mini_engine.show.player.picture import step_picture, step_words
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.cluster import simulate_cluster
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import Arrival, arrivals
from mini_engine.trace import Trace, read_trace


@dataclass(frozen=True)
class Shown:
    """One run, or two side by side, and where the player opens."""

    runs: Sequence[Playable]
    names: Sequence[str]
    step: int | None = None
    follow: str | None = None
    texts: Texts | None = None

    def payload(self) -> dict[str, Any]:
        opened = {"step": self.step, "follow": self.follow, "texts": self.texts}
        shown = payload(*self.runs, names=self.names, **opened)
        return shown | {"brief": len(self.runs) > 1}

    def picture(self) -> str | None:
        """Return the step it opens at as SVG, for a page without JavaScript; a log of operations has none."""
        traces = [run for run in self.runs if isinstance(run, Trace)]
        return step_picture(traces[0], self.step, *traces[1:], names=self.names) if traces else None

    def words(self) -> str:
        """Return a description of that picture, in sentences."""
        traces = [run for run in self.runs if isinstance(run, Trace)]
        said = [step_words(run, run.steps[0].step if self.step is None else self.step) for run in traces]
        each = [" ".join([f"{name}:", *words]) for name, words in zip(self.names, said, strict=False)]
        return " ".join(["The trace player.", *each])


@dataclass(frozen=True)
class Engines(Shown):
    """The engines of a cluster, one above the other; `step` counts their moments, as the player does. Without
    JavaScript the first engine is shown."""

    def payload(self) -> dict[str, Any]:
        traces = dict(zip(self.names, self.runs, strict=True))
        return cluster_payload(traces, step=self.step, follow=self.follow) | {"brief": True}

    def first(self) -> Shown:
        traces = [run for run in self.runs if isinstance(run, Trace)]
        filled = with_idle({str(i): trace for i, trace in enumerate(traces)}).values()
        moment = sorted({record.t for trace in filled for record in trace.steps})[self.step or 0]
        begun = [record.step for record in traces[0].steps if record.t <= moment]
        return Shown(traces[:1], self.names[:1], begun[-1] if begun else None)

    def picture(self) -> str | None:
        return self.first().picture()

    def words(self) -> str:
        return self.first().words()


# ------------------------------------------------------------------------------ runs that figures show, too


def batching(lengths: Sequence[int], slots: int, num_blocks: int) -> list[Trace]:
    """Requests of one prompt token and these output lengths, under static and under continuous batching."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": slots, "long_prefill_token_threshold": 0}
    scenario = {
        "name": f"{len(lengths)} in line",
        "config": {"num_blocks": num_blocks, **settings},
        "requests": [{"id": f"r{i}", "prompt": 1, "max_tokens": n} for i, n in enumerate(lengths)],
        "max_steps": 5000,
    }
    return [drive(BASELINES[way](FakeKV(num_blocks), **settings), scenario) for way in ("static", "mixed")]


def counters() -> Trace:
    """lab-06's request that is preempted and comes back through its own blocks."""
    return _of_lab("lab-06", "preempted, and back through its own blocks")


def five_in_a_pool() -> Trace:
    config = {"max_num_batched_tokens": 16, "max_num_seqs": 6}
    requests = (("a", 13, 10, 0), ("b", 6, 18, 0), ("c", 21, 6, 2), ("d", 9, 12, 3), ("e", 5, 8, 6))
    kv = BlockManager(20, 4, enable_prefix_caching=False, watermark=0)
    scenario = _scenario("five in a pool of twenty", requests, **config, num_blocks=20, block_size=4)
    return drive(Scheduler(kv, **config), scenario)


def waits_for_a_slot() -> Trace:
    """Four requests on two slots of the simulator; r2 waits, and its first gap after that is long."""
    arrivals = [Arrival(0, 200, 6), Arrival(0, 200, 11), Arrival(10, 300, 14), Arrival(60, 700, 4)]
    return simulate(arrivals, max_num_batched_tokens=256, max_num_seqs=2, num_blocks=96).trace


@cache
def hero() -> tuple[Trace, dict[str, tuple[str, list[str]]]]:
    """Return the run that docs/images/hero.py recorded: six chats, and of each its prompt and its letters."""
    recorder = module("images/hero.py")
    trace, tokenizer = read_trace(recorder.RECORDING), load_tokenizer(resolve("shakespeare"))
    texts = {str(n): (prompt, list[str]()) for n, (prompt, *_) in enumerate(recorder.CHATS, 1)}
    for record in trace.steps:
        for name, token_ids in record.new_tokens.items():
            texts[name][1].extend(tokenizer.decode([token]) for token in token_ids)
    return trace, texts


# ------------------------------------------------------------------------------------- runs of their own


def _scenario(name: str, requests: Sequence[tuple[Any, ...]], **config: Any) -> dict[str, Any]:
    keys = ("id", "prompt", "max_tokens", "at", "priority")
    entries = [dict(zip(keys, request, strict=False)) for request in requests]
    return {"name": name, "config": config, "requests": entries}


def _run(lab_id: str, scenario: dict[str, Any]) -> Any:
    return loading.load(lab_id, "scenarios").run(loading.namespace(lab_id, "solution"), scenario)


def _of_lab(lab_id: str, name: str) -> Any:
    scenarios = loading.load(lab_id, "scenarios").SCENARIOS
    return _run(lab_id, next(scenario for scenario in scenarios if scenario["name"] == name))


def _lab_run(lab_id: str, name: str, title: str, step: int, follow: str | None = None) -> Shown:
    return Shown([_of_lab(lab_id, name)], [title], step, follow)


def first_preempted(trace: Trace) -> str:
    return next(event.id for record in trace.steps for event in record.events if event.type == "PREEMPTED")


def _resources() -> Shown:
    config = {"max_num_batched_tokens": 10, "max_num_seqs": 4, "long_prefill_token_threshold": 0}
    requests = [("d0", 3, 9, 0), ("d1", 2, 5, 0), ("a", 5, 6, 1), ("b", 8, 6, 1), ("c", 4, 5, 1)]
    scenario = _scenario("budget and slots", requests, **config, num_blocks=64, watermark=0)
    return Shown([_run("lab-01", scenario)], ["a budget of 10, four slots"], 1, "c")


def _preempting(trace: Trace, name: str, texts: Texts | None = None, step: int | None = None) -> Shown:
    """Show a run from its first preemption, or another step, on, and follow the request that is preempted."""
    steps = (r.step for r in trace.steps for event in r.events if event.type == "PREEMPTED")
    return Shown([trace], [name], next(steps) if step is None else step, first_preempted(trace), texts)


def _chunks() -> Shown:
    requests = [*((name, 4, 12, 0) for name in "abc"), ("d", 2000, 4, 3)]
    runs = []
    for threshold in (0, 512):
        limits: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 4}
        limits["long_prefill_token_threshold"] = threshold
        made = Scheduler(BlockManager(144, 16, enable_prefix_caching=False), **limits)
        scenario = _scenario("a long prompt", requests, **limits, num_blocks=144, block_size=16)
        runs.append(in_milliseconds(drive(made, scenario)))
    return Shown(runs, ["the prompt whole", "in chunks of 512"], 3, "d")


def _prefix() -> Shown:
    base = list(range(100, 109))  # two full blocks of four, and one token over
    requests = [("a", base, 8, 0), ("b", [*base, 1, 2], 8, 2), ("c", base[:6], 6, 2), ("d", base, 4, 11)]
    config = {"num_blocks": 14, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    scenario = _scenario("shared beginnings", requests, **config, prefix_caching=True)
    return Shown([_run("lab-06", scenario)], ["shared beginnings"], 2, "b")


def _metrics() -> Shown:
    trace = waits_for_a_slot()
    first = next(record.step for record in trace.steps if "r2" in record.new_tokens)
    return Shown([trace], ["four on two slots, in milliseconds"], first, "r2")


def _sampling() -> Shown:
    trace = _of_lab("lab-08", "preempted, and on with their own numbers")
    return _preempting(trace, "one greedy, three with seeds")


def _watched(name: str) -> Shown:
    watch = module("images/watch.py")
    return Shown(watch.runs(name), watch.NAMES, watch.place(name))


def _cost() -> Shown:
    arrivals = [Arrival(0, 40, 12), Arrival(0, 60, 12), *(Arrival(20 + 12 * i, 200, 4) for i in range(4))]
    ways = ("prefill-first", "mixed")
    limits = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "num_blocks": 96}
    return Shown([simulate(arrivals, way, **limits).trace for way in ways], ways, 2, "r0")


def _front() -> Shown:
    return _preempting(hero()[0], "six chats in a pool of 32 blocks", hero()[1])


def three_engines(router: str) -> list[Trace]:
    """Eighteen requests with three prefixes of 256 tokens, on three engines."""
    lengths: dict[str, Any] = {"input_length": 40, "output_length": 24, "spread": 0.4}
    given = arrivals(18, rate=40, **lengths, num_prefix_groups=3, prefix_length=256)
    limits: dict[str, Any] = {"num_blocks": 128, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    return simulate_cluster(given, 3, router, **limits).traces


def _cluster() -> Shown:
    return Engines(three_engines("prefix"), ["engine-0", "engine-1", "engine-2"], step=30, follow="r0")


WATCHED = ("threshold", "claims", "loop-ends", "demo")  # vLLM decides otherwise; the last is large
TIGHT = "two in a tight pool"
RUNS: dict[str, Callable[[], Shown]] = {
    "front": _front,
    "scheduling": lambda: _lab_run("lab-01", "a crowd for four slots", "ten requests, four slots", 1),
    "batching": lambda: Shown(
        batching([16, 4, 4, 4] * 3, 4, 64), ["static batching", "continuous batching"], 5
    ),
    "life": lambda: _lab_run("lab-03", TIGHT, "two in a pool of 22 slots", 2, "r0"),
    "resources": _resources,
    "counters": lambda: _preempting(counters(), "two in a pool of nine blocks", step=8),
    "chunks": _chunks,
    "fused": lambda: _lab_run("lab-02", "a long prompt beside two decodes", "a budget of 10", 1, "long"),
    "preemption": lambda: Shown(
        [_of_lab("lab-03", TIGHT), _of_lab("lab-03", f"{TIGHT}, fcfs")], ["priority", "fcfs"], 2
    ),
    "paging": lambda: Shown([five_in_a_pool()], ["five in a pool of 20 blocks"], 3, "c"),
    "prefix": _prefix,
    "metrics": _metrics,
    "cost": _cost,
    "sampling": _sampling,
    "structured": lambda: _lab_run("lab-09", "a date", "a date, token by token", 4),
    "speculation": lambda: _lab_run("lab-10", "a draft model", "four drafts a step", 3, "a"),
    "cluster": _cluster,
    "serving": lambda: _lab_run("lab-11", "one leaves", "one of two clients leaves", 3),
    **{f"watch-{name}": partial(_watched, name) for name in WATCHED},
}


def find(name: str) -> Shown:
    """A run by its name, or `bug-NAME`: a case of real-bugs.md, with the bug and without, where they part.
    Raises KeyError for any other."""
    if not name.startswith("bug-"):
        return RUNS[name]()
    bugs = module("images/real_bugs.py")
    case = {case.name: case for case in bugs.CASES}[name.removeprefix("bug-")]
    runs = case.runs(raise_errors=False)
    return Shown(runs, ["with the bug", "without"], compare.departure(*runs).index)


def module(path: str) -> Any:
    """A module of docs, which is no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[1] / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
