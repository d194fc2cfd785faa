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
    """Three chats and a prompt of 2,000 tokens on a clock. Whole, the prompt takes one step of 168 ms,
    in which the chats get no token; in chunks of 512 it takes four, and the chats get a token after
    each."""
    sheet = Sheet(404)
    for top, threshold, title in ((0, 0, "the prompt whole"), (200, 512, "the prompt in chunks of 512")):
        config = {
            "max_num_batched_tokens": 4096, "max_num_seqs": 8, "long_prefill_token_threshold": threshold,
            "num_blocks": 4096,
        }  # fmt: skip
        chats = [(name, 4, 40, 0) for name in "abc"]
        trace = trace_of("lab-02", config, [*chats, ("d", 2000, 30, 5)])
        sheet.title(LEFT - 40, top + 22, title)
        draw_clock(sheet, top + 50, trace)
    sheet.dot(LEFT - 33, 388)
    sheet.note(LEFT - 22, 388, "a token is given out")
    sheet.legend(LEFT + 120, 388, ("prefill", "a step with tokens of the prompt"))
    return sheet


LEFT, SCALE = 60, 2.9  # where step 3 ends, and units a millisecond


def draw_clock(sheet: Sheet, y: float, trace: Trace) -> None:
    """The requests' tokens over time, and what the long prompt d does to a, b and c."""
    ends = ends_of(trace)
    arrival = ends[4]

    def at(time: float) -> float:
        return LEFT + (time - ends[2]) * SCALE

    for row, name in enumerate("abcd"):
        middle = y + row * 27
        sheet.text(LEFT - 26, middle, name, ha="right", size=10, weight="bold")
        sheet.line([(LEFT - 12, middle), (684, middle)], colour="#E2E2DE")
        for record, start, end in zip(trace.steps[1:], ends, ends[1:], strict=False):
            if start < ends[2] - 0.01 or at(end) > 680:
                continue
            if name == "d" and record.scheduled.get("d", 0) > 1:
                words = f"{record.scheduled['d']:,} tokens"
                sheet.cell(at(start) + 1, middle - 10, (end - start) * SCALE - 2, 20, words, "prefill")
            if name in record.new_tokens:
                sheet.dot(at(end), middle)
    times = [end for record, end in zip(trace.steps, ends, strict=True) if "a" in record.new_tokens]
    start, end = max(pairwise(times), key=lambda gap: round(gap[1] - gap[0]))
    first = next(end for record, end in zip(trace.steps, ends, strict=True) if "d" in record.new_tokens)
    bottom = y + 104
    sheet.brace(at(start), at(end), bottom, f"{end - start:.0f} ms between two tokens of a, b and c")
    words = f"d's first: {first - arrival:.0f} ms"
    sheet.note(min(at(first), 692 - sheet.width(words) / 2), bottom + 11, words, ha="center")
    sheet.line([(at(first), bottom - 12), (at(first), bottom + 2)], colour=SOFT)


def dial() -> Sheet:
    """The threshold of lab-02 from off to 32 tokens: the chat's worst gap between two tokens falls from
    28.5 to 10.7 ms, and the prompt's own first token comes after 340 ms in place of 112."""
    scenarios = loading.load("lab-02", "scenarios")
    thresholds, gaps, firsts = (0, 128, 64, 32), [], []
    for threshold in thresholds:
        scenario = scenarios.beside_a_chat(threshold)
        trace = scenarios.run(solution("lab-02"), scenario)
        ends = ends_of(trace)
        chat = [end for end, record in zip(ends, trace.steps, strict=True) if "chat" in record.new_tokens]
        first = next(i for i, record in enumerate(trace.steps) if "essay" in record.new_tokens)
        gaps.append(max(b - a for a, b in pairwise(chat)))
        firsts.append(ends[first] - ends[scenario["requests"][1]["at"] - 1])
    alone = min(b - a for a, b in pairwise(chat))
    sheet = Sheet(296)
    panels = (
        (gaps, "what it buys", "the chat's worst gap between two tokens, ms", style.VERMILLION, 36),
        (firsts, "what it costs", "the prompt's own time to first token, ms", style.BLUE, 400),
    )
    for place, (values, title, words, colour, top) in enumerate(panels):
        ax = sheet.figure.add_axes((0.065 + place * 0.5, 0.19, 0.41, 0.6), facecolor=PAPER)
        labels = [str(threshold or "off") for threshold in thresholds]
        ax.plot(labels, values, "o-", color=colour, lw=2, ms=6)
        for label, value in zip(labels, values, strict=True):
            number = f"{value:.1f}" if value < 100 else f"{value:.0f}"
            offset = (5, 8) if values is gaps else (-2, 10)
            ax.annotate(
                number,
                (label, value),
                offset,
                textcoords="offset points",
                fontsize=10,
                color=INK,
                ha="center",
            )
        if values is gaps:
            ax.axhline(alone, color=SOFT, lw=1, ls=":")
            ax.text(-0.3, alone - 3.2, f"{alone:.1f}: a step with no prompt in it", fontsize=9, color=SOFT)
        ax.set(ylim=(0, top), xlim=(-0.4, 3.4))
        ax.tick_params(labelsize=9, colors=SOFT)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[:].set_color(SOFT)
        ax.set_xlabel("long_prefill_token_threshold", fontsize=9, color=SOFT)
        sheet.text(18 + place * 350, 22, title, size=11, colour=colour, weight="bold")
        sheet.note(18 + place * 350, 42, words)
    return sheet


PICTURES = (chunks, dial)
