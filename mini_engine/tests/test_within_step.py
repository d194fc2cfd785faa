"""A prefix that is shared within a step: rows behind find it, unless the step is not computed."""

from dataclasses import replace

import pytest
import torch

from mini_engine.backends.two_pass import TwoPassBackend
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.fallbacks import let_share_within_step
from mini_engine.invariants import InvariantError, watch
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import Arrival
from mini_engine.tests.helpers import alone, drafted, drain, make_request, tiny_model, tokens_of
from mini_engine.trace import Scheduled

PREFIX = [i % 50 for i in range(992)]


def scheduler(shares=True, num_blocks=40, block_size=4, manager=BlockManager, **settings):
    kv = manager(num_blocks, block_size, watermark=0)
    kv.caches_scheduled = shares
    return Scheduler(kv, **{"max_num_batched_tokens": 64, "max_num_seqs": 8} | settings)


def found(kv, prompt, **kwargs):
    """Return how many blocks a request with this prompt would find."""
    return len(kv.get_computed_blocks(make_request("probe", [*prompt, 99], **kwargs)))


def serve(made, prompts):
    """Serve prompts of one token each. Return the numbers of tokens of the steps."""
    for i, prompt in enumerate(prompts):
        made.add(make_request(f"r{i}", prompt, 1))
    steps = []
    with watch(made):
        while made.has_work:
            scheduled = made.schedule()
            steps.append(sum(scheduled.values()))
            ending = [r for r in made.running if scheduled[r.request_id] == r.num_new_tokens]
            made.update(scheduled, {r.request_id: [7] for r in ending})
            made.kv.check()
    return steps


def test_sixteen_prompts_compute_their_common_prefix_once():
    """With 992 of 1,000 tokens in common 1,120 are computed in one step; without sharing 9,056 in two."""
    prompts = [[*PREFIX, *[50 + i] * 8] for i in range(16)]
    settings = dict(num_blocks=2000, block_size=16, max_num_batched_tokens=8192, max_num_seqs=64)
    assert serve(scheduler(**settings), prompts) == [1000 + 15 * 8] == [1120]
    assert serve(scheduler(False, **settings), prompts) == [8192, 808 + 7 * 8] and 8192 + 864 == 9056


def test_the_simulator_shares_as_the_engine_does():
    arrivals = [Arrival(0, 10, 1, prefix_group="same", prefix_length=9)] * 3
    trace = simulate(arrivals, num_blocks=20, block_size=4).trace
    assert [record.num_batched_tokens for record in trace.steps] == [10 + 2 + 2]


@pytest.mark.parametrize("way", ["kernels or torch", "torch", "plain", "two passes"])
def test_tokens_are_those_of_a_request_alone(way):
    """In all ways to compute: the step finds a prefix of its own, also in a chunk and behind a decode."""
    model = tiny_model(dtype="float32")
    fast = {"plain": False, "torch": "torch"}.get(way, True)
    parts = Parts(attend_backend=TwoPassBackend) if way == "two passes" else None
    settings = dict(num_blocks=60, block_size=4, max_num_batched_tokens=30, record=True)
    engine = Engine(model, fast=fast, parts=parts, **settings)
    params = SamplingParams(temperature=0, max_tokens=5)
    prompts = {"first": [5, 6, 7]} | {f"r{i}": [*range(1, 14), *[20 + i] * (i + 1)] for i in range(6)}
    engine.add_request(prompts["first"], params, request_id="first")
    said = {"first": engine.step()}
    for name in list(prompts)[1:]:
        engine.add_request(prompts[name], params, request_id=name)
    with watch(engine):
        for name, deltas in drain(engine).items():
            said.setdefault(name, []).extend(deltas)
    assert {n: tokens_of(d) for n, d in said.items()} == {
        n: alone(model, p, params) for n, p in prompts.items()
    }
    events = [event for event in engine.trace.steps[1].events if isinstance(event, Scheduled)]
    assert [event.num_cached_tokens for event in events] == [0, 12, 12, 12, 12]


def test_a_step_that_is_taken_back_takes_its_names_back():
    """Those of a running chunk and of an admitted one; what was computed before is still found."""
    made = scheduler(max_num_batched_tokens=10)
    long, other = list(range(24)), [30 + i for i in range(9)]
    made.add(make_request("a", long))
    made.update(made.schedule(), {})
    assert (found(made.kv, long), made.kv.num_cached_blocks) == (2, 2)
    made.add(make_request("b", other))
    made.max_num_batched_tokens = 30
    before = list(made.running)
    assert made.schedule() == {"a": 14, "b": 9}
    made.add(make_request("c", long))
    # "b" was the last to be admitted: it is found when another is.
    assert (found(made.kv, long), found(made.kv, other), made.kv.num_cached_blocks) == (6, 0, 2)
    made.take_back(before)
    made.kv.check()
    assert (found(made.kv, long), found(made.kv, other), made.kv.num_cached_blocks) == (2, 0, 2)
    assert [r.request_id for r in made.running] == ["a"] and len(made.waiting) == 2

    assert made.schedule() == {"a": 14, "b": 9, "c": 4}
    assert (found(made.kv, long), found(made.kv, other), made.kv.num_cached_blocks) == (6, 2, 2)
    made.take_back(before)
    made.kv.check()
    assert (found(made.kv, long), found(made.kv, other), made.kv.num_cached_blocks) == (2, 0, 2)
    assert serve(made, []) == [27, 3, 3, 3]  # "c" finds five blocks of "a", whose last it computes


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_request_that_ends_in_mid_step_takes_its_names_with_it(end):
    made, prompt = scheduler(), list(range(10))
    first, second = make_request("a", prompt), make_request("b", [*prompt, 1])
    made.add(first), made.add(second)
    made.schedule()
    assert found(made.kv, prompt) == 2 and made.kv.block_table(first)[:2] == made.kv.block_table(second)[:2]
    made.abort("a") if end == "abort" else made.fail(first)
    assert found(made.kv, prompt) == 0
    made.abort("b")
    made.kv.check()
    assert made.kv.num_free_blocks == made.kv.num_blocks and made.kv.num_cached_blocks == 0


def test_an_update_that_fails_leaves_no_name_of_its_step():
    """Whichever request it fails at; the step that is tried again gives all of them back."""
    for at in range(3):
        made, prompt = scheduler(), list(range(10))
        for name in "abc":
            made.add(make_request(name, [*prompt, 50 + ord(name)]))
        scheduled, calls, publish = made.schedule(), [], made.kv.cache_blocks

        def fail(request, publish=publish, calls=calls, at=at):
            calls.append(request)
            if len(calls) == at + 1:
                raise OSError("cannot publish")
            publish(request)

        made.kv.cache_blocks = fail
        with pytest.raises(OSError):
            made.update(scheduled, {name: [7] for name in "abc"})
        made.kv.check()
        assert found(made.kv, prompt) == made.kv.num_cached_blocks == 0
        made.kv.cache_blocks = publish
        made.update(scheduled, {name: [7] for name in "abc"})
        made.kv.check()
        assert found(made.kv, prompt) == made.kv.num_cached_blocks == 2


def test_drafts_and_rows_of_one_token_are_not_found_before_their_step():
    """A NaN may reach a row of one token from others' blocks, its padding; drafts may be rejected."""
    made, request = drafted(20)
    made.kv.caches_scheduled = True
    tokens = request.token_ids()
    made.add(make_request("late", [*tokens, 5, 5, 5, 9]))
    assert made.schedule() == {"q0": 4, "late": 4} and found(made.kv, [*tokens, 5, 5, 5]) == 4

    made, prompt = scheduler(), [1, 2, 3]
    made.add(make_request("a", prompt))
    made.update(made.schedule(), {"a": [4]})
    made.add(make_request("late", [*prompt, 4, 5]))
    assert made.schedule() == {"a": 1, "late": 5}


def test_chunks_of_all_rows_are_found_from_two_tokens_on():
    """Rows that were running before count as well as the latest."""
    made = scheduler(block_size=2, long_prefill_token_threshold=2)
    made.add(make_request("a", [1, 2, 3, 4, 5, 6])), made.add(make_request("b", [9] * 6))
    made.update(made.schedule(), {})
    late = make_request("late", [1, 2, 3, 4, 7])
    made.add(late)
    assert made.schedule() == {"a": 2, "b": 2, "late": 1} and late.num_cached_tokens == 4


def test_nothing_of_a_step_that_preempts_is_found_in_it():
    """No request is admitted then, so none is to find anything."""
    made = scheduler(num_blocks=4, max_num_batched_tokens=12)
    made.add(make_request("a", list(range(8)), 5)), made.add(make_request("b", [9] * 8, 5))
    made.update(made.schedule(), {"a": [7]})
    cached = made.kv.num_cached_blocks
    before, scheduled = list(made.running), made.schedule()
    assert len(made.running) < len(before) and list(scheduled) == ["a"]
    assert made.kv._num_scheduled_block == {} and made.kv.num_cached_blocks <= cached


def nan_engine(**settings):
    model = tiny_model(dtype="float32", tie_word_embeddings=False)
    good = tiny_model(dtype="float32", tie_word_embeddings=False)
    model.embed_tokens.weight[7] = float("nan")
    return Engine(model, num_blocks=40, block_size=4, record=True, **settings), good


def count_forward(engine):
    """Return a list that gets, of each call of the model from now on, the tokens found cached by each row."""
    calls, forward = [], engine.backend.forward

    def forward_seen(rows):
        calls.append([row.request.num_cached_tokens for row in rows])
        return forward(rows)

    engine.backend.forward = forward_seen
    return calls


@pytest.mark.parametrize("way", [True, "torch", False])
def test_a_reader_outlives_a_writer_whose_own_tokens_are_nan(way):
    """A NaN reaches the common blocks, because masked tokens count 0 times NaN. The step is computed again
    without sharing; the next one shares again."""
    engine, good = nan_engine(fast=way)
    prompt, params = list(range(10, 21)), SamplingParams(temperature=0, max_tokens=3)
    engine.add_request([*prompt, 7, 8], params, request_id="bad")
    engine.add_request([*prompt, 9], params, request_id="good")
    calls = count_forward(engine)
    said = drain(engine)
    assert said["bad"][-1].finish_reason == "error" and "embed_tokens.weight" in said["bad"][-1].error
    assert calls[:2] == [[0, 8], [0, 0]] and engine.scheduler.kv.caches_scheduled
    assert tokens_of(said["good"]) == alone(good, [*prompt, 9], params)
    assert engine.backend.pool.k.isfinite().all() and engine.backend.pool.v.isfinite().all()


@pytest.mark.parametrize("chunk", [0, 3])
def test_nothing_is_found_of_a_common_prefix_that_is_nan(chunk):
    """Writer and readers end with an error; when the weight is mended, the prompt has its tokens."""
    engine, good = nan_engine(fast=False, long_prefill_token_threshold=chunk)
    prompt, params = [1, 2, 7, *range(10, 18)], SamplingParams(temperature=0, max_tokens=3)
    for i in range(3):
        engine.add_request([*prompt, 20 + i, 30], params, request_id=f"r{i}")
    assert {d[-1].finish_reason for d in drain(engine).values()} == {"error"}
    kv, pool = engine.scheduler.kv, engine.backend.pool
    assert kv.num_cached_blocks == 0 and kv.num_free_blocks == kv.num_blocks
    assert pool.k.isfinite().all() and pool.v.isfinite().all()
    engine.model.embed_tokens.weight[7] = good.embed_tokens.weight[7]
    engine.add_request(prompt, params, request_id="again")
    assert tokens_of(drain(engine)["again"]) == alone(good, prompt, params)


def test_a_reader_of_a_later_chunk_outlives_its_nan():
    """The reader comes after the writer's first chunk, and finds a block of the second, which becomes NaN."""
    engine, good = nan_engine(fast=False, long_prefill_token_threshold=8)
    prompt, params = list(range(10, 22)), SamplingParams(temperature=0, max_tokens=3)
    engine.add_request([*prompt, 7, 8], params, request_id="bad")
    engine.step()
    engine.add_request([*prompt, 9], params, request_id="good")
    calls = count_forward(engine)
    said = engine.step()
    assert calls == [[0, 12], [0, 8], [0]] and said[0].finish_reason == "error"
    assert [*said[1].token_ids, *tokens_of(drain(engine)["good"])] == alone(good, [*prompt, 9], params)


def test_a_step_that_shares_nothing_is_computed_once():
    """One row is NaN, and no block is another's: that request is computed once more, alone, and ends."""
    engine, good = nan_engine(fast=False)
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, first in ("bad", 7), ("good", 20):
        engine.add_request([first, 30, 31, 32, 33], params, request_id=name)
    calls = count_forward(engine)
    said = drain(engine)
    assert calls == [[0, 0], [0]] and said["bad"][-1].finish_reason == "error"
    assert tokens_of(said["good"]) == alone(good, [20, 30, 31, 32, 33], params)


def test_a_token_of_minus_infinity_is_no_nan():
    """A model rules a token out for all rows, and a request fails: nothing is computed again for that."""

    def fail(output_token_ids, logits):
        raise ValueError("not today")

    model, prompt = tiny_model(dtype="float32"), list(range(10, 21))
    engine = Engine(model, num_blocks=40, block_size=4, fast=False)
    forward = engine.backend.forward

    def forward_without_5(rows):
        logits = forward(rows)
        logits[:, 5] = -torch.inf
        return logits

    engine.backend.forward = forward_without_5
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request([*prompt, 8], replace(params, logits_processors=(fail,)), request_id="bad")
    engine.add_request([*prompt, 9], params, request_id="good")
    calls = count_forward(engine)
    said = drain(engine)
    assert calls == [[0, 8]] and "not today" in said["bad"][-1].error
    assert tokens_of(said["good"]) == alone(model, [*prompt, 9], params)


def test_no_block_is_copied_that_this_step_computes():
    """A sibling that found its twin's blocks in this step has not computed the prompt: it is no parent."""
    copied, made = [], scheduler()
    made.kv.copy_block = lambda *block: copied.append(block)
    twins = [make_request(name, list(range(6)), 9) for name in "abc"]
    for request in twins:
        request.siblings = twins
        made.add(request)
    for request in twins[:2]:  # both were preempted with the same outputs
        request.output_token_ids += [10, 11, 12, 13]
    assert made.schedule() == {"a": 10, "b": 2, "c": 2} and copied == []
    tables = [made.kv.block_table(request) for request in twins]
    assert tables[0][:2] == tables[1][:2] and tables[2][0] == tables[0][0] and tables[2][1] != tables[0][1]


class Plain:
    """A scheduler or a backend that cannot take back, or does not say in which order it computes."""


def test_a_part_that_cannot_undo_it_keeps_the_old_order():
    """Blocks are then found after the step that computed them: the flag is set only where all parts can."""
    made, kv = scheduler(False), BlockManager(4, 4)
    paged, unsaid = type("Paged", (), {"writes_before_reading": True})(), Plain()
    for deciding, backend, shares in ((made, unsaid, False), (Plain(), paged, False), (made, paged, True)):
        let_share_within_step(kv, deciding, backend)
        assert kv.caches_scheduled is shares, (deciding, backend)
    let_share_within_step(Plain(), made, paged)  # a block manager of a lab's
    for fast in (True, False):
        engine = Engine(tiny_model(dtype="float32"), num_blocks=8, fast=fast)
        assert engine.scheduler.kv.caches_scheduled
    assert not Engine(
        tiny_model(), num_blocks=8, parts=Parts(attend_backend=lambda model, kv, _: Plain())
    ).scheduler.kv.caches_scheduled


class FindsTooMuch(BlockManager):
    """Lets a block be found that the step fills in part only."""

    def cache_scheduled_blocks(self, request, num_new_tokens):
        super().cache_scheduled_blocks(request, num_new_tokens + self.block_size)


def test_a_block_that_is_filled_in_part_is_seen_by_the_monitor():
    prompts = [list(range(20)), [*range(20), 1]]
    settings = dict(long_prefill_token_threshold=10)
    assert serve(scheduler(**settings), prompts) == [20, 13]
    with pytest.raises(InvariantError, match="rule 'shared'"):
        serve(scheduler(manager=FindsTooMuch, **settings), prompts)


def test_a_block_is_not_shared_in_its_step_where_the_manager_says_so():
    """For a manager without the ability the monitor holds the old rule: computed, then shared."""
    made = scheduler()
    made.kv.caches_scheduled = False
    with watch(made) as monitor:
        made.kv.caches_scheduled = True
        for name in "ab":
            made.add(make_request(name, [*range(9), ord(name)]))
        with pytest.raises(InvariantError, match="rule 'shared'"):
            made.schedule()
    assert not monitor.shares_in_step


def test_a_salt_keeps_a_step_apart_too():
    made = scheduler()
    for i, salt in enumerate(("x", "y", "x")):
        made.add(make_request(f"r{i}", [*range(9), i], cache_salt=salt))
    assert made.schedule() == {"r0": 10, "r1": 10, "r2": 2}


def test_logits_equal_those_without_sharing():
    """In float64, to 1e-12: the rows behind read what the rows in front write in the same layer."""
    model, logits = tiny_model(), []
    for shares in (True, False):
        engine = Engine(model, num_blocks=60, block_size=4, max_num_batched_tokens=100)
        engine.scheduler.kv.caches_scheduled = shares
        for i in range(4):
            engine.add_request([*range(1, 14), 20 + i], SamplingParams(max_tokens=1), request_id=f"r{i}")
        forward = engine.backend.forward
        engine.backend.forward = lambda rows, forward=forward: logits.append(forward(rows)) or logits[-1]
        drain(engine)
    assert len(logits) == 2 and torch.allclose(*logits, rtol=0, atol=1e-12)
