"""Answers to one prompt (SamplingParams.n) share its blocks, and have the tokens that they have alone."""

import random
from collections import Counter

import pytest

from mini_engine.backends.padded import PaddedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.invariants import watch
from mini_engine.llm import LLM
from mini_engine.parts import Parts
from mini_engine.request import RequestStatus, SamplingParams
from mini_engine.tests.helpers import (
    SlotEngine,
    every_third,
    make_request,
    random_workload,
    tiny_model,
)
from mini_engine.tests.soak import SOAK, count
from mini_engine.trace import VirtualClock, replay
from mini_engine.trace.metrics import summary


def family(n, prompt, max_tokens=4, name="q", **sampling):
    """n answers to one prompt, of different seeds."""
    siblings = [make_request(f"{i}_{name}", prompt, max_tokens, seed=i, **sampling) for i in range(n)]
    for request in siblings:
        request.siblings = siblings
    return siblings


def forks(trace):
    return [
        e for record in trace.steps for e in record.events if e.type == "SCHEDULED" and e.num_forked_tokens
    ]


def serve(seed):
    """Play a random workload, each request with up to four answers, aborts between steps, and a pool that is
    as tight as can be. What each slot holds is checked at every read, and the monitor looks on."""
    settings, arrivals = random_workload(seed)
    rng, engine = random.Random(f"answers {seed}"), SlotEngine(**settings)
    arrivals = [
        (step, family(rng.randint(1, 4), r.prompt_token_ids, r.max_tokens, r.request_id, priority=r.priority))
        for step, r in arrivals
    ]
    waiting, step = [], 0
    with watch(engine.scheduler, seed):
        while arrivals or waiting or engine.scheduler.has_work:
            while arrivals and arrivals[0][0] <= step:
                first, *others = arrivals.pop(0)[1]
                engine.add(first)
                waiting.append((first, others))
            for first, others in list(waiting):  # as LLM.generate does
                if first.output_token_ids or first.finish_reason:
                    waiting.remove((first, others))
                    engine.add(*others)
            if engine.scheduler.has_work:
                engine.step()
            if rng.random() < 0.05 and engine.scheduler.running:
                engine.abort(rng.choice(engine.scheduler.running).request_id)
            step += 1
            assert step < 3000, "no end"
    return engine.run()


PARTS, SEEDS = (2, 4000) if SOAK else (1, 40)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_answer_is_as_alone(part):
    """Over random workloads: all reads, all outputs, all rules, and the blocks in the trace."""
    total = Counter()
    for seed in range(part, SEEDS, PARTS):
        try:
            engine = serve(seed)
            num_blocks = engine.kv.num_blocks
            for record, views in replay(engine.trace):
                held = [b for view in views.values() if view.running for b in view.blocks]
                assert len(set(held)) == num_blocks - record.num_free_blocks
                total["shared blocks"] += len(held) - len(set(held))
            found = summary(engine.trace)
            if engine.kv.enable_prefix_caching:
                assert found.num_cached_tokens == engine.kv.stats.hits
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay it with serve({seed})") from error
        total["copies"] += len(engine.copies)
        total["copied tokens"] += sum(engine.copies)
        resumed = Counter(e.id for r in engine.trace.steps for e in r.events if e.type == "PREEMPTED")
        for event in forks(engine.trace):
            total["forks"] += 1
            total["forks after a preemption"] += event.id in resumed
            total["forks that copy nothing"] += event.num_cached_tokens % engine.kv.block_size == 0
    for what, number in total.items():
        count(f"answers: {what}", number)
    assert all(number > 2 for number in total.values()) and len(total) == 6, total


@every_third("size", [3, 1, 16, 4], "caching", [True, False])
def test_answers_of_a_model(size, caching):
    """On real attention, in a pool so tight that answers are preempted: each has the tokens of its seed,
    and with drafts too."""
    model, prompts = tiny_model(), [list(range(17)), list(range(9)), [5]]
    params = [SamplingParams(seed=5, max_tokens=9, n=4, top_k=20), SamplingParams(seed=9, max_tokens=7, n=3)]
    params.append(SamplingParams(seed=1, max_tokens=8, n=2))
    settings = dict(block_size=size, enable_prefix_caching=caching, watermark=0)

    def propose(requests):
        return [[1, 2] if len(request.output_token_ids) % 2 else [] for request in requests]

    engine = Engine(
        model,
        num_blocks=max(4, 32 // size),
        record=True,
        clock=VirtualClock(),
        parts=Parts(propose=propose),
        **settings,
    )
    with watch(engine):
        outputs = LLM.from_engine(engine).generate(prompts, params, use_tqdm=False)
    preempted = sum(e.type == "PREEMPTED" for record in engine.trace.steps for e in record.events)
    assert (preempted or size == 16) and (forks(engine.trace) or size == 1 and caching)
    alone = LLM.from_engine(Engine(model, num_blocks=64, **settings))
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        for i, answer in enumerate(output.outputs):
            (expected,) = alone.generate(prompt, param.of_sample(i), use_tqdm=False)
            assert answer.token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("caching", [True, False])
def test_the_memory_of_eight_answers(caching):
    """A prompt of 500 tokens and 16 of output, in blocks of 16: eight requests hold 264 blocks, eight answers
    47, because they share 31 and each has a copy of the block that the prompt does not fill, and one more.
    With the prefix cache eight requests of one step share as much."""

    model = tiny_model(max_position_embeddings=600, dtype="float32")

    def most_held(prompts, **params):
        settings = dict(block_size=16, max_num_batched_tokens=4096, enable_prefix_caching=caching)
        engine = Engine(model, num_blocks=300, record=True, **settings)
        params = SamplingParams(max_tokens=16, seed=1, **params)
        LLM.from_engine(engine).generate(prompts, params, use_tqdm=False)
        return max(300 - record.num_free_blocks for record in engine.trace.steps)

    prompt = [7] * 500
    assert most_held([prompt] * 8) == (47 if caching else 8 * 33)
    assert most_held(prompt, n=8) == 31 + 8 * 2 == 47


def test_a_backend_that_cannot_copy_computes_each_answer_whole():
    model, prompt = tiny_model(), list(range(17))
    parts, params = Parts(attend_backend=PaddedBackend), SamplingParams(seed=5, max_tokens=4, n=3)
    engine = Engine(model, num_blocks=64, enable_prefix_caching=False, parts=parts, record=True)
    (output,) = LLM.from_engine(engine).generate(prompt, params, use_tqdm=False)
    assert forks(engine.trace) == [] and sum(r.num_batched_tokens for r in engine.trace.steps) == 3 * (17 + 3)
    forked = LLM.from_engine(Engine(model, num_blocks=64, enable_prefix_caching=False))
    (other,) = forked.generate(prompt, params, use_tqdm=False)
    assert [a.token_ids for a in output.outputs] == [a.token_ids for a in other.outputs]


# ------------------------------------------------------------------------------------ the manager


def parent_and_child(num_prompt_tokens=10, num_blocks=6, **settings):
    """A manager of blocks of 4 with a request that has computed its prompt, and one with the same prompt."""
    kv = BlockManager(num_blocks, 4, watermark=0, **settings)
    copies = []
    kv.copy_block = lambda *block: copies.append(block)
    parent, child = family(2, list(range(num_prompt_tokens)))
    assert kv.admit(parent)
    parent.num_computed_tokens, parent.status = num_prompt_tokens, RequestStatus.RUNNING
    kv.cache_blocks(parent)
    return kv, copies, parent, child


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("num_prompt_tokens", "shared", "copied"), [(10, 2, 1), (8, 1, 3), (9, 2, 0), (1, 0, 0), (4, 0, 3)]
)
def test_full_blocks_are_shared_and_the_last_is_copied(num_prompt_tokens, shared, copied, caching):
    """All but the last token of the prompt is there; of its block, the child has a copy."""
    kv, copies, parent, child = parent_and_child(num_prompt_tokens, enable_prefix_caching=caching)
    assert kv.admit(child)
    kv.check()
    ours, theirs = kv.block_table(parent), kv.block_table(child)
    assert theirs[:shared] == ours[:shared] and not {*theirs[shared:]} & {*ours}
    assert copies == ([(ours[shared], theirs[shared], copied)] if copied else [])
    assert child.num_computed_tokens == child.num_cached_tokens == num_prompt_tokens - 1
    assert child.num_forked_tokens == (copied if caching else num_prompt_tokens - 1)
    assert kv.stats.hits == (4 * shared if caching else 0)
    kv.unadmit(child)
    assert child.num_computed_tokens == child.num_cached_tokens == child.num_forked_tokens == 0
    assert kv.stats.hits == 0 and kv.num_free_blocks == 6 - len(ours)
    kv.check()


def test_a_fork_without_room_changes_nothing():
    kv, copies, parent, child = parent_and_child(num_blocks=3)
    before = list(kv.block_table(parent))
    assert kv.admit(child) is kv.fork(parent, child) is False
    assert copies == [] and kv.block_table(parent) == before and not kv.block_table(child)
    assert child.num_computed_tokens == 0 and kv.num_free_blocks == 0
    kv.check()


@pytest.mark.parametrize(
    ("change", "forked"),
    [
        (dict(status=RequestStatus.FINISHED), False),  # its id may be another's now
        (dict(num_computed_tokens=8), False),
        (dict(num_computed_tokens=9), True),  # the child computes the last token for itself in any case
        # What it found at its admission may be computed in this step, too late to be copied.
        (dict(num_cached_tokens=11, num_computed_tokens=11), False),
        (dict(num_cached_tokens=11, num_computed_tokens=12), True),
    ],
)
def test_only_a_running_sibling_with_the_whole_prompt_is_forked(change, forked):
    kv, copies, parent, child = parent_and_child(num_blocks=9, enable_prefix_caching=False)
    vars(parent).update(change)
    assert kv.admit(child) and child.num_computed_tokens == (9 if forked else 0) and len(copies) == forked


def test_a_resumed_answer_is_forked_with_its_outputs():
    """The whole prompt is there, and the last of its tokens too, because an output follows."""
    kv, copies, parent, child = parent_and_child(num_blocks=9, enable_prefix_caching=False)
    child.output_token_ids = [5, 6, 7]
    assert kv.admit(child) and child.num_computed_tokens == 10 and len(kv.block_table(child)) == 4
    assert copies == [(kv.block_table(parent)[2], kv.block_table(child)[2], 2)]


def test_a_fork_is_refused_for_another_prompt():
    for change in (
        dict(prompt_token_ids=[1] * 10),
        dict(cache_salt="other"),
        dict(prompt_token_ids=[1] * 11),
    ):
        kv, _, parent, child = parent_and_child(num_blocks=9)
        vars(child).update(change)
        with pytest.raises(ValueError, match="request '0_q' has not computed the prompt of '1_q'"):
            kv.fork(parent, child)
        assert not kv.block_table(child)
    kv, _, parent, child = parent_and_child(num_blocks=9)
    parent.num_computed_tokens = 8
    with pytest.raises(ValueError, match="has not computed the prompt"):
        kv.fork(parent, child)
    parent.num_computed_tokens = 10
    assert kv.fork(parent, child)
    with pytest.raises(ValueError, match="holds blocks already"):
        kv.fork(parent, child)
    kv.copy_block = None
    with pytest.raises(ValueError, match="set copy_block"):
        kv.fork(parent, child)
