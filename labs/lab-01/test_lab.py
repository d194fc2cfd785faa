"""Tests of schedule_step. The first part looks at single steps, the second at whole runs."""

from functools import partial

import pytest

from labs.kit import (
    FakeKV,
    RequestQueue,
    assert_drained,
    assert_texts_alone,
    judge_random_scripts,
    load,
    make_request,
    make_running,
    one_step,
)
from mini_engine.block_manager import BlockManager
from mini_engine.request import RequestStatus

scenarios = load("lab-01", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}


def step(lab, waiting, running, kv, *, budget=64, slots=8, threshold=0, **more):
    if threshold:  # else the default, which is off
        more["long_prefill_token_threshold"] = threshold
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": slots, **more}
    return one_step(lab.schedule_step, waiting, running, kv, **settings)


def queue(**prompts):
    return RequestQueue(make_request(name, length) for name, length in prompts.items())


def names(requests):
    return [request.request_id for request in requests]


def newest_first(requests):
    """The front came last, and is the least important: only the order itself counts."""
    for number, request in enumerate(requests):
        request.arrival = request.priority = len(requests) - number
    return requests


# ------------------------------------------------------------------------------- the token budget


def test_nobody_there(lab):
    """With no request running and none waiting the schedule is empty."""
    assert step(lab, queue(), [], FakeKV(8)) == {}


def test_budget_caps_the_total(lab):
    """A budget of 10 computes 8, 2 and 0 tokens of three prompts of 8: one is cut, one must wait."""
    waiting, running = queue(r0=8, r1=8, r2=8), []
    assert step(lab, waiting, running, FakeKV(64), budget=10) == {"r0": 8, "r1": 2}
    assert names(running) == ["r0", "r1"]
    assert names(waiting) == ["r2"]


def test_one_budget_for_both_phases(lab):
    """The waiting requests share what the running ones leave: the budget is one pool a step."""
    kv = FakeKV(64)
    running = [make_running(kv, f"d{i}", 4, outputs=1) for i in range(3)]
    scheduled = step(lab, queue(new=20), running, kv, budget=8)
    assert scheduled == {"d0": 1, "d1": 1, "d2": 1, "new": 5}


def test_last_prompt_is_cut_not_let_through(lab):
    """A prompt longer than what is left is cut to it; the budget is not overdrawn even once."""
    kv = FakeKV(64)
    running = [make_running(kv, "d0", 4, outputs=1)]
    assert step(lab, queue(new=9), running, kv, budget=9) == {"d0": 1, "new": 8}


def test_long_prompt_alone_may_use_the_whole_budget(lab):
    """Without a threshold a lone prompt of 100 tokens takes all 64 of the budget and is not refused."""
    assert step(lab, queue(long=100), [], FakeKV(128), budget=64) == {"long": 64}


def test_threshold_caps_a_long_prompt(lab):
    """With a threshold of 16 a 100-token prompt, new or running, computes 16 of a budget of 64."""
    waiting, running, kv = queue(long=100), [], FakeKV(128)
    assert step(lab, waiting, running, kv, budget=64, threshold=16) == {"long": 16}
    running[0].num_computed_tokens = 16
    assert step(lab, waiting, running, kv, budget=64, threshold=16) == {"long": 16}


def test_threshold_is_per_request(lab):
    """The threshold caps each request by itself: running, new or cached in part; the budget their sum."""
    kv = FakeKV(256, cached={"a": 10})
    running = [make_running(kv, "old", 60, computed=16), make_running(kv, "back", 9, outputs=30, computed=16)]
    scheduled = step(lab, queue(a=50, b=50), running, kv, budget=56, threshold=16)
    assert scheduled == {"old": 16, "back": 16, "a": 16, "b": 8}


def test_no_admission_without_budget(lab):
    """When the running requests use up the budget, the queue and its KV memory are left alone."""
    kv = FakeKV(64)
    running = [make_running(kv, "long", 40, computed=0)]
    waiting = queue(new=4)
    free = kv.num_free_blocks
    assert step(lab, waiting, running, kv, budget=16) == {"long": 16}
    assert names(waiting) == ["new"]
    assert kv.num_free_blocks == free


def test_a_row_of_0_is_left_out(lab):
    """A running request that finds the budget spent is left out: no row of 0, no decode on credit."""
    kv = FakeKV(64)
    running = [make_running(kv, "old", 20, computed=0), make_running(kv, "late", 5, computed=5)]
    running[1].output_token_ids.append(7)
    assert step(lab, queue(), running, kv, budget=16) == {"old": 16}
    assert names(running) == ["old", "late"]


def test_nothing_left_to_compute(lab):
    """A running request that has 0 tokens left is left out, keeps its slot, and ends nothing."""
    kv = FakeKV(64)
    running = [make_running(kv, "idle", 5, computed=5), make_running(kv, "next", 5, outputs=1)]
    assert step(lab, queue(a=4, b=4), running, kv, slots=3) == {"next": 1, "a": 4}
    assert names(running) == ["idle", "next", "a"]


def test_no_limit_of_its_own(lab):
    """Nothing but the settings limits a step: not at 300 slots, and not at a budget above 2**20 tokens."""
    kv, tokens = BlockManager(302, 2**22, watermark=0), 2**20 + 9
    waiting, running = queue(**{f"r{i}": 1 for i in range(301)}), []
    waiting.peek().prompt_token_ids = range(tokens)
    scheduled = step(lab, waiting, running, kv, budget=tokens + 320, slots=300)
    assert scheduled == {"r0": tokens} | {f"r{i}": 1 for i in range(1, 300)}
    assert names(waiting) == ["r300"]


# --------------------------------------------------------------------------- running before waiting


def test_running_before_waiting(lab):
    """A running decode gets its token first; the 20-token waiter gets what is left, in this order."""
    kv = FakeKV(64)
    running = [make_running(kv, "decode", 5, outputs=1)]
    scheduled = step(lab, queue(eager=20), running, kv, budget=16)
    assert list(scheduled.items()) == [("decode", 1), ("eager", 15)]


def test_running_prefill_goes_on_where_it_stopped(lab):
    """Half computed or half cached, with outputs or without, a running request gets the rest, in its row."""
    kv = FakeKV(64, cached={"half": 8})
    running = [
        make_running(kv, "half", 20, computed=8),
        make_running(kv, "decode", 5, outputs=2),
        make_running(kv, "back", 6, outputs=5, computed=4),
    ]
    scheduled = step(lab, queue(), newest_first(running), kv, budget=32)
    assert list(scheduled.items()) == [("half", 12), ("decode", 1), ("back", 7)]
    assert names(running) == ["half", "decode", "back"]


def test_admission_order(lab):
    """Requests are admitted in the queue's order, to the end of running, and rows keep that order."""
    kv = FakeKV(64)
    running = [make_running(kv, "old", 4, outputs=1)]
    scheduled = step(lab, newest_first(queue(b=2, a=3, c=1)), running, kv)
    assert list(scheduled) == names(running) == ["old", "b", "a", "c"]


def test_admitted_means_running(lab):
    """An admitted request leaves the queue, is in running once, and is RUNNING, though its prompt was cut."""
    waiting, running = queue(r0=3, r1=3), []
    step(lab, waiting, running, FakeKV(64), budget=5)
    assert len(waiting) == 0
    assert names(running) == ["r0", "r1"]
    assert [request.status for request in running] == [RequestStatus.RUNNING] * 2


# ----------------------------------------------------------------------------------------- the slots


def test_slots_cap_the_running_set(lab):
    """Ten short prompts and four slots: four are admitted and claim room, though there is plenty of it."""
    waiting, running, kv = queue(**{f"r{i}": 2 for i in range(10)}), [], FakeKV(64)
    assert step(lab, waiting, running, kv, slots=4) == {f"r{i}": 2 for i in range(4)}
    assert len(waiting) == 6
    assert kv.num_free_blocks == 56


def test_running_requests_take_slots(lab):
    """Three of four slots are taken by earlier steps' requests, so one waiter gets in, not four."""
    kv = FakeKV(64)
    running = [make_running(kv, f"old{i}", 3, outputs=1) for i in range(3)]
    step(lab, queue(a=2, b=2, c=2), running, kv, slots=4)
    assert names(running) == ["old0", "old1", "old2", "a"]


def test_running_requests_keep_their_slots(lab):
    """The slot cap is asked at admission only: with all slots taken, every running request is served."""
    kv = FakeKV(64)
    running = [make_running(kv, f"r{i}", 3, outputs=1) for i in range(4)]
    assert step(lab, queue(), running, kv, slots=4) == {f"r{i}": 1 for i in range(4)}


# ------------------------------------------------------------------------------------------ memory


def test_memory_stops_admission(lab):
    """A fills the pool, so B stays in the queue: no crash, no partial admission, no slot taken."""
    kv = FakeKV(10)
    waiting, running = queue(A=8, B=8), []
    assert step(lab, waiting, running, kv) == {"A": 8}
    assert (names(waiting), names(running), kv.num_free_blocks) == (["B"], ["A"], 2)
    assert waiting.peek().status is RequestStatus.WAITING


def test_admission_claims_the_whole_sequence(lab):
    """Two 15-token prompts in a pool of 20, 8 tokens a step: the second must not enter on credit."""
    kv = FakeKV(20)
    waiting, running = queue(a=15, b=15), []
    assert step(lab, waiting, running, kv, budget=12, threshold=8) == {"a": 8}
    assert names(waiting) == ["b"]
    assert kv.num_free_blocks == 5


def test_head_of_line_blocks(lab):
    """When the front of the queue does not fit, no request behind it is tried, however small."""
    kv = FakeKV(10)
    waiting, running = queue(large=12, small=1), []
    assert step(lab, waiting, running, kv) == {}
    assert names(waiting) == ["large", "small"]
    assert kv.num_free_blocks == 10


def test_an_exact_fit_is_admitted(lab):
    """A running decode holds 5 of 6 slots, and a prompt of 1 fits: nothing is held back but by kv itself."""
    kv = FakeKV(6)
    running = [make_running(kv, "old", 4, outputs=1)]
    assert step(lab, queue(new=1), running, kv) == {"old": 1, "new": 1}
    assert kv.num_free_blocks == 0


def test_a_full_pool_serves_the_running(lab):
    """With no slot free a half prompt and a decode go on: their room was claimed when they were admitted."""
    kv = FakeKV(25)
    running = [make_running(kv, "half", 20, computed=8), make_running(kv, "decode", 4, outputs=1)]
    assert kv.num_free_blocks == 0
    assert step(lab, queue(), running, kv) == {"half": 12, "decode": 1}


def test_only_the_memory_knows_what_fits(lab):
    """In 7 blocks of 4 tokens a prompt of 20 fits twice, for the second shares 4 blocks: admit knows that."""
    kv, running = BlockManager(7, 4), []
    first = step(lab, queue(one=20), running, kv)
    assert (first, kv.num_free_blocks) == ({"one": 20}, 2)
    one = running[0]
    one.num_computed_tokens = 20
    one.output_token_ids.append(7)
    kv.cache_blocks(one)
    two = make_request("two", one.prompt_token_ids)
    second = step(lab, RequestQueue([two]), running, kv)
    assert (first, second) == ({"one": 20}, {"one": 1, "two": 4})
    assert kv.num_free_blocks == 0


def test_no_room_for_a_running_request_is_named(lab):
    """If allocate says no for the second of three that run, the error names it, and none is preempted."""
    kv = FakeKV(13)
    running = [make_running(kv, name, 4, computed=4) for name in ("first", "unlucky", "last")]
    for request in running:
        request.output_token_ids.append(7)
    with pytest.raises(RuntimeError, match="unlucky"):
        step(lab, queue(), running, kv)
    assert names(running) == ["first", "unlucky", "last"]


def without_room(kv, name, prompt):
    """A running prompt that holds nothing, as on a memory that is claimed chunk by chunk."""
    request = make_running(kv, name, prompt, computed=0)
    kv.free(request)
    return request


def test_no_room_for_a_running_prompt_is_named(lab):
    """A running prompt of 8 finds 6 free slots: that is an error too, and no smaller chunk is tried."""
    kv = FakeKV(14)
    running = [make_running(kv, "half", 4, computed=2), without_room(kv, "unlucky", 8)]
    running.append(make_running(kv, "last", 4, computed=2))
    with pytest.raises(RuntimeError, match="unlucky"):
        step(lab, queue(), running, kv)
    assert (names(running), kv.num_free_blocks) == (["half", "unlucky", "last"], 6)


def test_a_chunk_asks_for_its_own_room(lab):
    """The same with a threshold of 5: room for 5 is enough, and is taken; not for 8, and not for 1."""
    kv = FakeKV(14)
    running = [make_running(kv, "half", 8, computed=2), without_room(kv, "lucky", 6)]
    lucky = running[1]
    lucky.prompt_token_ids = list(range(8))
    assert step(lab, queue(), running, kv, threshold=5) == {"half": 5, "lucky": 5}
    assert kv.num_free_blocks == 1


# ------------------------------------------------------------------------- work that is done already


def test_prefix_hit_schedules_only_the_rest(lab):
    """A waiter of 20 tokens with 12 in the cache schedules 8, and the budget pays for 8 only."""
    kv = FakeKV(64, cached={"hit": 12})
    scheduled = step(lab, queue(hit=20, next=20), [], kv, budget=16)
    assert scheduled == {"hit": 8, "next": 8}


def test_whole_prompt_cached_still_computes_one_token(lab):
    """A waiter whose prompt is cached entirely computes its last token: without it, no next one."""
    kv = FakeKV(64, cached={"hit": 20})
    assert step(lab, queue(hit=20), [], kv) == {"hit": 1}


def test_preempted_request_recomputes_its_outputs_too(lab):
    """A preempted waiter, prompt 6 and 5 outputs, schedules and pays 11: its outputs are recomputed, too."""
    waiting = queue(back=6, new=20)
    waiting.peek().output_token_ids = [1, 2, 3, 4, 5]
    assert step(lab, waiting, [], FakeKV(64), budget=16) == {"back": 11, "new": 5}


def test_preempted_requests_wait_like_all(lab):
    """Among new waiters the preempted ones get what all get: their turn, the uncached part, a cut, a slot."""

    def kept(requests):
        return [(r.num_prompt_tokens, r.num_tokens, r.arrival, r.num_preemptions) for r in requests]

    waiting, running, kv = queue(new=2, half=6, back=6, next=9, again=3), [], FakeKV(64, cached={"half": 7})
    for request, outputs in zip(waiting, (0, 5, 30, 0, 1), strict=True):
        request.output_token_ids, request.num_preemptions = list(range(outputs)), int(outputs > 0)
    before = kept(newest_first(waiting))
    scheduled = step(lab, waiting, running, kv, budget=20, slots=4, threshold=5)
    assert list(scheduled.items()) == [("new", 2), ("half", 4), ("back", 5), ("next", 5)]
    assert names(running) == list(scheduled)
    assert {request.status for request in running} == {RequestStatus.RUNNING}
    assert kept([*running, *waiting]) == before


def test_the_clamp_it_is_given(lab):
    """schedule_step cuts with the clamp that it is handed, in both phases: lab-02 swaps it."""
    kv = FakeKV(64)
    running = [make_running(kv, "old", 20, computed=4)]

    def half_of_it(num_new, budget, threshold):
        return min((num_new + 1) // 2, budget)

    scheduled = step(lab, queue(new=20), running, kv, clamp=half_of_it)
    assert scheduled == {"old": 8, "new": 10}


def test_clamp_knows_what_is_left(lab):
    """A clamp that gives half of what is left sees the budget shrink: 12 of 24, then 6, 3 and 2."""
    kv = FakeKV(128)
    running = [make_running(kv, "old", 20, computed=4), make_running(kv, "back", 9, outputs=6, computed=4)]

    def half_of_the_rest(num_new, budget, threshold):
        return min(num_new, (budget + 1) // 2)

    scheduled = step(lab, queue(a=20, b=20), running, kv, budget=24, slots=4, clamp=half_of_the_rest)
    assert scheduled == {"old": 12, "back": 6, "a": 3, "b": 2}


# -------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_request_finishes(lab, name):
    """Every scenario drains: all requests finish with the text they would have got alone."""
    assert_texts_alone(SCENARIOS[name], partial(scenarios.run, lab))


def test_b_is_admitted_when_a_finishes(lab):
    """B, for which there was no room, is admitted in the very step after A has finished."""
    trace = scenarios.run(lab, SCENARIOS["a slot for B when A is done"])
    assert_drained(trace)
    assert step_of(trace, "SCHEDULED", "B") == step_of(trace, "FINISHED", "A") + 1


@pytest.mark.parametrize("name", ["a long prompt beside a decode", "the same with a threshold"])
def test_a_decode_gets_a_token_every_step(lab, name):
    """While a 60-token prompt is prefilled, the chat beside it gets a token in every single step."""
    trace = scenarios.run(lab, SCENARIOS[name])
    assert_drained(trace)
    assert [record.step for record in trace.steps if "chat" in record.new_tokens] == list(range(12))


def test_limits_hold_in_every_step(lab):
    """On 30 random workloads no step exceeds a limit, no memory is lost, and each wait has a reason."""
    for scenario in scenarios.draw(seed=1, count=30):
        trace, config = scenarios.run(lab, scenario), scenario["config"]
        assert_drained(trace)
        for record in trace.steps:
            assert record.num_batched_tokens <= config["max_num_batched_tokens"]
            assert record.num_running <= config["max_num_seqs"]
            waits = f"step {record.step} has budget, a slot and memory for {record.blocked.id}, and it waits"
            assert record.blocked.reason in ("budget", "slots", "memory", "empty"), waits
        assert trace.end.num_free_blocks == config["num_blocks"]


def step_of(trace, kind, request_id):
    for record in trace.steps:
        for event in record.events:
            if (event.type, event.id) == (kind, request_id):
                return record.step
    raise AssertionError(f"{request_id} was never {kind}")


def test_random_scripts(lab):
    """In 60 random scripts of steps over one queue and memory, each step decides what a slow model does."""
    judge_random_scripts("lab-01", lab)
