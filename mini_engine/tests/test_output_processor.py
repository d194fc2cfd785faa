"""The output processor alone: what is fed to a text, read anew after a fault, and said in a Delta."""

from types import SimpleNamespace

import pytest
import torch

from mini_engine.output_processor import OutputProcessor
from mini_engine.tests.helpers import make_request

END = 0


class Letters:
    """A text in which token 1 is "a"; a stop string is "c", and END is "@" where it is fed."""

    def __init__(self):
        self.text, self.faults = "", []

    def feed(self, token_id):
        self.text += "@abcdefgh"[token_id]
        return "c" if self.text.endswith("c") else None

    def flush(self):
        return None

    def take(self, finished):
        if self.faults:
            raise self.faults.pop()
        given, self.text = self.text, ""
        return given


def made(failed=lambda request, error: None, **kwargs):
    """Return an output processor, and the texts that it makes."""
    texts = []

    def make_text(request):
        texts.append(Letters())
        return texts[-1]

    return OutputProcessor(make_text, failed, **kwargs), texts


def added(outputs, **sampling):
    request = make_request("r", [4, 5], 9, eos=(END,), **sampling)
    outputs.add_request(request, outputs.make_text(request))
    return request


def take(outputs, request, *token_ids):
    """Process a step's tokens and give the request those that count; return its stop string."""
    logits = torch.zeros(len(token_ids), 9)
    accepted, stopped = outputs.process([(request, list(token_ids), logits)])
    request.output_token_ids += accepted["r"]
    return stopped.get("r")


@pytest.mark.parametrize("steps", [[(1,), (END,)], [(1, END)], [(1, END, 2)], [(END,), (END,)], [(END, END)]])
def test_the_end_of_sequence_ends_a_text_from_min_tokens_on(steps):
    """Before, it is a token as any other; there and later it ends the text, which does not show it."""
    outputs, texts = made()
    request = added(outputs, min_tokens=2)
    for step in steps:
        take(outputs, request, *step)
    assert request.output_token_ids == [steps[0][0], END]
    assert texts[0].text == ("a" if steps[0][0] == 1 else "@")


def test_a_step_that_is_undone_is_read_again_from_the_tokens():
    """The text is made anew: with the end-of-sequence token that came before min_tokens, and no further."""
    outputs, texts = made()
    request = added(outputs, min_tokens=2)
    take(outputs, request, END)
    outputs.make_delta(request)
    outputs.process([(request, [1, 3], torch.zeros(2, 9))])
    outputs.undo()
    take(outputs, request, 2)
    assert outputs.make_delta(request).text == "b" and len(texts) == 2


@pytest.mark.parametrize(("token_ids", "reason", "text"), [((1, END), "stop", "a"), ((END, 1), None, "@a")])
def test_a_text_that_failed_is_read_without_the_token_that_ended_it(token_ids, reason, text):
    """An error that does not come again is raised; the next try gives the same piece."""
    outputs, texts = made()
    request = added(outputs, min_tokens=2)
    take(outputs, request, *token_ids)
    request.finish_reason, texts[0].faults = reason, [OSError("busy")]
    with pytest.raises(OSError, match="busy"):
        outputs.make_delta(request)
    assert outputs.make_delta(request).text == text


def test_the_first_delta_has_the_prompts_log_probabilities():
    """None for its first token, then a row for each. Later Deltas have None, as has every Delta of a request
    that did not ask."""
    outputs, _ = made(prompt_logits=lambda token_ids: iter([torch.zeros(len(token_ids) - 1, 9)]))
    request = added(outputs, prompt_logprobs=1)
    take(outputs, request, 1)
    first = outputs.make_delta(request)
    take(outputs, request, 2)
    second = outputs.make_delta(request)
    assert first.prompt_logprobs[0] is None and 5 in first.prompt_logprobs[1]
    assert second.prompt_logprobs is None
    other = added(outputs)
    take(outputs, other, 1)
    assert outputs.make_delta(other).prompt_logprobs is None


def test_without_a_models_logits_the_prompt_has_no_log_probabilities():
    """Where a part computes none, its first token's None is all there is."""
    outputs, _ = made()
    request = added(outputs, prompt_logprobs=1)
    take(outputs, request, 1)
    assert outputs.make_delta(request).prompt_logprobs == [None]


def test_a_delta_names_the_stop_string():
    """The one that the caller hands over; a Delta that is made after a fault has it from the text."""
    for handed_over in (True, False):
        outputs, _ = made()
        request = added(outputs)
        stop = take(outputs, request, 1, 3)
        request.finish_reason = "stop"
        assert outputs.make_delta(request, stop if handed_over else None).stop_reason == stop == "c"
    outputs, _ = made()
    request = added(outputs)
    take(outputs, request, 1)
    assert outputs.make_delta(request, "elsewhere").stop_reason == "elsewhere"


@pytest.mark.parametrize("complete", [True, False])
def test_the_last_delta_says_whether_the_shape_is_complete(complete):
    """Those before it do not, and without a shape no Delta does."""
    outputs, _ = made()
    request = added(outputs)
    request.grammar = SimpleNamespace(is_complete=lambda outputs, eos: complete)
    take(outputs, request, 1)
    assert outputs.make_delta(request).is_complete is None
    request.finish_reason = "length"
    assert outputs.make_delta(request).is_complete is complete
    request.grammar = None
    assert outputs.make_delta(request).is_complete is None
