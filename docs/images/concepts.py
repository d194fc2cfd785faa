"""Pictures of docs/concepts, from runs; the other pictures there are those of the labs.

python docs/images/concepts.py [NAME ...]
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from mini_engine.show import figures
from mini_engine.show.figures import style
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.cluster import figures as figures_of
from mini_engine.sim.cost_model import CostModel, StepLoad
from mini_engine.sim.routers import ROUTERS
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import workload
from mini_engine.trace import replay
from mini_engine.trace.metrics import request_metrics

FOLDER = Path(__file__).with_name("concepts")
sys.path.append(str(Path(__file__).parents[1] / "_ext"))
import runs as made  # noqa: E402  what the book plays


def step_cost() -> Any:
    """The cost of a step by the number of its tokens, on the course's cost model: nearly flat up to some ten
    tokens, where reading the weights is all of it, and in proportion to the tokens from some hundred on."""
    cost = CostModel()
    tokens = [2**n for n in range(13)]
    time = [cost.step_time(StepLoad(1, n, n)) for n in tokens]
    axes = style.panels(1, 2, 2.6, gridspec_kw={"wspace": 0.28})
    each = [t / n for t, n in zip(time, tokens, strict=True)]
    panels = (time, "a step takes (ms)", [8, 30, 100, 300]), (each, "a token costs (ms)", [0.1, 1, 8])
    for ax, (values, label, ticks) in zip(axes, panels, strict=True):
        style.frame(ax, xlabel="tokens in the step", ylabel=label)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.plot(tokens, values, "o-", color=style.BLUE, markersize=4)
        ax.set_xticks([1, 16, 256, 4096], ["1", "16", "256", "4096"])
        ax.set_yticks(ticks, map(str, ticks))
    return tuple(axes)


def batching() -> Any:
    """Busy slots in each step, for eight groups of one answer of 500 tokens and seven of 10. Static batching
    has all eight busy for 10 steps of every 500 and one for the rest; continuous batching keeps all eight
    busy until the queue is empty."""
    return figures.utilisation(*made.batching(([500] + [10] * 7) * 8, slots=8, num_blocks=4000))


def two_counters() -> Any:
    """num_tokens and num_computed_tokens of one request in each step. Its prompt of 9 is computed at once;
    then both counters climb, one token apart; a preemption sets the computed ones to 0; on the way back it
    finds most of its own blocks in the prefix cache."""
    trace = made.counters()
    name = made.first_preempted(trace)
    steps, known, computed, out = [], [], [], []
    for record, views in replay(trace):
        if (view := views.get(name)) and view.state != "finished":
            new = len(record.new_tokens.get(name, ()))
            steps.append(record.step)
            known.append(view.num_prompt_tokens + view.num_output_tokens + new)
            computed.append(view.num_computed_tokens + view.num_scheduled)
            out += [record.step] if view.state in ("preempted", "waiting") else []
    (ax,) = style.panels(1, 1, 2.8)
    style.frame(ax, xlabel="engine step", ylabel="tokens")
    ax.step(steps, known, where="mid", color=style.VERMILLION, lw=2, label="num_tokens")
    ax.step(steps, computed, where="mid", color=style.BLUE, lw=2, label="num_computed_tokens")
    fill = {"color": style.LIGHT_ORANGE, "alpha": 0.6, "label": "left to compute"}
    ax.fill_between(steps, computed, known, step="mid", **fill)
    ax.axvspan(min(out) - 0.5, max(out) + 0.5, color=style.PALE, label="preempted, waiting")
    style.add_legend(ax)
    return ax


def swap_or_recompute() -> Any:
    """The cost of bringing a victim back, by the length of its sequence, for a model of 8 billion
    parameters: copying keys and values out and in at 25 GB/s grows slowly, computing them
    anew grows eight times as fast. By arithmetic, not measured."""
    tokens = list(range(0, 4001, 250))
    swap = [2 * n * 128 * 1024 / 25e9 * 1e3 for n in tokens]
    recompute = [n * CostModel().per_token for n in tokens]
    (ax,) = style.panels(1, 1, 2.6)
    style.frame(ax, xlabel="tokens of the victim", ylabel="ms")
    ax.plot(tokens, recompute, color=style.VERMILLION, lw=2, label="recompute, 0.08 ms a token")
    ax.plot(tokens, swap, color=style.BLUE, lw=2, label="swap, 128 KiB a token, out and in at 25 GB/s")
    style.add_legend(ax, ncols=1)
    return ax


def waste() -> Any:
    """KV slots that five requests take in each step of a run: in blocks of four hardly more than the tokens
    that they hold, with 40 slots reserved for each up to 200, more than the pool has."""
    return figures.waste(made.five_in_a_pool(), max_model_len=40)


def metrics() -> Any:
    """One request on a time line of milliseconds: it arrives, waits in the queue, its prompt is
    computed, and its tokens come. From arrival to the first token is TTFT; each gap between two
    tokens is an ITL; their mean is TPOT."""
    trace, name = made.waits_for_a_slot(), "r2"
    found = request_metrics(trace)[name]
    queued = next(e.t for r in trace.steps for e in r.events if e.type == "QUEUED" and e.id == name)
    times = [record.t_end - queued for record in trace.steps if name in record.new_tokens]
    (ax,) = style.panels(1, 1, 1.9)
    ax.set(xlim=(-0.03 * times[-1], times[-1] * 1.04), ylim=(-1.5, 1.5), yticks=[])
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.set_xlabel("ms since the request arrived", fontsize=9, color=style.INK)
    ax.tick_params(colors=style.INK, labelsize=8)
    queue, first, last = found.queue_time, times[0], times[-1]
    ends, colours = (0, queue, first, last), (style.GREY, style.BLUE, style.LIGHT_ORANGE)
    for (start, end), colour in zip(pairwise(ends), colours, strict=True):
        ax.barh(0, end - start, left=start, height=0.5, color=colour)
    ax.plot(times, [0] * len(times), "o", color=style.DARK, markersize=5, zorder=3)
    gap, before = max((b - a, a) for a, b in pairwise(times))
    for start, end, y, words in (
        (0, first, 0.75, f"TTFT {first:.0f} ms"),
        (first, last, 0.75, f"TPOT {found.tpot:.1f} ms, the mean of the gaps"),
        (0, queue, -0.75, f"queue {queue:.0f} ms"),
        (queue, first, -0.75, "prefill"),
        (before, before + gap, -0.75, f"longest ITL {gap:.0f} ms"),
    ):
        ax.annotate("", (start, y), (end, y), arrowprops={"arrowstyle": "<->", "color": style.INK, "lw": 1})
        below = y + (0.22 if y > 0 else -0.5)
        ax.text((start + end) / 2, below, words, ha="center", fontsize=8, color=style.INK)
    return ax


def ways() -> Any:
    """Output tokens a second and the longest gap between two tokens, for seven ways to serve the same 120
    requests on the course's cost model. One at a time is slowest and has the shortest gap; the padded
    rectangle has by far the longest; the continuous ways are at the top."""
    given: dict[str, Any] = {"max_num_seqs": 16, "num_blocks": 1024, "enable_prefix_caching": False}
    runs = {way: simulate(workload("poisson", 120, rate=40), way, **given).trace for way in BASELINES}
    return figures.ladder(runs)


def more_machines() -> Any:
    """Four engines. Left, the median time to first token under a rising load with three routers: the one that
    looks at the prefix stays low longest. Right, with none, one or two of the engines only prefilling, the
    times of first tokens and the gaps: gaps become even and short, and first tokens come later."""
    rates = (6, 9, 12, 15, 18)
    load, gaps = style.panels(1, 2, 2.8, gridspec_kw={"wspace": 0.28})
    style.frame(load, xlabel="requests a second and engine", ylabel="TTFT, median (ms)")
    looks = (style.VERMILLION, "s"), (style.GREY, "^"), (style.BLUE, "o")
    for router, (colour, mark) in zip(ROUTERS, looks, strict=True):
        times = [figures_of(replicas=4, router=router, rate=4 * n, requests=200)["ttft_p50"] for n in rates]
        load.plot(rates, times, f"{mark}-", color=colour, markersize=4, label=router)
    load.set_xticks(rates)
    style.add_legend(load, ncols=1)
    style.frame(gaps, ylabel="ms, logarithmic")
    options = {"replicas": 4, "router": "least-loaded", "rate": 40, "requests": 200, "kind": "poisson"}
    runs = [figures_of(**options, prefill=n) for n in range(3)]
    for offset, (key, colour, label) in enumerate(
        (("ttft_p50", style.BLUE, "TTFT, median"), ("itl_p99", style.LIGHT_ORANGE, "ITL, 99th percentile"))
    ):
        places = [n + 0.36 * offset - 0.18 for n in range(3)]
        bars = gaps.bar(places, [run[key] for run in runs], 0.34, color=colour, label=label)
        gaps.bar_label(bars, fmt="%.0f", fontsize=8, color=style.INK)
    gaps.set_yscale("log")
    gaps.set_ylim(5, 900)
    gaps.set_yticks([10, 100], ["10", "100"])
    gaps.minorticks_off()
    gaps.set_xticks(range(3), ["none", "one", "two"])
    gaps.set_xlabel("of four engines only prefill", fontsize=9, color=style.INK)
    style.add_legend(gaps, ncols=1)
    return load, gaps


PICTURES = (step_cost, batching, two_counters, swap_or_recompute, waste, metrics, ways, more_machines)


def main(*names: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        if not names or picture.__name__ in names:
            path = FOLDER / f"{picture.__name__.replace('_', '-')}.svg"
            figures.save(picture(), path, alt=" ".join((picture.__doc__ or "").split()), dpi=130)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
