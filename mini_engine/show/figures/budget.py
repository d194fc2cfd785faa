"""The token budget: the tokens of each step, decode below prefill, against the limit."""

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace, replay
from mini_engine.trace.metrics import summary


def budget_data(trace: Trace) -> style.Data:
    """Return the steps, their decode and prefill tokens, the budget, and the share of it that was used."""
    tokens: dict[str, list[int]] = {style.DECODE: [], style.PREFILL: []}
    for _, views in replay(trace):
        for state, totals in tokens.items():
            totals.append(sum(view.num_scheduled for view in views.values() if view.state == state))
    return {
        "steps": [record.step for record in trace.steps],
        "decode_tokens": tokens[style.DECODE],
        "prefill_tokens": tokens[style.PREFILL],
        "budget": trace.header.config.get("max_num_batched_tokens"),
        "utilisation": summary(trace).budget_utilisation,
    }


def budget(trace: Trace) -> Axes:
    """Draw the tokens of each step, decode below prefill, against the budget. Return the Axes."""
    (ax,) = style.panels(1, 1, 2.6)
    draw_budget(ax, budget_data(trace), headroom=0.15)
    ax.set_xlabel("engine step", fontsize=9, color=style.INK)
    style.add_legend(ax)
    return ax


def draw_budget(ax: Axes, data: style.Data, headroom: float = 0.4) -> None:
    style.frame(ax, ylabel="tokens\nin the step", grid="")
    decode, prefill = data["decode_tokens"], data["prefill_tokens"]
    both = [a + b for a, b in zip(decode, prefill, strict=True)]
    edges = [data["steps"][0] - 0.5 + i for i in range(len(both) + 1)]
    if any(prefill):
        ax.stairs(both, edges, baseline=decode, fill=True, color=style.BLUE, linewidth=0, label="prefill")
    if any(decode):
        ax.stairs(decode, edges, fill=True, color=style.LIGHT_ORANGE, linewidth=0, label="decode")
    ax.set_xlim(edges[0], edges[-1])
    if data["budget"]:
        style.draw_limit(ax, data["budget"], f"budget: {data['budget']} tokens", headroom)
