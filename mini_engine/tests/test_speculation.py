"""Several tokens a step: drafts that are right or wrong change the number of steps, and nothing else.

Where drafts are drawn here, they are parts of what the request says without them, and other tokens.
"""

import random
from collections import Counter

import pytest

from mini_engine.backends.padded import PaddedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.config import SpeculativeConfig
from mini_engine.engine import Engine
from mini_engine.invariants import watch
from mini_engine.llm import LLM
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.schedule_step import next_chunk
from mini_engine.scheduler import Scheduler
from mini_engine.speculative.adaptive import AdaptiveProposer
from mini_engine.tests.helpers import byte_tokenizer, drain, make_request, scripted_engine, text_of, tokens_of
from mini_engine.tests.soak import SOAK, count
from mini_engine.tests.test_faults import MODELS, check_trace, workload
from mini_engine.trace import VirtualClock


class Drafts:
    """Proposes at random up to five tokens of what each request says without drafts, some of them changed."""

    def __init__(self, seed, said, vocab_size=200):
        self.rng, self.said, self.vocab_size = random.Random(f"drafts of {seed}"), said, vocab_size

    def __call__(self, requests):
        proposed = []
        for request in requests:
            done = len(request.output_token_ids)
            drafts = self.said.get(request.request_id, [])[done : done + self.rng.randint(0, 5)]
            drafts += [3] * self.rng.choice([0, 0, 2])
            if drafts and self.rng.random() < 0.5:
                drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(self.vocab_size)
            proposed.append(drafts)
        return proposed


def serve(seed, propose=None, **parts):
    """Play a random workload, watched; return the outcome by request, and the engine."""
    settings, requests = workload(seed)
    if parts:
        settings["enable_prefix_caching"] = False
    parts = Parts(propose=propose, **parts)
    engine = Engine(
        MODELS["float64"], byte_tokenizer(), record=True, clock=VirtualClock(), parts=parts, **settings
    )
    said, left, step = {name: [] for _, name, *_ in requests}, list(requests), 0
    with watch(engine, seed):
        while left or engine.has_work:
            while left and left[0][0] <= step:
                _, name, prompt, params, priority = left.pop(0)
                engine.add_request(prompt, params, request_id=name, priority=priority)
            for delta in engine.step() if engine.has_work else ():
                said[delta.request_id].append(delta)
            engine.scheduler.kv.check()
            step += 1
            assert step < 500, "no end"
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    return said, engine


def outcome(said):
    return {n: (tokens_of(d), text_of(d), d[-1].finish_reason, d[-1].stop_reason) for n, d in said.items()}


def compare(seed, path, **parts):
    """Check that drafts change nothing but the steps; return what became of them."""
    quiet, plain = serve(seed, **parts)
    said, engine = serve(seed, Drafts(seed, {name: tokens_of(d) for name, d in quiet.items()}), **parts)
    assert outcome(said) == outcome(quiet)
    for name, deltas in said.items():
        logprobs, expected = ([x for d in ds for x in d.logprobs or ()] for ds in (deltas, quiet[name]))
        for got, right in zip(logprobs, expected, strict=True):
            assert got == pytest.approx(right, abs=1e-6)
    check_trace(
        engine, {n: (t, text, reason, None) for n, (t, text, reason, _) in outcome(said).items()}, path
    )
    steps = engine.trace.steps
    proposed = sum(len(ids) for record in steps for ids in record.draft_token_ids.values())
    accepted = sum(n for record in steps for n in record.num_accepted_tokens.values())
    given = sum(len(blocks) for record in steps for blocks in record.returned_blocks.values())
    preempted = sum(event.type == "PREEMPTED" for record in steps for event in record.events)
    fewer = len(plain.trace.steps) - len(steps)
    return Counter(proposed=proposed, accepted=accepted, returned=given, preempted=preempted, fewer=fewer)


@pytest.mark.parametrize("part", range(2))
def test_drafts_change_nothing_but_the_steps(part, tmp_path):
    """Over random workloads with preemption, chunking, prefix cache, seeds, penalties and stop strings:
    tokens, text, log probabilities, finish reasons; every rule holds, and the trace is folded right."""
    total = Counter()
    for seed in range(part, 1000 if SOAK else 24, 2):
        try:
            total += compare(seed, tmp_path / "run.jsonl")
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay it with compare({seed}, path)") from error
    for what, number in total.items():
        count(f"speculation: {what}", number)
    assert all(total[what] > 3 for what in ("proposed", "accepted", "returned", "preempted", "fewer")), total
    assert total["accepted"] < total["proposed"]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_in_the_padded_batch(seed, tmp_path):
    compare(seed, tmp_path / "run.jsonl", attend_backend=PaddedBackend)


def test_several_tokens_a_step_find_room():
    """Three requests that are given three tokens a step, on six blocks of two: the newest is preempted."""
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


def drafted(num_blocks, size=1, prompt=3, max_tokens=9, drafts=(5, 5, 5), others=0):
    """A scheduler with requests in decode, the first of them with drafts, and that request."""
    kv = BlockManager(num_blocks, size, watermark=0)
    scheduler = Scheduler(kv, max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(1 + others):
        scheduler.add(make_request(f"q{i}", prompt, max_tokens))
    scheduler.update(scheduler.schedule(), {f"q{i}": [4] for i in range(1 + others)})
    scheduler.running[0].spec_token_ids = list(drafts)
    return scheduler, scheduler.running[0]


def test_a_draft_takes_no_block_that_another_was_promised():
    """Two decodes need a block each, and three are free: of three drafts one is scheduled, none preempts."""
    scheduler, request = drafted(9, max_tokens=5, others=1)
    assert scheduler.schedule() == {"q0": 2, "q1": 1} and request.spec_token_ids == [5]
    assert len(scheduler.running) == 2 and scheduler.kv.num_free_blocks == 0


def test_drafts_end_before_max_tokens():
    """Three tokens are left, and one of them is the model's own."""
    scheduler, request = drafted(20, max_tokens=4, drafts=[5] * 9)
    assert scheduler.schedule() == {"q0": 3} and request.spec_token_ids == [5, 5]


def test_drafts_fit_into_budget_and_threshold():
    for name, value, expected in (("max_num_batched_tokens", 3, 2), ("long_prefill_token_threshold", 2, 1)):
        scheduler, request = drafted(20)
        setattr(scheduler, name, value)
        assert scheduler.schedule() == {"q0": 1 + expected} and len(request.spec_token_ids) == expected


@pytest.mark.parametrize(("given", "accepted"), [([7], 0), ([5, 7], 1), ([5, 5, 7], 2), ([5, 5, 5, 7], 3)])
def test_rejected_tokens_count_for_nothing(given, accepted):
    """They are not computed, not published, and their blocks are free in the same step."""
    scheduler, request = drafted(20)
    assert scheduler.schedule() == {"q0": 4} and scheduler.kv.num_free_blocks == 20 - 7
    assert scheduler.update({"q0": 4}, {"q0": given}) == []
    assert request.num_computed_tokens == 4 + accepted and request.output_token_ids == [4, *given]
    assert scheduler.kv.num_free_blocks == 20 - 4 - accepted and request.spec_token_ids == []
    assert scheduler.kv.num_cached_blocks == 4 + accepted and len(request.block_hashes) == 4 + accepted
    twin = make_request("twin", request.token_ids() + [1])
    assert len(scheduler.kv.get_computed_blocks(twin)) == 4 + accepted
    assert scheduler.schedule() == {"q0": 1}


def test_an_error_in_update_leaves_drafts_and_hashes_as_they_were():
    """The second request's blocks cannot be published: nothing of the first's is."""
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


def test_a_preempted_request_drops_its_drafts():
    scheduler, request = drafted(20)
    scheduler.preempt(request)
    assert request.spec_token_ids == [] and request.token_ids(0, 9) == request.token_ids()


def test_a_stop_in_the_midst_of_several_tokens():
    """Stop string, end of text and max_tokens end a request where they would one by one, text included."""
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


def test_a_chunk_that_reaches_beyond_the_text_ends_it():
    request = drafted(20)[1]
    assert next_chunk(request, 4) == ([4, 5, 5, 5], [3, 4, 5, 6], True)


class Scripted:
    """Proposes the first tokens of `text` that the request has not said; `asked` is how many it could."""

    def __init__(self, text):
        self.text, self.asked = text, []

    def propose(self, request, most):
        self.asked.append(most)
        done = len(request.output_token_ids)
        return self.text[done : done + most]


def numbers_of_drafts(right, most=8, max_tokens=999):
    """How many drafts were asked for in each step when `right(i)` says how many of those of step i are right;
    0 for a pause."""
    request, scripted = make_request("a", 2, max_tokens), Scripted([5] * 999)
    request.output_token_ids.append(5)
    propose, numbers = AdaptiveProposer(scripted, most), []
    for step in range(60):
        scripted.asked.clear()
        (drafts,) = propose([request])
        assert len(drafts) <= max(0, max_tokens - len(request.output_token_ids) - 1)
        numbers.append(len(drafts) if scripted.asked else 0)
        said = min(right(step), len(drafts))
        request.output_token_ids += [5] * said + [5 if said == len(drafts) else 6]
        scripted.text = request.output_token_ids + [5] * 99
    return numbers


def test_drafts_are_as_many_as_are_accepted():
    """All: the most. None: half, down to one, then pauses of 4, 8, 16 steps. Some: one more than those."""
    assert numbers_of_drafts(lambda step: 99) == [8] * 60
    none = numbers_of_drafts(lambda step: 0)
    assert none[:4] == [8, 4, 2, 1] and [i for i, n in enumerate(none) if n] == [0, 1, 2, 3, 8, 17, 34]
    assert numbers_of_drafts(lambda step: 3) == [8] + [4] * 59
    again = numbers_of_drafts(lambda step: 99 * (step > 16))
    assert again[16:22] == [0, 1, 2, 4, 8, 8], "what is accepted again is proposed again"


def test_no_more_drafts_than_may_be_said():
    assert numbers_of_drafts(lambda step: 99, max_tokens=15)[:3] == [8, 4, 0]


def test_a_step_that_failed_teaches_nothing():
    request, scripted = make_request("a", 2, 99), Scripted([5] * 99)
    request.output_token_ids.append(5)
    propose = AdaptiveProposer(scripted, 4)
    assert [len(propose([request])[0]) for _ in range(5)] == [4] * 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 3)),
        ({"prompt_lookup_max": 5}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lengths_that_are_looked_up(given, expected):
    """As in vLLM, one of them alone is both."""
    assert SpeculativeConfig.of({"num_speculative_tokens": 4, **given}).lookup_lengths == expected


def test_a_setting_of_the_engine():
    """speculative_config alone makes an engine draft: the same text in fewer steps; a dict or an object."""
    config = SpeculativeConfig.parse("ngram:3")
    assert config == SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3})
    texts, steps = [], []
    for given in (None, config, {"num_speculative_tokens": 3}):
        llm = LLM("shakespeare", dtype="float32", device="cpu", record=True, speculative_config=given)
        (output,) = llm.generate("the the the the ", SamplingParams(temperature=0, max_tokens=40))
        texts.append(output.outputs[0].token_ids)
        steps.append(len(llm.engine.trace.steps))
    assert texts[0] == texts[1] == texts[2] and steps[0] == 40 and steps[1] == steps[2] < 36
