"""LLM.generate and LLM.chat: the shape people know, on an engine whose texts are known."""

import numpy as np
import pytest
import torch

from mini_engine.llm import LLM
from mini_engine.tests.helpers import greedy, scripted_engine


def llm(scripts=(), **settings):
    scripts = dict(enumerate(scripts))
    return LLM.from_engine(scripted_engine({f"r{i}": text for i, text in scripts.items()}, **settings))


def test_outputs_come_in_the_order_of_the_prompts():
    """Whatever finishes first: short after long, important after unimportant."""
    front = llm(["first", "2nd", "third!!"], max_num_seqs=1, policy="priority")
    params = [greedy(5), greedy(3), greedy(7)]
    outputs = front.generate(["a", "bb", "ccc"], params, priority=[2, 1, 0], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["first", "2nd", "third!!"]
    assert [output.prompt for output in outputs] == ["a", "bb", "ccc"]
    assert [output.request_id for output in outputs] == ["r0", "r1", "r2"]
    assert all(output.finished for output in outputs)
    steps = front.engine.trace.steps
    order = list(dict.fromkeys(i for record in steps for i in record.scheduled))
    assert order == ["r2", "r1", "r0"], "they did run in another order"


def test_an_output_has_all_its_fields():
    front = llm(["hello"])
    (output,) = front.generate("hi", greedy(5, logprobs=2), use_tqdm=True)
    (completion,) = output.outputs
    assert (completion.index, completion.text, completion.finish_reason) == (0, "hello", "length")
    assert completion.token_ids == front.tokenizer.encode("hello")
    assert output.prompt_token_ids == front.tokenizer.encode("hi")
    best = [min(found, key=lambda i: found[i].rank) for found in completion.logprobs]
    assert best == completion.token_ids
    assert (
        "".join(found[i].decoded_token for i, found in zip(best, completion.logprobs, strict=True)) == "hello"
    )
    total = sum(found[i].logprob for i, found in zip(best, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert completion.stop_reason is None and output.num_cached_tokens == 0
    (output,) = front.generate("hi", greedy(5), use_tqdm=False)
    assert output.outputs[0].logprobs is output.outputs[0].cumulative_logprob is None


def test_the_log_probability_of_a_special_token_names_it():
    (output,) = llm([[256]]).generate("hi", greedy(5, logprobs=1), use_tqdm=False)
    (found,) = output.outputs[0].logprobs
    assert (output.outputs[0].text, found[256].decoded_token) == ("", "<eos>")


IDS = ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(i) for i in (1, 2, 3)])


@pytest.mark.parametrize("prompt", ["hi", *IDS], ids=type)
def test_one_prompt_or_a_list(prompt):
    """Text, or token ids of any kind: a flat list of ids is one prompt, a list of lists is several."""
    text, token_ids = (prompt, [71, 72]) if isinstance(prompt, str) else (None, [1, 2, 3])
    for prompts in (prompt, [prompt], [prompt, "ho"]):
        output, *others = llm(["hello", "two"]).generate(prompts, greedy(5), use_tqdm=False)
        assert (output.prompt, output.prompt_token_ids) == (text, token_ids)
        assert output.outputs[0].text == "hello" and [other.prompt for other in others] in ([], ["ho"])


def test_the_default_parameters_are_vllms():
    """Sixteen tokens at temperature 1."""
    (output,) = llm().generate("hi", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    ("script", "params", "reason"),
    [
        ("abcd", dict(stop=["x", "cd"]), "cd"),
        ("abcd", dict(stop_token_ids="c"), "c"),
        ([97, 256], dict(), None),
        ("abcd", dict(max_tokens=2), None),
    ],
)
def test_stop_reason(script, params, reason):
    """The stop string or stop id that ended it; None for an end of sequence or the length."""
    front = llm([script])
    params = {"max_tokens": 9} | params
    if "stop_token_ids" in params:
        params["stop_token_ids"] = front.tokenizer.encode(params["stop_token_ids"])
        (reason,) = params["stop_token_ids"]
    (output,) = front.generate("hi", greedy(**params), use_tqdm=False)
    assert output.outputs[0].stop_reason == reason


def test_nothing_starts_unless_all_is_accepted():
    """One bad prompt in the middle, or too few parameters: an error, and an engine as it was before."""
    front = llm(num_blocks=8)
    for kwargs in (dict(sampling_params=[greedy()]), dict(priority=[1, 2, 3]), dict(sampling_params=[])):
        with pytest.raises(ValueError, match="2 prompts, but .*give one for each prompt"):
            front.generate(["a", "b"], **kwargs, use_tqdm=False)
    with pytest.raises(ValueError, match="no chat template"):
        front.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    with pytest.raises(ValueError, match="token id 999 is outside"):
        front.generate(["fine", [999], "fine"], greedy(), use_tqdm=False)
    assert not front.engine.has_work and front.engine.requests == {}
    assert front.engine.trace.steps == []
    assert len(front.generate(["fine", "fine"], greedy(), use_tqdm=False)) == 2


def test_an_interrupt_leaves_nothing_behind():
    """Ctrl-C in mid-run: the requests of this call are gone, others stay."""
    front = llm()
    front.engine.add_request("other", greedy(9), request_id="other")
    step, calls = front.engine.reader.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    front.engine.reader.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        front.generate(["a", "b"], greedy(9), use_tqdm=False)
    assert list(front.engine.requests) == ["other"]


def test_generate_twice_uses_the_cache():
    front = llm()
    prompt = "a long prompt of some blocks"
    first, second = (front.generate(prompt, greedy(2), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt) - 4)


def chatty():
    front = llm(["hello", "hello"])
    messages = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    front.tokenizer.chat_template = messages + "{% if add_generation_prompt %}>{% endif %}"
    return front


def test_chat():
    """One conversation or several, through the model's template."""
    one = [{"role": "user", "content": "hi"}]
    front = chatty()
    (output,) = front.chat(one, greedy(5), use_tqdm=False)
    assert front.tokenizer.decode(output.prompt_token_ids) == "<user>hi>"
    assert output.outputs[0].text == "hello"
    outputs = chatty().chat([one, [*one, {"role": "assistant", "content": "yo"}]], greedy(5), use_tqdm=False)
    assert front.tokenizer.decode(outputs[1].prompt_token_ids) == "<user>hi<assistant>yo>"


def test_the_embedded_model_writes():
    """LLM() is the embedded model; greedy text repeats and continues the prompt with words."""
    front = LLM(num_blocks=40)
    first, again = (front.generate("O Romeo, ", greedy(40), use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].text == again.outputs[0].text
    assert len(first.outputs[0].text) == 40 and " " in first.outputs[0].text
