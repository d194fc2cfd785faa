"""Figures: the plotted data, on runs of the real scheduler, and that the drawn figures are readable."""

import random
import re
from itertools import combinations
from types import MappingProxyType

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.request import Request, SamplingParams
from mini_engine.schedule_step import schedule_step
from mini_engine.scheduler import Scheduler
from mini_engine.show import figures
from mini_engine.show.figures import style
from mini_engine.show.figures.timeline import HIT
from mini_engine.tests.helpers import make_request, record_run
from mini_engine.trace import Header, Trace, VirtualClock
from mini_engine.trace.metrics import request_metrics, summary


def record(requests, *, num_blocks=36, block_size=4, cost=None, aborts=MappingProxyType({}), **settings):
    """Run (arrival step, Request) pairs with random tokens; `aborts` are {step: id}."""
    rng = random.Random(0)
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 6, **settings}
    clock = VirtualClock(cost and (lambda r: cost[0] + cost[1] * r.num_batched_tokens))
    return record_run(
        Scheduler(BlockManager(num_blocks, block_size), **settings),
        requests,
        token=lambda request: rng.randrange(100),
        before=lambda run: run.abort(aborts[run.step]) if run.step in aborts else None,
        clock=clock,
    )


def mixed_requests():
    rng = random.Random(3)
    shared, requests, at = [rng.randrange(100) for _ in range(24)], [], 0
    for i in range(9):
        prompt = [rng.randrange(100) for _ in range(rng.choice([6, 12, 24, 48]))]
        prompt = shared + prompt[:8] if i % 3 == 2 else prompt
        sampling = SamplingParams(max_tokens=rng.choice([8, 16, 24]))
        requests.append((at, Request(f"r{i}", prompt, sampling, priority=rng.choice([0, 1, 2]))))
        at += rng.choice([0, 1, 3, 6])
    return requests


def mixed(**settings):
    """Chunks, mixed steps, preemptions, prefix hits and an abort, in one run."""
    settings = {"policy": "priority", "long_prefill_token_threshold": 16, "aborts": {30: "r6"}, **settings}
    return record(mixed_requests(), **settings)


def uniform(num_requests, max_tokens=10, prompt=4, **settings):
    requests = [(0, make_request(f"r{i}", [i + 1] * prompt, max_tokens)) for i in range(num_requests)]
    return record(requests, **{"num_blocks": 4000, "block_size": 16, **settings})


@pytest.fixture(scope="module")
def trace():
    trace = mixed()
    result = summary(trace)
    assert result.num_preemptions and result.num_cached_tokens  # else the tests below show little
    return trace


@pytest.fixture(autouse=True)
def pyplot():
    """matplotlib, which takes seconds to load: only processes that run these tests load it."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    yield pyplot
    pyplot.close("all")


# ------------------------------------------------------------------------------------ timeline


def test_timeline_of_two_requests_cell_by_cell():
    """A budget of 4: `a` computes 3 tokens, `b` takes what is left, then what is missing."""
    a, b, c = make_request("a", [1, 2, 3], 3), make_request("b", [4, 5, 6], 1), make_request("c", [7], 1)
    requests = [(0, a), (0, b), (1, c)]
    settings = {"max_num_batched_tokens": 4, "max_num_seqs": 2}
    data = figures.timeline_data(record(requests, num_blocks=5, block_size=2, **settings))
    assert data["ids"] == ["a", "b", "c"]
    assert data["states"] == [
        ["prefill", "decode", "decode"],
        ["prefill", "prefill", "finished"],
        [None, "waiting", "prefill"],
    ]
    assert data["tokens"] == [[3, 1, 1], [1, 2, 0], [0, 0, 1]]
    assert data["finished"] == {"a": (3, "length"), "b": (2, "length"), "c": (3, "length")}
    assert (data["decode_tokens"], data["prefill_tokens"]) == ([0, 1, 1], [4, 2, 1])
    assert (data["used_blocks"], data["num_blocks"], data["budget"]) == ([4, 4, 4], 5, 4)


def test_a_request_that_runs_without_a_token_is_idle_in_the_timeline():
    """In whatever phase; not prefill or decode, of which nothing is computed."""

    def only_the_first(waiting, running, kv, **limits):
        rows = schedule_step(waiting, running, kv, **limits)
        return dict([*rows.items()][:1])

    requests = [(0, make_request("a", [1, 2], 2)), (0, make_request("b", [3], 1))]
    trace = record(requests, schedule_step=only_the_first)
    states = {"a": ["prefill", "decode", "finished"], "b": ["idle", "idle", "prefill"]}
    assert dict(zip(states, figures.timeline_data(trace)["states"], strict=True)) == states
    rows, _, _ = figures.timeline(trace)
    assert "idle" in [text.get_text() for text in rows.get_legend().get_texts()]


def test_timeline_agrees_with_the_metrics(trace):
    """Cells, hits and preemptions counted in the picture are those in the table; an abort ends a row."""
    data, metrics = figures.timeline_data(trace), request_metrics(trace)
    assert data["ids"] == list(metrics)
    for rid, states, tokens in zip(data["ids"], data["states"], data["tokens"], strict=True):
        result = metrics[rid]
        assert states.count("preempted") == result.num_preemptions
        found = sum(data["hits"].get(rid, {}).values())
        assert found == result.num_cached_tokens + result.num_resumed_cached_tokens
        assert (sum(tokens) == 0) == (result.num_output_tokens == 0)
    together = map(sum, zip(data["decode_tokens"], data["prefill_tokens"], strict=True))
    assert list(together) == [step.num_batched_tokens for step in trace.steps]
    assert data["finished"]["r6"] == (30, "abort")
    assert data["states"][data["ids"].index("r6")].index("finished") == 30
    budget = figures.budget_data(trace)
    assert all(budget[name] == data[name] for name in ("steps", "decode_tokens", "prefill_tokens", "budget"))
    assert budget["utilisation"] == summary(trace).budget_utilisation


def test_a_part_of_the_timeline_is_the_same_cells(trace):
    """steps=(first, last) cuts columns, folds what came before, and drops who had gone."""
    whole, part = figures.timeline_data(trace), figures.timeline_data(trace, (25, 40))
    assert part["steps"] == whole["steps"][25:41]
    assert part["decode_tokens"] == whole["decode_tokens"][25:41]
    for rid, states in zip(part["ids"], part["states"], strict=True):
        assert states == whole["states"][whole["ids"].index(rid)][25:41]
    assert "r0" in whole["ids"] and "r0" not in part["ids"]


def test_timeline_draws_rows_labels_and_legend(trace):
    """A row a request, a mark at its end, each state in the legend; the size of each chunk in its cell if
    that is wide enough, else their sum above."""
    rows, pool, budget = figures.timeline(trace)
    data = figures.timeline_data(trace)
    names = [f"{rid} (p{data['priorities'][rid]})" for rid in data["ids"]]
    assert [label.get_text() for label in rows.get_yticklabels()] == names
    legend = [text.get_text() for text in rows.get_legend().get_texts()]
    assert legend == [
        "waiting",
        "prefill (tokens; Σ: of all chunks)",
        "decode",
        "preempted",
        "finished",
        "prefix-cache hit",
    ]
    texts = [text.get_text() for text in rows.texts]
    assert "Σ32" in texts and "abort" in texts and not any("+" in text for text in texts)
    assert any(text.startswith(HIT) for text in texts)
    assert [text.get_text() for text in pool.texts] == ["pool: 36 blocks"]
    assert [text.get_text() for text in budget.texts] == ["budget: 32 tokens"]
    rows, _, _ = figures.timeline(trace, steps=(0, 19))
    at = dict(zip(data["ids"], rows.get_yticks(), strict=False))
    drawn = {(*text.get_position(), text.get_text()) for text in rows.texts if text.get_color() == "white"}
    assert {(9, at["r2"], "16"), (10, at["r2"], "16")} <= drawn
    assert not any("Σ" in text.get_text() for text in [*rows.texts, *rows.get_legend().get_texts()])


def test_timeline_refuses_too_many_rows_and_none():
    """61 rows are refused with the numbers and a way out; a part of them is drawn."""
    trace = uniform(61, max_num_seqs=8)
    with pytest.raises(ValueError, match=r"61 requests over \d+ steps .* steps=\(first, last\)"):
        figures.timeline(trace)
    last = len(trace.steps) - 1
    assert len(figures.timeline(trace, steps=(last - 5, last))[0].get_yticks()) < 61
    with pytest.raises(ValueError, match="no request to draw"):
        figures.timeline(Trace(Header("virtual", "step", "", {}, {})))


# --------------------------------------------------------------------- budget and utilisation


def classic(num_shorts):
    """One request of 500 tokens, the others of 10, eight slots."""
    lengths = [500] + [10] * num_shorts
    requests = [(0, make_request(f"r{i}", [i + 1] * 4, n)) for i, n in enumerate(lengths)]
    return record(requests, num_blocks=4000, block_size=16, max_num_batched_tokens=64, max_num_seqs=8)


def test_utilisation_of_the_classic_case():
    """Eight requests alone keep (500 + 7 x 10) of 8 x 500 slots busy; with 343 shorts behind, all."""
    data = figures.utilisation_data(classic(7), classic(343))
    assert data["static"]["mean"] == 0.1425
    assert data["static"]["mean_while_waiting"] is None
    assert data["static"]["busy"] == [8] * 10 + [1] * 490
    assert data["continuous"]["mean"] == (343 * 10 + 500) / (8 * 500)
    assert data["speedup"] == pytest.approx((343 * 10 + 500) / 570)
    static, continuous = figures.utilisation(classic(7), classic(343))
    assert static.get_title(loc="left") == "Static batching: 14.25% of the slots busy, 500 steps"
    assert continuous.get_title(loc="left").startswith("Continuous batching: 98.25%")


# ----------------------------------------------------------------------------------- block map


def test_block_map_agrees_with_the_pool_in_every_step(trace):
    """Derived from the events alone, held and cached blocks are as many as the manager counted."""
    steps = list(range(len(trace.steps)))
    data = figures.block_map_data(trace, steps)
    for step, owners, cached in zip(trace.steps, data["owners"], data["cached"], strict=True):
        assert sum(map(bool, owners)) == data["num_blocks"] - step.num_free_blocks
        assert len(cached) == step.num_cached_blocks
    assert any(len(ids) > 1 for owners in data["owners"] for ids in owners)


def test_block_map_labels_every_held_block(trace):
    with pytest.raises(ValueError, match=r"within 0 to \d+"):
        figures.block_map_data(trace, [0, 10_000])
    (ax,) = figures.block_map(trace, [20])
    owners = figures.block_map_data(trace, [20])["owners"][0]
    drawn = [text.get_text() for text in ax.texts if text.get_text()]
    assert drawn == [ids[0] if len(ids) == 1 else f"×{len(ids)}" for ids in owners if ids]


# ------------------------------------------------------------------------------ attention mask


def test_attention_mask_of_two_decodes_and_a_chunk():
    """Left padding on both sides of the seam; a query sees its own past and nothing later."""
    data = figures.attention_mask_data([2, 1], [1, 2])
    pad = "pad"
    assert data["padded"]["rows"] == [("A", None), ("A", 2), ("B", 1), ("B", 2)]
    assert data["padded"]["cells"] == [
        [pad, pad, pad, pad],
        [0, 1, pad, 2],
        [pad, 0, 1, "later"],
        [pad, 0, 1, 2],
    ]
    assert data["ragged"]["cells"] == [[0, 1, 2], [0, 1, "later"], [0, 1, 2]]
    assert (data["padded"]["computed"], data["ragged"]["computed"]) == (16, 9)
    assert data["padded"]["seen"] == data["ragged"]["seen"] == 8
    trace = uniform(2, prompt=10, max_num_batched_tokens=12)
    assert figures.step_rows(trace, 0) == (["r0", "r1"], [0, 0], [10, 2])
    assert figures.step_rows(trace, 1) == (["r0", "r1"], [10, 2], [1, 8])


@pytest.mark.parametrize(("past", "new"), [([5, 3, 0], [1, 1, 4]), ([0], [3]), ([2, 7], [5, 1])])
def test_the_padded_mask_is_the_one_that_the_engine_computes(past, new):
    """Cell by cell the same keys are visible, for every query that is not a pad."""
    import torch

    from mini_engine.backends.padded import fused_attention_mask

    mask = fused_attention_mask(torch.tensor(past), torch.tensor(new)).flatten(0, 2)
    result = figures.attention_mask_data(past, new)["padded"]
    assert mask.shape == (len(result["cells"]), len(result["cells"][0]))
    for (_, query), visible, row in zip(result["rows"], mask.tolist(), result["cells"], strict=True):
        if query is not None:
            assert visible == [isinstance(cell, int) for cell in row]


def test_attention_mask_refuses_bad_batches():
    with pytest.raises(ValueError, match="40 padded rows of 120 keys do not fit"):
        figures.attention_mask([100, 3], [1, 20])
    with pytest.raises(ValueError, match="each row needs a past length and a number"):
        figures.attention_mask([1, 2], [1])
    with pytest.raises(ValueError, match="not 999"):
        figures.step_rows(uniform(1), 999)


# ------------------------------------------------------------------------ waste, latency, ladder


def test_waste(trace):
    """Prompt 5 and up to 4 tokens in blocks of 4: two blocks at first; contiguous reserves 9 throughout.
    Paging counts shared blocks once, contiguous allocation copies them."""
    data = figures.waste_data(uniform(1, max_tokens=4, prompt=5, num_blocks=8, block_size=4))
    assert data["held"] == data["held_contiguous"] == [5, 6, 7, 8]
    assert data["paged"] == [8, 8, 8, 8]
    assert data["contiguous"] == [9, 9, 9, 9]
    assert data["wasted"] == {"paged": 1 - 26 / 32, "contiguous": pytest.approx(1 - 26 / 36)}
    whole = figures.waste_data(uniform(1, max_tokens=4, prompt=5, num_blocks=8, block_size=4), 100)
    assert whole["contiguous"] == [100] * 4
    data = figures.waste_data(trace)
    assert all(held <= taken for held, taken in zip(data["held"], data["paged"], strict=True))
    assert any(one < copies for one, copies in zip(data["held"], data["held_contiguous"], strict=True))


def test_latency_plots_every_value_once(trace):
    data = figures.latency_data({"a": trace, "b": uniform(3)})
    result = summary(trace)
    assert list(data) == ["a", "b"]
    counts = [len(data["a"][name]) for name in ("ttft", "tpot", "itl")]
    assert counts == [result.ttft.count, result.tpot.count, result.itl.count]
    assert data["b"] == {"ttft": [1] * 3, "tpot": [1] * 3, "itl": [1] * 27}
    for ax in figures.latency({"a": trace, "b": uniform(3)}):
        assert len(ax.lines) == 2


def long_prompts(threshold):
    """Decodes that are under way when prompts of 400 tokens come in, on a clock with a cost model."""
    rng = random.Random(1)
    short = [(i, make_request(f"s{i}", [rng.randrange(99) for _ in range(16)], 40)) for i in range(3)]
    long = [(9 + 9 * i, make_request(f"l{i}", [rng.randrange(99) for _ in range(400)], 4)) for i in range(2)]
    settings = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": threshold}
    return record(short + long, num_blocks=200, block_size=16, cost=(2, 0.25), **settings)


def test_a_smaller_threshold_shortens_the_worst_gap_and_delays_the_first_token():
    rows = figures.itl_vs_threshold_data([long_prompts(n) for n in (0, 128, 32)])
    assert [row["threshold"] for row in rows] == [32, 128, 0]
    gaps, firsts = [row["itl_max"] for row in rows], [row["ttft_max"] for row in rows]
    assert gaps == sorted(gaps) and gaps[0] < gaps[-1] / 3
    assert firsts == sorted(firsts, reverse=True) and firsts[0] > firsts[-1]


def test_ladder_is_in_tokens_a_second_and_draws_the_longest_gap():
    """A clock in milliseconds: 1 token in 16 + 4 ms is 50 a second; each bar says its number, and its ratio
    to the first."""
    rows = figures.ladder_data({"one": uniform(4, max_num_seqs=1), "four": uniform(4, max_num_seqs=4)})
    assert rows == [("one", 1.0, 1.0, 1.0), ("four", 4.0, 4.0, 1.0)]
    trace = uniform(1, prompt=4, cost=(16, 1))
    trace.header.unit = "ms"
    [(_, rate, ratio, gap)] = figures.ladder_data({"alone": trace})
    assert (rate, ratio, gap) == (pytest.approx(1000 * 10 / (20 + 9 * 17)), 1, 17)
    rates, gaps = figures.ladder({"alone": trace, "again": trace})
    assert rates.get_title(loc="left") == "Output tokens a second"
    assert gaps.get_title(loc="left") == "Longest gap (ms)"
    assert [bar.get_width() for bar in gaps.patches] == [17, 17]
    assert [text.get_text() for text in gaps.texts] == ["17", "17"]
    assert [text.get_text() for text in rates.texts] == ["58  (×1)"] * 2


# ------------------------------------------------------------------------------------- compare


def test_compare_marks_the_first_differing_step(trace):
    from matplotlib.colors import to_rgba

    other = mixed(long_prefill_token_threshold=12)
    data = figures.compare_data(trace, other)
    index = data["first_difference"]
    assert index == 9  # r2 brings the first prompt longer than 12
    ours, theirs = data["fields"]["scheduled"]
    assert (dict(ours)["r2"], dict(theirs)["r2"]) == (16, 12)
    # Both counts are in framed cells of that step, and in words below.
    axes, yellow = figures.compare(trace, other), to_rgba(style.YELLOW, 0.45)
    for ax, count in zip(axes, ("16", "12"), strict=True):
        (band,) = [patch for patch in ax.patches if patch.get_facecolor() == yellow]
        assert (band.get_x(), band.get_width()) == (8.5, 1)
        row = dict(zip([t.get_text() for t in ax.get_yticklabels()], ax.get_yticks(), strict=True))["r2 (p2)"]
        assert (9, row, count) in {(*text.get_position(), text.get_text()) for text in ax.texts}
        [frame] = [p for p in ax.patches if not p.get_fill()]
        assert frame.get_x() == 8.5 and frame.get_y() < row < frame.get_y() + frame.get_height()
    assert "first differ at step 9: scheduled (r2 computes 16 above, 12 below)" in axes[1].get_xlabel()
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend[-1] == "first difference" and "preempted" in legend and axes[1].get_legend() is None


def test_compare_of_equals_and_of_a_trace_that_stops_early(trace):
    assert figures.compare_data(trace, mixed()) == {"first_difference": None, "fields": {}}
    assert "the two are the same" in figures.compare(trace, mixed())[1].get_xlabel()
    short = Trace(trace.header, trace.steps[:20])
    data = figures.compare_data(short, trace)
    assert data["first_difference"] == 20
    assert data["fields"]["num_running"][0] is None


# -------------------------------------------------------------------------------- all figures

DRAW = {
    "timeline": lambda t: figures.timeline(t),
    "budget": lambda t: figures.budget(t),
    "utilisation": lambda t: figures.utilisation(classic(7), classic(100)),
    "block_map": lambda t: figures.block_map(t),
    "attention_mask": lambda t: figures.attention_mask([5, 3, 0], [1, 1, 4]),
    "attention_mask, large": lambda t: figures.attention_mask([19, 9, 4], [1, 1, 8]),
    "waste": lambda t: figures.waste(t),
    "latency": lambda t: figures.latency({"chunked": long_prompts(32), "whole": long_prompts(0)}),
    "itl_vs_threshold": lambda t: figures.itl_vs_threshold([long_prompts(n) for n in (32, 128, 0)]),
    "ladder": lambda t: figures.ladder({"one": uniform(4, max_num_seqs=1), "four": uniform(4)}),
    "compare": lambda t: figures.compare(t, mixed(long_prefill_token_threshold=12)),
}


LARGE = pytest.param("attention_mask, large", marks=pytest.mark.soak)


@pytest.mark.parametrize("name", [*(name for name in DRAW if "large" not in name), LARGE])
def test_every_figure_is_readable(name, trace, monkeypatch):
    """At the width of a notebook no text is below 8 points, none covers another, none is cut off. Text
    beside the cells contrasts with white and dark pages; no area is as bright or as dark as one of them."""
    from matplotlib.colors import to_rgb, to_rgba_array
    from matplotlib.text import Text

    axes = DRAW[name](trace)
    figure = (axes[0] if isinstance(axes, tuple) else axes).figure
    assert figure.get_figwidth() <= 8
    drawn, draw = [], Text.draw  # what is really drawn: matplotlib keeps texts that it never shows
    monkeypatch.setattr(Text, "draw", lambda text, renderer: (drawn.append(text), draw(text, renderer)))
    figure.canvas.draw()
    drawn = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    assert min(text.get_fontsize() for text in drawn) >= 8
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn]
    for (one, a), (other, b) in combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 3, f"{one!r} and {other!r} overlap"
    page = figure.bbox.padded(1)
    for text, box in boxes:
        assert page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1), f"{text!r} is cut off"

    for text in figure.findobj(Text):
        colour = to_rgb(text.get_color())
        in_a_cell = colour in map(to_rgb, ("white", style.DARK))
        if text.get_text().strip() and not in_a_cell:
            assert min(contrast(colour, page) for page in ("white", "#111111")) >= 4, text
    for part in (part for ax in figure.axes for part in [*ax.patches, *ax.collections]):
        for *face, alpha in to_rgba_array(part.get_facecolor()):
            assert not alpha or contrast(face, "white") > 1.2 < contrast(face, "black")


def contrast(one, other):
    """Return the contrast of two colours by WCAG 2."""
    from matplotlib.colors import to_rgb

    def luminance(colour):
        rgb = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2] + 0.05

    dark, light = sorted(luminance(to_rgb(colour)) for colour in (one, other))
    return light / dark


def test_legends_list_only_what_is_drawn():
    """A kind that a run does not have is not in the legend of its figures."""

    def legend(axes):
        ax = axes[0] if isinstance(axes, tuple) else axes
        legends = filter(None, (ax.get_legend(), *ax.figure.legends))
        return [text.get_text() for one in legends for text in one.get_texts()]

    plain = uniform(2, num_blocks=40)
    assert legend(figures.timeline(plain)) == ["prefill (tokens)", "decode", "finished"]
    assert legend(figures.budget(plain)) == ["prefill", "decode"]
    assert legend(figures.budget(uniform(1, max_tokens=1))) == ["prefill"]
    assert legend(figures.block_map(plain)) == ["held by the named request", "free"]
    assert legend(figures.utilisation(classic(100), uniform(3, max_num_seqs=3))) == ["idle slot", "busy slot"]
    assert legend(figures.utilisation(*[uniform(3, max_num_seqs=3)] * 2)) == ["busy slot"]
    assert legend(figures.attention_mask([3, 3], [1, 1])) == ["seen (key position)"]


def test_every_figure_is_covered_above():
    assert {name for name in dir(figures) if f"{name}_data" in dir(figures)} <= DRAW.keys()


def test_save_writes_a_picture_with_its_alt_text_and_closes_it(trace, tmp_path, pyplot):
    from PIL import Image

    alt = figures.alt_text(trace, "timeline")
    figures.save(figures.timeline(trace), tmp_path / "timeline.png", alt=alt)
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.info["Description"] == alt
        assert image.width > 900
        assert image.getpixel((0, 0))[3] == 0  # the page shows through
    assert pyplot.get_fignums() == []


def test_an_svg_has_a_dark_palette_in_which_every_contrast_is_kept(trace, tmp_path):
    """And the same run gives the same file."""
    from matplotlib.colors import to_rgb

    from mini_engine.show.figures.svg import COLOUR, counterpart, luminance

    for name in ("one.svg", "two.svg"):
        figures.save(figures.timeline(trace, steps=(24, 34)), tmp_path / name, alt="a timeline")
    drawn = (tmp_path / "one.svg").read_text("utf-8")
    assert drawn == (tmp_path / "two.svg").read_text("utf-8") and "<dc:description>a timeline<" in drawn
    style = re.search(r"<style>@media \(prefers-color-scheme: dark\) (.*?)</style>", drawn)[1]
    colours = {colour for _, _, colour in COLOUR.findall(drawn.replace(style, ""))}
    assert len(colours) > 4 and all(f":{counterpart(colour)}!important" in style for colour in colours)

    page = counterpart("#ffffff")
    assert luminance(to_rgb(page)) < 0.01 and luminance(to_rgb(counterpart("#000"))) > 0.9
    for colour in colours - {"#000000"}:
        assert contrast(counterpart(colour), page) == pytest.approx(contrast(colour, "#ffffff"), rel=0.03)


def test_alt_text_has_the_numbers_of_the_trace(trace):
    """In the plural and in the singular."""
    result, alt = summary(trace), figures.alt_text(trace, "block_map")
    assert alt.startswith(f"Block map of 9 requests over {result.num_steps} steps: 8 completed,")
    assert f"{result.num_preemptions} preemptions" in alt
    assert f"longest gap between tokens {result.max_itl:.3g} steps" in alt
    alt = figures.alt_text(uniform(1, max_tokens=2), "timeline")
    assert alt.startswith("Timeline of 1 request over 2 steps: 1 completed, 0 preemptions, 0 prompt tokens")
    assert "Mean time to first token 1 step, longest gap between tokens 1 step." in alt
    counted = [figures.counted(n, "step") for n in (0, 1, 1.0, 2, 2.5)]
    assert counted == ["0 steps", "1 step", "1 step", "2 steps", "2.5 steps"]
    assert [figures.counted(1.25, unit) for unit in ("ms", "s")] == ["1.25 ms", "1.25 s"]
