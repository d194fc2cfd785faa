"""Request and SamplingParams: what is refused at the door, and the arithmetic of the two counters."""

import json
import math
import re

import numpy as np
import pytest

from mini_engine.request import Request, RequestStatus, SamplingParams

BAD = [
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 2.5),
    ("top_k", "5"),
    ("top_k", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", "0.9"),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 1.5),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("logprobs", -1),
    ("logprobs", 1.5),
    ("logprobs", True),
    ("seed", "seven"),
    ("seed", 1.5),
    ("seed", -1),
    ("stop", [""]),
    ("stop", ["a", ""]),
    ("stop", [5]),
    ("stop", 5),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", 5),
    ("ignore_eos", "no"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r}" for name, value in BAD])
def test_sampling_params_refuse_at_the_door(name, value):
    """Every value that could only fail later, in mid-run, is refused with the field's name."""
    with pytest.raises(ValueError, match=f"^{name} must be .+, but is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", 0),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("logprobs", 0),
        ("seed", 0),
        ("seed", 2**70),
    ],
)
def test_the_limits_themselves_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_numpy_numbers_are_numbers():
    """What comes out of an array works as well as what is typed."""
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(1))
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 1)


def test_spellings_of_stop():
    """A lone string is one stop string, not its letters; lists become tuples; None is none."""
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    hash(SamplingParams(stop=["a"], stop_token_ids=[3]))


def test_sampling_params_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="'a' has an empty prompt"):
        Request("a", [])


def test_a_priority_that_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="'a': priority must be a whole number, but is 'high'"):
        Request("a", [1], priority="high")


def test_the_prompt_is_a_copy():
    prompt = [1, 2]
    request = Request("a", prompt)
    prompt.append(3)
    assert request.prompt_token_ids == [1, 2]


def test_the_two_counters():
    """What is left is the difference; a decode has outputs and one token left."""
    request = Request("a", [1, 2, 3, 4])
    assert (request.num_prompt_tokens, request.num_tokens, request.num_new_tokens) == (4, 4, 4)
    assert request.status is RequestStatus.WAITING
    request.num_computed_tokens = 3
    assert request.num_new_tokens == 1 and not request.is_decode, "one left, but it is still the prompt"
    request.num_computed_tokens = 4
    request.output_token_ids.append(9)
    assert (request.num_tokens, request.num_new_tokens, request.is_decode) == (5, 1, True)
    request.num_computed_tokens = 0
    assert request.num_new_tokens == 5 and not request.is_decode, "preempted: it prefills again"


def test_token_ids_are_a_slice_of_prompt_and_outputs():
    request = Request("a", [0, 1, 2, 3])
    request.output_token_ids = [4, 5, 6]
    everything = list(range(7))
    assert request.token_ids() == everything
    for start in range(8):
        for end in range(start, 8):
            assert request.token_ids(start, end) == everything[start:end]


def test_requests_are_compared_by_identity():
    assert Request("a", [1]) != Request("a", [1])


def stopped(outputs, *, eos=(), max_tokens=8, **sampling):
    request = Request("a", [1], SamplingParams(max_tokens=max_tokens, **sampling), eos_token_ids=eos)
    request.output_token_ids = outputs
    return request.check_stop()


def test_check_stop():
    """Only the last token counts; a stop goes before the length."""
    assert stopped([5, 6]) is None
    assert stopped([5, 6], eos=(6,)) == "stop"
    assert stopped([6, 5], eos=(6,)) is None
    assert stopped([5, 6], eos=(6,), ignore_eos=True) is None
    assert stopped([5, 6], stop_token_ids=[6], ignore_eos=True) == "stop"
    assert stopped([5, 6], max_tokens=2) == "length"
    assert stopped([5, 6], max_tokens=2, eos=(6,)) == "stop"
    assert stopped([5, 6], max_tokens=None) is None


@pytest.mark.parametrize("request_id", [7, None, b"a", np.int64(3)])
def test_a_request_id_is_a_string(request_id):
    """An id of another kind would write a trace that nothing reads: it is refused by its value."""
    with pytest.raises(ValueError, match=re.escape(f"request_id must be a string, but is {request_id!r}")):
        Request(request_id, [1])


def test_numbers_become_python_s_own():
    """numpy's numbers are taken, and what is kept can be written as JSON."""
    numbers = {
        "max_tokens": np.int64(3),
        "top_k": np.int32(4),
        "seed": np.uint8(5),
        "stop_token_ids": [np.int64(6)],
    }
    sampling = SamplingParams(temperature=np.float32(0.5), top_p=np.float64(0.9), **numbers)
    request = Request("a", np.array([1, 2]), sampling, priority=np.int64(1))
    kept = [*vars(sampling).values(), request.priority, request.max_tokens, *request.prompt_token_ids]
    assert {type(value) for value in kept} <= {int, float, bool, tuple, type(None)}
    assert json.loads(json.dumps(kept)) == [list(v) if isinstance(v, tuple) else v for v in kept]
    assert type(sampling.stop_token_ids[0]) is int
