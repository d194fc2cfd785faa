"""Tests of sampling: one row in lists, the numbers of a request, then a batch of rows with torch.

No test depends on luck: probabilities are compared with fractions, tokens with the numbers that draw them.
"""

import math
import random
from dataclasses import asdict
from fractions import Fraction

import pytest

from labs.kit import assert_texts_alone, judge_random_scripts, load, make_request, tokens_of
from mini_engine.request import SamplingParams

scenarios, Play = load("lab-08", "scenarios"), load("lab-08", "random_scripts").Play
RUNS = {run["name"]: run for run in scenarios.RUNS}
OUT = -math.inf
LIMITS = ("apply_min_p", "apply_top_k", "apply_top_p")


def logits_of(weights):
    """Logits whose probabilities are in the proportion of these weights."""
    return [math.log(weight) for weight in weights]


def request(name="r0", prompt=(0,), outputs=(), arrival=0, **settings):
    made = make_request(name, [*prompt], max_tokens=None)
    made.sampling_params = SamplingParams(**settings)
    made.output_token_ids, made.arrival = [*outputs], arrival
    return made


def floats(row):
    """A row as floats, whether it is a list or a tensor."""
    return [float(value) for value in row]


def kept(row):
    """The ids of the tokens that were not dropped."""
    return [token_id for token_id, logit in enumerate(floats(row)) if logit != OUT]


def assert_row(row, expected):
    assert floats(row) == pytest.approx(floats(expected), abs=1e-9)


# --------------------------------------------------------------------------------------- apply_penalties


def penalized(lab, logits, prompt=(), outputs=(), **settings):
    return floats(lab.apply_penalties(logits, [*prompt], [*outputs], SamplingParams(**settings)))


def test_repetition_makes_every_seen_logit_smaller(lab):
    """A penalty of 2: a logit of 3 becomes 1.5, one of -3 becomes -6, and an unseen one stays."""
    row = penalized(lab, [3.0, -3.0, -0.25, 1.0], [0, 1, 2], repetition_penalty=2.0)
    assert_row(row, [1.5, -6.0, -0.5, 1.0])


def test_repetition_counts_a_token_once(lab):
    """A token that is twice in the prompt and twice in the outputs is divided once."""
    row = penalized(lab, [4.0, 4.0, 4.0], [0, 0, 1], [0, 0, 1], repetition_penalty=2.0)
    assert_row(row, [2.0, 2.0, 4.0])


def test_repetition_knows_prompt_and_outputs(lab):
    """A token of the prompt counts for the repetition penalty, and so does one of the outputs."""
    assert_row(penalized(lab, [4.0, 4.0, 4.0], [0], [2], repetition_penalty=4.0), [1.0, 4.0, 1.0])


def test_frequency_counts_every_time(lab):
    """0.5 for each time that a token is among the outputs: 0, 1 and 3 times."""
    row = penalized(lab, [1.0, 1.0, 1.0], [], [2, 1, 2, 2], frequency_penalty=0.5)
    assert_row(row, [1.0, 0.5, -0.5])


def test_presence_counts_once(lab):
    """0.5 for each token that is among the outputs, once or three times."""
    row = penalized(lab, [1.0, 1.0, 1.0], [], [2, 1, 2, 2], presence_penalty=0.5)
    assert_row(row, [1.0, 0.5, 0.5])


def test_frequency_and_presence_leave_the_prompt_alone(lab):
    """A token that only the prompt contains was not sampled: neither penalty counts it."""
    row = penalized(lab, [1.0, 1.0, 1.0], [0, 0, 1], [1], frequency_penalty=0.5, presence_penalty=0.25)
    assert_row(row, [1.0, 0.25, 1.0])


def test_repetition_comes_before_the_other_two(lab):
    """A logit of 1, divided by 2 and then reduced by 1, is -0.5; in the other order it would be 0."""
    settings = {"repetition_penalty": 2.0, "frequency_penalty": 0.75, "presence_penalty": 0.25}
    assert_row(penalized(lab, [1.0, 1.0], [], [0], **settings), [-0.5, 1.0])


def test_a_negative_penalty_is_a_reward(lab):
    """With penalties below 0, and a repetition penalty below 1, seen tokens get likelier."""
    settings = {"repetition_penalty": 0.5, "frequency_penalty": -0.5, "presence_penalty": -1.0}
    assert_row(penalized(lab, [1.0, -1.0, 1.0], [], [0, 1], **settings), [3.5, 1.0, 1.0])


def test_penalties_that_are_off_change_nothing(lab):
    """With 1, 0 and 0 each logit stays, also one of 0 and one of a dropped token."""
    assert_row(penalized(lab, [1.0, 0.0, OUT, -2.0], [0, 1, 2], [3, 3, 1]), [1.0, 0.0, OUT, -2.0])


# ------------------------------------------------------------------------ temperature, and three limits


@pytest.mark.parametrize(("temperature", "expected"), [(2.0, [1.0, -0.5, 0.0]), (0.5, [4.0, -2.0, 0.0])])
def test_the_temperature_divides(lab, temperature, expected):
    """A temperature of 2 halves the logits, and their differences; one of 0.5 doubles them."""
    assert_row(lab.apply_temperature([2.0, -1.0, 0.0], temperature), expected)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_a_tiny_temperature_overflows_nothing(lab, temperature):
    """A temperature below 1e-6 counts as 1e-6: nothing is infinite, and the best token has everything."""
    row = floats(lab.apply_temperature([900.0, 899.0, -900.0], temperature))
    assert_row([value / 1e6 for value in row], [900.0, 899.0, -900.0])
    probs = lab.probabilities([900.0, 899.0, -900.0], SamplingParams(temperature=temperature))
    assert_row(probs, [1.0, 0.0, 0.0])


def test_min_p_is_a_share_of_the_best(lab):
    """The best has 8 of 20, the others 6, 3, 2 and 1. A min_p of 0.3 keeps those from 2.4 on: 8, 6 and 3."""
    assert kept(lab.apply_min_p(logits_of([2, 8, 3, 1, 6]), 0.3)) == [1, 2, 4]


def test_min_p_keeps_the_equals_of_the_best(lab):
    """A min_p of 1 keeps the best, and what is as likely; 0 keeps all."""
    row = [1.0, 3.0, 2.9, 3.0]
    assert kept(lab.apply_min_p(row, 1.0)) == [1, 3]
    assert kept(lab.apply_min_p([0.0, 900.0, -900.0], 0.0)) == [0, 1, 2]


def test_top_k_keeps_the_best_wherever_they_stand(lab):
    """The three best of six stay, with their logits, at their places."""
    row = lab.apply_top_k([-3.0, 0.5, 2.0, -1.0, 1.0, 0.0], 3)
    assert floats(row) == [OUT, 0.5, 2.0, OUT, 1.0, OUT]


def test_equals_of_the_last_one_stay(lab):
    """top_k 2 keeps four of the logits 2, 1, 1, 1, 0: no 1 is better than another."""
    assert kept(lab.apply_top_k([1.0, 2.0, 0.0, 1.0, 1.0], 2)) == [0, 1, 3, 4]
    assert kept(lab.apply_top_k([1.0, 1.0, 1.0], 1)) == [0, 1, 2]
    assert kept(lab.apply_top_k([3.0, 2.0, 3.0, 1.0], 2)) == [0, 2]


@pytest.mark.parametrize("top_k", [0, 3, 4, 2**31 - 1])
def test_top_k_may_be_off_or_larger_than_the_vocabulary(lab, top_k):
    """0 is no limit, and as many as there are, or more, is none either."""
    assert kept(lab.apply_top_k([1.0, 0.0, 2.0], top_k)) == [0, 1, 2]


def test_the_token_that_crosses_top_p_stays(lab):
    """With 8, 4, 2, 1 and 1 sixteenths the second crosses 0.7 and the third crosses 0.8; both are kept."""
    row = logits_of([1, 4, 8, 1, 2])
    assert kept(lab.apply_top_p(row, 0.7)) == [1, 2]
    assert kept(lab.apply_top_p(row, 0.8)) == [1, 2, 4]


def test_the_nucleus_is_no_larger_than_it_must_be(lab):
    """Tokens after the one that crosses top_p are dropped, even if one that stays is no likelier."""
    assert kept(lab.apply_top_p(logits_of([3, 3, 3, 3]), 0.6)) == [0, 1, 2]
    assert kept(lab.apply_top_p(logits_of([1, 9]), 0.8)) == [1]


def test_the_best_token_always_stays(lab):
    """A top_p of nearly nothing keeps one token, the best."""
    assert kept(lab.apply_top_p([0.0, 3.0, 1.0], 1e-9)) == [1]


def test_of_equals_the_lower_id_is_in_the_nucleus_first(lab):
    """One better token and four equal ones: a top_p of 0.6 keeps the better one and two lower ids."""
    assert kept(lab.apply_top_p(logits_of([2, 2, 3, 2, 2]), 0.6)) == [0, 1, 2]


def test_a_top_p_of_1_is_off(lab):
    """Also a token of one in 10**20 stays, whatever the sum of those before it is rounded to."""
    assert kept(lab.apply_top_p(logits_of([1, 10**20, 1]), 1.0)) == [0, 1, 2]


@pytest.mark.parametrize("limit", LIMITS)
def test_what_stays_keeps_its_logit_and_what_was_dropped_stays_out(lab, limit):
    """A limit that drops nothing returns the row as it was; what an earlier limit dropped stays out."""
    setting = {"apply_min_p": 1e-9, "apply_top_k": 3, "apply_top_p": 0.9999}[limit]
    row = getattr(lab, limit)([2.5, OUT, 0.5, 1.5], setting)
    assert floats(row) == [2.5, OUT, 0.5, 1.5]


@pytest.mark.parametrize("name", ["apply_penalties", "apply_temperature", *LIMITS])
def test_the_row_is_only_read(lab, name):
    """The list that is given is as it was, also when the returned one is changed, or nothing was to do."""
    settings = {"apply_temperature": (1.0, 2.0), "apply_min_p": (0.0, 0.9), "apply_top_k": (0, 1)}
    for setting in settings.get(name, (1.0, 0.2)):
        row, others = [2.0, 1.0, 0.0], (setting,)
        if name == "apply_penalties":
            others = [0], [1], SamplingParams(repetition_penalty=setting)
        result = getattr(lab, name)(row, *others)
        result[0] = 77.0
        assert row == [2.0, 1.0, 0.0], f"{name} changed the row that it was given"


# ----------------------------------------------------------------------------------------- probabilities

EXACT = [  # settings, and what is left of the weights 8, 4, 2, 1 and 1
    ({}, [8, 4, 2, 1, 1]),
    ({"temperature": 0.5}, [64, 16, 4, 1, 1]),
    ({"top_k": 2}, [8, 4, 0, 0, 0]),
    ({"top_k": 4}, [8, 4, 2, 1, 1]),
    ({"top_p": 0.7}, [8, 4, 0, 0, 0]),
    ({"min_p": 0.2}, [8, 4, 2, 0, 0]),
    ({"temperature": 0.5, "min_p": 0.2}, [64, 16, 0, 0, 0]),
    ({"temperature": 0.5, "top_p": 0.9}, [64, 16, 0, 0, 0]),
    ({"temperature": 0.25, "top_k": 3}, [8**4, 4**4, 2**4, 0, 0]),
]


@pytest.mark.parametrize(("settings", "left"), EXACT)
def test_probabilities_are_exact(lab, settings, left):
    """A temperature of 1/n raises weights to the power n; those that are left are divided by their sum."""
    row = lab.probabilities(logits_of([8, 4, 2, 1, 1]), SamplingParams(**settings))
    assert_row(row, [Fraction(weight, sum(left)) for weight in left])


def test_the_temperature_comes_before_the_limits(lab):
    """At a temperature of 2 the weights 16, 4 and 1 are 4, 2 and 1: a top_p of 0.8 needs the second token,
    and a min_p of 0.4 keeps it."""
    for limit in ({"top_p": 0.8}, {"min_p": 0.4}):
        row = lab.probabilities(logits_of([16, 4, 1]), SamplingParams(temperature=2.0, **limit))
        assert_row(row, [Fraction(4, 6), Fraction(2, 6), 0])


def test_a_limit_works_on_what_the_one_before_has_left(lab):
    """top_k or min_p leaves 8, 4 and 2 fourteenths; the first two are enough for a top_p of 0.8."""
    for limit in ({"top_k": 3}, {"min_p": 0.2}):
        row = lab.probabilities(logits_of([8, 4, 2, 1, 1]), SamplingParams(top_p=0.8, **limit))
        assert_row(row, [Fraction(8, 12), Fraction(4, 12), 0, 0, 0])


def test_top_k_comes_before_top_p(lab):
    """top_k leaves 10, 9, 9, 9 of the weights 10, 9, 9, 9, 3. top_p needs three of these, not four of all."""
    row = lab.probabilities(logits_of([10, 9, 9, 9, 3]), SamplingParams(top_k=2, top_p=0.71))
    assert_row(row, [Fraction(10, 28), Fraction(9, 28), Fraction(9, 28), 0, 0])


def test_large_logits_overflow_nothing(lab):
    """Logits of 1000 have the probabilities of logits of 0, and so have those of -1000."""
    for shift in (1000.0, -1000.0):
        row = lab.probabilities([shift, shift + math.log(3)], SamplingParams())
        assert floats(row) == pytest.approx([0.25, 0.75], abs=1e-9)


# -------------------------------------------------------------------------------------------------- draw


@pytest.mark.parametrize("weights", [[8, 4, 2, 1, 1], [1, 1, 2, 4, 8], [0, 3, 0, 13, 0], [16]])
def test_every_token_is_drawn_as_often_as_its_probability_says(lab, weights):
    """The middles of 16 equal stretches are drawn: each token as often as it has sixteenths."""
    tokens = [lab.draw([weight / 16 for weight in weights], (i + 0.5) / 16) for i in range(16)]
    assert [tokens.count(token_id) for token_id in range(len(weights))] == weights
    assert tokens == sorted(tokens), "the stretches lie in the order of the ids"


def test_a_border_belongs_to_the_later_token(lab):
    """Stretches of a quarter, a half and a quarter: 0.25 draws the second token, 0.75 the third."""
    assert [lab.draw([0.25, 0.5, 0.25], u) for u in (0.0, 0.25, 0.75)] == [0, 1, 2]


def test_what_has_no_probability_is_never_drawn(lab):
    """Not by 0, where the first token has none; not by the largest number, where the last has none."""
    assert lab.draw([0.0, 0.0, 1.0, 0.0], 0.0) == 2
    assert lab.draw([0.5, 0.5, 0.0, 0.0], 1 - 2**-53) == 1
    assert lab.draw([0.5, 0.0, 0.5], 0.5) == 2


def test_a_sum_that_is_rounded_leaves_no_gap(lab):
    """Where all probabilities have a sum of 0.75 or 1.5, the number is a share of that."""
    for scale in (0.75, 1.5):
        tokens = [lab.draw([scale / 2, scale / 4, scale / 4], u) for u in (0.1, 0.45, 0.55, 0.7, 0.8, 0.99)]
        assert tokens == [0, 0, 1, 1, 2, 2], f"the sum is {scale}"


# --------------------------------------------------------------------------- a request's own numbers


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**70])
def test_the_numbers_are_those_of_the_seed(lab, seed):
    """Output i gets number i of Python's generator with the request's whole seed, whatever its arrival."""
    numbers = random.Random(seed)
    expected = [numbers.random() for _ in range(6)]
    for arrival in (0, 3):
        sampler, one = lab.Sampler(5), request(seed=seed, arrival=arrival)
        assert [sampler.uniform(one, index) for index in range(6)] == expected


def test_a_seed_of_0_is_a_seed(lab):
    """A request with seed 0 has the numbers of seed 0, and not those of a request without a seed."""
    with_seed, without = (lab.Sampler(4).uniform(request(seed=seed, arrival=2), 0) for seed in (0, None))
    assert with_seed == random.Random(0).random() != without


@pytest.mark.parametrize(("run", "arrival"), [(0, 0), (0, 3), (9, 3)])
def test_without_a_seed_the_run_and_the_arrival_count(lab, run, arrival):
    """The generator is then seeded by the text "run/arrival": other requests and runs have other numbers."""
    numbers, sampler = random.Random(f"{run}/{arrival}"), lab.Sampler(run)
    one = request(f"r{arrival}", arrival=arrival)
    assert [sampler.uniform(one, index) for index in range(3)] == [numbers.random() for _ in range(3)]


def test_an_index_has_one_number(lab):
    """Asked for again, backwards or with gaps: output i has the number that it had."""
    sampler, one = lab.Sampler(), request(seed=3)
    numbers = random.Random(3)
    expected = [numbers.random() for _ in range(8)]
    for index in (0, 0, 5, 2, 7, 7, 1, 0):
        assert sampler.uniform(one, index) == expected[index], f"output {index}"


def test_requests_do_not_disturb_one_another(lab):
    """Three requests, two with one seed, ask in turns: each has its seed's numbers, as if it were alone."""
    seeds, sampler = {"a": 1, "b": 2, "c": 1}, lab.Sampler()
    requests = [request(name, seed=seed) for name, seed in seeds.items()]
    found = [[sampler.uniform(one, index) for one in requests] for index in range(4)]
    alone = [random.Random(seed) for seed in seeds.values()]
    assert found == [[numbers.random() for numbers in alone] for _ in range(4)]


def test_asking_for_a_number_changes_nothing(lab):
    """A request is as it was, and two samplers share nothing."""
    one, before = request(seed=3, outputs=[1, 2]), asdict(request(seed=3, outputs=[1, 2]))
    first = lab.Sampler(1).uniform(one, 2)
    assert asdict(one) == before
    assert lab.Sampler(2).uniform(one, 2) == first
    unseeded = request("r0", arrival=1)
    assert lab.Sampler(1).uniform(unseeded, 0) != lab.Sampler(2).uniform(unseeded, 0)


def test_an_id_that_comes_again_has_its_own_numbers(lab):
    """When r0 has ended and was forgotten, another request r0 has the numbers of its own seed."""
    sampler = lab.Sampler()
    sampler.uniform(request("r0", seed=1), 4)
    sampler.forget("r0")
    assert sampler.uniform(request("r0", seed=2), 0) == random.Random(2).random()


def test_forgotten_in_the_middle_it_goes_on(lab):
    """A step failed, and r0 was forgotten at its third token, which gets the third number again."""
    sampler, one, numbers = lab.Sampler(), request("r0", seed=1), random.Random(1)
    expected = [numbers.random() for _ in range(4)]
    assert [sampler.uniform(one, index) for index in range(3)] == expected[:3]
    sampler.forget("r0")
    assert [sampler.uniform(one, index) for index in (2, 3)] == expected[2:]


def test_forgetting_concerns_one_request_only(lab):
    """One that never drew a number is forgotten without an error, and the others keep what they have."""
    sampler, others = lab.Sampler(), [request("r1", seed=1), request("r2")]
    numbers = [sampler.uniform(one, 1) for one in others]
    sampler.forget("r0")
    sampler.forget("r0")
    assert [sampler.uniform(one, 1) for one in others] == numbers


def test_nothing_is_kept_of_what_was_forgotten(lab):
    """After a thousand requests have come and gone, the sampler holds as much as before."""
    sampler = lab.Sampler()

    def size():
        return len(repr(vars(sampler)))

    sampler.uniform(request("r0"), 0)
    sampler.forget("r0")
    before = size()
    for number in range(1, 1000):
        sampler.uniform(request(f"r{number}", arrival=number), 1)
        sampler.forget(f"r{number}")
    assert size() == before


@pytest.mark.parametrize("name", RUNS)
def test_row_by_row_each_text_is_that_of_a_run_alone(lab, name):
    """With the first half alone: each request has the text of a run by itself, whatever it is batched with,
    however its prompt is cut, and after a preemption."""
    trace = assert_texts_alone(RUNS[name], lambda scenario: scenarios.run(lab, scenario))
    if "preempted" in name:
        assert sum(event.type == "PREEMPTED" for record in trace.steps for event in record.events) == 2


# ------------------------------------------------------------------------------------- a batch of rows

MIXED = [
    {},
    {"temperature": 0.5},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.8},
    {"temperature": 3.0, "min_p": 0.3, "top_p": 0.99},
    {"temperature": 1e-320},
]


def batch(num_rows=8, size=6):
    import torch

    rng = random.Random(8)
    rows = [[rng.gauss(0, 2) for _ in range(size)] for _ in range(num_rows)]
    return torch.tensor(rows, dtype=torch.float64)


def one_by_one(logits, settings):
    """Return each row's probabilities from the reference's functions for one row."""
    row, reference = load("lab-08", "oracle"), []
    for logit, one in zip(logits.tolist(), settings, strict=True):
        reference.append(row.probabilities(logit, SamplingParams(**one)))
    return reference


def test_every_row_has_its_own_settings(lab):
    """Eight rows with eight kinds of settings, some of them off: each is what it is as a row by itself."""
    logits = batch()
    probs = lab.batch_probabilities(logits, [SamplingParams(**one) for one in MIXED])
    assert tuple(probs.shape) == (8, 6)
    for number, (row, expected) in enumerate(zip(probs, one_by_one(logits, MIXED), strict=True)):
        assert floats(row) == pytest.approx(expected, abs=1e-9), f"row {number}, with {MIXED[number]}"


def test_neighbours_make_no_difference(lab):
    """A row's probabilities are the same alone, in another order, and beside rows with limits it lacks."""
    logits, params = batch(), [SamplingParams(**one) for one in MIXED]
    together = lab.batch_probabilities(logits, params)
    backwards = lab.batch_probabilities(logits.flip(0), params[::-1]).flip(0)
    for number in range(len(MIXED)):
        alone = lab.batch_probabilities(logits[number : number + 1], params[number : number + 1])[0]
        assert floats(alone) == pytest.approx(floats(together[number]), abs=1e-12), f"row {number} alone"
        assert floats(backwards[number]) == pytest.approx(floats(together[number]), abs=1e-12)


def test_equals_in_a_batch(lab):
    """Ties are treated as in a list: top_k keeps all that equal the last, top_p takes the lower ids first."""
    import torch

    logits = torch.zeros(2, 300, dtype=torch.float64)
    probs = lab.batch_probabilities(logits, [SamplingParams(top_k=7), SamplingParams(top_p=0.495)])
    assert floats(probs[0]) == pytest.approx([1 / 300] * 300, abs=1e-9)
    assert floats(probs[1]) == pytest.approx([1 / 149] * 149 + [0] * 151, abs=1e-9)


def test_settings_at_the_edge_of_a_batch(lab):
    """A top_k beyond the vocabulary, a min_p and a top_p of 1, and a top_p of nearly 0 side by side."""
    import torch

    logits = torch.tensor([[math.log(w) for w in (1, 4, 3, 4)]] * 4, dtype=torch.float64)
    settings = [{"top_k": 2**31 - 1}, {"min_p": 1.0}, {"top_p": 1.0}, {"top_p": 1e-9}]
    probs = lab.batch_probabilities(logits, [SamplingParams(**one) for one in settings])
    everything = [1 / 12, 4 / 12, 3 / 12, 4 / 12]
    for row, expected in zip(probs, [everything, [0, 0.5, 0, 0.5], everything, [0, 1, 0, 0]], strict=True):
        assert floats(row) == pytest.approx(expected, abs=1e-9)
    steep = torch.tensor([[0.0, 46.0, 0.0]] * 2, dtype=torch.float64)
    off, on = lab.batch_probabilities(steep, [SamplingParams(), SamplingParams(top_p=0.5)])
    assert float(off[2]) > 0 and floats(on) == [0, 1, 0], "1 is off, though a sum is rounded to 1"


def test_a_batch_is_only_read(lab):
    """The tensor of logits is as it was, with every limit on."""
    logits = batch(2)
    before = logits.clone()
    lab.batch_probabilities(logits, [SamplingParams(temperature=0.5, top_k=2, top_p=0.6, min_p=0.1)] * 2)
    assert logits.equal(before), "batch_probabilities changed the logits that it was given"


# -------------------------------------------------------------------------------------------- the Sampler


def sampled(lab, rows, requests, seed=0):
    import torch

    return [int(token_id) for token_id in lab.Sampler(seed)(torch.tensor(rows), requests)]


def test_greedy_takes_the_best_token(lab):
    """A temperature of 0 takes the largest logit, the first of equals, whatever the limits say."""
    settings = [{}, {"top_k": 3}, {"top_p": 0.9, "seed": 2}]
    requests = [request(f"r{i}", temperature=0, **one) for i, one in enumerate(settings)]
    rows = [[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0], [2.0, 5.0, 5.0]]
    assert sampled(lab, rows, requests) == [1, 0, 1]


def test_a_request_draws_with_the_number_of_its_next_output(lab):
    """A thousand equally likely tokens: the token says which number drew it, after 0, 1 and 5 outputs."""
    rows = [[0.0] * 1000]
    for seed in (7, 11):
        numbers = random.Random(seed)
        expected = [int(1000 * numbers.random()) for _ in range(6)]
        for count in (0, 1, 5):
            token_id = sampled(lab, rows, [request(seed=seed, outputs=[9] * count)])
            assert token_id == [expected[count]], f"seed {seed}, output {count}"


def test_the_prompt_takes_no_numbers(lab):
    """A prompt of 40 tokens, whose chunks drew nothing: the first output has the first number."""
    token_id = sampled(lab, [[0.0] * 1000], [request(seed=7, prompt=range(40))])
    assert token_id == [int(1000 * random.Random(7).random())]


def test_each_row_goes_to_its_request(lab):
    """Greedy and random rows in turns: each request has its own row's token, drawn with its own number."""
    requests = [request(f"r{i}", seed=i, **({"temperature": 0} if i % 2 else {})) for i in range(6)]
    rows = [[0.0] * 1000 for _ in requests]
    for i in (1, 3, 5):
        rows[i][100 + i] = 1.0
    expected = [100 + i if i % 2 else int(1000 * random.Random(i).random()) for i in range(6)]
    assert sampled(lab, rows, requests) == expected
    assert sampled(lab, rows[::-1], requests[::-1]) == expected[::-1]
    assert [sampled(lab, [row], [one])[0] for row, one in zip(rows, requests, strict=True)] == expected


def test_penalties_come_first(lab):
    """They change what is best, so a greedy request has them too: 3 / 2 is less than 2."""
    requests = [
        request("r0", prompt=[0], temperature=0, repetition_penalty=2.0),
        request("r1", outputs=[0, 0], temperature=0, frequency_penalty=0.75),
        request("r2", outputs=[0], temperature=0, presence_penalty=1.5),
        request("r3", prompt=[0], outputs=[0], temperature=0),
        request("r4", outputs=[0, 1], seed=0, top_k=1, presence_penalty=2.0),
    ]
    assert sampled(lab, [[3.0, 2.0, 1.5]] * 5, requests) == [1, 1, 1, 0, 2]


def test_the_logits_are_only_read(lab):
    """Penalties and limits work on a copy: the tensor that the model gave is as it was."""
    import torch

    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    before, requests = (
        logits.clone(),
        [request("a", repetition_penalty=2.0, top_k=1), request("b", temperature=0)],
    )
    lab.Sampler()(logits, requests)
    assert logits.equal(before), "the Sampler changed the logits that it was given"
    assert [one.output_token_ids for one in requests] == [[], []], (
        "the scheduler appends tokens, not the Sampler"
    )


def test_coarse_numbers_are_made_fine(lab):
    """In bfloat16 5,000 equally likely tokens are drawn as in float32, and a top_p of 0.5 keeps half."""
    import torch

    logits = torch.zeros(2, 5000, dtype=torch.bfloat16)
    requests = [request("a", seed=5), request("b", seed=5, top_p=0.5)]
    u = random.Random(5).random()
    found = [int(token_id) for token_id in lab.Sampler()(logits, requests)]
    assert abs(found[0] - 5000 * u) <= 1 and abs(found[1] - 2500 * u) <= 1, (found, u)


def test_loading_needs_no_torch(lab):
    """A program without torch can load your file: torch is imported inside the functions that need it."""
    lab.batch_probabilities(batch(1), [SamplingParams()])  # it is written
    names = Play(lab, {}).names_that_need_torch()
    assert not names, f"{names[0]} loads torch with the file; import it inside the functions that need it"


@pytest.mark.parametrize("name", RUNS)
def test_the_same_seed_the_same_text_whatever_the_batch(lab, name):
    """Each request has the text of a run by itself, whatever it is batched with, also after a preemption."""
    by_sampler = RUNS[name] | {"by": "Sampler"}
    trace = assert_texts_alone(by_sampler, lambda scenario: scenarios.run(lab, scenario))
    if name == "one seed, three times":
        assert tokens_of(trace, "a") == tokens_of(trace, "b") == tokens_of(trace, "d")


def test_random_scripts(lab):
    """In 60 random scripts rows and batches get what a slow model says, whatever happens in between."""
    judge_random_scripts("lab-08", lab)
