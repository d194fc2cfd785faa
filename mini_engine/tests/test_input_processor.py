"""The input processor alone: how much of a prompt is kept, how bad words are spelled, which numbers fit."""

import pytest

from mini_engine.config import EngineConfig
from mini_engine.input_processor import InputProcessor
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import refusal

SPELLINGS = {
    "hot": [1], " hot": [2],  # each one token
    "cold": [3, 5], " cold": [5, 5],  # the space changes the first of two
    "warm": [4, 6], " warm": [5, 4],
    "wet": [6], " wet": [9, 6],  # the space is a token of its own
    "dry": [7, 8], " dry": [7, 9],  # the first token says nothing of the space
}  # fmt: skip


class Words:
    """A tokenizer of the words above; with special tokens it would put 0 before them."""

    eos_token_ids = (0,)
    default_sampling_params = {}

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + SPELLINGS[text]


def made(prompt=(1, 2, 3), **sampling):
    """Return a request of a model of length 8 and 10 tokens."""
    config = EngineConfig(max_model_len=8, num_blocks=4, block_size=4)
    params = SamplingParams(**{"max_tokens": 1} | sampling)
    return InputProcessor(config, Words(), 10).make_request("r", prompt, params)


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("hot", ((1,), (2,))),
        (" hot", ((1,), (2,))),
        ("cold", ((3, 5), (5, 5))),
        ("warm", ((4, 6), (5, 4))),
        ("wet", ((6,),)),
        ("dry", ((7, 8),)),
    ],
)
def test_a_bad_word_is_spelled_with_a_space_where_that_takes_no_token_more(word, spelled):
    """vLLM's rule: the other spelling has as many tokens, and another first one."""
    assert made(bad_words=[word]).bad_words_token_ids == spelled
    both = made(bad_words=[word, "wet"]).bad_words_token_ids
    assert both == (*spelled, (6,))


@pytest.mark.parametrize(
    ("most", "max_tokens", "kept"), [(3, 1, 3), (1, 1, 1), (2, 1, 2), (-1, 3, 5), (-1, None, 7), (-1, 7, 1)]
)
def test_the_last_tokens_of_a_prompt_are_kept(most, max_tokens, kept):
    """truncate_prompt_tokens of them, or with -1 as many as leave room for max_tokens, or for one token."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    request = made(prompt, truncate_prompt_tokens=most, max_tokens=max_tokens)
    assert request.prompt_token_ids == prompt[-kept:]


def test_a_token_is_kept_of_a_prompt_without_room():
    """max_tokens is the model's length: the error names what does not fit with the one token."""
    words = "prompt 1 + max_tokens 8 exceeds the model's length 8"
    refusal(lambda: made([1, 2, 3], truncate_prompt_tokens=-1, max_tokens=8), words)


@pytest.mark.parametrize("what", ["logprobs", "prompt_logprobs"])
def test_as_many_log_probabilities_as_there_are_tokens(what):
    """All ten of the vocabulary may be asked for, and no eleventh."""
    assert getattr(made(**{what: 10}).sampling_params, what) == 10
    refusal(lambda: made(**{what: 11}), f"{what} 11 exceeds the vocabulary of 10 tokens")


def test_other_values_than_sampling_params_are_refused():
    """By the request's name, and the value."""
    config = EngineConfig(max_model_len=8, num_blocks=4, block_size=4)
    make = InputProcessor(config, None, 10).make_request
    refusal(lambda: make("r", [1], {"n": 1}), "request 'r'", "must be a SamplingParams, but is {'n': 1}")
