"""A draft model: greedy drafts change no text, drawn ones change no distribution."""

import random
from collections import Counter

import pytest
import torch

from mini_engine.backends.draft import DraftLM, DraftLMProposer
from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import load
from mini_engine.request import SamplingParams
from mini_engine.sampler import Sampler, probabilities, random_number
from mini_engine.tests.helpers import dense_logits, make_request, tiny_model
from mini_engine.tests.soak import SOAK
from mini_engine.tests.test_speculation_equality import happened

DRAFT = {"method": "draft_model", "model": "shakespeare-draft", "num_speculative_tokens": 4}
PROMPTS = ["ROMEO:\n", "O, speak again", "First Witch:\nWhen shall we"]


def generate(loaded, config, **params):
    engine = Engine(*loaded, record=True, speculative_config=config, block_size=4, num_blocks=28)
    given = SamplingParams(**{"max_tokens": 30, "seed": 3} | params)
    outputs = LLM.from_engine(engine).generate(PROMPTS, given, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs], happened(engine.trace)


@pytest.mark.parametrize(("temperature", "share", "steps"), [(0, 0.5, 0.7), (0.8, 0.3, 0.9)])
def test_greedy_drafts_change_no_text(shakespeare, temperature, share, steps):
    """The small model of the plays says much of what the large one says, most where that is greedy."""
    plain, before = generate(shakespeare, None, temperature=temperature)
    said, after = generate(shakespeare, DRAFT, temperature=temperature)
    assert said == plain and before["preempted"]
    assert after["accepted"] > share * after["drafts"] and after["steps"] < steps * before["steps"]


def test_drawn_drafts_repeat_with_the_seed_and_are_accepted_more_often(shakespeare):
    drawn = DRAFT | {"draft_sample_method": "probabilistic"}
    said, after = generate(shakespeare, drawn, temperature=1.0)
    assert (said, after) == generate(shakespeare, drawn, temperature=1.0)
    greedy = generate(shakespeare, DRAFT, temperature=1.0)[1]
    assert after["accepted"] / after["drafts"] > greedy["accepted"] / greedy["drafts"]
    assert generate(shakespeare, drawn, temperature=0)[0] == generate(shakespeare, None, temperature=0)[0]


def test_a_draft_model_follows_the_text_wherever_it_goes():
    """Drafts are what a model without a cache says, after growth and rejection, while its context lasts."""
    model, rng = tiny_model(dtype="float32", max_position_embeddings=24), random.Random(1)
    proposer, request = DraftLMProposer(DraftLM(model), 4), make_request("a", [3, 1, 4, 1, 5], 99)
    for _ in range(12):
        drafts = proposer.propose(request)
        said = request.token_ids()
        for draft in drafts:
            assert draft == int(dense_logits(model, said)[-1].argmax())
            said.append(draft)
        assert len(drafts) == max(0, min(4, 24 - request.num_tokens))
        request.output_token_ids += drafts[: rng.randint(0, 4)] + [rng.randrange(60)]


def test_what_drafts_are_drawn_from_is_told():
    model, params = tiny_model(dtype="float32"), SamplingParams(temperature=0.7, top_k=9, seed=5)
    proposer, request = DraftLMProposer(DraftLM(model), 3, seed=0), make_request("a", [3, 1, 4], 99)
    request.sampling_params = params
    drafts, said = proposer.propose(request), [3, 1, 4]
    for index, (draft, q) in enumerate(zip(drafts, request.spec_probs, strict=True)):
        expected = probabilities(dense_logits(model, said)[-1], params)
        assert q == pytest.approx(expected.tolist(), abs=1e-5)
        below = sum(q[:draft])
        assert below <= random_number(0, request, index, "draft") <= below + q[draft]
        said.append(draft)


def test_drawn_drafts_change_no_distribution():
    """The first tokens of 2,000 requests, 20,000 in the soak, are distributed as the target's, and so are the
    second tokens of those whose draft is accepted: sum(min(p, q)) of them."""
    num, generator = 20_000 if SOAK else 2_000, torch.Generator().manual_seed(0)
    logits, logits_q = (torch.randn(3, 6, generator=generator) for _ in range(2))
    params = [SamplingParams(seed=seed) for seed in range(num)]
    requests, q = [], logits_q[0].softmax(-1)
    for i in range(num):
        request = make_request(f"r{i}", [1], 9)
        request.sampling_params, request.spec_probs = params[i], [q.tolist()]
        u, draft = random_number(0, request, 0, "draft"), 0
        while u >= q[draft] and draft < 5:
            u, draft = u - float(q[draft]), draft + 1
        request.spec_token_ids = [draft]
        requests += [request, request]
    chosen = Sampler(0)(logits[:2].repeat(num, 1), requests)
    first, second = chosen[::2], chosen[1::2]
    kept = [b for a, b, r in zip(first, second, requests[::2], strict=True) if [a] == r.spec_token_ids]
    p, p_next = logits[0].softmax(-1), logits[1].softmax(-1)
    for tokens, expected in ((first, p), (kept, p_next)):
        counts = Counter(tokens)
        for token_id in range(6):
            share, right = counts[token_id] / len(tokens), float(expected[token_id])
            assert abs(share - right) < 5 * (right * (1 - right) / len(tokens)) ** 0.5
    share = float(torch.minimum(p, q).sum())
    assert abs(len(kept) / num - share) < 5 * (share * (1 - share) / num) ** 0.5


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smollm3", "unknown model 'smollm3'"),
        ("no/such", "no/such: there is no such folder"),
    ],
)
def test_a_draft_model_that_is_not_there(shakespeare, model, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        Engine(*shakespeare, speculative_config=DRAFT | {"model": model})


def test_a_draft_model_with_another_tokenizer_is_refused(shakespeare):
    """By the size of the vocabulary, and by what the tokens stand for."""
    with pytest.raises(ValueError, match="'shakespeare-draft' has another tokenizer than the model"):
        Engine(tiny_model(vocab_size=66, dtype="float32"), speculative_config=DRAFT)
    tokenizer = load("shakespeare")[1]
    tokenizer.token_bytes = tokenizer.token_bytes[::-1]
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        Engine(shakespeare[0], tokenizer, speculative_config=DRAFT)
