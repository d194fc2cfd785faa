"""The sampler: what each parameter keeps and drops, and that a seed is all that randomness depends on."""

import math
import random

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import NotFiniteError, Sampler, draw, probabilities, top_logprobs
from mini_engine.tests.helpers import drain, tokens_of

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def softmax(logits, temperature=1.0):
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def counts(n, logits=LOGITS, prompt=(0,), **params):
    """Counts of tokens drawn from the same logits by n requests with seeds of their own."""
    requests = [Request(str(i), list(prompt), SamplingParams(seed=i, **params)) for i in range(n)]
    token_ids = Sampler()(torch.tensor([logits]).expand(n, -1), requests)
    return [token_ids.count(i) for i in range(len(logits))]


def assert_distributed(found, expected):
    """Pearson's chi-square, below its 99.9 % point; what has no probability is never drawn."""
    n, chi = sum(found), 0.0
    for count, p in zip(found, expected, strict=True):
        if p == 0:
            assert count == 0
        else:
            chi += (count - n * p) ** 2 / (n * p)
    limits = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5}
    assert chi < limits[sum(p > 0 for p in expected) - 1], (found, expected)


def renormalized(probs, keep):
    total = sum(probs[i] for i in keep)
    return [p / total if i in keep else 0 for i, p in enumerate(probs)]


def drawn(sampler, row, request, num):
    """Draw `num` tokens for a request that is given each of them."""
    for _ in range(num):
        request.output_token_ids += sampler(row, [request])
    return request.output_token_ids[len(request.output_token_ids) - num :]


def test_greedy_takes_the_best_and_the_first_of_equals():
    row = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    sampler = Sampler()
    assert sampler(row, [Request("a", [0], SamplingParams(temperature=0))]) == [1]
    assert sampler._numbers == {}, "greedy needs no randomness"


ALL = set(range(len(LOGITS)))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 0.5}, ALL),
        ({}, ALL),
        ({"temperature": 2.0}, ALL),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.7}, {0, 1}),  # the smallest set that reaches it
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),  # of the 3 that are left, all are needed to reach 0.9
        ({"top_p": 0.7, "temperature": 4.0}, {0, 1, 2, 3}),  # the temperature comes before the limits
        ({"min_p": 0.2, "temperature": 4.0}, ALL),
    ],
)
def test_the_distribution(params, kept):
    """The tokens that the limits keep are drawn as often as their probabilities say, and no others."""
    probs = softmax(LOGITS, params.get("temperature", 1.0))
    assert_distributed(counts(3000, **params), renormalized(probs, kept))


@pytest.mark.parametrize(("name", "value"), [("top_k", 1), ("top_p", 1e-9), ("min_p", 1.0)])
def test_the_best_token_always_stays(name, value):
    assert counts(50, **{name: value})[0] == 50


def test_limits_that_are_just_met():
    assert counts(300, top_k=100) == counts(300), "more than there are is no limit"
    assert counts(50, [0.0, 0.0], top_p=0.5) == [50, 0], "half is reached by the first"


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    """No overflow on the way: the best token, always."""
    assert counts(20, [-5.0, 80.0, 79.0, 30.0], temperature=temperature) == [0, 20, 0, 0]


def test_the_order_of_the_vocabulary_plays_no_part():
    """Limits work on the likeliest tokens wherever these stand."""
    shuffled = [-3.0, 0.5, 2.0, -1.0, 1.0, 0.0]
    assert [i for i, n in enumerate(counts(500, shuffled, top_k=2)) if n] == [2, 4]


def test_repetition_penalty():
    """Seen tokens, of the prompt or the output, lose: positive logits divided, negative multiplied."""
    request = Request("a", [0, 4], SamplingParams(temperature=0, repetition_penalty=2.5))
    row = torch.tensor([LOGITS])
    sampler = Sampler()
    assert sampler(row, [request]) == [1], "2 / 2.5 is less than 1"
    request.output_token_ids = [1]
    assert sampler(row, [request]) == [0], "1 / 2.5 is less than 2 / 2.5"
    assert row.tolist() == [LOGITS], "the logits themselves are left alone"
    penalized = [x / 2 if x > 0 else x * 2 for x in LOGITS]
    expected = softmax([penalized[0], *LOGITS[1:4], penalized[4], LOGITS[5]])
    assert_distributed(counts(3000, prompt=[0, 4, 4], repetition_penalty=2.0), expected)


def test_a_mixed_batch_is_as_each_alone():
    """Rows with all kinds of parameters side by side draw what they draw alone."""
    kinds = [
        {"temperature": 0},
        {},
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.4},
        {"repetition_penalty": 3.0},
        {"temperature": 3.0, "top_k": 4, "top_p": 0.9, "min_p": 0.01},
    ]
    rows = torch.randn(len(kinds), 50, generator=torch.Generator().manual_seed(0)) * 2

    def requests():
        return [Request(str(i), [i], SamplingParams(**{"seed": i, **k})) for i, k in enumerate(kinds)]

    together, batch, sampler = [], requests(), Sampler()
    for _ in range(20):
        together.append(sampler(rows, batch))
        for request, token_id in zip(batch, together[-1], strict=True):
            request.output_token_ids.append(token_id)
    sampler, separate = Sampler(), []
    for row, request in zip(rows[:, None], requests(), strict=True):
        separate.insert(0, drawn(sampler, row, request, 20))
    separate = [list(step) for step in zip(*reversed(separate), strict=True)]
    assert together == separate


def test_a_seed_repeats_and_seeds_differ():
    def stream(seed, run_seed=0):
        sampler, row = Sampler(run_seed), torch.zeros(1, 1000)
        request = Request("a", [0], SamplingParams(seed=seed))
        request.arrival = 3
        return drawn(sampler, row, request, 8)

    assert stream(7) == stream(7) == stream(7, run_seed=5), "its own seed is all that counts"
    assert stream(7) != stream(8)
    assert stream(None) == stream(None) != stream(None, run_seed=5)
    assert stream(2**32 + 7) != stream(7), "all of a seed counts, not its last 32 bits"


def test_a_vocabulary_end_is_reachable_and_never_passed():
    """A draw just below 1 is the last token with any probability, not one beyond."""
    last = 1 - 2**-53
    assert draw(probabilities(LOGITS, SamplingParams()), last) == 5
    assert draw(probabilities(LOGITS, SamplingParams(top_k=2)), last) == 1
    for logits in torch.randn(300, 20, generator=torch.Generator().manual_seed(0)):
        assert draw(probabilities(logits, SamplingParams()), last) == 19
    assert draw([0.0, 0.75, 0.25], 0.0) == 1, "0 never draws the impossible"
    assert draw([[0.5, 0.5], [0.5, 0.5]], [0.4999, 0.5]) == [0, 1], "u is below the cumulative probability"


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


def serve(model, others, *, seed=11, **settings):
    """Tokens of one seeded request amid `others` unseeded ones."""
    settings = {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    engine = Engine(model, **settings)
    rng = random.Random(others)
    for _ in range(others):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 12))]
        engine.add_request(prompt, SamplingParams(temperature=rng.choice([0, 1.0]), max_tokens=15))
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=15)
    engine.add_request(list(range(9)), params, request_id="me")
    request = engine.requests["me"]
    return tokens_of(drain(engine)["me"]), request.num_preemptions > 0


def test_a_seeded_request_is_the_same_in_any_company(model):
    """Alone, among others, in chunks, and preempted: the same tokens; with another seed, others."""
    expected, _ = serve(model, 0)
    assert serve(model, 5) == (expected, False)
    assert serve(model, 3, max_num_batched_tokens=4, max_num_seqs=4) == (expected, False)
    assert serve(model, 4, long_prefill_token_threshold=2) == (expected, False)
    assert serve(model, 3, num_blocks=14, max_num_seqs=4) == (expected, True)
    assert serve(model, 0, seed=12)[0] != expected


def test_an_unseeded_run_repeats_with_the_engines_seed(model):
    def texts(seed):
        engine = Engine(model, num_blocks=60, block_size=4, max_num_seqs=4, seed=seed)
        for i in range(4):
            engine.add_request([i], SamplingParams(max_tokens=8))
        return [tokens_of(deltas) for deltas in drain(engine).values()]

    assert texts(0) == texts(0) != texts(1)
    assert len({tuple(t) for t in texts(0)}) == 4


def test_logprobs_through_the_engine(model):
    """Each delta carries its token's logprob and the n best; chunks and others do not disturb it."""
    from mini_engine.tests.helpers import dense_logits

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


def test_a_stream_is_its_generators_numbers_one_after_the_other():
    """The generator is seeded by the request's seed, or by the run's (0 by default) and the arrival."""
    flat = torch.zeros(1, 1000)
    for seed, name in ((7, 7), (None, "0/3")):
        request, numbers = Request("a", [0], SamplingParams(seed=seed)), random.Random(name)
        request.arrival = 3
        for token_id in drawn(Sampler(), flat, request, 5):
            assert abs(token_id - 1000 * numbers.random()) <= 1


def test_a_small_negative_logit_is_made_smaller_too():
    request = Request("a", [0], SamplingParams(temperature=0, repetition_penalty=4.0))
    assert Sampler()(torch.tensor([[-0.25, -0.5]]), [request]) == [1], "-0.25 becomes -1"


def test_the_number_of_an_output_is_a_function_of_seed_and_index():
    """A draw that is repeated, rewound or forgotten gives what it gave."""
    request, row = Request("a", [0], SamplingParams(seed=3)), torch.zeros(1, 1000)
    expected = drawn(Sampler(), row, request, 6)
    sampler, indices = Sampler(), [0, 0, 5, 2, 2, 1, 5, 3, 4]
    for repeat in range(2):
        for index in indices:
            request.output_token_ids = expected[:index]
            assert sampler(row, [request]) == [expected[index]], (repeat, index)
        sampler.forget("a")


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


def test_the_limits_of_one_are_not_those_of_another():
    """Beside a request with limits, one without keeps its unlikeliest token."""
    rows = torch.tensor([[40.0, 0.0, 0.0]] * 2)
    limited = SamplingParams(top_k=2, top_p=0.5, min_p=0.5)
    free = probabilities(rows, [limited, SamplingParams()])[1]
    assert free.tolist() == rows[1].softmax(-1).tolist() and free[2] > 0
