"""The trace player: the page agrees with the trace.

The tests drive the real page in a headless Chromium (skipped if there is none) and compare its state with
Python's replay() and the records. No page may log an error or request anything. test_fold.py compares the
folds themselves, under node.
"""

import io
import json
import random
import re
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Thread
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from mini_engine.block_manager import BlockManager
from mini_engine.scheduler import Scheduler
from mini_engine.show.player import (
    cluster_payload,
    payload,
    player_html,
    read_texts,
    ready_setup,
    script,
    titles,
    write_cluster,
    write_player,
    write_shell,
)
from mini_engine.show.player.cluster import read_cluster, with_idle
from mini_engine.show.player.picture import step_picture
from mini_engine.sim.cluster import simulate_cluster
from mini_engine.sim.workloads import workload
from mini_engine.tests import test_fork
from mini_engine.tests.helpers import make_request, record_run
from mini_engine.tests.soak import SOAK
from mini_engine.trace import Fold, Recorder, Trace, decisions, first_difference, replay
from mini_engine.trace.records import Blocked, End, Finished, Queued, RequestView, Scheduled


def run(requests, *, aborts=0.0, seed=0, pool=(12, 4), keep=True, **settings) -> Trace:
    """Return a run of the real scheduler over [(id, prompt, max_tokens, priority, arrival step)]."""
    rng = random.Random(seed)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **settings}

    def abort_some(recorder):
        if rng.random() < aborts:
            recorder.abort(rng.choice([*recorder.running, *recorder.waiting]).request_id)

    scheduler = Scheduler(BlockManager(*pool, watermark=1), **settings)
    arrivals = [(at, make_request(name, tokens, n, priority=rank)) for name, tokens, n, rank, at in requests]
    return record_run(scheduler, arrivals, before=abort_some, keep=keep)


def crowd(seed: int, number: int = 30) -> list:
    rng = random.Random(seed)
    steps = sorted(rng.randrange(3 * number) for _ in range(number))
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 30))] for _ in range(number)]
    # Ids that look like numbers, because JavaScript would reorder them.
    return [
        (str(40 - n), p, rng.randint(1, 16), rng.randrange(3), s)
        for n, (p, s) in enumerate(zip(prompts, steps, strict=True))
    ]


@cache
def crowded(seed: int) -> Trace:
    """Return a shared run with aborts, of seed 1 or 4: do not change it."""
    policy, threshold = {1: ("fcfs", 0), 4: ("priority", 6)}[seed]
    return run(crowd(seed), aborts=0.06, seed=seed, policy=policy, long_prefill_token_threshold=threshold)


REASONS = {"empty", "preempted", "slots", "budget", "memory"}

# --------------------------------------------------------------------------------- without a browser


def test_the_example_shows_the_abilities_of_a_scheduler():
    """A chunked prefill, a mixed step, full slots, a prefix hit, a preemption and its resumption. The random
    traces have every reason and event."""
    trace = ready_setup()
    assert trace.header.config["num_blocks"] == 20 and trace.end.num_free_blocks == 20
    states = [{view.state for view in views.values() if view.num_scheduled} for _, views in replay(trace)]
    assert {"prefill", "decode"} in states
    events = [event for record in trace.steps for event in record.events]
    (preempted,) = [event.id for event in events if event.type == "PREEMPTED"]
    admitted = [event for event in events if event.type == "SCHEDULED"]
    assert [event.id for event in admitted].count(preempted) == 2
    assert any(event.num_cached_tokens for event in admitted)
    assert {record.blocked.reason for record in trace.steps} == REASONS
    assert ready_setup() == trace
    for trace in (crowded(1), crowded(4)):
        events = [event for record in trace.steps for event in record.events]
        assert {"QUEUED", "SCHEDULED", "PREEMPTED", "FINISHED"} == {event.type for event in events}
        assert any(event.type == "FINISHED" and event.reason == "abort" for event in events)
        assert {record.blocked.reason for record in trace.steps} == REASONS


def test_the_page_requests_nothing_and_holds_the_trace(tmp_path):
    """It has no address and a policy that forbids requests, and its data are those of the trace."""
    trace = ready_setup()
    trace.steps[0].events[0].id += "</script><script>alert(1)"
    path = write_player(tmp_path / "deep" / "player.html", trace, names=("a {{DATA}} name",))
    page = path.read_text("utf-8")
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert page.count("</script>") == 2
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    (shown,) = json.loads(data)["traces"]
    assert shown["name"] == "a {{DATA}} name"
    assert shown["header"] == trace.header.to_json() and shown["end"] == trace.end.to_json()
    steps = [{**step, "scheduled": dict(step["scheduled"])} for step in shown["steps"]]
    assert steps == [record.to_json() for record in trace.steps]
    with pytest.raises(ValueError, match="no steps"):
        player_html(Trace(trace.header))


# ------------------------------------------------------------------------------------ in the browser


def listen(page, troubles: list[str]) -> None:
    """Collect the messages and errors of a page."""
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))


# The component has no global name; the tests find it at its element.
PLAYER = """Object.defineProperty(window, "player", {
    get: () => document.querySelector(".mini-engine-player").player,
});"""


# As page.js begins, with a component in place of the one that is there.
ANEW = """([data, fragment]) => {
    const { constructor: Player, host, options } = player, box = host.parentElement;
    player.destroy();
    history.replaceState(null, "", fragment || "#");
    new Player(box, options).load({
        ...JSON.parse(data), ...Object.fromEntries(new URLSearchParams(fragment.slice(1))),
    });
}"""


@pytest.fixture(scope="module")
def page(browser):
    """One page for all tests: to load one takes longer than most of them."""
    page = browser.new_page()
    page.at, page.troubles = "", []
    page.add_init_script(PLAYER)
    listen(page, page.troubles)
    page.on("request", lambda one: one.url.split("#")[0] == page.at or page.troubles.append(one.url))
    return page


@pytest.fixture
def open_player(page, tmp_path):
    """A function that opens a player, in place of the one before; `reload`: in a page of its own. No page
    may have an error or have requested anything."""

    def open_(trace, other=None, *, fragment="", width=1280, height=900, scheme="light", forced="none",
              reload=False, **options):  # fmt: skip
        page.emulate_media(color_scheme=scheme, forced_colors=forced)
        page.set_viewport_size({"width": width, "height": height})
        is_cluster = isinstance(trace, dict)
        if reload or not page.at:
            path = tmp_path / "player.html"
            if is_cluster:
                write_cluster(path, trace)
            else:
                write_player(path, trace, other, **options)
            page.at = path.as_uri()
            page.goto(page.at + fragment)
        else:
            data = cluster_payload(trace) if is_cluster else payload(trace, other, **options)
            page.evaluate(ANEW, [json.dumps(data), fragment])
        return page

    yield open_
    troubles = page.troubles.copy()
    page.troubles.clear()
    assert not troubles


def test_queues_agree_with_the_records(open_player):
    """The running and waiting requests, in order."""
    trace = crowded(4)
    page = open_player(trace)
    shown = page.evaluate("""() => player.panes[0].fold.steps.map((record, step) => {
        const { fold } = player.panes[0], views = fold.at(step);
        const { waiting, running } = player.panes[0].queues(record, views);
        return {
            running: running.map((v) => v.request_id),
            waiting: waiting.map((v) => [v.priority, v.arrival]),
        }})""")
    for record, now in zip(trace.steps, shown, strict=True):
        assert now["running"] == list(record.scheduled)
        assert len(now["waiting"]) == record.num_waiting and now["waiting"] == sorted(now["waiting"])


SENTENCES = "() => player.panes[0].fold.steps.map((_, i) => player.panes[0].sentences(i))"


@pytest.mark.parametrize(
    "made",
    [ready_setup, partial(crowded, 1), partial(crowded, 4), lambda: test_fork.serve(3).trace],
    ids=["ready", "random fcfs", "random priority", "forks"],
)
def test_every_decision_is_explained_in_a_sentence(open_player, made):
    """Every row, event, refusal and new block of a step is reported, and nothing else."""
    trace = made()
    last = trace.steps[-1]
    kinds = {"QUEUED": "arrive", "SCHEDULED": "admit", "PREEMPTED": "preempt", "FINISHED": "finish"}
    limits = trace.header.config
    for (record, views), shown in zip(replay(trace), open_player(trace).evaluate(SENTENCES), strict=True):
        about = {
            kind: {i for line in shown if line["kind"] == kind for i in line["ids"]}
            for kind in kinds.values()
        }
        for type_, kind in kinds.items():
            events = record.events + (trace.end.events if record is last else [])
            ids = {event.id for event in events if event.type == type_}
            assert ids <= about[kind] and (kind == "preempt" or ids == about[kind]), (record.step, kind)
        work = {i for line in shown if line["kind"] in ("decode", "prefill", "admit") for i in line["ids"]}
        assert work == set(record.scheduled)
        text = " ".join(line["text"] for line in shown)
        forks = [e for e in record.events if e.type == "SCHEDULED" and e.num_forked_tokens]
        assert text.count("another answer to its prompt ha") == len(forks)
        partial = [e for e in forks if e.num_cached_tokens % trace.header.config["block_size"]]
        assert text.count("are copied into its first new block") == len(partial)
        for request_id, blocks in record.blocks.items():
            if request_id not in about["admit"]:
                assert f"{request_id} takes block {blocks[0]}" in text
        for line in shown:
            if line["kind"] in ("admit", "prefill"):
                view = views[line["ids"][0]]
                left = view.num_prompt_tokens + view.num_output_tokens
                left -= view.num_computed_tokens + view.num_scheduled
                assert (f"; {left} " in line["text"]) == bool(left)
                threshold = limits["long_prefill_token_threshold"]
                cut = bool(left) and view.num_scheduled == threshold
                assert ("threshold" in line["text"], "budget" in line["text"]) == (cut, bool(left) > cut)
        blocked = record.blocked
        expected = {
            "empty": None,
            "preempted": "memory was short in this step",
            "slots": f"all {limits['max_num_seqs']} slots are taken",
            "budget": f"the budget of {limits['max_num_batched_tokens']} tokens is spent",
            "memory": f"needs {blocked.needs} block",
        }[blocked.reason]
        waits = [line["text"] for line in shown if line["kind"] == "wait"]
        assert len(waits) == (expected is not None)
        if expected:
            assert waits[0].startswith(f"{blocked.id} waits: {expected}")


def test_sentences_are_good_english(open_player):
    """In the singular and the plural; also for vLLM, which allocates two blocks of 4 for 8 of 20 tokens."""
    queued = [
        Queued(i, 0.0, num_prompt_tokens=1, max_tokens=1, priority=0, arrival=n) for n, i in enumerate("abcd")
    ]
    ready = ready_setup()
    record = replace(
        ready.steps[0],
        scheduled={"a": 1},
        num_running=1,
        num_waiting=3,
        blocked=Blocked("memory", "b", needs=2, free=1),
        blocks={"a": [4]},
        new_tokens={"a": [5]},
        events=[*queued, Scheduled("a", 0, []), Finished("a", "length")],
    )
    (shown,) = open_player(Trace(ready.header, [record])).evaluate(SENTENCES)
    assert [line["text"] for line in shown][3:] == [
        "d arrives: 1 prompt token, at most 1 output token.",
        "a is admitted: it claims 1 block for its 1 token. "
        "It starts with token 1 of its prompt, the last chunk, and output token 1 is sampled.",
        "b waits: needs 2 blocks, 1 is free. 2 more wait behind it.",
        "a finishes: it has its 1 output token. Its 1 block can be used from the next step on.",
    ]
    events = [replace(queued[0], num_prompt_tokens=20), Scheduled("a", 0, [])]
    step = replace(ready.steps[0], scheduled={"a": 8}, blocks={"a": [0, 1]}, new_tokens={}, events=events)
    trace = Trace(ready.header, [replace(step, blocked=Blocked("empty"))])
    (shown,) = open_player(trace).evaluate(SENTENCES)
    said = next(line["text"] for line in shown if "is admitted" in line["text"])
    assert said.startswith("a is admitted: it takes 2 blocks for this chunk of its 20 tokens. It starts with")


def test_keys_move_through_the_trace(open_player):
    """The keyboard reaches everything, and the page shows the current step."""
    trace = ready_setup()
    page = open_player(trace)
    last = len(trace.steps) - 1
    for key, step in (
        ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Shift+ArrowRight", 11), ("End", last),
        ("ArrowRight", last), ("Home", 0), ("ArrowLeft", 0),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert page.locator("#readout").text_content() == f"Step {step} of {last}", key
        assert page.locator("#slider").input_value() == str(step)
        assert page.locator(".log-card h3").text_content() == f"What step {step} decides"
    page.locator("#slider").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("player.step") == 1
    page.locator("#forward").focus()
    page.keyboard.press("Space")  # presses the button that has the focus, and does not play
    assert page.evaluate("[player.step, player.playing]") == [2, False]
    # Speech input may type letters by accident: they can be switched off, and the arrow keys stay.
    page.keyboard.press("?")
    page.locator("#letters").uncheck()
    page.locator("dialog button").click()
    page.keyboard.press("f")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[player.followed, player.step]") == ["r0", 3]


def test_play_runs_to_the_end_and_stays_quiet_meanwhile(open_player):
    """A screen reader is silent while the run plays, and reads the log again when it stops."""
    trace = ready_setup()
    page = open_player(trace)
    log = page.locator(".log")
    assert log.get_attribute("aria-live") == "polite"
    page.locator("#speed").select_option("30")
    page.locator("body").press("Space")
    assert log.get_attribute("aria-live") == "off"
    page.get_by_role("button", name="Play", exact=True).wait_for()  # it says Pause while playing
    assert page.evaluate("player.step") == len(trace.steps) - 1
    assert log.get_attribute("aria-live") == "polite"


def test_following_a_request_lights_its_state(open_player):
    """By click, selection and key; in every step the state machine shows the state of replay()."""
    trace = ready_setup()
    page = open_player(trace)
    page.locator(".running-card .row", has_text="r1").click()
    assert page.evaluate("player.followed") == "r1"
    assert page.locator(".row[aria-pressed=true]").get_attribute("data-id") == "r1"
    page.keyboard.press("f")
    assert page.locator("#follow").input_value() == "r2"
    page.keyboard.press("Shift+F")
    assert page.locator(".who").text_content() == "r1"
    page.locator("#follow").select_option("r3")
    shown = page.evaluate("""() => player.panes[0].run.steps.map((_, step) => {
        player.go(step);
        return [...player.root.querySelectorAll(".machine .lit")].map((e) => e.classList.value);
    })""")
    for lit, (record, views) in zip(shown, replay(trace), strict=True):
        state = views["r3"].state if "r3" in views else None
        name = "waiting" if state == "preempted" else state
        assert [one for one in lit if "state" in one] == ([f"state {name} lit"] if name else [])
        assert ("arrow preempted of-decode lit" in lit) == (state == "preempted")
        began = any(e.type == "SCHEDULED" and e.id == "r3" for e in record.events)
        assert ("arrow admitted lit" in lit) == began


def states_of(views: dict[str, RequestView]) -> dict[str, tuple]:
    """Return the fields of each request after a step that two equal runs share."""
    alike = ("running", "num_computed_tokens", "num_output_tokens", "finish_reason", "priority", "arrival")
    return {i: tuple(getattr(view, name) for name in alike) for i, view in views.items()}


def divergences(ours: Trace, theirs: Trace) -> list[tuple]:
    """Return (step, decision, over, ids of lives) by docs/trace.md's definition of a difference."""
    found, diverged, folds = [], set(), [Fold(trace.header) for trace in (ours, theirs)]
    said: list[dict] = [{}, {}]
    before, rows = [states_of(fold.views) for fold in folds], [[], []]
    for step, records in enumerate(zip(ours.steps, theirs.steps, strict=False)):
        going = {i for run in before for i, state in run.items() if state[3] is None}
        equal = rows[0] == rows[1] and all(before[0].get(i) == before[1].get(i) for i in going)
        equal &= all(said[0].get(i) == said[1].get(i) for i in going)
        decision = equal and decisions(records[0]) != decisions(records[1])
        views = [fold.add(record) for fold, record in zip(folds, records, strict=True)]
        lives = set()
        for i in {*views[0], *views[1]} - diverged:
            if len({run[i].state if i in run else None for run in views}) == 2:
                lives.add(i)
        diverged |= lives
        if decision or lives:
            found.append((step, decision, False, lives))
        for record, shown in zip(records, said, strict=True):
            for i, tokens in record.new_tokens.items():
                shown[i] = shown.get(i, []) + tokens
        before, rows = [states_of(fold.settle()) for fold in folds], [list(r.scheduled) for r in records]
    if len(ours.steps) != len(theirs.steps):
        found.append((min(len(ours.steps), len(theirs.steps)), False, True, set()))
    return found


DIVERGENCES = (
    "player.divergences.map((one) => [one.step, one.decision, one.over, one.lives.map(({ id }) => id)])"
)


@pytest.mark.parametrize("how", ["threshold", "policy", "tokens", "pool"])
def test_a_difference_is_a_decision_or_a_state_that_begins_to_differ(open_player, how):
    """The player's differences are those of the definition; the first is that of Python's comparison."""
    other = {
        "threshold": {"long_prefill_token_threshold": 7},
        "policy": {"policy": "priority"},
        "pool": {"pool": (14, 4)},
    }
    ours = run(crowd(1), long_prefill_token_threshold=6)
    theirs = run(crowd(1), **{"long_prefill_token_threshold": 6, **other.get(how, {})})
    if how == "tokens":  # one token of a text differs; the schedule is the same
        theirs.steps[9].new_tokens = {i: [8] for i in theirs.steps[9].new_tokens}
    page = open_player(ours, theirs)
    expected = divergences(ours, theirs)
    shown = [(step, decision, over, set(ids)) for step, decision, over, ids in page.evaluate(DIVERGENCES)]
    assert shown == expected and shown[0][0] == first_difference(ours, theirs)
    assert len(shown) < len(page.evaluate("player.differing")) or how == "tokens"


def test_next_difference_stops_where_one_begins(open_player):
    """Forward and back; the page names the difference that begins, and the fields of the step that differ."""
    ours = run(crowd(1), long_prefill_token_threshold=6)
    theirs = run(crowd(1), long_prefill_token_threshold=7)
    page = open_player(ours, theirs, names=("six", "seven"))
    length = max(len(ours.steps), len(theirs.steps))
    padded = [[decisions(r) for r in t.steps] + [None] * (length - len(t.steps)) for t in (ours, theirs)]
    differing = [i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b]
    assert page.evaluate("player.differing") == differing
    first, second = (step for step, *_ in divergences(ours, theirs)[:2])
    page.keyboard.press("n")
    assert page.evaluate("player.step") == first == first_difference(ours, theirs) > 0
    summary = page.locator("#difference-summary").text_content()
    assert f"Step {first} differs: from equal state the two decide differently" in summary
    assert f"{len(differing)} steps differ in all" in summary
    fields = page.locator("#difference-table th[scope=row]").all_text_contents()
    assert "scheduled" in fields
    page.keyboard.press("n")
    assert page.evaluate("player.step") == second
    assert re.search(
        r"The state of \d+ begins to differ: \w+ in six, \w+ in seven",
        page.locator("#difference-summary").text_content(),
    )
    page.keyboard.press("Shift+N")
    assert page.evaluate("player.step") == first
    shown = "player.root.querySelector('#difference-table').textContent"
    said = page.evaluate(
        f"(steps) => steps.map((step) => {{ player.go(step); return {shown}; }}).join('')",
        differing if SOAK else differing[::4],
    )
    assert " admitted" in said and "SCHEDULED" not in said  # the terminal's words


def test_the_request_that_parts_is_followed(open_player):
    """Its row, event, token or place among the rows; also where the run opens at the step."""
    base = ready_setup()
    at = next(r.step for r in base.steps if len(r.scheduled) == 3 and r.step > 4)
    names = list(base.steps[at].scheduled)

    def more(record):
        record.scheduled[names[2]] += 1

    def left_out(record):  # and the first gets its token
        record.scheduled[names[0]] += record.scheduled.pop(names[1])

    def other_token(record):
        record.new_tokens[names[1]] = [7]

    def arrives(record):
        record.events.append(Queued("new", 0.0, 3, 1, 0, 9))

    def turned(record):
        record.scheduled = {name: record.scheduled[name] for name in (names[0], names[2], names[1])}

    cases = (more, names[2]), (left_out, names[1]), (other_token, names[1]), (arrives, "new")
    for change, name in (*cases, (turned, names[1])):
        other = ready_setup()
        change(other.steps[at])
        assert open_player(base, other, fragment=f"#step={at}").evaluate("player.followed") == name, change
    log = [("admit", [name, [n]], True, {name: 1}) for n, name in enumerate("abc")]
    page = open_player(log_of(*log), log_of(*log[:2], (*log[2][:3], {"c": 2})), fragment="#step=2")
    assert page.evaluate("player.followed") == "c"


def test_equal_traces_are_equal_and_the_shorter_one_ends(open_player):
    """Times, block ids and `blocked` make no difference; a missing step does."""
    trace, other = ready_setup(), ready_setup()
    for record in other.steps:
        record.t, record.blocked = record.t + 5, Blocked("empty")
    page = open_player(trace, other)
    assert page.evaluate("[player.differing, player.divergences]") == [[], []]
    assert "decide the same in every step" in page.locator("#difference-summary").text_content()
    other.steps.pop()
    page = open_player(trace, other)
    page.keyboard.press("n")
    assert page.evaluate("[player.step, player.differing]") == [len(other.steps), [len(other.steps)]]
    assert page.locator(".log-card h3").all_text_contents()[1].startswith("Over after step")


def test_the_page_is_labelled_for_screen_readers(open_player):
    """It has landmarks, a name for every control and picture, a live log, focus that follows its request."""
    crowded, log = run(crowd(1)), log_of(*OPERATIONS)
    for traces in ((crowded,), (log, log), (ready_setup(), ready_setup())):
        page = open_player(*traces, fragment="#step=4")
        unnamed = page.evaluate("""() => {
            const all = [...player.root.querySelectorAll("button, select, input, [role=img], [role=log]")];
            const named = (e) => e.ariaLabel || e.textContent.trim() || e.labels?.length;
            return all.filter((e) => !named(e)).map((e) => e.outerHTML);
        }""")
        assert unnamed == []
    assert page.locator("main").count() == 1 and page.locator("header.top").count() == 1
    assert page.get_by_role("region", name="Playback").count() == 1
    assert page.get_by_role("log").count() == 2
    assert "step 4 of" in page.locator("#slider").get_attribute("aria-valuetext")
    ids = page.evaluate("[...player.root.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    row = page.locator(".running-card .row").nth(1)
    row.focus()
    name = row.get_attribute("data-id")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("player.root.activeElement.dataset.id") == name
    page.locator("body").press("Tab")


def test_text_stands_out_in_both_themes(open_player):
    """The theme follows the system and the button; every text has a contrast of 4.5 to 1 (WCAG AA)."""
    trace, other = run(crowd(1)), run(crowd(1), policy="priority")
    texts = {i: ("a prompt", ["out"] * 40) for i in ("r0", "r1", "r2", "r3", "r4", "r5")}
    logs = [log_of(*OPERATIONS[:3]), log_of(*OPERATIONS)]
    for themes, traces, at, shown in (
        (("light", "dark"), [ready_setup()], "11&follow=r3", texts),
        (("dark", "light"), [trace, other], "13", None),
        (("dark", "light"), logs, "2", None),
    ):
        page = open_player(*traces, scheme=themes[0], fragment=f"#step={at}", texts=shown)
        for theme in themes:
            assert page.evaluate("player.host.dataset.theme") == theme
            # The colours are read when their transitions have ended.
            page.evaluate("Promise.all(player.root.getAnimations().map((running) => running.finished))")
            assert page.evaluate(CONTRAST) == []
            page.keyboard.press("t")


# Every element with text of its own whose colour is too close to that of its background.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (rgb) => {
        const curve = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const linear = rgb.map((v) => curve(v / 255));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const over = (below, [r, g, b, a]) => [r, g, b].map((v, i) => (v * a + below[i] * (255 - a)) / 255);
    const ground = (element) => {
        const layers = [];
        for (let e = element; e; e = e.parentElement ?? e.getRootNode().host) {
            layers.unshift(rgba(getComputedStyle(e).backgroundColor));
        }
        return layers.reduce(over, [255, 255, 255]);
    };
    const faint = [];
    for (const e of player.root.querySelectorAll("*")) {
        const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !e.checkVisibility() || e.disabled) continue;
        const style = getComputedStyle(e), svg = e.namespaceURI.endsWith("svg");
        const box = svg && e.parentElement.querySelector("rect");
        const back = box ? rgba(getComputedStyle(box).fill).slice(0, 3) : ground(e);
        const front = rgba(svg ? style.fill : style.color).slice(0, 3);
        const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
        const ratio = (high + 0.05) / (low + 0.05);
        const outlined = style.textShadow !== "none"; // the white X on its hatch
        if (ratio < 4.5 && !outlined) faint.push([e.textContent.trim(), ratio]);
    }
    return faint;
}"""


def test_no_width_needs_sideways_scrolling(open_player):
    """For one trace and for two, with differences, and for logs of operations."""
    log = log_of(*OPERATIONS, ("admit", ["a-name-that-goes-on-and-on", list(range(40))], True, {"a": 4}))
    crowded = run(crowd(1)), run(crowd(1), policy="priority")
    for traces in ((ready_setup(),), (ready_setup(), ready_setup()), crowded, (log,), (log, log)):
        page = open_player(*traces, width=390, height=800, fragment="#step=4")
        for width in (320, 390, 768, 1280, 1920) if SOAK else (320, 768, 1920):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    # At 1,920 pixels the cards have four columns and fill the width, without scrolling down either.
    page = open_player(ready_setup(), width=1920, height=1000, fragment="#step=11")
    boxes = [card.bounding_box() for card in page.locator(".card:visible").all()]
    assert len({round(box["x"]) for box in boxes}) == 4
    assert max(box["x"] + box["width"] for box in boxes) > 1880
    assert max(box["y"] + box["height"] for box in boxes) < 1000


CUT = """() => {
    const cut = [];
    for (const e of player.root.querySelectorAll("*")) {
        const style = getComputedStyle(e), box = e.getBoundingClientRect();
        if (!box.width || style.visibility === "hidden") continue;
        if (e.closest(".spoken, .log, .skip, .tail, .pool")) continue; // they scroll, or are not for the eye
        if (e.matches("select")) {
            const ruler = document.createElement("canvas").getContext("2d");
            ruler.font = style.font;
            const { width } = ruler.measureText(e.selectedOptions[0].textContent);
            const arrow = 20;
            if (width + parseFloat(style.paddingLeft) + arrow > e.clientWidth) cut.push(e.id);
        } else if (style.overflowX !== "visible" && e.textContent && e.scrollWidth > e.clientWidth) {
            cut.push(e.className + ": " + e.textContent);
        }
    }
    return cut;
}"""


def test_two_runs_stand_side_by_side_row_by_row_and_nothing_is_cut(open_player):
    """From 640 pixels on, so in half of a page, too; also where one run is over or has fewer requests.

    What differs is whole in every step, and nothing below it moves.
    """
    names = [f"r{n}" for n in range(8)]
    requests = [(name, [n] * 9, 6, 0, 0) for n, name in enumerate(names)]
    ours, theirs = run(requests[:3], pool=(9, 4)), run(requests, policy="priority", pool=(40, 4))
    page = open_player(ours, theirs, names=("yours", "reference"))
    cards = (
        "(pane) => [...pane.querySelectorAll('.card')].map((e) => Math.round(e.getBoundingClientRect().top))"
    )
    rows = page.evaluate("player.panes.map((pane) => pane.scale.ids)")
    assert rows == [names, names]  # of the chart, where one lacks five
    for width in (640, 700, 1100, 1440) if SOAK else (640, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        tops = set()
        for step in (0, 3, len(ours.steps) + 1):
            page.evaluate(f"player.go({step})")
            left, right = (pane.evaluate(cards) for pane in page.locator(".pane").all())
            assert left == right, (width, step)
            tops.add(left[0])
            assert page.evaluate(CUT) == [], (width, step)
            table = page.locator("#difference-table").bounding_box()
            card = page.locator("#difference").bounding_box()
            assert not table or table["y"] + table["height"] <= card["y"] + card["height"]
        assert len(tops) == 1, width
        boxes = [pane.bounding_box() for pane in page.locator(".pane").all()]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate(CUT) == []
    page.evaluate("player.go(0)")
    said = {row.locator("th").text_content(): row.locator("td").all_text_contents()
            for row in page.locator("#difference-table tr:has(td)").all()}  # fmt: skip
    assert said.keys() == {"waiting", "free blocks", "events"} and said["events"][0] == "none"
    assert said["events"][1].startswith("r3 queued (priority 0, arrival 3), r4 queued")


def test_hostile_ids_stay_text(open_player):
    """A request's id is shown as text, even if it looks like markup."""
    evil = "<img src=x onerror=alert(1)></script>"
    page = open_player(
        run([(evil, [1, 2], 3, 0, 0)]), names=(evil,), texts={evil: (evil, [evil] * 3)}, reload=True
    )
    assert page.locator(".who").text_content() == evil
    assert page.locator(".life-card .text").text_content() == evil * 2 and evil in page.title()
    log = log_of(("admit", [evil, evil], evil, {evil: 2}), error=evil)
    for opened in (lambda: page, lambda: open_player(log, log, names=(evil, evil))):
        assert opened().locator("img").count() == 0
        assert evil in page.locator(".log").first.text_content()


def test_a_broken_trace_is_reported_on_the_page(open_player):
    """A sentence that a screen reader reads at once, not an empty page."""
    trace = ready_setup()
    trace.steps[3].scheduled = {"unknown": 1}
    page = open_player(trace)
    assert page.get_by_role("alert").text_content().startswith("This trace cannot be shown")
    assert len(page.troubles) == 1  # the error that the page reports
    page.troubles.clear()


def test_thousands_of_steps_and_hundreds_of_requests_do_not_stall(open_player):
    """Any step, also when zoomed in, takes less than 50 ms of processor time with layout and painting, and
    so is no Long Task (W3C).

    In a soak there are seven thousand steps and six hundred requests.
    """
    number, each = (600, 40) if SOAK else (200, 6)
    trace = piled(number, 16, 128, range(100, 260), pool=(1024, 16))
    all_steps = range(len(trace.steps))
    assert len(all_steps) >= 11 * number
    page = open_player(trace)
    # Processor time, so that other work on the machine does not count.
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    rng = random.Random(0)
    go = "(step) => new Promise((done) => { player.go(step); requestAnimationFrame(() => setTimeout(done)) })"
    for zoomed in (False, True):
        if zoomed:
            page.keyboard.press("+")
            page.keyboard.press("+")
        early, late = len(all_steps) // 7, len(all_steps) * 4 // 7
        for steps in (
            all_steps[early : early + each],
            all_steps[late : late - each : -1],
            rng.sample(all_steps, each),
        ):
            before = busy()
            for step in steps:
                page.evaluate(go, step)
            assert (busy() - before) / len(steps) < 0.050
    assert page.locator(".waiting-card li").count() < 20  # of hundreds that wait
    assert int(page.locator("#slider").get_attribute("max")) == len(trace.steps) - 1


# ---------------------------------------------------------------------------------------- large runs


@cache
def piled(number: int, slots: int, budget: int, steps: range, **settings) -> Trace:
    """Return a shared run of `number` requests that all arrive at the start: do not change it."""
    rng = random.Random(0)
    prompts = [[n * 1000 + k for k in range(rng.randint(20, 600))] for n in range(number)]
    requests = [(f"r{n}", prompt, rng.choice(steps), 0, 0) for n, prompt in enumerate(prompts)]
    limits = {"max_num_seqs": slots, "max_num_batched_tokens": budget, "long_prefill_token_threshold": 64}
    return run(requests, **limits, **settings)


def pixels(page, selector: str) -> Counter:
    """Return the number of pixels of each colour in an element."""
    picture = Image.open(io.BytesIO(page.locator(selector).first.screenshot())).convert("RGB")
    return Counter({colour: number for number, colour in picture.getcolors(1 << 24)})


def test_meters_of_wide_limits(open_player):
    """Above 32 slots the slots are one bar, as full as they are. One decode of 2,048 tokens is a thin piece
    in the colour of decodes; so are eleven."""
    wide = piled(11, 128, 2048, range(8, 20), pool=(4096, 16))
    page = open_player(wide)
    page.evaluate("player.go(player.panes[0].fold.steps.findIndex((r) => r.num_running === 11))")
    assert page.locator(".slots p").text_content() == "11 of 128 taken"
    taken, bar = (page.locator(f".slots {part}").bounding_box()["width"] for part in (".taken", ".bar"))
    assert taken / bar == pytest.approx(11 / 128, abs=0.01)
    only_decodes = next(r.step for r in wide.steps if r.num_batched_tokens == r.num_running)
    for step in (len(wide.steps) - 1, only_decodes):
        page.evaluate(f"player.go({step})")
        assert page.locator(".budget .bar i").count() == 1
        assert pixels(page, ".budget .bar")[(0xF3, 0xB5, 0x4A)] >= 20


def test_what_exceeds_the_budget_is_red(open_player):
    """Meter, row and the run's bar show the tokens over the budget; a step within it has no such mark."""
    trace = ready_setup()
    trace.header.config["max_num_batched_tokens"] = 7
    over = next(r for r in trace.steps if len(r.scheduled) > 1 and r.num_batched_tokens > 7)
    within = next(r for r in trace.steps if 0 < r.num_batched_tokens <= 7)
    page = open_player(trace, fragment=f"#step={over.step}")
    said = page.locator(".budget p").text_content()
    assert said == f"{over.num_batched_tokens} of 7, {over.num_batched_tokens - 7} over"
    assert page.locator(".budget .bar .over").count() == 1
    sums = [sum(list(over.scheduled.values())[: n + 1]) for n in range(len(over.scheduled))]
    wrong = [name for name, total in zip(over.scheduled, sums, strict=True) if total > 7]
    row = ".running-card .row:has(.plus.over)"
    assert [r.get_attribute("data-id") for r in page.locator(row).all()] == wrong
    red = page.evaluate("player.panes[0].colours.over")
    drawn = pixels(page, ".overview canvas")
    assert drawn[tuple(map(int, re.findall(r"\d+", red)[:3]))] > 20
    page.evaluate(f"player.go({within.step})")
    assert page.locator(".budget p").text_content() == f"{within.num_batched_tokens} of 7 tokens"
    assert page.locator(".over").count() == 0


def test_a_running_request_without_a_token_is_idle(open_player):
    """In the run's picture, its row, words, and SVG. Counts that contradict the events are reported."""
    trace = ready_setup()
    at = next(r.step for r in trace.steps if len(r.scheduled) == 3 and r.blocked.reason == "empty")
    record, (name, *_) = trace.steps[at], trace.steps[at].scheduled
    assert record.num_batched_tokens < 16 and "class='idle" not in step_picture(trace).replace('"', "'")
    del record.scheduled[name], record.new_tokens[name]
    record.num_batched_tokens -= 1
    record.num_waiting += 1
    page = open_player(trace, fragment=f"#step={at}&follow={name}")
    states = page.evaluate(f"player.panes[0].fold.lives.get('{name}')")
    assert {"step": at, "state": "idle"} in states and states[-1]["state"] != "idle"
    assert page.locator(f".running-card .row[data-id={name}] .letter").text_content() == "I"
    assert (
        page.locator(".saying").text_content() == f"{name} is running, and this step computes nothing of it."
    )
    given = page.locator(".log").text_content()
    left = 16 - record.num_batched_tokens
    assert (
        f"{name} runs without a token in this step, although {left} of the budget of 16 tokens are left."
        in given
    )
    assert "The scheduler has 1 request waiting; by the events so far it should be 0." in given
    assert page.locator(".overview .if-idle").is_visible()
    page.evaluate(f"player.go({at + 1})")
    assert page.locator(f".running-card .row[data-id={name}] .letter").text_content() != "I"
    assert step_picture(trace, at).count('class="idle"') == 2  # in the chart and in the legend


def test_forced_colours_keep_the_marks(open_player):
    """In a contrast theme of the system, meters, letters and canvases are still readable."""
    page = open_player(ready_setup(), fragment="#step=16&follow=r3", forced="active", scheme="dark")
    prefill, decode, used = (0x3D, 0x9F, 0xD8), (0xE6, 0x9F, 0x00), (0x3F, 0x8F, 0x78)
    for selector, colours in (
        (".budget .bar", (prefill, decode)), (".kv .bar", (used,)), (".slots .bar", ((0x8F, 0x98, 0xA3),)),
        (".overview canvas", (prefill, decode, used)), (".running-card .rows", (prefill, decode)),
        (".overview .key.decode", (decode,)), (".strip", (prefill, decode)),
    ):  # fmt: skip
        seen = pixels(page, selector)
        assert all(seen[colour] for colour in colours), (selector, seen.most_common(4))
        assert seen[(0, 0, 0)] or "key" in selector  # the system's background


def test_zoom_shows_a_part_and_the_requests_that_compute_in_it(open_player):
    """The part follows the step; every row of it has a name; and the whole run is shown again."""
    trace = piled(120, 8, 64, range(10, 30), pool=(1024, 16))
    page = open_player(trace, fragment=f"#step={len(trace.steps) // 2}")
    whole = page.evaluate("player.panes[0].scale.ids.length")
    page.locator(".closer").click()
    page.keyboard.press("+")
    scale = page.evaluate("({ ...player.panes[0].scale, ...player.window, step: player.step })")
    assert scale["to"] - scale["from"] == pytest.approx(len(trace.steps) / 16, abs=1)
    assert scale["from"] <= scale["step"] < scale["to"] and len(scale["ids"]) < whole == 120
    acting = {i for r in trace.steps[scale["from"] : scale["to"]] for i in r.scheduled}
    assert acting <= set(scale["ids"]) and scale["rowHeight"] >= 11
    assert page.locator(".scope").text_content().startswith(f"Steps {scale['from']} to {scale['to'] - 1} of")
    page.keyboard.press("End")
    assert page.evaluate("player.window.to") == len(trace.steps)
    page.locator(".all").click()
    assert page.evaluate("player.window") is None and page.locator(".all").is_disabled()


KINDS = {
    "preemption": lambda r, _: any(e.type == "PREEMPTED" for e in r.events),
    "prefix hit": lambda r, _: any(e.type == "SCHEDULED" and e.num_cached_tokens for e in r.events),
    "abort": lambda r, _: any(e.type == "FINISHED" and e.reason == "abort" for e in r.events),
    "finish": lambda r, _: any(e.type == "FINISHED" and e.reason != "abort" for e in r.events),
    "wait for memory": lambda r, last: r.blocked.reason == "memory" != (last and last.blocked.reason),
}


def test_next_of_a_kind(open_player):
    """Forward and back through the steps that have an event, from the list or by key, and no further."""
    trace = crowded(1)
    page = open_player(trace)
    for kind, holds in KINDS.items():
        before = [None, *trace.steps[:-1]]
        steps = [r.step for r, last in zip(trace.steps, before, strict=True) if holds(r, last)]
        page.locator("#kind").select_option(kind)
        assert page.evaluate("player.events()") == steps, kind
        assert page.locator("#kind option:checked").text_content() == f"{kind} ({len(steps)})"
        page.keyboard.press("Home")
        page.locator("#next-event").focus()
        for step in steps[steps[0] == 0 :][:3]:
            page.keyboard.press("e")
            assert page.evaluate("player.step") == step
        page.evaluate(f"player.go({steps[-1]})")
        assert page.locator("#next-event").is_disabled()
    page.locator("#kind").select_option("")  # the changes of the request that is followed
    page.evaluate("player.follow('39')")
    lives = page.evaluate("player.panes[0].fold.lives.get('39').map((l) => l.step)")
    assert page.evaluate("player.events()") == lives


def test_following_goes_to_a_step_of_the_request(open_player):
    """To the nearest step in which it is present; its row is scrolled into view."""
    trace = piled(120, 8, 64, range(10, 30), pool=(1024, 16))
    page = open_player(trace)
    page.locator("#follow").fill("r11")  # a part of a name finds the first that has it
    page.locator("#follow").press("Enter")
    assert page.evaluate("player.followed") == "r11" and page.locator("#follow").input_value() == "r11"
    page.locator("#follow").fill("r100")
    page.locator("#follow").press("Enter")
    assert page.evaluate("[player.followed, player.step]") == ["r100", 0]  # it waits from the first step on
    assert page.locator(".waiting-card .row[aria-pressed=true]").get_attribute("data-id") == "r100"
    page.evaluate("player.go(9999)")
    page.evaluate("player.follow('r1')")
    last = max(r.step for r in trace.steps if "r1" in r.scheduled)
    assert page.evaluate("player.step") == last
    assert page.locator(".running-card .row[aria-pressed=true]").get_attribute("data-id") == "r1"
    page.locator("#follow").fill("no such name")
    page.locator("#follow").press("Enter")
    assert page.evaluate("player.followed") == "r1"


def test_a_click_in_a_picture_follows_and_seeks(open_player):
    """In a row of the timeline it follows the request and goes to that step; below the rows it only goes to
    the step. In the pool it follows the owner of a block; of a shared one, the next owner."""
    page = open_player(ready_setup())
    scale = page.evaluate("player.panes[0].scale")
    at = {"x": scale["left"] + 11.5 * scale["column"], "y": scale["top"] + 3.5 * scale["rowHeight"]}
    page.locator(".chart").click(position=at)
    assert page.evaluate("[player.step, player.followed]") == [11, "r3"]
    tokens = {"x": scale["left"] + 4.5 * scale["column"], "y": scale["top"] + 6 * scale["rowHeight"] + 20}
    page.locator(".chart").click(position=tokens)
    assert page.evaluate("[player.step, player.followed]") == [4, "r3"]
    page.evaluate("player.go(5)")  # r3 is admitted, and finds blocks of r0
    side, owners = page.evaluate("[player.panes[0].pool.side, player.panes[0].pool.owners]")
    place = {"x": (owners.index(["r0", "r3"]) + 0.5) * side, "y": side / 2}  # the first row holds it
    for owner in ("r0", "r3"):
        page.locator(".pool canvas").click(position=place)
        assert page.evaluate("player.followed") == owner


def test_the_address_has_the_place(open_player):
    """Every move is written into it, as often as browsers allow; a reload and a new address move there."""
    page = open_player(ready_setup(), reload=True)
    for _ in range(12):
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowRight")
    page.evaluate("player.follow('r3', { jump: false })")
    page.wait_for_url("**#step=10&follow=r3")
    page.reload()
    assert page.evaluate("[player.step, player.followed]") == [10, "r3"]
    page.keyboard.press("ArrowRight")  # after a rest a move is written at once
    page.reload()
    assert page.evaluate("player.step") == 11
    page.evaluate("location.hash = '#step=4&follow=r1'")
    page.locator("#readout", has_text="Step 4").wait_for()
    assert page.evaluate("[player.step, player.followed]") == [4, "r1"]
    page.evaluate("location.hash = '#step=nonsense&follow=unknown'")
    page.wait_for_timeout(50)
    assert page.evaluate("[player.step, player.followed]") == [4, "r1"]


def test_a_cut_log_has_a_cue(open_player):
    """Also on a phone: there is a cue if, and only if, sentences are out of view."""
    page = open_player(ready_setup(), width=390, height=800)
    cut = 0
    for step in range(0, len(ready_setup().steps), 1 if SOAK else 3):
        page.evaluate(f"player.go({step})")
        page.wait_for_timeout(60)
        log = "player.panes[0].find('.log')"
        more = page.evaluate(f"{log}.scrollHeight > {log}.clientHeight + 2")
        assert page.locator(".cue").is_visible() == more, step
        cut += more
    assert cut
    page.evaluate("player.go(11)")
    page.locator(".cue").wait_for()
    page.evaluate("player.panes[0].find('.log').scrollTop = 999")
    page.locator(".cue").wait_for(state="hidden")


def test_legends_explain_the_marks(open_player):
    """Letters, the tick, the hatch and the difference's colour; letters have a tooltip."""
    page = open_player(ready_setup(), ready_setup(), fragment="#step=11")
    pane = page.locator(".pane").first
    legends = {item.strip() for item in pane.locator(".legend li").all_inner_texts() if item}
    for item in ("P\nprefill", "D\ndecode", "W\nwaits", "X\npreempted in this step", "end of the prompt"):
        assert item.replace("\n", "") in {legend.replace("\n", "") for legend in legends}
    assert "a difference begins" in legends
    assert pane.locator(".running-card .row .letter").first.get_attribute("title") == "decoding"
    colours = page.evaluate("[player.panes[0].colours.difference, player.panes[0].colours.preempted]")
    assert colours[0] != colours[1]
    assert page.locator(".two .key.difference").first.is_visible()
    page = open_player(ready_setup(), fragment="#step=11&follow=r3")
    assert not page.locator(".key.difference").is_visible()
    # A waiting request holds no block: it needs some.
    name = "r3: preempted, 27 tokens, needs 7 blocks, preempted once"
    assert page.locator(".waiting-card .row").first.get_attribute("title") == name
    assert page.get_by_role("button", name=name, exact=True).first.get_attribute("data-id") == "r3"
    assert page.locator(".facts .wide dd").text_content() == "none"


def test_texts_so_far(open_player):
    """The prompt, the text before the step, and the text of the step; also for the followed request."""
    trace = ready_setup()
    said = Counter(i for r in trace.steps for i in r.new_tokens)
    texts = {i: (f"<b>{i}</b>:", [f" {i}-{n}" for n in range(number)]) for i, number in said.items()}
    page = open_player(trace, texts=texts, fragment="#step=0&follow=r0")
    shown = page.evaluate("""() => player.panes[0].run.steps.map((_, step) => {
        player.go(step);
        return [".text", "mark"].map((part) => player.root.querySelector(`.life-card ${part}`).textContent);
    })""")
    number = 0
    for record, (text, new) in zip(trace.steps, shown, strict=True):
        before, number = number, number + ("r0" in record.new_tokens)
        assert text == "<b>r0</b>:" + "".join(texts["r0"][1][:number])
        assert new == "".join(texts["r0"][1][before:number])
    assert page.locator(".texts-card .row").count() == 6
    assert page.locator(".texts-card .row").nth(5).locator(".tail").text_content().endswith(" r5-3")
    assert not open_player(trace).locator(".texts-card").is_visible()


def test_of_a_long_text_the_end_is_seen(open_player):
    """A short one begins where its row begins."""
    trace = ready_setup()
    names = [name for record in trace.steps for name in record.new_tokens]
    page = open_player(trace, texts={name: ("p", ["seven ! "] * 16) for name in names}, width=390)
    for step, cut in ((1, False), (len(trace.steps) - 4, True)):
        page.evaluate(f"player.go({step})")
        row = page.locator(".texts-card .row:has(mark:not(:empty))").first
        line, tail, mark = (row.locator(part).bounding_box() for part in (".line", ".tail", "mark"))
        assert (line["width"] > tail["width"] + 1) == cut
        assert tail["x"] <= mark["x"] and mark["x"] + mark["width"] <= tail["x"] + tail["width"] + 1


def test_play_finds_the_texts_beside_its_trace_and_names_runs_by_scheduler(tmp_path):
    """Another run's texts are not shown. Two runs of the same scheduler have the names of their files."""
    trace, other = ready_setup(), crowded(4)
    said = Counter(i for r in trace.steps for i in r.new_tokens)
    texts = {i: ["a prompt", ["x"] * number] for i, number in said.items()}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    path, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert read_texts(path, trace) == {i: (prompt, pieces) for i, (prompt, pieces) in texts.items()}
    assert read_texts(path, other) is None and read_texts(tmp_path / "deep" / "a.jsonl", trace) is None
    (tmp_path / "texts.json").write_text("[1]")
    assert read_texts(path, trace) is None
    assert titles([path, second], [trace, other]) == ("fcfs", "priority")
    assert titles([path, second], [trace, trace]) == (str(path), str(second))
    other = Trace(replace(other.header, parts={"Scheduler": "static"}), other.steps)
    assert titles([path, second], [other, trace]) == ("static", "fcfs")


# --------------------------------------------------------------------- other runs: short, cut, operations


def test_a_run_of_one_step_can_be_played(open_player):
    """The labs' tests record such runs: requests that were there before, and one schedule."""
    scheduler = Scheduler(BlockManager(12, 4), max_num_batched_tokens=8, max_num_seqs=4)
    for name, length in (("a", 7), ("b", 5)):
        scheduler.add(make_request(name, length))
    scheduler.update(scheduler.schedule(), {"a": [1]})
    recorder = Recorder(scheduler, requests=[*scheduler.running, *scheduler.waiting])
    recorder.update(recorder.schedule(), {})
    page = open_player(recorder.close("drained"))
    assert page.locator("#readout").text_content() == "Step 0 of 0"
    assert page.locator("#forward").is_disabled() and page.locator("#back").is_disabled()
    assert page.locator(".log .tag").all_text_contents() == ["decodes", "prefills", "end"]
    assert page.locator(".log li").last.text_content() == "endThe recording ends here."  # they are not done
    assert page.locator(".running-card .row").count() == 2


def test_runs_that_begin_at_different_steps_are_matched_by_number(open_player):
    """A step that was not recorded yet is reported; the latest steps of a run can be played alone."""
    whole, kept = (run(crowd(1), keep=keep) for keep in (True, 7))
    last = whole.steps[-1].step
    page = open_player(kept, fragment=f"#step={last - 2}")
    assert page.locator("#readout").text_content() == f"Step {last - 2} of {last}"
    page = open_player(whole, kept, fragment=f"#step={kept.steps[2].step}")
    assert page.locator(".log-card h3").all_text_contents() == [f"What step {kept.steps[2].step} decides"] * 2
    page.keyboard.press("Home")
    assert (
        page.locator(".log-card h3").all_text_contents()[1].startswith("Not recorded: the trace begins with")
    )


def test_a_run_that_ended_before_its_first_step_is_shown_beside_another(open_player):
    """A failing test has such a run: an error at once, beside the reference's run."""
    trace = ready_setup()
    broken = Trace(trace.header, [], End("error", 0, error="IndexError: list index out of range"))
    page = open_player(broken, trace, names=("yours", "reference"))
    headings = page.locator(".log-card h3").all_text_contents()
    assert headings == ["Over before its first step", "What step 0 decides"]
    error = "The run ends here with an error. IndexError: list index"
    assert error in page.locator(".log").first.text_content()
    assert "Step 0 differs: yours is over." in page.locator("#difference-summary").text_content()


def log_of(*operations, num_blocks=4, error="") -> Any:
    """Return an operation log in the format of labs 05 and 06: (name, arguments, returned, {id: blocks})."""
    steps = []
    for number, (name, arguments, returned, lengths) in enumerate(operations):
        seen = {"num_free_blocks": num_blocks - sum(lengths.values()), "lengths": lengths}
        steps.append({"step": number, "op": [name, *arguments], "returned": returned, "observed": seen})
    header = {"trace": "mini-engine-ops", "version": 1, "config": {"num_blocks": num_blocks, "block_size": 4}}
    end = {"end": "error" if error else "drained", "step": len(steps), **({"error": error} if error else {})}
    as_record = [SimpleNamespace(to_json=lambda line=line: dict(line)) for line in (header, *steps, end)]
    return SimpleNamespace(header=as_record[0], steps=as_record[1:-1], end=as_record[-1])


OPERATIONS = (
    ("admit", ["a", 9], True, {"a": 3}),
    ("admit", ["b", 5], False, {"a": 3}),
    ("decode", ["a"], 4, {"a": 4}),
    ("free", ["a"], None, {"a": 0}),
)


def test_an_operation_log_is_played_operation_by_operation(open_player):
    """The call, its result and its effects; the pool, the tables, the list of operations."""
    page = open_player(log_of(*OPERATIONS), fragment="#step=1")
    assert page.locator("#readout").text_content() == "Operation 1 of 3"
    assert page.locator(".op-card .log li").all_text_contents() == [
        "Operation 1",
        "calladmit('b', 5) returned False.",
        "waitsb asks to be admitted, and is refused: nothing may change.",
        "count1 of 4 blocks is free.",
    ]
    page.locator(".calls-card .row").nth(2).click()
    assert page.evaluate("player.step") == 2
    assert "a asks for room for one more token, and there is room." in page.locator(".op-card").inner_text()
    assert page.locator(".calls-card .row[aria-current=step] .number").text_content() == "2"
    assert page.locator(".tables-card .row").first.get_attribute("title") == "a: 4 blocks, +1"
    assert page.get_by_role("button", name="a: 4 blocks, +1", exact=True).count() == 1
    assert page.locator(".tables-card .block").count() == 4
    assert "0 of 4 blocks are free" in page.locator(".pool-card canvas").get_attribute("aria-label")
    assert pixels(page, ".pool-card canvas")[(0xF7, 0xC8, 0x73)] > 500
    assert page.locator(".observed tr").last.inner_text().split() == ["free", "blocks", "1", "0"]
    page.locator("#kind").select_option("refusal")
    page.keyboard.press("Shift+E")
    assert page.evaluate("player.step") == 1


def test_two_operation_logs_stop_at_the_first_difference(open_player):
    """The first operation from equal state with another effect; and the error that ends one log."""
    ours = log_of(*OPERATIONS[:2], ("decode", ["a"], 4, {"a": 3}), error="AssertionError: room for 12")
    page = open_player(ours, log_of(*OPERATIONS), names=("yours", "reference"))
    assert page.evaluate(DIVERGENCES) == [[2, True, False, []], [3, False, True, []]]
    page.keyboard.press("n")
    assert "Operation 2 differs: from equal state" in page.locator("#difference-summary").text_content()
    assert page.locator("#difference-table th[scope=row]").all_text_contents() == ["lengths", "free blocks"]
    page.keyboard.press("n")
    assert "Operation 3 raised an error" in page.locator(".log").first.text_content()


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"slots": 4, "prefix_caching": False}, ""),  # a lab without blocks has no cache to speak of
        ({"num_blocks": 4, "block_size": 4, "prefix_caching": False}, "4 blocks of 4 · prefix cache off"),
        ({"num_blocks": 4, "block_size": 4}, "4 blocks of 4"),
    ],
)
def test_only_what_an_operation_log_has_is_in_its_heading(open_player, config, shown):
    log = log_of(*OPERATIONS)
    log.header.to_json = lambda: {"trace": "mini-engine-ops", "version": 1, "config": config}
    assert open_player(log).locator(".pane-head .config").text_content() == shown


# ------------------------------------------------------------------------------ the component's hosts


def cluster_traces(**options) -> dict[str, Trace]:
    made = simulate_cluster(workload("shared-prefix", 25, rate=12), 3, num_blocks=200, **options)
    return {engine.name: trace for engine, trace in zip(made.engines, made.traces, strict=True)}


def test_an_idle_engine_has_steps_without_requests(tmp_path):
    """They fill the time between its steps, and what is cached then is what the next step finds cached."""
    traces = cluster_traces(prefill=1)
    filled = with_idle(traces)
    assert len({trace.steps[-1].t_end for trace in filled.values()}) == 1
    gaps = 0
    for name, trace in filled.items():
        steps = trace.steps
        assert steps[0].t == 0 and [r.t for r in steps[1:]] == [r.t_end for r in steps[:-1]]
        assert [r for r in steps if r.scheduled] == traces[name].steps
        pairs = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if not a.scheduled and b.step]
        gaps += len(pairs)
        for idle, after in pairs:
            evicted = sum(map(len, after.blocks.values()))
            assert idle.num_cached_blocks - evicted <= after.num_cached_blocks
            assert idle.num_free_blocks == 200
    assert gaps > 3
    for name in ("decode-10", "decode-9", "prefill-0"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(r.to_json()) + "\n" for r in traces["decode-0"].lines()), "utf-8"
        )
    assert list(read_cluster(tmp_path)) == ["prefill-0", "decode-9", "decode-10"]
    assert with_idle({"engine-0": Trace(trace.header)})["engine-0"].steps == []


@pytest.mark.parametrize("options", [{}, {"prefill": 1}], ids=["whole", "apart"])
def test_a_cluster_s_engines_show_the_same_moment(open_player, options):
    """Each engine shows the step that runs at that moment, or that it is idle; every step is shown."""
    traces = cluster_traces(**options)
    page = open_player(traces)
    given = page.evaluate("""() => {
        const at = (place) => (pane) => {
            const { step, t, t_end, scheduled } = pane.run.steps[pane.indexAt(place)];
            return [step, t, t_end, scheduled.map(([id]) => id), pane.placeOf(pane.indexAt(place))];
        };
        return JSON.stringify(player.moments.map((t, place) => [t, player.panes.map(at(place))]));
    }""")
    shown = json.loads(given)  # playwright takes long for so many lists
    times = [moment for moment, _ in shown]
    assert times == sorted(times) and {r.t for trace in traces.values() for r in trace.steps} <= set(times)
    for number, (name, trace) in enumerate(traces.items()):
        steps, seen = {record.step: record for record in trace.steps}, []
        for place, (moment, engines) in enumerate(shown):
            step, t, t_end, ids, begins = engines[number]
            assert t <= moment and (moment < t_end or place == len(shown) - 1), (name, moment)
            assert begins <= place and times[begins] == t
            if ids:
                assert (t, t_end, ids) == (steps[step].t, steps[step].t_end, list(steps[step].scheduled))
                seen.append(step)
            else:
                assert not any(r.t <= moment < r.t_end for r in trace.steps), (name, moment)
        assert sorted(set(seen)) == list(steps), name
    assert page.locator("#difference").is_hidden()


def test_a_cluster_s_engines_open_and_close(open_player):
    """At first all are seen at a glance; Details shows the rest of one, and an idle one says so."""
    page = open_player(cluster_traces(prefill=1), width=390)
    tops = [pane.bounding_box()["y"] for pane in page.locator(".pane").all()]
    assert tops == sorted(tops) and len(set(tops)) == 3
    assert not page.locator(".running-card:visible").count() and page.locator(".meters:visible").count() == 3
    page.get_by_role("button", name="Details").nth(1).click()
    assert page.locator(".running-card:visible").count() == page.locator(".closed").count() - 1 == 1
    page.locator("#kind").select_option("moved blocks")
    page.locator("#next-event").click()
    assert "the blocks from another engine have" in page.locator(".log:visible").inner_text()
    page.keyboard.press("End")
    assert page.locator(".pane .config").first.inner_text() == "idle"
    assert page.locator("#readout").inner_text().endswith(" ms")
    page.get_by_role("button", name="Less").click()
    assert page.locator(".closed").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_component_has_no_global_name_and_is_isolated(open_player):
    """Two on one page have their own places and keys; no style leaks in or out."""
    page = open_player(ready_setup(), reload=True)
    names = ["Player", "el", "Fold", "MARKUP", "STYLE", "place", "count"]
    assert page.evaluate("(names) => names.filter((name) => name in window)", names) == []
    shown = page.evaluate("""() => {
        const Player = player.constructor, box = document.body.appendChild(document.createElement("div"));
        const data = JSON.parse(document.getElementById("data").textContent);
        const second = new Player(box, { embedded: true });
        second.load({ ...data, step: 3 });
        second.go(5);
        second.host.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        const places = [player.step, second.step];
        second.destroy();
        const styles = document.styleSheets.length + document.adoptedStyleSheets.length;
        return [...places, box.childElementCount, styles];
    }""")
    assert shown == [0, 6, 0, 0]


def test_the_page_allows_its_own_script_and_nothing_else(tmp_path, browser):
    """Its policy names the one script by hash, and no style: any other is refused."""
    page, troubles = browser.new_page(), []
    page.on("console", lambda message: troubles.append(message.text))
    html = player_html(ready_setup())
    assert "unsafe" not in html
    evil = html.replace("</body>", "<script>window.evil = 1</script><i style='color: red'>x</i></body>")
    (tmp_path / "page.html").write_text(evil, encoding="utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("window.evil") is None and len(troubles) == 2
    assert page.locator("#readout").text_content() == "Step 0 of 25"
    page.close()


SHELL = """<!DOCTYPE html><iframe id="frame" src="/shell.html" width="1000" height="700"></iframe>
<iframe id="stranger" srcdoc="<p>another frame</p>"></iframe><script>
window.heard = [];
addEventListener("message", ({ data }) => heard.push(data));
</script>"""


@pytest.fixture
def embedded(browser, tmp_path):
    """A page on a local server that embeds the shell, and the shell's frame."""
    folder = write_shell(tmp_path / "site")
    (folder / "index.html").write_text(SHELL, encoding="utf-8")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page, troubles = browser.new_page(), []
        listen(page, troubles)
        page.add_init_script(PLAYER)
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        yield page, page.frame(url="**/shell.html")
        page.close()
        server.shutdown()
    assert [line for line in troubles if "favicon" not in line and "404" not in line] == []


def test_the_shell_plays_what_its_embedder_sends(embedded):
    """Under a policy without inline scripts and styles it reports that it is ready, plays, reports its place
    and its errors. Messages from another frame are ignored."""
    page, frame = embedded
    policy = "default-src 'none'; script-src 'self'; style-src 'self'"
    assert frame.locator("meta[http-equiv]").get_attribute("content") == policy
    page.wait_for_function("heard.some((one) => one.type === 'mini-engine-ready')")
    send = "(data) => frame.contentWindow.postMessage({ type: 'mini-engine-trace', ...data }, '*')"
    stranger = (
        "(data) => stranger.contentWindow.eval('d => top.frame.contentWindow.postMessage(d, `*`)')(data)"
    )
    page.evaluate(stranger, {"type": "mini-engine-trace", **payload(crowded(1), names=("a stranger's",))})
    page.wait_for_timeout(100)
    assert frame.evaluate("player.panes.length") == 0
    page.evaluate(send, {**payload(ready_setup(), names=("sent",), step=3), "theme": "dark"})
    frame.locator(".name", has_text="sent").wait_for()
    assert frame.locator("#readout").text_content() == "Step 3 of 25"
    assert frame.evaluate("player.host.dataset.theme") == "dark"
    # The style was loaded, and the canvas was drawn with it.
    assert frame.evaluate("player.panes[0].colours.decode") == "rgb(230, 159, 0)"
    frame.locator("#forward").click()
    page.wait_for_function("heard.some((one) => one.type === 'mini-engine-moved' && one.step === 4)")
    page.evaluate(send, {"traces": 5})
    page.wait_for_function("heard.some((one) => one.type === 'mini-engine-failed')")
    assert frame.get_by_role("alert").text_content().startswith("This trace cannot be shown")


def test_the_widget_is_small_and_synchronises_step_and_request():
    """Its one module is below 150 kB; its state has the values that Python sets, also for a new trace."""
    pytest.importorskip("anywidget", reason="anywidget is not installed (the dev extra has it)")
    from mini_engine.show.player.widget import PlayerWidget

    assert len(script("widget").encode()) < 150_000
    widget = PlayerWidget(ready_setup(), names=("a run",), step=3)
    state = widget.get_state()
    assert (state["step"], state["follow"], state["payload"]["traces"][0]["name"]) == (3, None, "a run")
    widget.set_state({"step": 7, "follow": "r1"})  # a move on the page
    assert (widget.step, widget.follow) == (7, "r1")
    widget.show(ready_setup(), ready_setup(), names=("yours", "reference"), step=2)
    assert len(widget.payload["traces"]) == 2 and (widget.step, widget.follow) == (2, "r1")


MODEL = """(data) => {
    const listeners = {}, state = { payload: data, step: 3, follow: null };
    window.model = {
        state, get: (name) => state[name], save_changes: () => (window.saved = { ...state }),
        set: (changes) => Object.assign(state, changes),
        on: (names, call) => names.split(" ").forEach((name) => (listeners[name] ??= []).push(call)),
        off: (names, call) => names.split(" ").forEach((name) =>
            (listeners[name] = listeners[name].filter((one) => one !== call))),
        change(changes) {
            Object.assign(state, changes);
            for (const name of Object.keys(changes)) listeners[`change:${name}`]?.forEach((call) => call());
        },
        count: () => Object.values(listeners).flat().length,
    };
}"""


def test_the_widgets_module_follows_its_model(browser):
    """Rendered twice from one model, as by anywidget: both follow it, it follows them; then both are gone."""
    page, troubles = browser.new_page(), []
    listen(page, troubles)
    page.add_init_script(PLAYER)
    page.goto("about:blank")
    page.set_content("<body data-jp-theme-light='false'><div id='a'></div><div id='b'></div></body>")
    page.evaluate(MODEL, payload(ready_setup()))
    code = b64encode(script("widget").encode()).decode()
    page.evaluate(f"""async () => {{
        const widget = (await import("data:text/javascript;base64,{code}")).default;
        window.gone = ["a", "b"].map((id) => widget.render({{ model, el: document.getElementById(id) }}));
    }}""")
    players = "[...document.querySelectorAll('.mini-engine-player')].map((one) => one.player)"
    assert page.evaluate(f"{players}.map((one) => [one.step, one.host.dataset.theme])") == [[3, "dark"]] * 2
    page.evaluate("model.change({ step: 9, follow: 'r2' })")
    assert page.evaluate(f"{players}.map((one) => [one.step, one.followed])") == [[9, "r2"]] * 2
    page.locator("#a #forward").click()
    page.wait_for_function("window.saved?.step === 10")
    page.wait_for_timeout(600)  # the other view does not come back to where it was
    assert page.evaluate("model.state.step") == 10
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    page.wait_for_function(f"{players}.every((one) => one.host.dataset.theme === 'light')")
    page.evaluate("(data) => model.change({ payload: data })", payload(crowded(1), names=("another",)))
    assert page.locator("#b .name").text_content() == "another"
    assert page.locator("#a #forward").text_content().strip() == "Step"  # in words, where it is embedded
    ours, theirs = crowded(1), Trace(crowded(1).header, crowded(1).steps[:-1])
    page.evaluate("(data) => model.change({ payload: data })", payload(ours, theirs, step=len(theirs.steps)))
    last = next(iter(ours.steps[-1].scheduled))  # the request on which they part; it is reported
    assert page.evaluate(f"[...{players}.map((one) => one.followed), saved.follow]") == [last] * 3
    page.evaluate("gone.forEach((end) => end())")
    assert page.evaluate("[document.querySelectorAll('.mini-engine-player').length, model.count()]") == [0, 0]
    page.close()
    assert troubles == []


# ----------------------------------------------------------------------------------- a step as a picture


def test_the_picture_has_the_players_colours_and_every_decision():
    """For every step of the example: well-formed, with the waiting requests, and a sentence per event."""
    trace = ready_setup()
    style = (files("mini_engine.show.player") / "player.css").read_text("utf-8")
    for name, light, dark in re.findall(
        r"--(waiting|prefill|decode|preempted|used): light-dark\((\S+), (\S+)\)", style
    ):
        rules = re.findall(rf"\.{name}{{fill:(#\w+)}}", step_picture(trace))
        expected = [("#" + "".join(c * 2 for c in rule[1:])) if len(rule) == 4 else rule for rule in rules]
        assert expected == [light, dark], name
    for record, views in replay(trace):
        picture = ElementTree.fromstring(step_picture(trace, record.step, names=("a run",)))
        text = " ".join(picture.itertext())
        assert f"Step {record.step} of 25" in text and "a run" in text
        for event in record.events:
            if event.type != "QUEUED":
                assert re.search(rf"{event.id} (is admitted|is preempted|finishes)", text)
        waiting = [i for i, view in views.items() if view.state in ("waiting", "preempted")]
        assert f"waiting: {', '.join(waiting) or 'none'}" in text
    assert step_picture(trace, 11) == step_picture(trace, 11)


def test_the_picture_of_two_runs_and_of_hostile_names():
    """One below the other, on one scale; a run that is over is named; an unknown step is refused."""
    trace = ready_setup()
    short = Trace(trace.header, trace.steps[:12])
    picture = ElementTree.fromstring(step_picture(trace, 16, short, names=("yours", "<b>theirs</b>")))
    text = " ".join(picture.itertext())
    assert "<b>theirs</b>" in text and "Step 16: the run is over" in text
    with pytest.raises(ValueError, match="no step 26"):
        step_picture(trace, 26, short)
    evil = run([("<script>alert(1)</script>", [1, 2], 3, 0, 0)])
    assert "<script" not in step_picture(evil)
