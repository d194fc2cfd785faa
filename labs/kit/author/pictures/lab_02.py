"""lab-02: what a long prompt does to the requests beside it, and the dial of the threshold."""

from itertools import accumulate, pairwise

from labs.kit.author.pictures.sheet import INK, PAPER, SOFT, Look, Sheet, made_up, run_of
from labs.kit.judge import loading
from mini_engine.show.figures import style
from mini_engine.sim.cost_model import CostModel
from mini_engine.trace import Trace

LEFT, SCALE = 60, 2.9  # where step 3 ends, and units a millisecond


def ends_of(trace: Trace) -> list[float]:
    """Return when each step ends, in milliseconds of the cost model."""
    return list(accumulate(map(CostModel().clock(), trace.steps)))


def tokens_of(trace: Trace, name: str) -> list[float]:
    """Return when a request gets each of its tokens."""
    timed = zip(trace.steps, ends_of(trace), strict=True)
    return [end for record, end in timed if name in record.new_tokens]


def chunks(sheet: Sheet) -> None:
    """Three chats and a prompt of 2,000 tokens on a clock, the prompt whole and in chunks of 512."""
    requests = [*((name, 4, 40, 0) for name in "abc"), ("d", 2000, 30, 5)]
    config = {"max_num_batched_tokens": 4096, "max_num_seqs": 8}
    for top, threshold, title in ((0, 0, "the prompt whole"), (200, 512, "the prompt in chunks of 512")):
        sheet.title(LEFT - 40, top + 22, title)
        trace = made_up("lab-02", requests, long_prefill_token_threshold=threshold, **config)
        draw_clock(sheet, top + 50, trace)
    sheet.dot(LEFT - 33, 388)
    sheet.note(LEFT - 22, 388, "a token is given out")
    sheet.legend(LEFT + 120, 388, ("prefill", "a step with tokens of the prompt"))


def draw_clock(sheet: Sheet, y: float, trace: Trace) -> None:
    """The requests' tokens over time, and what the long prompt d does to a, b and c."""
    ends = ends_of(trace)

    def at(time: float) -> float:
        return LEFT + (time - ends[2]) * SCALE

    for row, name in enumerate("abcd"):
        middle = y + row * 27
        sheet.text(LEFT - 26, middle, name, ha="right", size=10, weight="bold")
        sheet.line((LEFT - 12, middle), (684, middle), colour="#E2E2DE")
        for record, start, end in zip(trace.steps[3:], ends[2:], ends[3:], strict=False):
            if at(end) > 680:
                break
            if name == "d" and record.scheduled.get("d", 0) > 1:
                words = f"{record.scheduled['d']:,} tokens"
                sheet.cell(at(start) + 1, middle - 10, (end - start) * SCALE - 2, 20, words, "prefill")
            if name in record.new_tokens:
                sheet.dot(at(end), middle)
    start, end = max(pairwise(tokens_of(trace, "a")), key=lambda gap: round(gap[1] - gap[0]))
    first, bottom = tokens_of(trace, "d")[0], y + 104
    sheet.brace(at(start), at(end), bottom, f"{end - start:.0f} ms between two tokens of a, b and c")
    words = f"d's first: {first - ends[4]:.0f} ms"
    sheet.label(min(at(first), 692 - sheet.width(words) / 2), bottom + 11, words)
    sheet.line((at(first), bottom - 12), (at(first), bottom + 2), colour=SOFT)


def dial(sheet: Sheet) -> None:
    """The threshold from off to 32 tokens: the chat's worst gap, and the prompt's first token."""
    scenarios = loading.load("lab-02", "scenarios")
    gaps, firsts, alone = {}, {}, 0.0
    for threshold in (0, 128, 64, 32):
        scenario = scenarios.beside_a_chat(threshold)
        trace, label = run_of("lab-02", scenario), str(threshold or "off")
        between = [after - before for before, after in pairwise(tokens_of(trace, "chat"))]
        gaps[label], alone = max(between), min(between)
        arrival = ends_of(trace)[scenario["requests"][1]["at"] - 1]
        firsts[label] = tokens_of(trace, "essay")[0] - arrival
    for place, (values, title, words, colour, top, offset) in enumerate((
        (gaps, "what it buys", "the chat's worst gap between two tokens, ms", style.VERMILLION, 36, (5, 8)),
        (firsts, "what it costs", "the prompt's own time to first token, ms", style.BLUE, 400, (-2, 10)),
    )):  # fmt: skip
        ax = sheet.figure.add_axes((0.065 + place * 0.5, 0.19, 0.41, 0.6), facecolor=PAPER)
        ax.plot([*values], [*values.values()], "o-", color=colour, lw=2, ms=6)
        look: Look = {"textcoords": "offset points", "fontsize": 10, "color": INK, "ha": "center"}
        for at in values.items():
            ax.annotate(f"{at[1]:.1f}" if at[1] < 100 else f"{at[1]:.0f}", at, offset, **look)
        if values is gaps:
            ax.axhline(alone, color=SOFT, lw=1, ls=":")
            ax.text(-0.3, alone - 3.2, f"{alone:.1f}: a step with no prompt in it", fontsize=9, color=SOFT)
        ax.set(ylim=(0, top), xlim=(-0.4, 3.4))
        ax.tick_params(labelsize=9, colors=SOFT)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[:].set_color(SOFT)
        ax.set_xlabel("long_prefill_token_threshold", fontsize=9, color=SOFT)
        sheet.title(18 + place * 350, 22, title, colour=colour)
        sheet.note(18 + place * 350, 42, words)


PICTURES = {chunks: 404, dial: 296}  # and their heights
