"""Several tokens a step: drafts that are right or wrong change the number of steps, and nothing else.

Where drafts are drawn here, they are parts of what the request says without them, and other tokens.
"""

import random
from collections import Counter

import pytest
import torch

from mini_engine.backends.padded import PaddedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.config import SpeculativeConfig
from mini_engine.engine import Engine
from mini_engine.invariants import watch
from mini_engine.llm import LLM
from mini_engine.parts import Parts
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import Sampler
from mini_engine.schedule_step import next_chunk
from mini_engine.speculative.adaptive import AdaptiveProposer, draft
from mini_engine.speculative.draft_model import DraftModelProposer
from mini_engine.speculative.ngram import NgramProposer
from mini_engine.speculative.rejection_sampler import residual
from mini_engine.speculative.verify import schedule_drafts
from mini_engine.structured.grammar import regex_grammar
from mini_engine.structured.logits import GrammarProcessor
from mini_engine.tests.helpers import (
    alone,
    byte_tokenizer,
    drafted,
    drain,
    make_request,
    outcome,
    scripted_engine,
    tokens_of,
)
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


PARTS, SEEDS = (2, 1000) if SOAK else (1, 7)


@pytest.mark.parametrize("part", range(PARTS))
def test_drafts_change_nothing_but_the_steps(part, tmp_path):
    """Over random workloads with preemption, chunking, prefix cache, seeds, penalties and stop strings:
    tokens, text, log probabilities, finish reasons; every rule holds, and the trace is folded right."""
    total = Counter()
    for seed in range(part, SEEDS, PARTS):
        try:
            total += compare(seed, tmp_path / "run.jsonl")
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay it with compare({seed}, path)") from error
    for what, number in total.items():
        count(f"speculation: {what}", number)
    assert all(total[what] > 3 for what in ("proposed", "accepted", "returned", "preempted", "fewer")), total
    assert total["accepted"] < total["proposed"]


@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_drafts_in_the_padded_batch(seed, tmp_path):
    compare(seed, tmp_path / "run.jsonl", attend_backend=PaddedBackend)


def test_drafts_fit_into_budget_and_threshold():
    limits = ("max_num_batched_tokens", 3, 2), ("long_prefill_token_threshold", 2, 1)
    none_left = ("long_prefill_token_threshold", 1, 0), ("clamp", lambda *_: 0, 0)
    for name, value, expected in (*limits, *none_left):
        scheduler, request = drafted(20)
        setattr(scheduler, name, value)
        assert scheduler.schedule() == {"q0": 1 + expected} and len(request.spec_token_ids) == expected


def test_a_preempted_request_drops_its_drafts():
    scheduler, request = drafted(20)
    scheduler.preempt(request)
    assert request.spec_token_ids == [] and request.token_ids(0, 9) == request.token_ids()


def test_no_text_beyond_max_tokens():
    """A schedule that lets more tokens through than are left gives out no text of the others."""
    engine, tokenizer = scripted_engine({"a": "hello"}), byte_tokenizer()
    engine.add_request("hi", SamplingParams(temperature=0, max_tokens=3), request_id="a")
    engine.step()
    request = engine.requests["a"]
    sampled = [(request, tokenizer.encode("ello"), torch.zeros(4, 257))]
    tokens, stopped = engine.output_processor.process(sampled)
    assert (tokenizer.decode(tokens["a"]), stopped) == ("el", {})
    assert engine.output_processor.make_delta(request).text == "el"


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


def numbers_of_drafts(right, most=8, max_tokens=999, steps=60):
    """How many drafts were asked for in each step when `right(i)` says how many of those of step i are right;
    0 for a pause."""
    request, scripted = make_request("a", 2, max_tokens), Scripted([5] * 999)
    request.output_token_ids.append(5)
    propose, numbers = AdaptiveProposer(scripted, most), []
    for step in range(steps):
        scripted.asked.clear()
        (drafts,) = propose([request])
        assert len(drafts) <= max(0, max_tokens - len(request.output_token_ids) - 1)
        numbers.append(len(drafts) if scripted.asked else 0)
        said = min(right(step), len(drafts))
        request.output_token_ids += [5] * said + [5 if said == len(drafts) else 6]
        scripted.text = request.output_token_ids + [5] * 99
    return numbers


def test_drafts_are_as_many_as_are_accepted():
    """Some: the most, or two after a single one. None: half, down to one, then pauses of 4 to 64 steps."""
    assert numbers_of_drafts(lambda step: 99) == [2] + [8] * 59
    none = numbers_of_drafts(lambda step: 0, steps=200)
    assert none[:2] == [2, 1] and [i for i, n in enumerate(none) if n] == [0, 1, 6, 15, 32, 65, 130, 195]
    assert numbers_of_drafts(lambda step: 1) == [2] + [8] * 59
    falls = numbers_of_drafts(lambda step: 99 * (step < 2))
    assert falls[:7] == [2, 8, 8, 4, 2, 1, 0]
    again = numbers_of_drafts(lambda step: 99 * (step > 14))
    assert again[14:18] == [0, 1, 2, 8], "what is accepted again is proposed again"
    assert numbers_of_drafts(lambda step: 99, most=1) == [1] * 60


def test_drafts_end_where_the_grammar_forbids_them():
    request, other = make_request("a", 2, 9), make_request("b", 2, 9)
    for made in (request, other):
        made.output_token_ids, made.num_computed_tokens = [0], 2
    request.grammar = GrammarProcessor(regex_grammar("ab*c", (b"a", b"b", b"c", b""), 3))
    draft([request, other], lambda requests: [[1, 1, 0, 1]] * 2)
    assert (request.spec_token_ids, other.spec_token_ids) == ([1, 1], [1, 1, 0, 1])


def test_no_more_drafts_than_may_be_said():
    assert numbers_of_drafts(lambda step: 99, max_tokens=12)[:3] == [2, 7, 0]


def test_a_prompt_between_decodes_gets_no_drafts():
    prompt, decode = make_request("a", 3, 9), make_request("b", 3, 9)
    prompt.spec_token_ids, decode.spec_token_ids = [1], [1, 2]
    decode.output_token_ids, decode.num_computed_tokens = [5], 3
    scheduled, kv = {"a": 3, "b": 1}, BlockManager(9, 2)
    schedule_drafts([prompt, decode], scheduled, kv, 9)
    assert scheduled == {"a": 3, "b": 3} and (prompt.spec_token_ids, decode.spec_token_ids) == ([], [1, 2])


def test_a_step_that_failed_teaches_nothing():
    request, scripted = make_request("a", 2, 99), Scripted([5] * 99)
    request.output_token_ids.append(5)
    propose = AdaptiveProposer(scripted, 4)
    assert [len(propose([request])[0]) for _ in range(5)] == [2] * 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 5)),
        ({"prompt_lookup_max": 5}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lengths_that_are_looked_up(given, expected):
    """One of them alone is both, as in vLLM."""
    assert SpeculativeConfig.of({"num_speculative_tokens": 4, **given}).lookup_lengths == expected


def test_a_text_that_is_shorter_than_the_longest_end():
    assert NgramProposer(1, 6, 4).propose(make_request("a", [1, 2, 2, 1, 2], 9)) == [2, 1, 2]


def test_a_lookup_reads_no_more_than_what_is_new(monkeypatch):
    proposer, request, starts, read = NgramProposer(), make_request("a", 500, 9), [], Request.token_ids
    proposer.propose(request)
    request.output_token_ids.append(9999)
    monkeypatch.setattr(
        Request, "token_ids", lambda self, start=0, *end: (starts.append(start), read(self, start, *end))[1]
    )
    proposer.propose(request)
    assert min(starts) >= 500 - 3


def test_rows_and_lists_that_do_not_fit_are_refused():
    request = make_request("a", 3, 9)
    request.output_token_ids, request.num_computed_tokens = [5], 3
    for wrong in (lambda: draft([request], lambda requests: []), lambda: residual([0.5, 0.5], [1.0])):
        with pytest.raises(ValueError, match="shorter"):
            wrong()


def test_the_proposers_defaults_are_the_labs():
    proposer = NgramProposer()
    assert (proposer.prompt_lookup_min, proposer.prompt_lookup_max) == (1, 3)
    assert proposer.num_speculative_tokens == DraftModelProposer(None).num_speculative_tokens == 4


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


def test_an_error_that_does_not_come_again_is_raised_whatever_is_rejected():
    """The sampler fails once, in a step whose drafts are wrong: the step raises, and then goes on."""
    failures = [OSError("the device was busy")]

    class FailsOnce(Sampler):
        def __call__(self, logits, requests):
            if len(requests) > 1 and failures:
                raise failures.pop()
            return super().__call__(logits, requests)

    model, params = MODELS["float64"], SamplingParams(temperature=0, max_tokens=6)
    parts = Parts(propose=lambda requests: [[3, 3] for _ in requests], Sampler=FailsOnce)
    engine = Engine(model, num_blocks=20, parts=parts)
    engine.add_request([1, 2, 3], params, request_id="r0")
    first = engine.step()
    with pytest.raises(OSError, match="the device was busy"):
        engine.step()
    assert tokens_of([*first, *drain(engine)["r0"]]) == alone(model, [1, 2, 3], params)
