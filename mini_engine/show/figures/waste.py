"""Reserved KV memory: contiguous allocation against paging, and the tokens that it holds."""

from mini_engine.show.figures import style
from mini_engine.show.figures.style import Axes
from mini_engine.trace import Trace, replay


def waste_data(trace: Trace, max_model_len: int | None = None) -> style.Data:
    """Return the KV slots of each step: taken by paging, by contiguous allocation, and the tokens in them.

    Contiguous allocation reserves prompt plus max_tokens for each running request (or `max_model_len`,
    where a server does not trust the request's limit), and copies what paging shares. `wasted` is the
    share of the slots taken that hold no token, over all steps.
    """
    config = trace.header.config
    size = config["block_size"]
    held, copies, paged, contiguous = [], [], [], []
    for record, views in replay(trace):
        running = [(v, v.num_computed_tokens + v.num_scheduled) for v in views.values() if v.blocks]
        fill: dict[int, int] = {}  # a shared block counts once
        for view, tokens in running:
            for i, block in enumerate(view.blocks):
                fill[block] = max(fill.get(block, 0), min(size, max(0, tokens - i * size)))
        held.append(sum(fill.values()))
        copies.append(sum(tokens for _, tokens in running))
        paged.append((config["num_blocks"] - record.num_free_blocks) * size)
        contiguous.append(sum(max_model_len or v.num_prompt_tokens + v.max_tokens for v, _ in running))

    def wasted(tokens: list[int], taken: list[int]) -> float | None:
        return 1 - sum(tokens) / sum(taken) if sum(taken) else None

    return {
        "steps": [record.step for record in trace.steps],
        "held": held,
        "held_contiguous": copies,
        "paged": paged,
        "contiguous": contiguous,
        "pool": config["num_blocks"] * size,
        "wasted": {"paged": wasted(held, paged), "contiguous": wasted(copies, contiguous)},
    }


def waste(trace: Trace, *, max_model_len: int | None = None) -> Axes:
    """Draw the KV memory reserved in each step, contiguous and paged, and the tokens that it holds."""
    data = waste_data(trace, max_model_len)
    (ax,) = style.panels(1, 1, 3.0)
    edges = [data["steps"][0] - 0.5 + i for i in range(len(data["steps"]) + 1)]
    ax.stairs(data["held"], edges, fill=True, color=style.LIGHT_GREEN, linewidth=0, label="tokens held")
    for name, colour, dash in (("paged", style.BLUE, "-"), ("contiguous", style.VERMILLION, style.DASH)):
        wasted = data["wasted"][name]
        label = f"{name}: {wasted:.0%} wasted" if wasted is not None else name
        ax.stairs(data[name], edges, color=colour, linewidth=1.6, linestyle=dash, label=label, baseline=None)
    ax.axhline(data["pool"], color=style.INK, linewidth=1, linestyle=":", label=f"pool: {data['pool']} slots")
    style.frame(ax, xlabel="engine step", ylabel="KV slots (tokens)")
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(0, 1.05 * max(data["pool"], *data["contiguous"]))
    style.add_legend(ax)
    return ax
