"""Request and SamplingParams: bad values are refused, and the arithmetic of the two counters."""

import json

import numpy as np
import pytest

from mini_engine.request import Request, RequestStatus, SamplingParams

LIMITS = [
    ("temperature", 0), ("temperature", 2), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("min_p", 1),
    ("max_tokens", None), ("max_tokens", 1), ("logprobs", 0), ("seed", 0), ("seed", 2**70),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), LIMITS)
def test_the_limits_themselves_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


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


def test_the_prompt_is_a_copy():
    prompt = [1, 2]
    request = Request("a", prompt)
    prompt.append(3)
    assert request.prompt_token_ids == [1, 2]


def test_the_two_counters():
    """Their difference is the work that is left; a decode has outputs and one token left."""
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


def test_a_request_is_shown_in_few_words():
    """An error message that shows a request stays short, whatever the prompt."""
    request = Request("essay", range(5000), output_token_ids=[7], num_computed_tokens=4096)
    assert repr(request) == "<request 'essay': waiting, 5000 + 1 tokens, 4096 computed>"
    assert len(repr(Request("x" * 10_000, [1]))) < 150
