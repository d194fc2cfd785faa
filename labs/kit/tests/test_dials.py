"""The book's dials: one a concept, with figures of the simulator, which runs in the page as well."""

import json
import re

import numpy as np
import pytest

from labs.kit.browser.race import DEFAULTS, NUM_REQUESTS, ROUTED, TPOT_LIMIT, TTFT_LIMIT, WAYS, p99, serve
from labs.kit.tests.test_docs import DOCS, OWN, script
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import arrivals
from mini_engine.tests.soak import SOAK

dial = script("_ext/dial")
DIALS = dial.dials()
CONCEPT = "docs/concepts/06-chunked-prefill.html"


def test_each_concept_has_one_dial_and_each_dial_a_page():
    pages = {page: re.findall(r"^<!-- \{dial\} (\w+) -->$", page.read_text("utf-8"), re.M) for page in OWN}
    with_one = {page for page, names in pages.items() if names}
    assert with_one == {DOCS / "index.md", *DOCS.glob("concepts/*.md")}
    assert sorted(name for names in pages.values() for name in names) == sorted(DIALS)


def test_a_dial_s_sliders_begin_where_they_can_go_and_its_ways_are_known():
    for name, one in DIALS.items():
        assert set(one.at) <= set(DEFAULTS) and set(one.ways) <= {*WAYS, *ROUTED}, name
        for slider in one.sliders:
            _, least, most, step = dial.SLIDERS[slider]
            value = one.at.get(slider, DEFAULTS[slider])
            assert least <= value <= most and (value - least) % step == 0, (name, slider)


def test_the_figures_are_those_of_the_simulator_s_summary():
    lengths = {"input_length": 256, "prefix_length": 256, "output_length": 64}
    workload = list(arrivals(NUM_REQUESTS, rate=14, num_prefix_groups=4, **lengths))
    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "num_blocks": 640}
    done = simulate(workload, enable_prefix_caching=False, **settings)
    expected = done.summary(ttft_limit=TTFT_LIMIT, tpot_limit=TPOT_LIMIT)
    found = serve("chunked")
    assert found["ttft"] == pytest.approx(expected.ttft.p99)
    assert found["itl"] == pytest.approx(expected.itl.p99)
    assert found["goodput"] == pytest.approx(1000 * expected.goodput)
    assert found["preempted"] == expected.num_preemptions
    for count in (1, 2, 60, 101):
        values = np.random.default_rng(count).random(count).tolist()
        assert p99(values) == pytest.approx(np.percentile(values, 99))


@pytest.mark.skipif(not SOAK, reason="each end of each slider, a minute; make soak")
def test_every_slider_can_go_to_both_ends():
    for one in DIALS.values():
        for slider in one.sliders:
            for end in dial.SLIDERS[slider][1:3]:
                for way in one.ways:
                    found = serve(way, **one.at | {slider: end})
                    assert found["ttft"] > 0 and found["refused"] < NUM_REQUESTS, (one.question, slider, end)


def test_a_dial_keeps_its_first_figures_where_python_cannot_start(site, browser, serving):
    """They are in the page, those above a limit in red; the slider goes back, and says why."""
    page = browser.new_page()
    page.route("**/race.js", lambda route: route.abort())
    for address in (f"{serving(site)}/{CONCEPT}", (site / CONCEPT).as_uri()):
        page.goto(address)
        figures = page.locator(".dial tbody").inner_text()
        continuous = serve("continuous", **DIALS["chunks"].at)
        assert f"{continuous['itl']:,.0f} ms" in figures
        assert page.locator(".dial .over").count() == 1
        page.locator(".dial input[name=budget]").press("ArrowRight")
        page.locator(".dial [role=status]", has_text="those of the first settings").wait_for()
        assert page.locator(".dial tbody").inner_text() == figures
        assert page.locator(".dial input[name=budget]").input_value() == "512"


@pytest.mark.skipif(not SOAK, reason="Python starts in the page, a minute; make soak")
def test_a_page_s_python_gives_the_same_figures_as_this_one(site, pages, browser, serving):
    page = browser.new_page()
    page.goto(f"{serving(site)}/docs/index.html")
    page.locator(".dial input[name=rate]").press("ArrowRight")
    page.locator(".dial tr.old").first.wait_for(state="detached", timeout=240_000)
    while page.locator(".dial tr.old").count():
        page.wait_for_timeout(200)
    at = DIALS["race"].at | {"rate": 13}
    for way in DIALS["race"].ways:
        cells = page.locator(f".dial tr[data-way='{way}'] td").all_inner_texts()
        found = serve(way, **at)
        times = [f"{found[name]:,.0f} ms" for name in ("ttft", "itl")]
        assert cells == [*times, f"{found['goodput']:.1f}/s", str(found["preempted"])]
    data = page.locator(".dial script").text_content()
    assert json.loads(data)["figures"] == {way: serve(way, **DIALS["race"].at) for way in DIALS["race"].ways}
