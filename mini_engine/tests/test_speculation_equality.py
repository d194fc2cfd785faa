"""Speculation says what plain decoding says: in float32 exactly, in bfloat16 up to rounding.

Random workloads with everything on. SOAK=1 plays 1,000 of them.
"""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.invariants import watch
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import load
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.sampler import Sampler, rows_before
from mini_engine.structured.grammar import regex_grammar
from mini_engine.structured.logits import GrammarProcessor
from mini_engine.tests.helpers import byte_tokenizer
from mini_engine.tests.soak import SOAK, count
from mini_engine.tests.test_faults import MODELS, workload
from mini_engine.tests.test_speculation import Drafts
from mini_engine.trace import VirtualClock

TOKENIZER = byte_tokenizer()
SHAPES = [{"regex": r"(ab|ba)+"}, {"regex": r"[a-c]{3,9}x?"}, {"choice": ["yes, yes", "no|no", "a.b"]}]
if find_spec("llguidance"):
    SHAPES.append({"json": {"type": "array", "items": {"enum": [1, "ab", True]}, "maxItems": 4}})


def prompts_of(seed):
    """Settings of an engine, and arguments of LLM.generate: prompts, parameters, priorities. Masks keep a
    state, so they are made anew for each run."""
    settings, requests = workload(seed)
    rng = random.Random(f"everything of {seed}")
    params = []
    for *_, given, _ in requests:
        n = rng.choice([1, 1, 2, 3]) if given.temperature else 1
        masks, shape = (), rng.choice([None, None, None, *SHAPES])
        if n == 1 and shape is None and rng.random() < 0.2:
            grammar = regex_grammar(SHAPES[0]["regex"], TOKENIZER.token_bytes, 256)
            masks = (GrammarProcessor(grammar),)
        params.append(
            replace(
                given,
                n=n,
                # Without one it is drawn for the arrival, and samples arrive when the prompt is done.
                seed=len(params) if n > 1 else given.seed,
                max_tokens=given.max_tokens + rng.choice([0, 8]),
                min_tokens=rng.choice([0, 0, 1]),
                presence_penalty=rng.choice([0, 0, 0.5]),
                frequency_penalty=rng.choice([0, 0, 0.3]),
                top_k=rng.choice([0, 0, 20]),
                top_p=rng.choice([1, 1, 0.9]),
                min_p=rng.choice([0, 0, 0.02]),
                logit_bias=rng.choice([None, {7: 2.0}]),
                bad_words=rng.choice([(), ("ab",)]),
                stop=rng.choice([(), given.stop, ("a", "bb")]),
                stop_token_ids=rng.choice([(), (9, 200)]),
                include_stop_str_in_output=rng.random() < 0.3,
                logits_processors=masks,
                structured_outputs=shape,
            )
        )
    settings["num_blocks"] += -(-8 // settings["block_size"])
    return settings, [prompt for _, _, prompt, *_ in requests], params, [r[-1] for r in requests]


def generate(seed, propose=None, logprobs=None, **changed):
    """Play the workload of a seed in float32, every rule watched; return the answers, and what happened."""
    settings, prompts, params, priorities = prompts_of(seed)
    if logprobs:
        params = [replace(given, logprobs=logprobs) for given in params]
    engine = Engine(
        MODELS["float32"],
        TOKENIZER,
        record=True,
        clock=VirtualClock(),
        parts=Parts(propose=propose),
        **settings | changed,
    )
    with watch(engine, seed):
        outputs = LLM.from_engine(engine).generate(prompts, params, priority=priorities, use_tqdm=False)
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    answers = {f"{o.request_id}/{a.index}": a for o in outputs for a in o.outputs}
    for output, given in zip(outputs, params, strict=True):
        check_shapes(output.outputs, given)
    return answers, happened(engine.trace), params


def check_shapes(answers, params):
    """Whole texts have the shape that was asked for, unless a stop string was cut off them."""
    wanted = params.structured_outputs
    for answer in answers:
        assert (answer.is_complete is None) == (wanted is None)
        if answer.is_complete and not params.stop and not params.stop_token_ids:
            if wanted.json:
                assert all(item in (1, "ab", True) for item in json.loads(answer.text))
            else:
                assert re.fullmatch(wanted.kind_and_spec[1], answer.text)


def happened(trace):
    """Count what a workload shows."""
    said, events = Counter(), Counter(e.type for r in trace.steps for e in r.events)
    said["steps"], said["preempted"] = len(trace.steps), events["PREEMPTED"]
    said["cached"] = sum(e.num_cached_tokens for r in trace.steps for e in r.events if e.type == "SCHEDULED")
    said["drafts"] = sum(len(ids) for r in trace.steps for ids in r.draft_token_ids.values())
    said["accepted"] = sum(sum(r.num_accepted_tokens.values()) for r in trace.steps)
    said["chunks"] = sum(
        n > 1 and name not in r.new_tokens for r in trace.steps for name, n in r.scheduled.items()
    )
    return said


def compare_ranks(got, right):
    """Tokens may only change places with others that are as likely up to rounding; `right` has all tokens."""
    likely = sorted((of.logprob for of in right.values()), reverse=True)
    for of in got.values():
        assert of.logprob == pytest.approx(likely[of.rank - 1], abs=1e-5)


def compare(seed):
    """Compare both ways to draft with none; return what happened in all."""
    plain, before, params = generate(seed)
    total = before + Counter(masked=sum(bool(p.logits_processors or p.structured_outputs) for p in params))
    ways = {"speculative_config": {"num_speculative_tokens": random.Random(seed).randint(1, 6)}}
    drawn = Drafts(seed, {name.replace("/0", ""): a.token_ids for name, a in plain.items()})
    for changed in (ways, {"propose": drawn}):
        answers, after, _ = generate(seed, **changed)
        total += after
        total["fewer"] += before["steps"] - after["steps"]
        assert answers.keys() == plain.keys()
        for name, answer in answers.items():
            expected = plain[name]
            for what in ("token_ids", "text", "finish_reason", "stop_reason", "is_complete"):
                assert getattr(answer, what) == getattr(expected, what), (name, what)
            assert len(answer.logprobs or ()) == len(expected.logprobs or ())
            for i, (got, right) in enumerate(
                zip(answer.logprobs or (), expected.logprobs or (), strict=True)
            ):
                if {of: got[of].rank for of in got} != {of: right[of].rank for of in right}:
                    right = generate(seed, logprobs=256)[0][name].logprobs[i]
                    compare_ranks(got, right)
                for token, of in got.items():
                    assert of.logprob == pytest.approx(right[token].logprob, abs=1e-5)
    return total


PARTS, SEEDS = (2, 1000) if SOAK else (1, 5)


@pytest.mark.parametrize("part", range(PARTS))
def test_speculation_says_what_plain_decoding_says(part):
    """Tokens, text, log probabilities, ranks, and why each answer ended: with preemption, chunking, prefix
    cache, n, seeds, penalties, limits, stop strings and masks, drafts by prompt lookup and drawn ones."""
    total = Counter()
    for seed in range(part, SEEDS, PARTS):
        try:
            total += compare(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay it with compare({seed})") from error
    for what, number in total.items():
        count(f"speculation, everything on: {what}", number)
    shown = ("preempted", "cached", "drafts", "accepted", "chunks", "masked", "fewer")
    assert all(total[what] > 5 for what in shown), total
    assert total["accepted"] < total["drafts"]


class Watching(Sampler):
    """Keeps the logits of each output, by request and number; those behind a wrong draft are overwritten."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.rows = {}

    def __call__(self, logits, requests):
        for row, request, ahead in zip(logits, requests, rows_before(requests), strict=True):
            self.rows[request.request_id, len(request.output_token_ids) + ahead] = row.float().clone()
        return super().__call__(logits, requests)


def listened(dtype, propose=None):
    """Return greedy tokens of the embedded model by request, and the logits of each."""
    prompts = [f"{name}:\n{line}" for name in ("ROMEO", "HAMLET", "FIRST WITCH") for line in ("O, ", "My ")]
    engine = Engine(*load("shakespeare", dtype, "cpu"), parts=Parts(Sampler=Watching, propose=propose))
    params = SamplingParams(temperature=0, max_tokens=50)
    outputs = LLM.from_engine(engine).generate(prompts, params, use_tqdm=False)
    return {o.request_id: o.outputs[0].token_ids for o in outputs}, engine.sampler.rows


@pytest.mark.parametrize(("dtype", "roundings"), [("float32", 64), ("bfloat16", 2)])
def test_another_token_only_within_rounding(dtype, roundings):
    """While two texts are the same their logits differ by some roundings of the largest; where they part, the
    token of plain decoding was ahead by no more than that. In float32 none parts."""
    plain, expected = listened(dtype)
    said, rows = listened(dtype, Drafts(dtype, plain, 67))
    compared = 0
    for name, token_ids in plain.items():
        pairs = enumerate(zip(token_ids, said[name], strict=True))
        parted = next((i for i, (a, b) in pairs if a != b), None)
        assert parted is None or dtype == "bfloat16"
        for i in range(len(token_ids) if parted is None else parted + 1):
            row, other = expected[name, i], rows[name, i]
            most = roundings * torch.finfo(getattr(torch, dtype)).eps * row.abs().max()
            compared += not torch.equal(row, other)
            assert (row - other).abs().max() <= most
            assert row[token_ids[i]] - row[said[name][i]] <= most
    assert compared > 50, "several rows of a product are rounded as one is"
