"""Busy slots: static batching against continuous batching, on one workload."""

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace
from mini_engine.trace.metrics import summary


def utilisation_data(static: Trace, continuous: Trace) -> style.Data:
    """Return the busy slots of two runs of one workload: {"static": ..., "continuous": ..., "speedup": ...}.

    A slot is busy in a step in which its request computes a token. `mean` is over all steps, including
    the drain at the end; `mean_while_waiting` over the steps in which a request was queued (None
    if there is none). `speedup` is the ratio of the output throughputs.
    """
    data: style.Data = {"static": _slots(static), "continuous": _slots(continuous)}
    slow, fast = (data[name]["output_throughput"] for name in data)
    return {**data, "speedup": fast / slow if slow and fast else None}


def _slots(trace: Trace) -> style.Data:
    busy = [len(record.scheduled) for record in trace.steps]
    slots = trace.header.config.get("max_num_seqs") or max(busy, default=1)
    queued = [n for n, record in zip(busy, trace.steps, strict=True) if record.num_waiting]
    return {
        "busy": busy,
        "slots": slots,
        "num_steps": len(busy),
        "mean": sum(busy) / (slots * len(busy)) if busy else None,
        "mean_while_waiting": sum(queued) / (slots * len(queued)) if queued else None,
        "output_throughput": summary(trace).output_throughput,
    }


def utilisation(static: Trace, continuous: Trace) -> tuple[Axes, ...]:
    """Draw the busy slots of each step, static above continuous batching. Return the two Axes."""
    data = utilisation_data(static, continuous)
    axes = style.panels(2, 1, 3.8, sharex=True)
    longest = max(data[name]["num_steps"] for name in ("static", "continuous"))
    for ax, name in zip(axes, ("static", "continuous"), strict=True):
        run = data[name]
        edges = [i - 0.5 for i in range(run["num_steps"] + 1)]
        whole = [run["slots"]] * run["num_steps"]
        idle: style.Data = {"facecolor": "none", "edgecolor": style.GREY, "hatch": "////", "linewidth": 0}
        if run["busy"] != whole:
            ax.stairs(whole, edges, baseline=run["busy"], fill=True, label="idle slot", **idle)
        ax.stairs(run["busy"], edges, fill=True, color=style.BLUE, linewidth=0, label="busy slot")
        share = f"{run['mean']:.2%} of the slots busy, {style.counted(run['num_steps'], 'step')}"
        style.frame(ax, ylabel="slots", title=f"{name.capitalize()} batching: {share}", grid="")
        ax.set(xlim=(-0.5, longest - 0.5), ylim=(0, run["slots"]), yticks=[0, run["slots"]])
    axes[1].set_xlabel("engine step", fontsize=9, color=style.INK)
    drawn = {handle.get_label(): handle for ax in axes for handle in ax.get_legend_handles_labels()[0]}
    style.add_legend(axes[0].figure, list(drawn.values()))
    return tuple(axes)
