"""lab-02: what a long prompt does to the requests beside it, and the dial of the threshold."""

from itertools import accumulate, pairwise

from labs.kit.author.pictures.sheet import INK, PAPER, SOFT, Sheet, solution, trace_of
from labs.kit.judge import loading
from mini_engine.show.figures import style
from mini_engine.sim.cost_model import CostModel
from mini_engine.trace import Trace


def ends_of(trace: Trace) -> list[float]:
    """When each step ends, in milliseconds of the cost model."""
    return list(accumulate(map(CostModel().clock(), trace.steps)))


def chunks() -> Sheet:
    """Three chats and a prompt of 2,000 tokens on a clock. Whole, the prompt takes one step, in which the
    chats get no token; in chunks of 512 it takes four shorter ones, and the chats get a token after each."""
    sheet = Sheet(420)
    left, scale = 80, 2.15  # units a millisecond
    for top, threshold, title in ((0, 0, "whole"), (195, 512, "in chunks of 512")):
        config = {
            "max_num_batched_tokens": 4096, "max_num_seqs": 8, "long_prefill_token_threshold": threshold,
            "num_blocks": 4096,
        }  # fmt: skip
        chats = [(name, 4, 40, 0) for name in "abc"]
        trace = trace_of("lab-02", config, [*chats, ("d", 2000, 30, 5)])
        ends = ends_of(trace)
        begin = ends[2]
        sheet.title(left, top + 24, title)
        for row, name in enumerate("abcd"):
            y = top + 50 + row * 28
            sheet.text(left - 12, y, name, ha="right")
            sheet.line([(left, y), (680, y)], colour="#E6E6E2")
            for record, start, end in zip(trace.steps[1:], ends, ends[1:], strict=False):
                x, x_end = left + (start - begin) * scale, left + (end - begin) * scale
                if x < left - 1 or x_end > 690:
                    continue
                if name == "d" and record.scheduled.get("d", 0) > 1:
                    words = f"{record.scheduled['d']:,} tokens"
                    sheet.cell(x + 1, y - 9, x_end - x - 2, 18, words, "prefill")
                if name in record.new_tokens:
                    sheet.ax.plot([x_end], [y], "o", ms=6.5, color=style.LIGHT_ORANGE, mec="#9A6A10", mew=0.8)
        times = [end for record, end in zip(trace.steps, ends, strict=True) if "a" in record.new_tokens]
        start, worst = max(pairwise(times), key=lambda gap: gap[1] - gap[0])
        sheet.brace(
            left + (start - begin) * scale,
            left + (worst - begin) * scale,
            top + 158,
            f"{worst - start:.0f} ms without a token for a, b and c",
        )
    return sheet


def dial() -> Sheet:
    """The threshold of lab-02 from off to 32 tokens: the chat's worst gap between two tokens falls from 28.5
    to 10.7 ms, and the prompt's own first token comes after 340 ms in place of 112."""
    scenarios = loading.load("lab-02", "scenarios")
    rows = []
    for threshold in (0, 128, 64, 32):
        scenario = scenarios.beside_a_chat(threshold)
        trace = scenarios.run(solution("lab-02"), scenario)
        ends = ends_of(trace)
        chat = [end for end, record in zip(ends, trace.steps, strict=True) if "chat" in record.new_tokens]
        first = next(i for i, record in enumerate(trace.steps) if "essay" in record.new_tokens)
        gap = max(b - a for a, b in pairwise(chat))
        rows.append((str(threshold or "off"), gap, ends[first] - ends[scenario["requests"][1]["at"] - 1]))
    sheet = Sheet(290)
    panels = (
        (1, "worst gap between two tokens of the chat", style.VERMILLION, 34),
        (2, "the prompt's own time to first token", style.BLUE, 400),
    )
    for place, (column, title, colour, top) in enumerate(panels):
        ax = sheet.figure.add_axes((0.075 + place * 0.5, 0.2, 0.4, 0.6), facecolor=PAPER)
        labels, values = [row[0] for row in rows], [row[column] for row in rows]
        ax.plot(labels, values, "o-", color=colour, lw=2, ms=6)
        for label, value in zip(labels, values, strict=True):
            words = f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
            ax.annotate(
                words, (label, value), (0, 8), textcoords="offset points", ha="center", fontsize=9, color=INK
            )
        ax.set(ylim=(0, top))
        ax.margins(x=0.12)
        ax.tick_params(labelsize=9, colors=SOFT)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[:].set_color(SOFT)
        ax.set_xlabel("threshold (tokens)", fontsize=9, color=SOFT)
        sheet.text(52 + place * 350, 28, title, size=10, weight="bold", colour=colour)
    return sheet


PICTURES = (chunks, dial)
