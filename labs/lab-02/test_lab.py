"""Tests of cutting a prompt into chunks: the three functions, then whole runs of them."""

from dataclasses import asdict
from itertools import accumulate, pairwise
from operator import is_
from types import SimpleNamespace

import pytest

from labs.kit import assert_drained, judge_random_scripts, load, make_request, tokens_of
from mini_engine import scheduler
from mini_engine.request import RequestStatus
from mini_engine.sim.cost_model import CostModel

scenarios = load("lab-02", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}


def request(prompt=20, outputs=0, computed=0, name="r0"):
    """A running request; if it has outputs, it was preempted once."""
    made = make_request(name, prompt, max_tokens=64)
    made.output_token_ids = [1000 + i for i in range(outputs)]
    made.num_computed_tokens = computed
    made.num_preemptions = int(outputs > 0)
    made.status = RequestStatus.RUNNING
    return made


def all_chunks(lab, made, budget, threshold=0):
    """The chunks of a request that has the budget to itself in every step; their sizes are the engine's."""
    chunks = []
    while made.num_new_tokens:
        assert len(chunks) < 200, "200 chunks and no end"
        start, size = made.num_computed_tokens, scheduler.clamp(made.num_new_tokens, budget, threshold)
        chunk = lab.next_chunk(made, size)
        got = (len(chunk.token_ids), len(chunk.positions))
        assert got == (size, size), f"asked for {size} from {start} on, got {got[0]} at {got[1]} positions"
        chunks.append(chunk)
        made.num_computed_tokens += size
    return chunks


def changes(function, before, made):
    """Return the fields of a request that a function changed, though it may only read them; "" if nothing."""
    after = asdict(made)
    changed = [
        f"{name} from {value!r} to {after[name]!r}" for name, value in before.items() if value != after[name]
    ]
    changed += sorted({*vars(made)} - {*before})
    return f"{function} changed {', '.join(changed)}" if changed else ""


# --------------------------------------------------------------------------------------------- clamp


@pytest.mark.parametrize("num_new, budget, threshold", [(100, 10, 0), (100, 50, 0), (100, 10, 16), (2, 1, 0)])
def test_clamp_to_the_budget(lab, num_new, budget, threshold):
    """Where the budget is the smallest of the three, the chunk is what is left of it: cut, not refused."""
    assert lab.clamp(num_new, budget, threshold) == budget


@pytest.mark.parametrize(
    "num_new, budget, threshold",
    [
        (100, 64, 16),
        (17, 64, 16),
        (100, 17, 16),
        (11, 10, 10),
        (5, 9, 1),
        (5000, 4096, 1003),
        (2**21, 2**21, 2**20 + 1),
    ],
)
def test_clamp_to_the_threshold(lab, num_new, budget, threshold):
    """Where the threshold is the smallest, it caps the chunk, though there is budget to burn."""
    assert lab.clamp(num_new, budget, threshold) == threshold


@pytest.mark.parametrize("num_new, budget, threshold", [(7, 64, 16), (16, 64, 16), (1, 64, 16), (9, 9, 9)])
def test_clamp_to_what_is_left(lab, num_new, budget, threshold):
    """Where the request has less left than both allow, it computes all of it: nothing is rounded."""
    assert lab.clamp(num_new, budget, threshold) == num_new


def test_no_threshold_is_no_limit(lab):
    """A threshold of 0 is off, no other takes its place: a prompt may use a budget of 64, or of 2**20 + 1."""
    assert lab.clamp(100, 64, 0) == 64
    assert lab.clamp(2_000_000, 2**20 + 1, 0) == 2**20 + 1
    assert lab.clamp(50, 64, 0) == 50


@pytest.mark.parametrize("budget", [0, -1, -7])
def test_never_below_zero(lab, budget):
    """With no budget left, or an overdrawn one, the chunk is empty: not negative, and not one token."""
    for num_new in (1, 20):
        for threshold in (0, 8):
            assert lab.clamp(num_new, budget, threshold) == 0, (num_new, budget, threshold)


def test_nothing_left_is_nothing(lab):
    """A request with nothing left to compute computes nothing."""
    assert [lab.clamp(0, 16, threshold) for threshold in (0, 8)] == [0, 0]


def test_clamp_is_as_large_as_allowed(lab):
    """For all small numbers: no limit is exceeded, and one token more would exceed one."""
    for num_new in range(8):
        for budget in range(-1, 8):
            for threshold in range(8):
                limits = [num_new, max(budget, 0), *([threshold] if threshold else [])]
                assert lab.clamp(num_new, budget, threshold) == min(limits), (num_new, budget, threshold)


# ---------------------------------------------------------------------------------------- next_chunk


@pytest.mark.parametrize("budget", [1, 7, 8, 16])
def test_chunks_add_up_to_the_prompt(lab, budget):
    """For every length from 1 to 3 budgets and one: the chunks are the prompt, at positions 0, 1, 2, ..."""
    for length in range(1, 3 * budget + 2):
        made = request(length)
        chunks = all_chunks(lab, made, budget)
        assert [token for chunk in chunks for token in chunk.token_ids] == made.prompt_token_ids
        assert [position for chunk in chunks for position in chunk.positions] == list(range(length))


def test_only_the_last_chunk_samples(lab):
    """Only the chunk that reaches the end of a prompt is_last, exact fits included."""
    for length in range(1, 34):
        flags = [chunk.is_last for chunk in all_chunks(lab, request(length), 16, threshold=5)]
        assert flags == [False] * (len(flags) - 1) + [True]


def test_positions_are_absolute(lab):
    """The second chunk of 8 starts at position 8, not at 0, and not at 9."""
    chunk = lab.next_chunk(request(20, computed=8), 8)
    assert list(chunk.positions) == [8, 9, 10, 11, 12, 13, 14, 15]


def test_it_goes_on_where_it_stopped(lab):
    """The second chunk of 8 has the tokens 8 to 15 of the prompt, each once over all chunks."""
    made = request(20, computed=8)
    assert list(lab.next_chunk(made, 8).token_ids) == made.prompt_token_ids[8:16]


def test_whatever_it_has_behind_it(lab):
    """Preempted, admitted again with 4 tokens cached, 8 computed by now: the chunk begins at token 8."""
    for size in (1, 8, 14):
        made = request(20, outputs=2, computed=8)
        made.num_cached_tokens = 4
        chunk = lab.next_chunk(made, size)
        assert list(chunk.token_ids) == made.token_ids(8, 8 + size)
        assert (list(chunk.positions), chunk.is_last) == (list(range(8, 8 + size)), size == 14)


def test_a_decode_is_a_chunk_of_one(lab):
    """22 tokens, 21 computed: the last one sampled is fed at position 21, len - 1, and it samples."""
    made = request(20, outputs=2, computed=21)
    chunk = lab.next_chunk(made, 1)
    assert (list(chunk.token_ids), list(chunk.positions), chunk.is_last) == ([1001], [21], True)


def test_the_prompts_end_is_not_the_end(lab):
    """Recomputing prompt 6 and 5 outputs in chunks of 6: the first ends the prompt, and samples nothing."""
    chunks = all_chunks(lab, request(6, outputs=5), 6)
    assert [(len(chunk.token_ids), chunk.is_last) for chunk in chunks] == [(6, False), (5, True)]


def test_recomputed_in_chunks_of_any_size(lab):
    """Prompt 6 and 5 outputs in chunks of 1 to 11: each token once, in place, one sample at the end."""
    for size in range(1, 12):
        made = request(6, outputs=5)
        chunks = all_chunks(lab, made, size)
        assert [token for chunk in chunks for token in chunk.token_ids] == made.token_ids()
        assert [position for chunk in chunks for position in chunk.positions] == list(range(11))
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_far_into_a_long_sequence(lab):
    """At 65,530 of 65,600 tokens whose ids exceed 2**31, all is as at the beginning. A chunk may be long."""
    made = request(1, outputs=5, computed=65_530)
    made.prompt_token_ids = [2**31 + 7 * i for i in range(65_595)]
    # Few, and beyond 2**16: a chunk that looks up each token in the whole list ends in time, too.
    for size, is_last in ((69, False), (70, True)):
        chunk, end = lab.next_chunk(made, size), 65_530 + size
        # Plain truths: pytest would spend seconds on the difference of two long lists.
        same_tokens = list(chunk.token_ids) == made.token_ids(65_530, end)
        same_positions = list(chunk.positions) == list(range(65_530, end))
        assert same_tokens, f"the token ids of {size} tokens from position 65,530 on are others"
        assert same_positions, f"the positions of {size} tokens from position 65,530 on are others"
        assert chunk.is_last == is_last
    long = lab.next_chunk(request(4_200), 4_200)
    assert len(long.token_ids) == len(long.positions) == 4_200, "asked for a prompt of 4,200 tokens, got less"


def test_asking_changes_nothing(lab):
    """next_chunk only looks: asked twice it says the same, and the request is as it was."""
    for size in (8, 14):
        made = request(20, outputs=2, computed=8)
        before = asdict(made)
        first = lab.next_chunk(made, size)
        assert not (said := changes("next_chunk", before, made)), said
        second = lab.next_chunk(made, size)
        assert list(first.token_ids) == list(second.token_ids)
        assert list(first.positions) == list(second.positions)
        assert not (said := changes("next_chunk", before, made)), said


def test_a_chunk_belongs_to_the_caller(lab):
    """Emptying a chunk's lists changes neither the request nor the chunk that comes next."""
    for made, size in ((request(20), 20), (request(1), 1), (request(6, outputs=2, computed=6), 2)):
        before, start = asdict(made), made.num_computed_tokens
        first = lab.next_chunk(made, size)
        for part in (first.token_ids, first.positions):
            if isinstance(part, list):  # a tuple or a range cannot be changed
                part.clear()
        assert not (said := changes("emptying the chunk's lists", before, made)), said
        second = lab.next_chunk(made, size)
        assert list(second.token_ids) == made.token_ids(start, start + size)
        assert list(second.positions) == list(range(start, start + size))


# ------------------------------------------------------------------------------------- prefill_budget


def test_decodes_are_paid_first(lab):
    """Three decodes leave 13 of a budget of 16, whatever their lengths."""
    sizes = [(4, 1), (300, 9), (1, 1)]
    decodes = [request(n, outputs, n + outputs - 1, f"d{n}") for n, outputs in sizes]
    left = lab.prefill_budget(decodes, 16)
    assert left == 13


def test_without_decodes_all_is_left(lab):
    """With no request running, or none decoding, the prompts have the whole budget."""
    for running in ([], [request(20), request(20, computed=8, name="r1")]):
        left = lab.prefill_budget(running, 16)
        assert left == 16


def test_decodes_may_take_it_all(lab):
    """A budget of as many tokens as there are decodes leaves nothing: the prompt waits, no decode does."""
    left = lab.prefill_budget([request(4, 1, 4, f"d{i}") for i in range(16)], 16)
    assert left == 0


def test_decodes_in_any_place(lab):
    """A prompt before, between or behind two decodes changes nothing: 14 of 16 are left."""
    for place in range(3):
        running = [request(4, 1, 4, "a"), request(5, 2, 6, "b")]
        running.insert(place, request(20, computed=8, name="prompt"))
        left = lab.prefill_budget(running, 16)
        assert left == 14, f"the prompt stands at {place}"


def test_what_is_a_decode(lab):
    """Neither a prompt with one token to go nor a victim that recomputes its outputs is a decode."""
    one_to_go = request(20, computed=19, name="one to go")
    recomputing = request(20, outputs=5, computed=8, name="in its prompt")
    behind = request(20, outputs=5, computed=23, name="behind its prompt")
    decode = request(20, outputs=5, computed=24, name="decode")
    left = lab.prefill_budget([one_to_go, recomputing, behind, decode], 16)
    assert left == 15


def test_counting_changes_nothing(lab):
    """prefill_budget only looks: asked twice it says the same, and requests and list are as they were."""
    running = [request(20, computed=8, name="a"), request(6, outputs=2, computed=7, name="b")]
    running.append(request(6, outputs=5, computed=2, name="c"))
    before, order = [asdict(made) for made in running], list(running)
    assert [lab.prefill_budget(running, budget) for budget in (16, 16, 4)] == [15, 15, 3]
    assert [made.request_id for made in running] == ["a", "b", "c"], "prefill_budget changed running"
    assert all(map(is_, running, order)), "prefill_budget put other requests into running"
    for fields, made in zip(before, order, strict=True):
        assert not (said := changes("prefill_budget", fields, made)), said


def test_hundreds_of_decodes(lab):
    """Three hundred decodes with the same tokens leave 2**20 of a budget that is so much larger."""
    decodes = [request(4, 1, 4, f"d{i}") for i in range(300)]
    for made in decodes:
        made.prompt_token_ids = [1, 2, 3, 4]
    assert lab.prefill_budget(decodes, 2**20 + 300) == 2**20


@pytest.mark.parametrize("decodes, budget, left", [(3, 2, -1), (5, 0, -5), (4, 4, 0)])
def test_more_decodes_than_budget(lab, decodes, budget, left):
    """With more decodes than budget, what is left is below 0, by as much: the floor is clamp's, not here."""
    answer = lab.prefill_budget([request(4, 1, 4, f"d{i}") for i in range(decodes)], budget)
    assert answer == left


# --------------------------------------------------------------------------------------- whole runs


def only(lab, *names):
    """These of the lab's parts, and the engine's in place of those that come later."""
    parts = {name: getattr(scheduler, name) for name in ("clamp", "next_chunk", "prefill_budget")}
    return SimpleNamespace(**parts | {name: getattr(lab, name) for name in names})


@pytest.mark.parametrize("name", SCENARIOS)
def test_chunks_do_not_change_the_text(lab, name):
    """However a prompt is cut, each text is that of a run alone with the prompt in one piece."""
    lab, scenario = only(lab, "next_chunk"), SCENARIOS[name]
    trace = scenarios.run(lab, scenario)
    assert_drained(trace)
    whole = scenario["config"] | {"max_num_batched_tokens": 200, "long_prefill_token_threshold": 0}
    for entry in scenario["requests"]:
        alone = scenarios.run(lab, scenario | {"config": whole, "requests": [entry | {"at": 0}]})
        assert tokens_of(trace, entry["id"]) == tokens_of(alone, entry["id"])
        assert len(tokens_of(trace, entry["id"])) == entry["max_tokens"]


def test_a_token_only_when_the_prompt_is_done(lab):
    """41 tokens beside two decodes, budget 10: five chunks of 8 give no token, the one after them does."""
    lab = only(lab, "next_chunk")
    trace = scenarios.run(lab, SCENARIOS["a long prompt beside two decodes"])
    assert_drained(trace)
    chunks = [record.scheduled["long"] for record in trace.steps if "long" in record.scheduled]
    tokens = ["long" in record.new_tokens for record in trace.steps if "long" in record.scheduled]
    assert chunks == [8, 8, 8, 8, 8, 1, 1, 1]
    assert tokens == [False] * 5 + [True] * 3


def test_a_long_prompt_never_starves(lab):
    """While chats come and go, the essay of 60 is in every step from its admission on, until it is done."""
    trace = scenarios.run(only(lab, "prefill_budget"), SCENARIOS["chats come and go around an essay"])
    assert_drained(trace)
    steps = [record.step for record in trace.steps if "essay" in record.scheduled]
    assert steps == list(range(steps[0], steps[-1] + 1))
    chats = {name for record in trace.steps[steps[0] : steps[-1]] for name in record.new_tokens}
    assert len(chats) > 8


def latencies(lab, threshold):
    """Under the cost model, in ms: the chat's worst gap between two tokens, the essay's time to its first."""
    scenario = scenarios.beside_a_chat(threshold)
    trace = scenarios.run(only(lab, "clamp"), scenario)
    assert_drained(trace)
    clock = CostModel().clock()
    ends = list(accumulate(clock(record) for record in trace.steps))
    chat = [end for end, record in zip(ends, trace.steps, strict=True) if "chat" in record.new_tokens]
    first = next(i for i, record in enumerate(trace.steps) if "essay" in record.new_tokens)
    arrival = scenario["requests"][1]["at"]
    return max(b - a for a, b in pairwise(chat)), ends[first] - ends[arrival - 1]


def test_worst_gap_falls_with_the_threshold(lab):
    """A 1,000-token prompt beside a chat: the chat's worst gap falls with each threshold, by half in all."""
    gaps = [latencies(lab, threshold)[0] for threshold in (0, 128, 64, 32)]
    assert gaps == sorted(gaps, reverse=True)
    assert len(set(gaps)) == 4
    assert gaps[-1] < gaps[0] / 2


def test_the_prompt_pays_for_it(lab):
    """The same prompt's own first token comes the later, the smaller the threshold: the dial has two ends."""
    firsts = [latencies(lab, threshold)[1] for threshold in (0, 128, 64, 32)]
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 4


def test_random_scripts(lab):
    """In 80 random scripts the three functions answer as a slow model does, and change nothing."""
    judge_random_scripts("lab-02", lab)
