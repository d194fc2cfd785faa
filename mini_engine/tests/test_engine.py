"""The engine as its users meet it: requests, deltas, stops, streams, aborts and refusals.

Mostly on an engine whose model says what a test chooses, so that every text is known.
"""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

from mini_engine.engine import Engine, step
from mini_engine.fast.model import FastLM
from mini_engine.llm import LLM
from mini_engine.parts import NoWorkError, Parts
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import (
    alone,
    drain,
    greedy,
    row,
    scripted_engine,
    spy,
    text_of,
    tiny_model,
    tokens_of,
)
from mini_engine.trace import Recorder, VirtualClock, read_trace, replay


def say(script, max_tokens=20, **kwargs):
    """The deltas of a request whose model says `script`."""
    engine = scripted_engine({"a": script})
    engine.add_request("hi", greedy(max_tokens, **kwargs), request_id="a")
    return drain(engine)["a"]


# ------------------------------------------------------------------------------------- deltas


def test_a_character_is_never_split():
    """Bytes of one character come out together; no delta holds half of it."""
    text = "né 日本 🙂!"
    deltas = say(text, len(text.encode()))
    assert text_of(deltas) == text
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert [delta.text for delta in deltas if delta.text] == list(text)


def test_half_a_character_at_the_end_is_given_as_it_is():
    """When max_tokens cuts a character, what was held back is flushed with the last delta."""
    deltas = say("a日", 2)
    assert text_of(deltas) == "a\ufffd" and deltas[-1].finish_reason == "length"


# ------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        ("one END two", "END", "one "),
        ("END", "END", ""),
        ("one ENE END", "END", "one ENE "),
        ("aab", "ab", "a"),
        ("ababac", "abac", "ab"),
        ("a\n\nb", ["\n\n", "zzz"], "a"),
        ("xyz", ["yz", "y"], "x"),
        ("abcd", ["bcd", "c"], "ab"),
        ("日本語", "本", "日"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(script, stop, text):
    """It is never given out, nor any part of it, also when it is spread over several tokens."""
    deltas = say(script, stop=stop)
    assert (text_of(deltas), deltas[-1].finish_reason) == (text, "stop")


def test_text_that_might_begin_a_stop_string_is_held_back():
    """And released as soon as it is decided; in between, deltas come without text."""
    deltas = say("a<b<e!", 6, stop="<end>")
    assert [delta.text for delta in deltas] == ["a", "", "<b", "", "", "<e!"]


def test_stop_strings_in_the_prompt_do_not_count():
    engine = scripted_engine({"a": "D ok"})
    engine.add_request("EN", greedy(4, stop="END"), request_id="a")
    assert text_of(drain(engine)["a"]) == "D ok"


def test_outputs_go_on_where_the_prompt_ends():
    """A leading space of the first output token is text, in tokenizers that mark words by spaces."""
    import tokenizers
    from tokenizers import decoders, models

    from mini_engine.text.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "▁sea": 1, "s": 2}, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, source="words")
    assert tokenizer.decode([0, 1, 2]) == "the seas"
    engine = Engine(tiny_model(), tokenizer, num_blocks=8, block_size=4)
    engine.recovery.sampler = lambda logits, requests: [1 + len(r.output_token_ids) for r in requests]
    engine.add_request([0], greedy(2), request_id="a")
    assert text_of(drain(engine)["a"]) == " seas"


# ------------------------------------------------------------------------------- the step


def test_no_work_is_an_error_of_its_own():
    engine = scripted_engine({})
    with pytest.raises(NoWorkError, match="no request is waiting or running; add one first"):
        engine.step()
    engine.add_request("hi", greedy(1))
    drain(engine)
    with pytest.raises(NoWorkError):
        engine.step()


def test_a_scheduler_that_schedules_nothing_is_reported():
    engine = scripted_engine({})
    engine.add_request("hi", greedy(1))
    engine.scheduler.schedule = dict
    with pytest.raises(RuntimeError, match="scheduled nothing with 1 requests waiting and 0 running"):
        engine.step()


def test_what_is_not_said_is_as_documented():
    """A priority of 0, and the model computed as quickly as can be."""
    engine = Engine(tiny_model(dtype="float32"), num_blocks=8, block_size=4)
    assert engine.requests[engine.add_request([1])].priority == 0
    stream = engine.stream([1], request_id="a")
    assert engine.requests["a"].priority == 0
    stream.close()
    assert isinstance(engine.model, FastLM)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "max_tokens"), [(3, 8, 30), (3, 64, 125), (127, 64, 1), (32, 8, 1)]
)
def test_without_max_tokens_a_request_goes_on_to_the_limit(num_tokens, num_blocks, max_tokens):
    """The pool's, which need not hold the last token, or the model's."""
    engine = scripted_engine({}, num_blocks=num_blocks)
    name = engine.add_request([1] * num_tokens, greedy(None))
    assert engine.requests[name].max_tokens == max_tokens


def test_a_salt_reaches_the_cache(model):
    engine = Engine(model, num_blocks=20, block_size=4)
    cached = []
    for salt in ("", "x", "x", ""):
        request = engine.requests[engine.add_request(list(range(9)), greedy(1), cache_salt=salt)]
        drain(engine)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 8, 8]


def test_without_a_record_there_is_no_trace(model):
    """record=False serves the same tokens and says what it lacks."""
    params, shown = greedy(6), []
    for record in (True, False):
        engine = Engine(model, num_blocks=20, block_size=4, record=record)
        engine.add_request([3, 4, 5], params)
        shown.append(tokens_of(drain(engine)["r0"]))
        if record:
            assert engine.trace.end.end == "drained" and engine.trace.steps
        else:
            with pytest.raises(RuntimeError, match="record=True"):
                _ = engine.trace
    assert shown[0] == shown[1] == alone(model, [3, 4, 5], params)


def test_recording_is_off_unless_asked_for(model):
    """Nothing is kept by default, however long the engine runs; a number keeps the last so many steps."""
    engine = Engine(model, num_blocks=8, block_size=4)
    assert not isinstance(engine.scheduler, Recorder)
    ring = Engine(model, num_blocks=20, block_size=4, record=5)
    for i in range(4):
        ring.add_request([3, 4, 5, i], greedy(6))
        drain(ring)
    trace = ring.trace
    assert [record.step for record in trace.steps] == list(range(19, 24))
    assert [view.request_id for _, views in replay(trace) for view in views.values()] == ["r3"] * 5


def test_a_trace_streamed_to_a_file_is_the_one_kept_in_memory(model, tmp_path):
    """record=PATH writes each step as it comes; the file is there once the engine is closed. In memory the
    trace can be read in the middle of a run, as often as one likes, and changes nothing."""
    path, traces = tmp_path / "run.jsonl", []
    for record in (path, True):
        engine = Engine(model, num_blocks=20, block_size=4, record=record, clock=VirtualClock())
        for i in range(3):
            engine.add_request([3, 4, 5, i], greedy(6))
        while engine.has_work:
            engine.step()
            seen = [engine.trace for _ in range(3)] if record is True else []
            assert all(trace.end.end == ("max_steps" if engine.has_work else "drained") for trace in seen)
        assert not path.exists() or record is True
        engine.close()
        traces.append(read_trace(path) if record is path else engine.trace)
    assert [line.to_json() for line in traces[0].lines()] == [line.to_json() for line in traces[1].lines()]


def test_closing_in_mid_run(model, tmp_path):
    """The trace says that the run was not over; without a trace there is nothing to close."""
    for record in (tmp_path / "run.jsonl", False):
        engine = Engine(model, num_blocks=8, block_size=4, record=record)
        engine.add_request([3, 4], greedy(3))
        engine.step()
        engine.close()
    assert read_trace(tmp_path / "run.jsonl").end.end == "max_steps"


def test_a_step_that_yields_several_tokens(model):
    """A step that brings three tokens gives them out in one Delta, less what follows the end."""

    def three_at_once(engine):
        scheduled = engine.scheduler.schedule()
        rows = [row(engine.requests[name], n) for name, n in scheduled.items()]
        ending = [r.request for r in rows if r.is_last]
        engine.scheduler.update(scheduled, {r.request_id: [7, 8, 9] for r in ending})
        return engine.collect(ending, {})

    engine = Engine(model, num_blocks=20, block_size=4, parts=Parts(step=three_at_once), record=True)
    engine.add_request([3, 4, 5], greedy(8), request_id="a")
    engine.add_request([3, 4, 5], SamplingParams(stop_token_ids=[8]), request_id="b")
    first, second = engine.step()
    assert (first.token_ids, first.finish_reason) == ([7, 8, 9], None)
    assert (second.token_ids, second.finish_reason, second.stop_reason) == ([7, 8], "stop", 8)
    assert engine.trace.steps[0].new_tokens == {"a": [7, 8, 9], "b": [7, 8]}


def test_several_tokens_are_accepted_up_to_a_stop_string():
    engine = scripted_engine({})
    engine.add_request("hi", greedy(9, stop="b", logprobs=0), request_id="a")
    tokens, request = engine.tokenizer.encode("abc"), engine.requests["a"]
    logits = torch.arange(3 * 257.0).reshape(3, 257) ** 2 / 1e5
    accepted = engine.output_processor.process([(request, tokens, logits)])
    assert accepted == ({"a": tokens[:2]}, {"a": "b"})
    expected = [logits[i].log_softmax(-1)[token].item() for i, token in enumerate(tokens[:2])]
    found = engine.output_processor.request_states["a"].logprobs
    values = [[of.logprob for of in row.values()] for row in found]
    assert values == [[pytest.approx(logprob)] for logprob in expected]


def test_a_step_leaves_no_gradients():
    engine = Engine(tiny_model().requires_grad_(True), num_blocks=20, block_size=4)
    engine.add_request([1, 2], greedy(2))
    drain(engine)
    assert not engine.backend.pool.k.requires_grad
    assert not torch.is_inference_mode_enabled()


# ------------------------------------------------------------------------------------- streams


def test_a_stream_is_queued_at_once():
    """The call itself adds the request, and refuses what add_request refuses."""
    engine = scripted_engine({})
    stream = engine.stream("hi", greedy(3), request_id="a")
    assert "a" in engine.requests
    added = spy(engine.scheduler, "add")
    for call in (engine.stream, engine.add_request):
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            call("hi", greedy(3), request_id="a")
    assert added == [], "a scheduler of one's own need not look"
    assert len(list(stream)) == 3


def test_the_stream_of_an_aborted_request_says_so():
    engine = scripted_engine({})
    stream = engine.stream("hi", greedy(3), request_id="a")
    assert engine.abort("a") and [delta.finish_reason for delta in stream] == ["abort"]


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("how", ["drop", "close"])
def test_dropping_a_stream_aborts_its_request(started, how):
    """Also when not a single delta was taken from it."""
    engine = scripted_engine({"a": "aaaa", "b": "bbbb"})
    engine.add_request("hi", greedy(4), request_id="b")
    stream = engine.stream("hi", greedy(4), request_id="a")
    if started:
        next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    del stream
    assert list(engine.requests) == ["b"] and engine.inboxes == {}
    assert text_of(drain(engine)["b"])


def test_a_stream_that_cannot_be_made_leaves_nothing():
    def broken(engine, request):
        engine.inboxes[request.request_id] = []
        raise LookupError("no room")

    engine = scripted_engine({}, parts={"Stream": broken})
    with pytest.raises(LookupError, match="no room"):
        engine.stream("hi")
    assert engine.requests == {} and engine.inboxes == {} and not engine.has_work


# ------------------------------------------------------------------------------------- aborts


def test_an_abort_that_comes_too_late():
    """From another thread, say: the request ends after it was looked up, and before its turn."""
    engine = scripted_engine({})
    engine.add_request("hi", greedy(3), request_id="a")
    lock = engine._lock

    @contextmanager
    def late():
        engine._lock = lock
        drain(engine)
        with lock:
            yield

    engine._lock = late()
    assert engine.abort("a") is False


def test_ids_that_are_made_up_are_new():
    """They avoid the user's own names, and those of requests that have gone."""
    engine = scripted_engine({})
    for name in ("r0", "r1"):
        assert engine.add_request("hi", greedy(1)) == name
        drain(engine)
    engine.add_request("hi", greedy(1), request_id="r4")
    ids = {engine.add_request("hi", greedy(1)) for _ in range(3)}
    assert len(ids) == 3 and not ids & {"r0", "r1", "r4"} and len(drain(engine)) == 4


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "'a' has an empty prompt"),
        ([1, 257], {}, r"'a': token id 257 is outside the vocabulary \(0 to 256\)"),
        ([-1], {}, "token id -1 is outside"),
        *[
            (v, {}, "'a': a prompt (must be text or token ids, but is|has the key) ")
            for v in (5, None, b"abc", bytearray(b"a"), {1: 2}, {1, 2}, iter([1, 2]), torch.tensor(3))
        ],
        (range(10**12), {}, "prompt 1000000000000 exceeds the model's length 128; shorten it"),
        ([1] * 60, {"max_tokens": 69}, "prompt 60 [+] max_tokens 69 exceeds the model's length 128"),
        ([1] * 128, {"max_tokens": None}, "prompt 128 [+] max_tokens 1 exceeds the model's length 128"),
        ([1] * 20, {"max_tokens": 14}, "KV room for 33 tokens .* pool holds 32"),
    ],
)
def test_requests_that_cannot_work_are_refused(prompt, params, message):
    """With the request's name and the value at fault; nothing is queued."""
    engine = scripted_engine({}, num_blocks=8, block_size=4)
    params = SamplingParams(**params) if isinstance(params, dict) else params
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params, request_id="a")
    assert not engine.has_work and engine.requests == {} and engine.output_processor.request_states == {}
    engine.add_request("hi", greedy(1), request_id="a")
    drain(engine)


def test_text_needs_a_tokenizer(model):
    engine = Engine(model, num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match="a prompt of text needs a tokenizer"):
        engine.add_request("hi", greedy(1))
    with pytest.raises(ValueError, match="a stop string needs a tokenizer"):
        engine.add_request([1], greedy(1, stop="x"))


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_sample_takes_a_row_for_each_request(model, num_rows):
    """A step that hands in other logits than those of the ending is refused, and no token is lost."""
    engine = Engine(model, num_blocks=8, block_size=4)
    requests = [engine.requests[engine.add_request([1, 2, 3], greedy(3))] for _ in range(2)]
    with pytest.raises(ValueError, match=f"{num_rows} rows of logits for 2 requests"):
        engine.sample(torch.zeros(num_rows, model.config.vocab_size), requests)
    assert engine.sample(torch.zeros(0, model.config.vocab_size), []) == engine.sample(None, []) == ({}, {})
    assert tokens_of(drain(engine)["r1"]) == alone(model, [1, 2, 3], greedy(3))


# ---------------------------------------------------------------------------- parts and sizes


def test_parts_can_be_replaced_and_are_named(model):
    """Each part is called, and the trace's header says where the replaced ones come from."""
    seen = set()
    base = Parts()
    none_given = {"step": step, "propose": lambda requests: [[] for _ in requests]}

    def noting(name):
        def part(*args, **kwargs):
            seen.add(name)
            return (getattr(base, name) or none_given[name])(*args, **kwargs)

        return part

    names = [field.name for field in fields(Parts) if field.name not in ("Stream", "grammar")]
    parts = Parts(**{name: noting(name) for name in names})
    engine = Engine(model, num_blocks=8, block_size=4, parts=parts, record=True)
    engine.add_request([1, 2, 3], greedy(3))
    assert tokens_of(drain(engine)["r0"]) == alone(model, [1, 2, 3], greedy(3))
    assert seen == set(names)
    assert base.origins() == {}
    assert engine.trace.header.parts == dict.fromkeys(names, __name__)


def test_the_pool_is_sized_by_memory(model):
    """The pool has as many blocks as the bytes allow."""
    per_token = 2 * 2 * 2 * 6 * 8  # k and v, layers, kv heads, head_dim, bytes
    engine = Engine(model, block_size=4, kv_cache_bytes=per_token * 4 * 10 + 1)
    assert engine.scheduler.kv.num_blocks == 10


def test_importing_the_package_does_not_import_torch():
    """Nor do the scheduler's side of it, the trace, the figures, which draw when they are asked to, and what
    reads a tokenizer."""
    code = (
        "import sys, mini_engine\n"
        "import mini_engine.scheduler, mini_engine.block_manager, mini_engine.trace.metrics\n"
        "import mini_engine.show.figures\n"
        "mini_engine.SamplingParams(), mini_engine.Request('a', [1])\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & {*sys.modules}\n"
        "assert set(mini_engine.__all__) <= {*dir(mini_engine), 'LLM', 'RequestOutput', 'Engine', 'Parts'}\n"
        "from mini_engine.loading import files, registry, tokenizer\n"
        "tokenizer.load_tokenizer(registry.resolve('shakespeare'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import mini_engine

    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = mini_engine.Motor


# ------------------------------------------------------------------------- the Deltas' one way out


def test_a_stream_leaves_the_others_their_deltas():
    """A stream serves steps; what others got meanwhile waits for the next step(), once, in order."""
    engine = scripted_engine({"a": "hello", "b": "world", "c": "third"})
    for name in "ac":
        engine.add_request("hi", greedy(5), request_id=name)
    streamed = text_of(list(engine.stream("hi", greedy(5), request_id="b")))
    assert streamed == "world" and engine.has_work and not engine.scheduler.has_work
    deltas = engine.step()
    texts = {name: text_of([d for d in deltas if d.request_id == name]) for name in "abc"}
    assert texts == {"a": "hello", "b": "", "c": "third"} and not engine.has_work


def test_step_leaves_a_stream_its_deltas():
    """step() returns none of them, and the stream has them all, however late it is read."""
    engine = scripted_engine({"a": "hello", "b": "world"})
    engine.add_request("hi", greedy(5), request_id="a")
    stream = engine.stream("hi", greedy(5), request_id="b")
    assert text_of(drain(engine)["a"]) == "hello" and engine.inboxes == {}
    assert text_of(list(stream)) == "world"


def test_generate_leaves_the_others_their_deltas():
    """Those of requests that were there before, and of streams."""
    engine = scripted_engine({"a": "hello", "b": "world"})
    engine.add_request("hi", greedy(5), request_id="a")
    stream = engine.stream("hi", greedy(5), request_id="b")
    (output,) = LLM.from_engine(engine).generate("hi", greedy(6), use_tqdm=False)
    assert output.outputs[0].text == "......"
    assert text_of(engine.step()) == "hello" and text_of(list(stream)) == "world" and not engine.has_work


def test_an_id_is_in_use_until_its_last_delta_is_read():
    """Else a new request under it would be given the old one's; a stream's own are never mixed up."""
    engine = scripted_engine({"a": "hello", "r1": "hello"})
    engine.add_request("hi", greedy(5), request_id="a")
    list(engine.stream("hi", greedy(6), request_id="b"))
    with pytest.raises(ValueError, match="'a' is in use: call step"):
        engine.add_request("hi", request_id="a")
    assert text_of(engine.step()) == "hello"
    old = engine.stream("hi", greedy(5), request_id="a")
    drain(engine)
    new = engine.stream("hi", greedy(2), request_id="a")
    assert text_of(list(new)) == "he" and text_of(list(old)) == "hello"


def test_a_resumed_request_reports_at_most_its_prompt_as_cached():
    """At its resumption its own outputs are found in the cache, too; they are no part of the prompt."""
    engine = scripted_engine({}, block_size=2, record=False)
    scheduler, take_in, seen = engine.scheduler, engine.scheduler.update, []

    def update(*args):
        finished = take_in(*args)
        seen.extend(request.num_cached_tokens for request in scheduler.running)
        if len(seen) == 10:
            scheduler.preempt(scheduler.running[0])
        return finished

    scheduler.update = update
    (output,) = LLM.from_engine(engine).generate("hello", greedy(18), use_tqdm=False)
    assert max(seen) == 14 and output.num_cached_tokens == 5
