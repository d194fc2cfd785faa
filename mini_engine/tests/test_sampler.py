"""The sampler beside its functions: log probabilities, unseeded runs, and logits that cannot be sampled.

Lab-08's tests prove the functions on the engine's too (`labs check`), test_oracle_sampling.py all options.
"""

import math
import random

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import (
    NotFiniteError,
    Sampler,
    apply_top_p,
    draw,
    probabilities,
    random_number,
    rows_before,
    top_logprobs,
)
from mini_engine.tests.helpers import dense_logits, drain, generated, tokens_of

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def softmax(logits, temperature=1.0):
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def test_greedy_takes_the_best_and_the_first_of_equals():
    row = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    sampler = Sampler()
    assert sampler(row, [Request("a", [0], SamplingParams(temperature=0))]) == [1]
    assert sampler._numbers == {}, "greedy needs no randomness"


def test_limits_draws_and_defaults_at_their_borders():
    def kept(logits, **settings):
        return [i for i, p in enumerate(probabilities(logits, SamplingParams(**settings))) if p > 0]

    assert kept([0.0, 0.0], top_p=0.5) == [0] and kept([0.0, 0.0], min_p=1.0) == [0, 1]
    limited = SamplingParams(top_k=2, top_p=0.5, min_p=0.5)
    free = probabilities(torch.tensor([[40.0, 0.0, 0.0]] * 2), [limited, SamplingParams()])[1]
    assert free[2] > 0, "the limits of one request are not those of another"
    assert draw([0.0, 0.75, 0.25], 0.0) == 1 and draw([[0.5, 0.5]] * 2, [0.4999, 0.5]) == [0, 1]
    request = Request("a", [0], SamplingParams(temperature=0, repetition_penalty=2.0))
    assert Sampler()(torch.tensor([[3.0, 2.0]]), [request]) == [1]
    request.sampling_params, request.arrival = SamplingParams(), 3
    assert Sampler().uniform(request, 0) == random.Random("0/3").random()


def test_numbers_are_kept_until_they_are_forgotten_and_rows_of_drafts_are_counted():
    sampler, (a, b) = Sampler(), (Request(name, [0], SamplingParams(seed=1)) for name in "ab")
    assert rows_before([a, a, a, b, a]) == [0, 1, 2, 0, 0]
    sampler.uniform(a, 3)
    kept = sampler._numbers["a"]
    sampler.uniform(a, 5)
    assert sampler._numbers["a"] is kept
    sampler.forget("a")
    assert sampler._numbers == {}


def test_the_row_behind_a_draft_takes_the_draft_as_given():
    """Penalties count it, and its random number is that of the output in whose place it stands."""
    request = Request("a", [3], SamplingParams(temperature=0, presence_penalty=1.5))
    request.spec_token_ids = [0, 1]
    assert Sampler()(torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3), [request] * 3) == [0, 1, 0]
    request.sampling_params, request.output_token_ids = SamplingParams(seed=5), [2, 2]
    sampler = Sampler()
    numbers = [sampler.uniform(request, index) for index in (2, 3, 4)]
    assert Sampler()(torch.zeros(3, 4), [request] * 3) == [int(u * 4) for u in numbers]


def test_a_draft_that_was_drawn_is_accepted_by_the_numbers_of_its_output():
    """With the chance p / q; else the token is drawn from what p has more, with the output's number."""
    logits, q = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [0.0, 2.0, 0.0]]), [0.7, 0.2, 0.1]
    accepted = refused = 0
    for seed in range(60):
        request, sampler = Request("a", [0], SamplingParams(seed=seed)), Sampler()
        request.output_token_ids, request.spec_token_ids = [1, 1], [seed % 3, seed // 3 % 3]
        request.spec_probs, expected = [q, q], []
        for index, draft in enumerate(request.spec_token_ids, 2):
            p = softmax(logits[index - 2].tolist())
            if random_number(0, request, index, "accept") * q[draft] < p[draft]:
                expected, accepted = [*expected, draft], accepted + 1
            else:
                more = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
                expected, refused = [*expected, draw(more, sampler.uniform(request, index))], refused + 1
        expected.append(draw(softmax(logits[2].tolist()), sampler.uniform(request, 4)))
        assert Sampler()(logits, [request] * 3) == expected, seed
    assert accepted > 40 and refused > 20


def test_what_a_logits_processor_may_return():
    def tokens(processor):
        params = SamplingParams(temperature=0, logits_processors=[processor])
        return Sampler()(torch.tensor([[1.0, 2.0, 0.0]]), [Request("a", [0], params)])

    assert tokens(lambda outputs, logits: -logits) == [2], "a new row, not only the given one changed"
    for wrong in (lambda outputs, logits: logits[:2], lambda outputs, logits: logits.tolist()):
        with pytest.raises(ValueError, match=r"must return logits of the shape \(3,\), but gave"):
            tokens(wrong)


def test_probabilities_of_greedy_requests():
    """The first of equals has 1, whatever the others of the batch ask for."""
    greedy, free = SamplingParams(temperature=0), SamplingParams()
    assert probabilities([3.0, 3.0, 1.0], greedy).tolist() == [1, 0, 0]
    both = probabilities([[3.0, 3.0, 1.0]] * 2, [free, greedy]).tolist()
    assert both == [pytest.approx(softmax([3.0, 3.0, 1.0])), [1, 0, 0]]


def test_top_logprobs():
    """The chosen token first, then the best, with ranks; they are the raw logits' own."""
    found = top_logprobs(torch.tensor(LOGITS), 4, 2)
    assert {i: of.rank for i, of in found.items()} == {4: 5, 0: 1, 1: 2} and list(found) == [4, 0, 1]
    for i, of in found.items():
        assert of.logprob == pytest.approx(math.log(softmax(LOGITS)[i]), abs=1e-5)
    assert list(top_logprobs(torch.tensor(LOGITS), 0, 2)) == [0, 1]
    assert list(top_logprobs(torch.tensor(LOGITS), 3, 0)) == [3]
    assert list(top_logprobs(torch.tensor(LOGITS), 0, 100)) == [0, 1, 2, 3, 4, 5], "more than there are"
    everything = top_logprobs(torch.tensor(LOGITS), 2, -1)
    assert {i: of.rank for i, of in everything.items()} == {i: i + 1 for i in range(6)}
    equals = torch.tensor([1.0, 3.0, 1.0, 1.0])
    assert top_logprobs(equals, 0, 0)[0].rank == 4, "the last of its equals, as in vLLM"


def test_an_unseeded_run_repeats_with_the_engines_seed(model):
    def texts(seed):
        engine = Engine(model, num_blocks=60, block_size=4, max_num_seqs=4, seed=seed)
        return generated(engine, [[i] for i in range(4)], SamplingParams(max_tokens=8))

    assert texts(0) == texts(0) != texts(1)
    assert len({tuple(t) for t in texts(0)}) == 4


def test_logprobs_through_the_engine(model):
    """Each delta carries its token's logprob and the n best; chunks and others do not disturb it."""
    engine = Engine(model, num_blocks=60, block_size=4, max_num_batched_tokens=5, max_num_seqs=3)
    prompt = list(range(12))
    engine.add_request([7], SamplingParams(max_tokens=20))
    engine.add_request(prompt, SamplingParams(max_tokens=5, logprobs=3, seed=2), request_id="a")
    deltas = drain(engine)["a"]
    logits = dense_logits(model, prompt + tokens_of(deltas))
    for i, delta in enumerate(deltas):
        row = logits[len(prompt) - 1 + i].log_softmax(-1)
        (token_id,), (logprobs,) = delta.token_ids, delta.logprobs
        assert set(logprobs) == {token_id, *row.topk(3).indices.tolist()}
        for token, logprob in logprobs.items():
            assert logprob.logprob == pytest.approx(row[token].item(), abs=1e-5)


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
def test_logits_that_nothing_can_be_chosen_by(worst):
    """Refused before anything is drawn, greedy or not; one -inf among others forbids its token, no more."""
    rows = torch.tensor([[1.0, 0.0], [worst, worst if worst < 0 else 0.0]])
    for temperature in (0, 1):
        sampler = Sampler()
        requests = [Request(name, [0], SamplingParams(temperature=temperature)) for name in "ab"]
        with pytest.raises(NotFiniteError, match=f"its largest logit is {worst}"):
            sampler(rows, requests)
        assert sampler._numbers == {}
    assert Sampler()(torch.tensor([[-math.inf, 0.0]]), [Request("a", [0])]) == [1]


@pytest.mark.parametrize("scale", [0, 0.2, 1, 4])
def test_top_p_keeps_what_sorting_keeps(scale):
    """Among 5,000 tokens with many equals: few are kept, more than are looked at first, or all."""
    logits = (scale * torch.randn(20, 5000, generator=torch.Generator().manual_seed(3))).bfloat16().float()
    limits = [(0.05, 0.5, 0.9, 0.999, 1)[i % 5] for i in range(20)]
    for row, limit, found in zip(logits, limits, apply_top_p(logits, limits), strict=True):
        order = row.sort(descending=True, stable=True).indices.tolist()
        ahead = row[order].softmax(-1).double().cumsum(-1).roll(1)
        ahead[0] = 0
        kept = {i for i, p in zip(order, ahead.tolist(), strict=True) if p < limit - 1e-6 or limit == 1}
        perhaps = {i for i, p in zip(order, ahead.tolist(), strict=True) if p < limit + 1e-6 or limit == 1}
        assert kept <= {*found.isfinite().nonzero().flatten().tolist()} <= perhaps
        assert torch.equal(found[sorted(kept)], row[sorted(kept)])


def test_top_p_looks_no_further_than_it_must(monkeypatch):
    """Among the likeliest 1,024 first, then 8,192, then all: a row without a limit asks for no more."""
    asked, topk = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda row, num: asked.append(num) or topk(row, num))
    steep, flat = torch.arange(10_000).neg().float(), torch.zeros(10_000)
    for rows, limits, looks, kept in (
        (steep, 0.9, [1024], 3),
        (torch.stack((steep, flat)), [0.9, 1], [1024], [3, 10_000]),
        (torch.stack((steep, flat)), [0.9, 0.5], [1024, 8192], [3, 5000]),
        (flat, 0.5, [1024, 8192], 5000),
        (flat, 0.9, [1024, 8192, 10_000], 9000),
        (steep[:1024], 0.9, [1024], 3),
        (flat[:2048], 0.5, [1024], 1024),  # just enough
    ):
        asked.clear()
        found = apply_top_p(rows, limits).isfinite().sum(-1)
        assert asked == looks and found.tolist() == pytest.approx(kept, rel=1e-3)
    assert not apply_top_p(flat, 0).isfinite().any(), "no token has less than 0 before it"
