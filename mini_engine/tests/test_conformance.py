"""The rules of behaviour of a scheduler and its cache, 1 to 39, each shown by a test of its number.

Most run without torch, on `SlotEngine`; where logits matter, on a tiny model in float64. The
modules' own tests go further into each part.
"""

import copy
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.fast.model import prepare
from mini_engine.llm import LLM
from mini_engine.request import RequestStatus, SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.tests import test_isolation as isolation
from mini_engine.tests.helpers import (
    VOCAB,
    SlotEngine,
    byte_tokenizer,
    computed,
    dense_logits,
    drafted,
    drain,
    every_third,
    expected_tokens,
    make_request,
    outcome,
    play,
    random_run,
    random_trace,
    random_workload,
    scripted_engine,
    spy,
    text_of,
    tiny_model,
    tokens_of,
)
from mini_engine.trace import VirtualClock, WallClock, decisions

SEEDS = range(40)


def events(engine, kind):
    return [(r.step, e) for r in engine.trace.steps for e in r.events if e.type == kind]


def stepped_runs():
    """Yield each random run before each of its steps."""
    for seed in SEEDS:
        workload, arrivals = random_workload(seed)
        engine = SlotEngine(**workload).add(*(request for _, request in arrivals))
        while engine.scheduler.has_work:
            yield engine
            engine.step()


def ids(requests):
    return [request.request_id for request in requests]


def test_every_rule_is_here():
    """All 39 numbers have a test, and each test's first line says its number."""
    rules = {}
    for name, test in globals().items():
        if match := re.match(r"test_(\d\d)_", name):
            rules.setdefault(int(match[1]), []).append(test)
    assert sorted(rules) == list(range(1, 40))
    for number, tests in rules.items():
        for test in tests:
            assert inspect.getdoc(inspect.unwrap(test)).startswith(f"{number}. "), test.__name__


# --------------------------------------------------------------------------- budget and phases


def test_01_short_prompts_start_together_in_order_of_arrival():
    """1. Short prompts are all scheduled in one step, in arrival order, and run."""
    engine = SlotEngine().add(*(make_request(i, 5) for i in "cab"))
    assert list(engine.step().items()) == [("c", 5), ("a", 5), ("b", 5)]
    assert ids(engine.scheduler.running) == ["c", "a", "b"]
    assert all(r.status is RequestStatus.RUNNING for r in engine.scheduler.running)
    assert len(engine.scheduler.waiting) == 0


def test_02_decodes_count_against_the_budget():
    """2. Three decodes leave a new prompt 5 of 8 tokens, and the fifth request no slot of 4."""
    engine = SlotEngine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(*(make_request(i, 2, 8) for i in "abc")).step()
    engine.add(make_request("d", 7), make_request("e", 1))
    assert engine.step() == {"a": 1, "b": 1, "c": 1, "d": 5}
    assert engine.step() == {"a": 1, "b": 1, "c": 1, "d": 2}, "budget is left"


def test_03_only_the_last_admitted_is_cut_by_the_budget():
    """3. Every admitted prompt but the last is cut only by the threshold; the last also by the budget."""
    engine = SlotEngine(max_num_batched_tokens=10, max_num_seqs=4, long_prefill_token_threshold=4)
    engine.add(make_request("a", 9), make_request("b", 3), make_request("c", 9), make_request("d", 9))
    assert engine.step() == {"a": 4, "b": 3, "c": 3}


def test_04_running_before_waiting():
    """4. Running requests come first; a decode has its token every step."""
    engine = SlotEngine(max_num_batched_tokens=6, max_num_seqs=4)
    engine.add(make_request("a", 3), make_request("long", 30))
    engine.step()
    engine.add(make_request("urgent", 2, priority=-1))
    for _ in range(3):
        assert engine.step() == {"a": 1, "long": 5}
    assert ids(engine.scheduler.waiting) == ["urgent"]


def test_05_an_inner_chunk_yields_no_token():
    """5. A chunk that does not end its sequence yields no token."""
    engine = SlotEngine(long_prefill_token_threshold=4).add(make_request("a", 10, 2))
    for tokens, yields in ((4, False), (4, False), (2, True), (1, True)):
        assert engine.step() == {"a": tokens}
        assert bool(engine.trace.steps[-1].new_tokens) == yields


def test_05_an_inner_chunk_consumes_no_randomness(model):
    """5. Cut into 1, 3 or 64 tokens a step, a random request asks for one number a token: the same text."""
    texts = set()
    for budget in (1, 3, 64):
        engine = Engine(model, num_blocks=16, block_size=4, max_num_batched_tokens=budget, max_num_seqs=1)
        draws = spy(engine.sampler, "uniform")
        engine.add_request(list(range(20)), SamplingParams(temperature=1.5, seed=7, max_tokens=8))
        texts.add(tuple(tokens_of(drain(engine)["r0"])))
        assert [index for _, index in draws] == list(range(8))
    assert len(texts) == 1


def test_06_a_long_prompt_alone_uses_the_whole_budget():
    """6. With the threshold at 0 a 100-token prompt alone takes 32, 32, 32 and 4 of a budget of 32."""
    engine = SlotEngine(max_num_batched_tokens=32).add(make_request("a", 100, 1))
    assert [engine.step()["a"] for _ in range(4)] == [32, 32, 32, 4]


def test_07_a_decode_never_waits_for_a_prefill():
    """7. While another prompt is prefilled, a decode's worst gap between two tokens is one step."""
    engine = SlotEngine(max_num_batched_tokens=5, max_num_seqs=2).add(make_request("a", 3, 20))
    engine.step()
    engine.add(make_request("b", 60))
    while engine.requests["b"].num_computed_tokens < 60:
        engine.step()
    with_token = [r.step for r in engine.trace.steps if "a" in r.new_tokens]
    assert len(engine.trace.steps) > 15
    assert {b - a for a, b in itertools.pairwise(with_token)} == {1}


# --------------------------------------------------------------------------------- preemption


def short_of_memory(policy, priorities, **workload):
    """Requests of 4 tokens in 4 blocks of 4, none of which can grow: the next step preempts."""
    engine = SlotEngine(num_blocks=len(priorities), block_size=4, policy=policy, **workload)
    for name, priority in zip("abcdefg", priorities, strict=False):
        engine.add(make_request(name, 4, 5, priority=priority))
    engine.step()
    assert len(engine.scheduler.running) == len(priorities)
    return engine


def test_08_victim_is_the_newest_of_the_least_important():
    """8. The victim: under fcfs the newest, under priority the largest (priority, arrival)."""
    engine = short_of_memory("fcfs", [0, 2, 1, 0])
    engine.step()
    assert sorted(engine.preemptions) == ["c", "d"]  # two blocks for the two that stay

    engine = short_of_memory("priority", [0, 2, 1, 2])
    engine.step()
    assert sorted(engine.preemptions) == ["b", "d"]


def test_08_arrival_is_a_sequence_number():
    """8. Arrival counts up from 0 and leaves no ties, whatever is aborted in between."""
    engine = SlotEngine().add(make_request("a"), make_request("b"))
    engine.abort("a")
    engine.add(make_request("c"))
    assert [engine.requests[i].arrival for i in "abc"] == [0, 1, 2]


def test_09_room_is_made_before_anything_is_scheduled():
    """9. The victim holds neither budget nor a place: the others get all of it, in the same step."""
    # Row order v, a, u: the victim would come first, and its chunk would take 5 of 7 tokens.
    engine = SlotEngine(num_blocks=15, max_num_batched_tokens=7, max_num_seqs=3, policy="priority")
    engine.add(make_request("v", 30, 2, priority=9), make_request("a", 4, 9), make_request("u", 21, 2))
    engine.requests["a"].priority = engine.requests["u"].priority = 0
    scheduler, kv = engine.scheduler, engine.kv
    for request in (engine.requests[i] for i in "vau"):  # as they would be found in mid-run
        scheduler.waiting.remove(request)
        assert kv.admit(request)
        scheduler.running.append(request)
        request.status = RequestStatus.RUNNING
    assert kv.num_free_blocks == 0
    scheduler.update({"a": 4}, {"a": [1]})
    assert engine.recorder.schedule() == {"a": 1, "u": 6}
    assert ids(scheduler.running) == ["a", "u"]
    assert ids(scheduler.waiting) == ["v"]


def test_10_the_victim_keeps_what_it_has():
    """10. A victim keeps its outputs and arrival, is ahead of later ones, and recomputes the rest."""
    engine = SlotEngine(num_blocks=4, block_size=4, caching=False)
    engine.add(make_request("a", 7, 8), make_request("b", 7, 8))
    engine.step()
    engine.add(make_request("later", 3))
    engine.step()
    a, b = engine.requests["a"], engine.requests["b"]
    outputs = list(b.output_token_ids)
    engine.step()
    assert engine.preemptions == ["b"]
    assert (b.output_token_ids, b.arrival, b.num_computed_tokens) == (outputs, 1, 0)
    assert (b.status, b.num_preemptions) == (RequestStatus.WAITING, 1)
    assert ids(engine.scheduler.waiting) == ["b", "later"]
    while a.finish_reason is None:
        engine.step()
    assert engine.step()["b"] == 7 + len(outputs), "prompt and outputs, all computed again"
    assert b.output_token_ids[: len(outputs)] == outputs and len(b.output_token_ids) == len(outputs) + 1
    engine.run()


def test_10_the_victim_finds_its_own_cached_blocks():
    """10. What a victim's cached blocks still hold is not computed again."""
    engine = SlotEngine(num_blocks=6, block_size=4)
    engine.add(make_request("a", 7, 3), make_request("b", 7, 8))
    for _ in range(3):
        engine.step()
    assert engine.preemptions == []
    engine.recorder.scheduler.preempt(engine.requests["b"])
    engine.step()
    assert engine.requests["b"].num_cached_tokens == 8
    engine.run()


def test_11_no_request_is_admitted_in_a_step_that_preempted():
    """11. Not even a request that would fit into what the victim has left behind."""
    engine = short_of_memory("fcfs", [0, 0, 0])
    engine.add(make_request("tiny", 1, 1))
    assert engine.step().keys() == {"a"}
    assert engine.kv.num_free_blocks == 1 and "tiny" in ids(engine.scheduler.waiting)


def test_12_admission_claims_the_whole_sequence():
    """12. Two prompts of 15 do not share 20 blocks: the second waits, and none is preempted."""
    engine = SlotEngine(num_blocks=20, block_size=1, max_num_batched_tokens=4, max_num_seqs=2)
    engine.add(make_request("a", 15, 2), make_request("b", 15, 2))
    engine.step()
    assert len(engine.kv.block_table(engine.requests["a"])) == 15
    assert ids(engine.scheduler.waiting) == ["b"]
    assert engine.run().preemptions == []


def test_12_chunks_never_allocate():
    """12. Only a decode ever needs a block; each preemption is paid for by a token or a request."""
    chunks, runs = 0, {}
    for engine in stepped_runs():
        runs[id(engine)] = engine
        for request in engine.scheduler.running:
            if not request.is_decode:
                assert engine.kv.num_new_blocks(request, request.num_new_tokens) == 0
                chunks += 1
    for engine in runs.values():
        outputs = sum(len(r.output_token_ids) for r in engine.requests.values())
        assert len(engine.preemptions) <= outputs + len(engine.requests)
    assert chunks > 100 and sum(len(engine.preemptions) for engine in runs.values()) > 20


def test_13_what_can_never_fit_is_refused_by_name():
    """13. Prompt plus max_tokens - 1 beyond the pool is refused when added; one token less runs."""
    engine = SlotEngine(num_blocks=5, block_size=4)
    with pytest.raises(ValueError, match="'big'.*21 tokens.*pool holds 20"):
        engine.add(make_request("big", 11, 11))
    assert not engine.scheduler.has_work
    engine.add(make_request("fits", 11, 10)).run()
    assert engine.requests["fits"].finish_reason == "length"


@pytest.mark.parametrize(("num_blocks", "expected"), [(64, 10), (6, 5)])
def test_13_no_max_tokens_runs_to_the_limit(model, num_blocks, expected):
    """13. max_tokens None ends at the model's length or at the pool's, with finish_reason length."""
    engine = Engine(model, num_blocks=num_blocks, block_size=4, max_model_len=30)
    engine.add_request([1] * 20, SamplingParams(max_tokens=None))
    deltas = drain(engine)["r0"]
    assert (len(tokens_of(deltas)), deltas[-1].finish_reason) == (expected, "length")


def test_13_the_watermark_is_waived_when_nothing_runs():
    """13. Blocks held back for decodes never keep a request out of an idle engine."""
    engine = SlotEngine(num_blocks=5, block_size=4, watermark=3)
    engine.add(make_request("a", 12, 9), make_request("b", 1, 2))
    engine.step()
    assert ids(engine.scheduler.running) == ["a"], "2 free blocks, and 3 are to stay free"
    engine.run()


def test_14_equal_priorities_are_fcfs():
    """14. With one priority for all, the priority policy decides as fcfs does, step by step."""
    preemptions = 0
    for seed in SEEDS[:20]:
        runs = []
        for policy in ("fcfs", "priority"):
            workload, arrivals = random_workload(seed)
            for _, request in arrivals:
                request.priority = 1
            engine = play(workload | {"policy": policy}, arrivals)
            runs.append([decisions(record) for record in engine.trace.steps])
            preemptions += len(engine.preemptions)
        assert runs[0] == runs[1]
    assert preemptions


def test_14_nothing_is_preempted_while_there_is_room():
    """14. A preemption means that the running requests needed more blocks than were free."""
    for seed in SEEDS[:20]:
        for _, event in events(random_run(seed), "PREEMPTED"):
            assert event.needs > event.free
        workload, arrivals = random_workload(seed)
        assert play(workload | {"num_blocks": 200}, arrivals).preemptions == []


def test_15_preemption_does_not_change_the_output():
    """15. Greedy output after preemption equals the output without it."""
    engine = short_of_memory("fcfs", [0, 0, 0, 0]).run()  # which compares each with itself alone
    assert len(engine.preemptions) >= 2


# --------------------------------------------------------------------- blocks and prefix cache


def hits(kv, prompt, **kwargs):
    """Return how many blocks a request with this prompt would find, without admitting it."""
    return len(kv.get_computed_blocks(make_request("probe", prompt, **kwargs)))


def test_16_only_full_and_computed_blocks_are_published():
    """16. Of 11 tokens in blocks of 4, two blocks are found, and none before it is computed."""
    kv = BlockManager(8, 4)
    prompt, request = list(range(11)), make_request("a", list(range(11)))
    assert kv.admit(request)
    for num_computed, found in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)):
        request.num_computed_tokens = num_computed
        kv.cache_blocks(request)
        kv.check()
        assert hits(kv, prompt + [99] * 9) == kv.num_cached_blocks == found


def test_16_rows_behind_find_what_their_step_computes():
    """16. Of a prompt of 11 tokens the same prompt behind it finds two blocks, if the manager may share them;
    when the step is taken back, nothing is found."""
    for shares in (True, False):
        kv = BlockManager(8, 4, watermark=0)
        kv.caches_scheduled = shares
        scheduler = Scheduler(kv, max_num_batched_tokens=30, max_num_seqs=4)
        for name in "ab":
            scheduler.add(make_request(name, list(range(11))))
        assert scheduler.schedule() == {"a": 11, "b": 3 if shares else 11}
        assert hits(kv, [*range(11), 99]) == (2 if shares else 0) and kv.num_cached_blocks == 0
        scheduler.take_back([])
        kv.check()
        assert hits(kv, [*range(11), 99]) == kv.num_cached_blocks == 0


def test_16_the_hash_chains_over_the_parent():
    """16. A block's hash is made from its parent's and its own tokens."""
    seen = []

    def note(parent, token_ids):
        seen.append((parent, token_ids))
        return b"%d" % len(seen)

    kv = BlockManager(8, 2, hash_block=note)
    computed(kv, make_request("a", [1, 2, 3, 4, 5, 6], cache_salt="s"))
    assert seen == [(b"s", (1, 2)), (b"1", (3, 4)), (b"2", (5, 6))]


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_17_a_hit_leaves_something_to_compute(block_size):
    """17. A hit covers (num_tokens - 1) // block_size blocks: 1 to block_size tokens are left."""
    for num_tokens in range(1, 4 * block_size + 1):
        kv, prompt = BlockManager(20, block_size), list(range(num_tokens))
        first = make_request("a", prompt)
        computed(kv, first)
        kv.free(first)
        again = make_request("b", prompt)
        assert kv.admit(again)
        assert again.num_computed_tokens == (num_tokens - 1) // block_size * block_size
        assert 1 <= again.num_new_tokens <= block_size


def test_18_a_hit_adds_a_reference():
    """18. A hit on a block in use shares it; a hit on a free cached block takes it off the free list."""
    kv, prompt = BlockManager(8, 4), list(range(8))
    a, b, c = (make_request(name, [*prompt, i]) for i, name in enumerate("abc"))
    table = list(computed(kv, a))
    assert kv.admit(b)
    assert kv.block_table(b)[:2] == table[:2] and kv.num_free_blocks == 8 - 4
    kv.check()
    kv.free(a)
    assert kv.num_free_blocks == 8 - 3, "what b still holds is not free"
    kv.free(b)
    assert kv.num_free_blocks == 8
    assert kv.admit(c)
    assert kv.block_table(c)[:2] == table[:2] and kv.num_free_blocks == 8 - 3
    kv.check()


def test_19_a_failed_allocation_changes_nothing():
    """19. When admit or allocate says no, manager and request are as they were."""
    kv = BlockManager(6, 4)
    old, holder = make_request("old", list(range(8))), make_request("holder", [9] * 16)
    computed(kv, old)
    kv.free(old)
    computed(kv, holder)

    def state(request):
        kept = {k: v for k, v in vars(request).items() if k != "block_hashes"}  # a memo, not a claim
        return copy.deepcopy(({**vars(kv), "_cache": vars(kv._cache)}, kept))

    big = make_request("big", [*range(8), *range(20)])
    before = state(big)
    assert kv.get_computed_blocks(big) and not kv.admit(big)
    assert state(big) == before
    before = state(holder)
    assert not kv.allocate(holder, 9)
    assert state(holder) == before
    assert kv.allocate(holder, 8)


def test_20_its_own_hits_are_no_room_for_a_request():
    """20. Three free blocks that are hits are not room for three new ones."""
    kv, prompt = BlockManager(5, 4), list(range(12))
    old, holder = make_request("old", prompt), make_request("holder", [7])
    computed(kv, old)
    kv.free(old)
    computed(kv, holder)
    assert kv.num_free_blocks == 4
    assert not kv.admit(make_request("b", [*prompt, *range(12)])), "3 hits + 3 new, 1 other block is free"
    kv.check()
    assert kv.admit(make_request("c", [*prompt, 1]))
    kv.check()


def test_21_eviction_order():
    """21. Uncached blocks go first, then the least recently used, a sequence's tail before its head."""
    kv = BlockManager(8, 2)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    for name, prompt in (("a", first), ("b", second)):
        request = make_request(name, prompt)
        computed(kv, request)
        kv.free(request)
    taker = make_request("t", [0])
    assert kv.admit(taker) and kv.allocate(taker, 8)  # four blocks: all that have no content
    assert (hits(kv, [*first, 0]), hits(kv, [*second, 0])) == (2, 2)
    touched = make_request("a", [*first, 0])
    kv.free(taker)
    assert kv.admit(touched)  # used again: now the second is the older one
    kv.free(touched)
    left = []
    taker = make_request("t", [0])
    kv.admit(taker)
    for tokens in range(2, 17, 2):
        kv.allocate(taker, tokens)
        left.append((hits(kv, [*first, 0]), hits(kv, [*second, 0])))
    assert left == [(2, 2)] * 4 + [(2, 1), (2, 0), (1, 0), (0, 0)]


def test_22_equal_blocks_coexist():
    """22. Two that computed the same side by side keep a copy each; one can go and the other be found."""
    kv, prompt = BlockManager(8, 4), list(range(8))
    a, b = make_request("a", prompt), make_request("b", prompt)
    assert kv.admit(a) and kv.admit(b)
    for request in (a, b):
        request.num_computed_tokens = 8
        kv.cache_blocks(request)
        kv.check()
    assert not set(kv.block_table(a)) & set(kv.block_table(b))
    assert kv.num_cached_blocks == 4 and hits(kv, [*prompt, 1]) == 2
    kv.free(a)
    taker = make_request("t", [9])
    kv.admit(taker)
    assert kv.allocate(taker, 4 * kv.num_free_blocks + 4), "a's copies are overwritten"
    kv.check()
    assert hits(kv, [*prompt, 1]) == 2
    c = make_request("c", [*prompt[:4], 7, 7, 7, 7])
    kv.free(taker)
    assert kv.admit(c) and kv.block_table(c)[0] == kv.block_table(b)[0]


def test_22_a_block_table_only_grows():
    """22. While a request runs its table keeps what it has and adds to the end."""
    tables = {}
    for engine in stepped_runs():
        running = {(r, r.num_preemptions): list(engine.kv.block_table(r)) for r in engine.scheduler.running}
        for life, table in running.items():
            known = tables.get(life, [])
            assert table[: len(known)] == known
        tables = running


@pytest.mark.parametrize("hash_block", [None, lambda parent, token_ids: b"same"])
def test_23_equal_content_elsewhere_never_hits(hash_block):
    """23. Nor do equal tokens under another parent or salt, even when all hashes collide."""
    kv = BlockManager(12, 2, **({"hash_block": hash_block} if hash_block else {}))
    computed(kv, make_request("a", [1, 2, 3, 4, 5, 6]))
    assert hits(kv, [1, 2, 3, 4, 5, 6, 0]) == 3
    assert hits(kv, [3, 4, 5, 6, 0]) == 0, "under no parent"
    assert hits(kv, [1, 2, 5, 6, 0]) == 1, "under another parent"
    assert hits(kv, [1, 9, 3, 4, 0]) == 0
    assert hits(kv, [1, 2, 3, 4, 0], cache_salt="another tenant") == 0
    salted = make_request("s", [1, 2, 3, 4], cache_salt="another tenant")
    assert kv.admit(salted) and salted.num_cached_tokens == 0
    salted.num_computed_tokens = 4
    kv.cache_blocks(salted)
    kv.check()
    assert hits(kv, [1, 2, 3, 4, 0], cache_salt="another tenant") == 2
    assert hits(kv, [1, 2, 3, 4, 0]) == 2


def test_24_reset_is_refused_while_blocks_are_held():
    """24. Reset clears everything, and is refused as long as a request holds a block."""
    kv, request = BlockManager(8, 4), make_request("a", list(range(9)))
    computed(kv, request)
    assert not kv.reset_prefix_cache()
    assert hits(kv, list(range(9))) == 2
    kv.free(request)
    assert kv.reset_prefix_cache()
    kv.check()
    assert hits(kv, list(range(9))) == kv.num_cached_blocks == kv.stats.queries == 0
    assert kv.num_free_blocks == 8


def test_25_without_caching_no_hits_and_the_same_tokens():
    """25. Caching off: nothing is found or kept, and each request has the tokens it has with it."""
    found = 0
    for seed in SEEDS[:20]:
        outputs = []
        for caching in (True, False):
            workload, arrivals = random_workload(seed)
            engine = play(workload | {"caching": caching}, arrivals)
            outputs.append([r.output_token_ids for _, r in arrivals])
            if caching:
                found += engine.kv.stats.hits
            else:
                assert engine.kv.stats.hits == engine.kv.num_cached_blocks == 0
                assert all(event.num_cached_tokens == 0 for _, event in events(engine, "SCHEDULED"))
        assert outputs[0] == outputs[1]
    assert found


def test_26_hits_are_counted_in_tokens_once_an_admission():
    """26. A head that waits for room is asked about every step and counted once; the resumed apart."""
    engine = SlotEngine(num_blocks=6, block_size=4)
    prompt = list(range(1, 5)) * 2
    engine.add(make_request("a", [*prompt, 0], 1)).run()
    assert (engine.kv.stats.queries, engine.kv.stats.hits) == (9, 0)
    engine.add(make_request("b", [9] * 12, 6), make_request("c", [*prompt, 3, 3, 3], 8))
    for _ in range(5):
        engine.step()
    stats, c = engine.kv.stats, engine.requests["c"]
    assert (stats.queries, stats.hits) == (9 + 12 + 11, 8)
    assert stats.preempted_queries == 0
    engine.run()
    assert engine.preemptions == ["c"]
    assert (stats.queries, stats.hits) == (9 + 12 + 11, 8), "resuming is not counted here"
    (_, resumed) = [e for _, e in events(engine, "SCHEDULED") if e.id == "c"]
    assert stats.preempted_queries > c.num_prompt_tokens
    assert stats.preempted_hits == resumed.num_cached_tokens


# --------------------------------------------------------------------- stopping and life cycle


SHOWN, IGNORED = {"include_stop_str_in_output": True}, {"ignore_eos": True}
SPECIAL = {"skip_special_tokens": False}
STOPS = [
    ("an eos", "ab\0cd", {}, "ab", "stop", 3),
    ("an eos, shown", "ab\0cd", SHOWN | SPECIAL, "ab<eos>", "stop", 3),
    ("an eos, ignored", "ab\0cd", IGNORED | {"max_tokens": 4}, "abc", "length", 4),
    ("an eos, ignored and shown", "ab\0c", IGNORED | SPECIAL | {"max_tokens": 4}, "ab<eos>c", "length", 4),
    ("a stop id", "abcd", {"stop_token_ids": "c"}, "ab", "stop", 3),
    ("a stop id, shown", "abcd", SHOWN | {"stop_token_ids": "c"}, "abc", "stop", 3),
    ("a stop id, eos ignored", "abcd", IGNORED | {"stop_token_ids": "c"}, "ab", "stop", 3),
    ("an eos id that is a stop id", "ab\0", IGNORED | {"stop_token_ids": "\0"}, "ab", "stop", 3),
    ("a stop string", "abcd", {"stop": "bc"}, "a", "stop", 3),
    ("a stop string, shown", "abcd", SHOWN | {"stop": "bc"}, "abc", "stop", 3),
    ("a stop string, eos ignored", "abcd", IGNORED | {"stop": "bc"}, "a", "stop", 3),
    ("a stop string after min_tokens", "abcd", {"stop": ["bc", "d"], "min_tokens": 3}, "abc", "stop", 4),
    ("max_tokens", "abcd", {"max_tokens": 3}, "abc", "length", 3),
    ("the model's length", "abcd", {"max_tokens": None}, "abcd....", "length", 8),
    ("no text", "ab\0", {"detokenize": False}, "", "stop", 3),
]


@pytest.mark.parametrize(
    ("script", "params", "text", "reason", "number"), [s[1:] for s in STOPS], ids=[s[0] for s in STOPS]
)
def test_27_stops(script, params, text, reason, number):
    """27. Ends: eos, stop ids, stop strings, max_tokens, the model's length; ignore_eos is for the first."""
    encode = byte_tokenizer().encode

    def tokens(printed):
        return [256 if char == "\0" else encode(char)[0] for char in printed]

    engine = scripted_engine({"a": tokens(script)}, max_model_len=10)
    params = {"max_tokens": 8} | params
    if "stop_token_ids" in params:
        params["stop_token_ids"] = tokens(params["stop_token_ids"])
    engine.add_request("xy", SamplingParams(temperature=0, **params), request_id="a")
    deltas = drain(engine)["a"]
    assert (text_of(deltas), deltas[-1].finish_reason, len(tokens_of(deltas))) == (text, reason, number)
    assert all(delta.finish_reason is None for delta in deltas[:-1])


@pytest.mark.parametrize("phase", ["waiting", "mid-prefill", "decoding", "preempted"])
def test_28_abort_frees_everything(phase):
    """28. Aborted while waiting, mid-prefill, decoding or preempted, a request leaves nothing behind."""
    engine = SlotEngine(num_blocks=7, block_size=4, max_num_batched_tokens=8, max_num_seqs=2)
    if phase == "preempted":
        engine.add(make_request("first", 12, 9))
    engine.add(make_request("a", 12, 9))
    if phase != "waiting":
        engine.step()
    request = engine.requests["a"]
    while phase in ("decoding", "preempted") and not request.output_token_ids:
        engine.step()
    while phase == "preempted" and not engine.preemptions:
        engine.step()
    facts = {
        "waiting": request.status is RequestStatus.WAITING,
        "mid-prefill": 0 < request.num_computed_tokens < 12,
        "decoding": request.is_decode,
        "preempted": request.num_preemptions == 1 and request.status is RequestStatus.WAITING,
    }
    assert facts[phase]
    assert engine.abort("a") is True
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")
    assert engine.kv.block_table(request) == []
    assert request not in engine.scheduler.running and request not in list(engine.scheduler.waiting)
    assert engine.abort("a") is False
    engine.run()


def test_29_when_drained_everything_is_back():
    """29. Free equals total, no references, empty queues and maps."""
    for seed in SEEDS:
        engine = play(*random_workload(seed))
        engine.check_drained()
        kv = engine.kv
        assert not any(kv._ref_cnts)
        assert kv._req_to_blocks == {} and kv._num_cached_block == {}
        taker = make_request("all", [0])
        kv.admit(taker)
        assert kv.allocate(taker, kv.num_blocks * kv.block_size)
        assert len(set(kv.block_table(taker))) == kv.num_blocks
        assert kv._cache.block_ids() == set() and kv.num_cached_blocks == 0


def test_30_any_mix_keeps_every_invariant():
    """30. Arrivals, aborts, chunks, preemptions and hits at random: each step checks itself and all reads."""
    seen = Counter()
    for seed in SEEDS:
        for record in random_trace(seed).steps:
            seen.update(event.type for event in record.events)
            seen.update(event.reason for event in record.events if event.type == "FINISHED")
            seen["hit"] += any(e.num_cached_tokens for e in record.events if e.type == "SCHEDULED")
            seen["chunk"] += len(record.new_tokens) < len(record.scheduled)
            seen[record.blocked.reason] += 1
    kinds = {"QUEUED", "SCHEDULED", "PREEMPTED", "FINISHED", "abort", "length", "hit", "chunk"}
    assert seen.keys() == kinds | {"preempted", "slots", "budget", "memory", "empty"}
    assert min(seen.values()) > 10


class SharesToo(BlockManager):
    """Wrong on purpose: hits the cache by content alone, whatever precedes it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._cache._match = self._match

    def _match(self, named, token_ids, parent):
        known = zip(self._cache.block_hashes, self._cache._token_ids, strict=True)
        equal = [hash is not None and content == token_ids for hash, content in known]
        return equal.index(True) if True in equal else None


class FreesTooMuch(BlockManager):
    """Wrong on purpose: a freed block may be taken though another still reads it."""

    def free(self, request):
        for block_id in self.block_table(request):
            self._ref_cnts[block_id] = 1
        super().free(request)


@pytest.mark.parametrize("manager", [SharesToo, FreesTooMuch])
def test_31_a_wrong_manager_is_caught(manager):
    """31. The check is able to fail: a manager that shares or frees wrongly is caught at once."""
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in SEEDS[:20]:
            workload, arrivals = random_workload(seed)
            play(workload | {"manager": manager, "caching": True}, arrivals)


class Separate(isolation.Watched):
    """A forward pass for each request of a step instead of one for all."""

    def forward(self, rows):
        return torch.cat([super(Separate, self).forward([row]) for row in rows])


WAYS = {
    "fused": dict(max_num_batched_tokens=9),
    "separate": dict(max_num_batched_tokens=9, backend=Separate),
    "unchunked": dict(max_num_batched_tokens=500),
    "one token a step": dict(max_num_batched_tokens=1, max_num_seqs=1),
    "as many tokens as slots": dict(max_num_batched_tokens=8, max_num_seqs=8),
    "cached": dict(max_num_batched_tokens=9, enable_prefix_caching=True),
    "preempted": dict(max_num_batched_tokens=16, num_tokens=64, policy="priority"),
}


@every_third("way", WAYS, "block_size", [3, 1, 16, 4])
def test_32_every_way_gives_the_same(model, way, block_size):
    """32. Each way of computing gives the tokens of the request alone, and its logits to 1e-9."""
    settings = {"max_num_seqs": 6, "num_tokens": 600, "enable_prefix_caching": False} | WAYS[way]
    num_blocks = -(-settings.pop("num_tokens") // block_size)
    arrivals = [0, 0, 0, 5, 5, 7, 9, 9]
    engine, requests = isolation.run(
        model, num_blocks=num_blocks, block_size=block_size, arrivals=arrivals, **settings
    )
    assert (isolation.num_preemptions(requests) > 0) == (way == "preempted")
    assert (engine.scheduler.kv.stats.hits > 0) == (way == "cached")


RERUN = """
import json
from mini_engine.engine import Engine
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import play, random_workload, tiny_model, drain, tokens_of
from mini_engine.trace import decisions
printed = []
for seed in range(3):
    engine = play(*random_workload(seed))
    printed += [[decisions(r), r.blocks, r.blocked.to_json()] for r in engine.trace.steps]
settings = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 9}
engine = Engine(tiny_model(), record=True, **settings)
for name in ("b", "a", "zz", "c", "k"):
    engine.add_request([1, 2, 3, len(name)] * 3, SamplingParams(max_tokens=9), request_id=name)
deltas = drain(engine)
printed += [decisions(r) for r in engine.trace.steps]
print(json.dumps([printed, {name: tokens_of(d) for name, d in deltas.items()}]))
"""


def test_33_nothing_depends_on_hash_seeds(capsys):
    """33. An interpreter with other string hashes and addresses decides and samples alike."""
    own = os.environ.get("PYTHONHASHSEED")  # drawn, if it is not set
    environment = {**os.environ, "PYTHONHASHSEED": "31337" if own == "1" else "1", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", RERUN]
    first = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, timeout=120).stdout
    exec(RERUN, {})
    second = capsys.readouterr().out
    printed, tokens = json.loads(first)
    assert len(printed) > 100 and all(len(ids) == 9 for ids in tokens.values())
    assert first == second


def test_33_nothing_depends_on_the_clock():
    """33. In wall time and in virtual time the decisions are the same."""
    runs = []
    for clock in (VirtualClock(), WallClock()):
        workload, arrivals = random_workload(3)
        engine = SlotEngine(**workload).add(*(request for _, request in arrivals))
        engine.recorder.clock = clock
        runs.append([decisions(record) for record in engine.run().trace.steps])
    assert runs[0] == runs[1]


def test_33_ties_are_decided_by_arrival_alone():
    """33. The ids play no part: renamed, the requests run in the same order."""
    orders = []
    for names in (["a", "b", "c", "d"], ["z", "y", "x", "w"]):
        engine = SlotEngine(policy="priority", max_num_seqs=1)
        engine.add(*(make_request(name, [1, 2], 1, priority=1) for name in names)).run()
        orders.append([names.index(i) for r in engine.trace.steps for i in r.scheduled])
    assert orders == [[0, 1, 2, 3]] * 2


# -------------------------------------------------------------------------- several tokens a step


def test_34_room_is_counted_for_several_tokens():
    """34. Three requests get three tokens a step, on six blocks of two: the newest is preempted."""
    scheduler = Scheduler(BlockManager(6, 2), max_num_batched_tokens=64, max_num_seqs=8)
    requests = {name: make_request(name, 2, 7) for name in "abc"}
    for request in requests.values():
        scheduler.add(request)
    steps = 0
    while scheduler.has_work:
        scheduled = scheduler.schedule()
        ends = [n for n, num in scheduled.items() if num == requests[n].num_new_tokens]
        scheduler.update(scheduled, {name: [7, 8, 9] for name in ends})
        scheduler.kv.check()
        steps += 1
        assert steps < 50
    assert [r.output_token_ids for r in requests.values()] == [[7, 8, 9, 7, 8, 9, 7]] * 3
    assert any(r.num_preemptions for r in requests.values()) and scheduler.kv.num_free_blocks == 6


def test_34_a_draft_takes_no_block_that_another_was_promised():
    """34. Two decodes need a block each, and three are free: of three drafts one is scheduled."""
    scheduler, request = drafted(9, max_tokens=5, others=1)
    assert scheduler.schedule() == {"q0": 2, "q1": 1} and request.spec_token_ids == [5]
    assert len(scheduler.running) == 2 and scheduler.kv.num_free_blocks == 0


def test_34_drafts_end_before_max_tokens():
    """34. Of the three tokens that are left, one is the model's own."""
    scheduler, request = drafted(20, max_tokens=4, drafts=[5] * 9)
    assert scheduler.schedule() == {"q0": 3} and request.spec_token_ids == [5, 5]


@pytest.mark.parametrize(("given", "accepted"), [([7], 0), ([5, 7], 1), ([5, 5, 7], 2), ([5, 5, 5, 7], 3)])
def test_35_rejected_tokens_count_for_nothing(given, accepted):
    """35. They are not computed, not published, and their blocks are free in the same step."""
    scheduler, request = drafted(20)
    assert scheduler.schedule() == {"q0": 4} and scheduler.kv.num_free_blocks == 20 - 7
    assert scheduler.update({"q0": 4}, {"q0": given}) == []
    assert request.num_computed_tokens == 4 + accepted and request.output_token_ids == [4, *given]
    assert scheduler.kv.num_free_blocks == 20 - 4 - accepted and request.spec_token_ids == []
    assert scheduler.kv.num_cached_blocks == 4 + accepted and len(request.block_hashes) == 4 + accepted
    twin = make_request("twin", request.token_ids() + [1])
    assert len(scheduler.kv.get_computed_blocks(twin)) == 4 + accepted
    assert scheduler.schedule() == {"q0": 1}


def test_36_a_stop_in_the_midst_of_several_tokens():
    """36. Stop string, end of text and max_tokens end a request where they would one by one."""
    for stop, eos, expected in ((("o w",), False, ("hello w", "hell")), ((), True, ("hello", "hello"))):
        tokenizer = byte_tokenizer()
        script = tokenizer.encode("hello") + ([256] if eos else []) + tokenizer.encode(" world!")
        outcomes = []
        for propose in (
            None,
            lambda requests, s=script: [s[len(r.output_token_ids) :][:9] for r in requests],
        ):
            engine = scripted_engine({"a": script}, parts={"propose": propose})
            engine.add_request(
                "hi", SamplingParams(temperature=0, max_tokens=11, stop=stop, logprobs=0), request_id="a"
            )
            deltas = drain(engine)["a"]
            outcomes.append((outcome({"a": deltas}), len([x for d in deltas for x in d.logprobs])))
            steps = len(deltas)
        assert outcomes[0] == outcomes[1] and steps == 2
        assert outcomes[0][0]["a"][1] == expected[1]
        assert tokenizer.decode(outcomes[0][0]["a"][0]) == expected[0]


def test_37_an_error_in_update_changes_nothing():
    """37. The second request's blocks cannot be published: nothing of the first's is."""
    scheduler, request = drafted(20, others=1)
    kv, hashes = scheduler.kv, [list(r.block_hashes) for r in scheduler.running]
    scheduled, publish, calls = scheduler.schedule(), kv.cache_blocks, []

    def fail(request):
        calls.append(publish(request))
        if len(calls) == 2:
            raise OSError("cannot publish")

    kv.cache_blocks, cached = fail, kv.num_cached_blocks
    with pytest.raises(OSError):
        scheduler.update(scheduled, {"q0": [5, 5, 7], "q1": [7]})
    assert [r.num_computed_tokens for r in scheduler.running] == [3, 3] and kv.num_cached_blocks == cached
    assert [r.block_hashes for r in scheduler.running] == hashes and request.output_token_ids == [4]
    kv.cache_blocks = publish
    scheduler.take_back(list(scheduler.running))
    assert request.spec_token_ids == [] and kv.num_free_blocks == 20 - 6
    kv.check()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("dtype", "roundings"), [("float32", 0), ("bfloat16", 2)])
def test_38_another_token_only_within_rounding(dtype, roundings, fast):
    """38. In float32 a batch has each request's tokens alone; in bfloat16 the best two may
    tie, within the rounding in the batch and the rounding alone."""
    model, prompts = tiny_model(dtype=dtype), [[7 * i % 64, *range(i)] for i in range(1, 40, 2)]
    settings = dict(num_blocks=400, block_size=4, max_num_batched_tokens=48, max_num_seqs=24, fast=fast)
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = LLM.from_engine(Engine(model, **settings)).generate(prompts, params, use_tqdm=False)
    alone = prepare(model, fast)  # the same products, a prompt at a time
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = output.outputs[0].token_ids
        rows = dense_logits(alone, prompt + token_ids)[len(prompt) - 1 : -1].float()
        behind = rows.amax(1) - rows[range(20), token_ids]
        assert (behind <= roundings * torch.finfo(model.dtype).eps * rows.abs().amax(1)).all()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_prompt_tokens", "copied"), [(10, 1), (8, 3), (9, 0)])
def test_39_answers_share_the_prompt(num_prompt_tokens, copied, caching):
    """39. Answers share full blocks, have a partial one copied, and the tokens of their seeds alone."""
    engine = SlotEngine(block_size=4, caching=caching)
    answers = [make_request(name, [1] * num_prompt_tokens, 9, seed=i) for i, name in enumerate("abc")]
    for request in answers:
        request.siblings = answers
    engine.add(answers[0]).step()
    assert engine.add(*answers[1:]).step() == {"a": 1, "b": 1, "c": 1}
    assert engine.copies == ([copied] * 2 if copied else [])
    full = (num_prompt_tokens - 1) // 4
    tables = [engine.kv.block_table(request) for request in answers]
    assert [table[:full] for table in tables] == [tables[0][:full]] * 3
    own = [block for table in tables for block in table[full:]]
    assert len(own) == len(set(own)) >= 3
    engine.run()
    assert len({tuple(request.output_token_ids) for request in answers}) == 3


def test_expected_tokens_stop_where_requests_stop():
    """The yardstick itself: outputs alone end at a stop id, an eos or max_tokens."""
    free = expected_tokens(make_request("a", [1, 2, 3], 30))
    assert len(free) == 30 and len(set(free)) == VOCAB
    assert expected_tokens(make_request("a", [1, 2, 3], 30, stop_token_ids=free[2:3]))[-1] == free[2]
