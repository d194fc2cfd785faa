"""Faults in the middle of a step: errors of the model, Ctrl-C, SIGTERM, requests that cannot go on.

A step is done or has not begun, and no request is harmed by another. Shown on chosen faults, and on random
ones at random points; SOAK=1 tries 10,000 of those.
"""

import random
import signal
import sys
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from mini_engine.backends.padded import PaddedBackend
from mini_engine.commands import app
from mini_engine.engine import Engine
from mini_engine.engine_lock import EngineBusyError
from mini_engine.invariants import watch
from mini_engine.llm import LLM
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import (
    alone,
    byte_tokenizer,
    drain,
    greedy,
    scripted_engine,
    text_of,
    tiny_model,
    tokens_of,
)
from mini_engine.tests.soak import SOAK, count
from mini_engine.text.output_text import OutputText
from mini_engine.trace import VirtualClock, read_trace, replay, write_trace

PARTS, SEEDS = (4, range(1400)) if SOAK else (1, range(12))
FAULTS = 8  # of a workload
# A backend that cannot compute a request by itself.
PADDED = {"parts": Parts(attend_backend=PaddedBackend), "enable_prefix_caching": False}


class Terminated(BaseException):
    """Raised by SIGTERM here."""


@contextmanager
def raising_handlers():
    """Let SIGTERM raise Terminated, and SIGALRM TimeoutError."""

    def stop(signum, _):
        raise Terminated if signum == signal.SIGTERM else TimeoutError

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
        assert all(signal.getsignal(signum) is stop for signum in before)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ModelError(RuntimeError):
    pass


# ---------------------------------------------------------------------------------- random faults


class Fault:
    """`Fault(what, *points)(call)`: the call's result, disturbed where Python itself looks for signals.

    That is where a function begins and where one of C's returns; `points` counts these places. At each of
    them `what` is done: a signal is raised, or, in the model only, an error.
    """

    def __init__(self, what, *points):
        self.what, self.points = what, points
        self.num_points, self.fired = 0, 0
        self.depth = 0  # in backend.forward, if it is not 0

    def __call__(self, call):
        try:
            sys.setprofile(self.profile)
            return call()
        finally:
            sys.setprofile(None)

    def profile(self, frame, event, arg):
        if frame.f_code.co_name == "forward" and "rows" in frame.f_code.co_varnames:
            self.depth += {"call": 1, "return": -1}.get(event, 0)
        if event not in ("call", "c_return") or (self.what is ModelError and not self.depth):
            return
        self.num_points += 1
        if self.num_points in self.points:
            self.fired += 1
            if self.what is ModelError:
                raise ModelError("injected")
            signal.raise_signal(self.what)


def workload(seed):
    """Settings of an engine, and the requests with the step in which each comes."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 7])
    shared, requests = [rng.randrange(200) for _ in range(9)], []
    for i in range(rng.randint(3, 6)):
        prompt = shared[: rng.choice([0, 5, 9])] + [rng.randrange(200) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(
            temperature=rng.choice([0, 0.8, 1.5]),
            max_tokens=rng.randint(1, 10),
            seed=rng.choice([None, i]),
            stop=rng.choice([(), ("e", "\ufffd\ufffd")]),
            logprobs=rng.choice([None, None, 2]),
            repetition_penalty=rng.choice([1, 1.2]),
        )
        requests.append((rng.randint(0, 6), f"q{i}", prompt, params, rng.choice([0, 0, 1])))
    longest = max(len(prompt) + params.max_tokens - 1 for _, _, prompt, params, _ in requests)
    seqs = rng.randint(1, 4)
    settings = dict(
        num_blocks=-(-longest // block_size) + rng.randint(0, 3),
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice([0, 2, 30]),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        watermark=0,
    )
    return settings, sorted(requests, key=lambda request: request[0])


MODELS = {dtype: tiny_model(vocab_size=257, dtype=dtype) for dtype in ("float64", "float32")}


class Run:
    """A workload on an engine that is disturbed by `faults` of random kinds at random points."""

    def __init__(self, seed, faults):
        self.rng = random.Random(f"faults of {seed}")
        settings, self.requests = workload(seed)
        model = MODELS["float32" if seed % 4 == 0 else "float64"]  # float32 on the CPU is computed by fast/
        tokenizer = byte_tokenizer()
        if seed % 5 == 1:
            settings |= PADDED
        self.engine = Engine(model, tokenizer, record=True, clock=VirtualClock(), **settings)
        self.num_points = {}  # that a call of this name has had
        self.done, self.num_faults = Counter(), faults
        self.said = {}
        self.num_rolled_back = 0
        self.aborted = set()

    def disturbed(self, name, call):
        """The result of a call that may be disturbed; None if it was ended by that."""
        kind = self.rng.choice(["none", "none", "error", "ctrl-c", "sigterm", "twice", "alarm"])
        if kind == "none" or self.done.total() >= self.num_faults or (kind == "error" and name != "step"):
            return call()
        key = (name, kind == "error")
        points = [self.rng.randint(1, self.num_points.get(key, 300)) for _ in range(1 + (kind == "twice"))]
        kinds = {"error": ModelError, "sigterm": signal.SIGTERM, "alarm": signal.SIGALRM}
        what = kinds.get(kind, signal.SIGINT)
        fault = Fault(what, *points)
        before = state(self.engine)
        try:
            return fault(call)
        except (KeyboardInterrupt, Terminated, TimeoutError):
            return None
        except ModelError:
            after = state(self.engine)
            if after["preemptions"] == before["preemptions"]:  # a preemption stands
                assert after == before
                self.num_rolled_back += 1
            return None
        finally:
            self.num_points[key] = max(20, fault.num_points)
            self.done[kind] += bool(fault.fired)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def add(self, request):
        _, name, prompt, params, priority = request
        while name not in self.said:
            self.disturbed(
                "add", lambda: self.engine.add_request(prompt, params, request_id=name, priority=priority)
            )
            if name in self.engine.requests:
                self.said[name] = []

    def step(self):
        for delta in self.disturbed("step", self.engine.step) or ():
            self.said[delta.request_id].append(delta)
        # The last to come is aborted when it has said three tokens.
        name = self.requests[-1][1]
        while len(self.said.get(name, ())) == 3 and name in self.engine.requests:
            self.disturbed("abort", lambda: self.engine.abort(name))
            self.aborted = {name}

    def check(self):
        engine = self.engine
        there = [*engine.scheduler.waiting, *engine.scheduler.running]
        ready = {delta.request_id for delta in engine._ready}
        assert (
            {r.request_id for r in there}
            == set(engine.requests)
            == set(engine.output_processor.request_states)
        )
        assert all(engine.requests[r.request_id] is r for r in there)
        engine.scheduler.kv.check()
        held = sum(len(engine.scheduler.kv.block_table(r)) for r in engine.scheduler.running)
        assert not any(engine.scheduler.kv.block_table(r) for r in engine.scheduler.waiting)
        assert held or engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
        assert ready <= set(self.said)

    def play(self):
        left, step = list(self.requests), 0
        while left or self.engine.has_work:
            while left and left[0][0] <= step:
                self.add(left.pop(0))
            if self.engine.has_work:
                self.step()
                self.check()
            step += 1
            assert step < 500, "no end"
        return self

    def outcome(self):
        return {
            name: (
                tokens_of(deltas),
                text_of(deltas),
                "abort" if name in self.aborted else deltas[-1].finish_reason,
                [logprobs for delta in deltas for logprobs in delta.logprobs or ()],
            )
            for name, deltas in self.said.items()
        }


def state(engine):
    """All of an engine that a step changes, but for the names of blocks and what is only cached."""
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    requests = {
        name: (r.num_computed_tokens, list(r.output_token_ids), r.status, len(kv.block_table(r)))
        for name, r in engine.requests.items()
    }
    return {
        "requests": requests,
        "queues": ([r.request_id for q in (scheduler.waiting, scheduler.running) for r in q]),
        "preemptions": sum(r.num_preemptions for r in engine.requests.values()),
        "blocks": (kv.num_free_blocks, vars(kv.stats).copy()),
        "trace": [line.to_json() for line in engine.trace.lines()],
        "texts": {name: output.text.text for name, output in engine.output_processor.request_states.items()},
        "ready": list(engine._ready),
    }


def check_trace(engine, outcome, path):
    """It can be read, and says of each request what was given out: queued once, finished once."""
    write_trace(path, engine.trace)
    trace = read_trace(path)
    events = [event for record in trace.steps for event in record.events] + trace.end.events
    queued = Counter(event.id for event in events if event.type == "QUEUED")
    finished = {event.id: event.reason for event in events if event.type == "FINISHED"}
    assert queued == Counter(list(outcome))
    assert finished == {name: reason for name, (_, _, reason, _) in outcome.items()}
    shown = {name: [] for name in outcome}
    for record, views in replay(trace):
        for name, token_ids in record.new_tokens.items():
            shown[name] += token_ids
        assert all(views[name].running for name in record.scheduled)
        held = [b for view in views.values() if view.running for b in view.blocks]
        assert len(set(held)) == trace.header.config["num_blocks"] - record.num_free_blocks
    assert shown == {name: token_ids for name, (token_ids, *_) in outcome.items()}


def disturbed_run(seed, path):
    """Check that the faults of a workload change nothing; return how many there were of each kind."""
    quiet = Run(seed, 0).play().outcome()
    run = Run(seed, FAULTS)
    with watch(run.engine, seed):
        run.play()
    outcome = run.outcome()
    assert outcome.keys() == quiet.keys()
    for name, (*said, logprobs) in quiet.items():
        assert list(outcome[name][:3]) == said
        for found, expected in zip(outcome[name][3], logprobs, strict=True):
            assert {i: of.rank for i, of in found.items()} == {i: of.rank for i, of in expected.items()}
            for i, of in found.items():
                assert of.logprob == pytest.approx(expected[i].logprob, abs=1e-4)
    check_trace(run.engine, outcome, path)
    assert run.engine.sampler._numbers == {} and run.engine.inboxes == {}
    return run.done + Counter({"rolled back": run.num_rolled_back})


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults(part, tmp_path):
    """Errors in the model, Ctrl-C (once, twice), SIGTERM and a time-out by SIGALRM, wherever Python looks for
    signals, in steps, add_request and abort: tokens, texts and trace are a quiet run's; nothing leaks."""
    done, seeds = Counter(), SEEDS[part::PARTS]
    with raising_handlers():
        for seed in seeds:
            try:
                done += disturbed_run(seed, tmp_path / "run.jsonl")
            except Exception as error:
                raise AssertionError(f"seed {seed}: replay it with disturbed_run({seed}, path)") from error
    for what, number in done.items():
        count(f"faults: {what}", number)
    assert all(
        done[what] > len(seeds) / 3
        for what in ("error", "ctrl-c", "sigterm", "twice", "alarm", "rolled back")
    )


# ---------------------------------------------------------------------------------- chosen faults


def step_whose_update_fails(engine):
    """Call step() once; it raises after the tokens are sampled."""

    def fail(*args):
        raise ModelError("injected")

    update, engine.scheduler.update = engine.scheduler.update, fail
    with pytest.raises(ModelError):
        engine.step()
    engine.scheduler.update = update


def during_forward(engine, call):
    """Let each forward pass be preceded by `call`."""
    forward = engine.backend.forward
    engine.backend.forward = lambda rows: [call(), forward(rows)][-1]


def served(script="hello", **parts):
    """An engine with one request, "a", whose model says `script`."""
    engine = scripted_engine({"a": script}, **parts)
    engine.add_request("hi", greedy(5), request_id="a")
    return engine


def test_an_error_after_sampling_costs_no_draw_and_no_text():
    """update() fails three times: tokens, texts and log probabilities are those of a run without failures."""
    outcomes = []
    for num_failures in (0, 3):
        engine = Engine(MODELS["float64"], byte_tokenizer(), num_blocks=40, block_size=4, record=True)
        for i in range(3):
            engine.add_request([i, 2, 3], SamplingParams(max_tokens=9, seed=i, logprobs=1, stop="zz"))
        said = [delta for _ in range(4) for delta in engine.step()]
        for _ in range(num_failures):
            step_whose_update_fails(engine)
        said += [delta for deltas in drain(engine).values() for delta in deltas]
        said.sort(key=lambda delta: delta.request_id)
        outcomes.append([(d.request_id, d.token_ids, d.text, d.logprobs) for d in said])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("at", range(5))
def test_an_error_in_the_middle_of_a_character_or_a_stop_string(at):
    """Whichever step fails once, the text is read again as far as its tokens stand."""
    engine = scripted_engine({"a": "aé<b"})
    engine.add_request("hi", greedy(9, stop="<b"), request_id="a")
    said = [delta for _ in range(at) for delta in engine.step()]
    step_whose_update_fails(engine)
    said += drain(engine)["a"]
    assert [delta.text for delta in said] == ["a", "", "é", "", ""] and said[-1].finish_reason == "stop"


def test_an_error_after_a_request_has_ended_with_one():
    """A request that was admitted beside it waits again; the message comes with the next call."""
    engine = scripted_engine({"a": "hello", "b": "!"}, parts={"OutputText": Brittle})
    for name in "ab":
        engine.add_request("hi", greedy(5), request_id=name)
    step_whose_update_fails(engine)
    assert [request.request_id for request in engine.scheduler.waiting] == ["a"]
    assert [(delta.request_id, delta.finish_reason) for delta in engine.step()] == [("b", "error")]
    assert text_of(drain(engine)["a"]) == "hello"


class Full:
    """A recorder's consumer whose disk is full in the third step."""

    def add(self, record):
        if record.step == 2:
            raise OSError("no space left")


def test_an_error_after_update_costs_no_token():
    """A full disk, say: the Deltas come with the next call and with streams, less those of an abort."""
    engine = scripted_engine({"a": "hello", "b": "world", "c": "third"})
    engine.scheduler.consumers.append(Full())
    for name in "ac":
        engine.add_request("hi", greedy(5), request_id=name)
    stream = engine.stream("hi", greedy(5), request_id="b")
    said = [*engine.step(), *engine.step()]
    with pytest.raises(OSError, match="no space"):
        engine.step()
    assert engine.has_work and engine.abort("c")
    said += engine.step()
    texts = {name: text_of([delta for delta in said if delta.request_id == name]) for name in "ac"}
    assert texts == {"a": "hel", "c": "th"}
    assert text_of(drain(engine)["a"]) == "lo" and text_of(list(stream)) == "world"


def test_ctrl_c_waits_for_the_end_of_the_step():
    """The step is whole, the handler runs after it, and its Deltas come with the next call, once."""
    engine = served()
    sample, engine.sample = engine.sample, lambda *a: [signal.raise_signal(signal.SIGINT), sample(*a)][-1]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.sample = sample
    assert tokens_of(engine._ready) == engine.requests["a"].output_token_ids and engine.backend.calls == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert text_of(engine.step()) == "h" and engine.backend.calls == 1
    assert text_of(drain(engine)["a"]) == "ello"


def test_a_time_out_waits_for_the_step_but_not_for_the_model():
    """In the sampler it comes when the step is done; in the model the step is undone."""
    engine = served()
    sample, engine.sample = engine.sample, lambda *a: [signal.raise_signal(signal.SIGALRM), sample(*a)][-1]
    with raising_handlers():
        with pytest.raises(TimeoutError):
            engine.step()
        engine.sample = sample
        assert text_of(engine.step()) == "h" and engine.backend.calls == 1
        before, forward = state(engine), engine.backend.forward
        engine.backend.forward = lambda rows: [signal.raise_signal(signal.SIGALRM), forward(rows)][-1]
        with pytest.raises(TimeoutError):
            engine.step()
        engine.backend.forward = forward
    assert state(engine) == before and engine.backend.calls == 1
    assert text_of(drain(engine)["a"]) == "ello"


def test_a_second_ctrl_c_does_not_wait():
    """While the model computes; the step is then as if it had not begun."""
    engine, reached = served(), []
    forward, before = engine.backend.forward, state(engine)
    engine.backend.forward = lambda rows: [reached.append(signal.raise_signal(signal.SIGINT)) for _ in "12"]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(reached) == 1 and state(engine) == before
    engine.backend.forward = forward
    assert text_of(drain(engine)["a"]) == "hello"


def test_sigterm_after_ctrl_c_is_not_lost():
    """Two different signals in one step: the handler of each is called."""
    engine, seen, signals = served(), [], (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, lambda s, _: seen.append(s)) for s in signals]
    try:
        sample = engine.sample
        engine.sample = lambda *a: [*map(signal.raise_signal, signals), sample(*a)][-1]
        engine.step()
    finally:
        for signum, handler in zip(signals, before, strict=True):
            signal.signal(signum, handler)
    assert sorted(seen) == sorted(signals) and engine.backend.calls == 1


def test_generate_that_is_interrupted_leaves_nothing(model):
    """Ctrl-C at points all over a call: no request is left, and the next call gives what it always gives."""
    llm = LLM.from_engine(Engine(model, num_blocks=16, block_size=4))
    params = SamplingParams(max_tokens=4, seed=1)

    def generate():
        return [o.outputs[0].token_ids for o in llm.generate([[1, 2], [3, 4]], params, use_tqdm=False)]

    expected, quiet, number = generate(), Fault(signal.SIGINT), 40 if SOAK else 12
    quiet(generate)
    for i in range(number):
        with pytest.raises(KeyboardInterrupt):
            Fault(signal.SIGINT, 1 + i * quiet.num_points // (number + 1))(generate)
        assert llm.engine.requests == {} and not llm.engine.has_work
        assert llm.engine.scheduler.kv.num_free_blocks == 16
        assert generate() == expected


# -------------------------------------------------------- requests that alone cannot go on


def nan_model(token_id=7, **settings):
    """A tiny model whose embedding of one token is NaN."""
    model = tiny_model(dtype="float32", tie_word_embeddings=False, **settings)
    model.embed_tokens.weight[token_id] = float("nan")
    return model


def ends_in_trace(engine):
    return {e.id: e.reason for r in engine.trace.steps for e in r.events if e.type == "FINISHED"}


@pytest.mark.parametrize("threshold", [0, 4])
@pytest.mark.parametrize("way", [True, "torch", False, PADDED])
def test_a_request_whose_logits_are_nan(way, threshold):
    """It ends with an error that names the weight; all others have the tokens they have without it, also
    where they read a padded batch or blocks that were its own, or decode while it is read in chunks."""
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "long_prefill_token_threshold": threshold}
    settings |= way if way is PADDED else {"fast": way}
    outcomes = []
    for weights in (tiny_model(dtype="float32", tie_word_embeddings=False), nan_model()):
        engine = Engine(weights, num_blocks=40, block_size=4, record=True, **settings)
        engine.add_request([7] * 20, greedy(), request_id="bad")
        for i in range(5):
            engine.add_request([1, 2, 3 + i % 4, 4] * (i + 1), greedy(6 + i), request_id=f"g{i}")
        outcomes.append({name: (tokens_of(d), d[-1].error) for name, d in drain(engine).items()})
    expected, got = outcomes
    clean = [name for name, (tokens, _) in expected.items() if 7 not in tokens and name != "bad"]
    assert len(clean) >= 2 and {n: got[n] for n in clean} == {n: expected[n] for n in clean}
    error = "request 'bad': its largest logit is nan; the model's embed_tokens.weight holds NaN or infinity"
    assert got["bad"] == ([], error)
    ends = ends_in_trace(engine)
    assert ends["bad"] == "error" and all(ends[name] == "length" for name in clean)


def test_nan_in_a_block_that_another_request_had():
    """A request is aborted before its NaN is seen; the next reads its block, masked."""
    settings = dict(num_blocks=3, block_size=8, enable_prefix_caching=False)
    engine = Engine(nan_model(), fast=False, long_prefill_token_threshold=16, **settings)
    engine.add_request([7] * 20, greedy(1), request_id="bad")
    assert engine.step() == [] and engine.abort("bad")
    engine.add_request([1, 2, 3], greedy(3), request_id="good")
    good = tiny_model(dtype="float32", tie_word_embeddings=False)
    assert tokens_of(drain(engine)["good"]) == alone(good, [1, 2, 3], greedy(3))


def test_nothing_is_left_of_what_was_nan():
    """The pool holds none of it, and the same prompt finds none of it when the weight is mended."""
    good, prompt = tiny_model(dtype="float32", tie_word_embeddings=False), [1, 2, 3, 7, 4]
    engine = Engine(nan_model(), num_blocks=8, block_size=2, fast=False)
    engine.add_request(prompt, greedy(2))
    assert engine.step()[0].finish_reason == "error"
    pool = engine.backend.pool
    assert pool.k.isfinite().all() and pool.v.isfinite().all()
    engine.model.embed_tokens.weight[7] = good.embed_tokens.weight[7]
    name = engine.add_request(prompt, greedy(2))
    assert tokens_of(drain(engine)[name]) == alone(good, prompt, greedy(2))


@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj.weight", "lm_head.weight", "norm.weight"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_weight_that_is_nan_is_named(name, fast):
    """However the model is computed."""
    model = tiny_model(dtype="float32", tie_word_embeddings=False)
    dict(model.named_parameters())[name].view(-1)[3] = float("nan")
    engine = Engine(model, num_blocks=8, block_size=4, fast=fast)
    engine.add_request([1, 2, 3], greedy())
    (delta,) = engine.step()
    assert delta.finish_reason == "error" and f"the model's {name} holds NaN" in delta.error
    assert not engine.has_work


class Brittle(OutputText):
    """A text that breaks at "!", or, of a prompt "?", when it is given out."""

    def __init__(self, tokenizer, stop, prompt=()):
        super().__init__(tokenizer, stop, prompt)
        self.last = tokenizer.decode(prompt) == "?"

    def append(self, text):
        if "!" in text:
            raise LookupError("no such character")
        return super().append(text)

    def take(self, finished):
        if self.last and len(self.text) > 2:
            raise LookupError("cannot be given out")
        return super().take(finished)


def test_a_text_that_cannot_be_decoded_ends_its_request():
    """With what was given out before; the others go on, and the message names the request."""
    scripts = {"a": "hello", "b": "hi!lo", "c": "hello"}
    engine = scripted_engine(scripts, parts={"OutputText": Brittle})
    for name, prompt in zip("abc", ("hi", "hi", "?"), strict=True):
        engine.add_request(prompt, greedy(5, logprobs=0), request_id=name)
    said = drain(engine)
    assert {name: text_of(deltas) for name, deltas in said.items()} == {"a": "hello", "b": "hi", "c": "he"}
    ends = {name: deltas[-1].finish_reason for name, deltas in said.items()}
    assert ends == ends_in_trace(engine) == {"a": "length", "b": "error", "c": "error"}
    assert said["b"][-1].error == "request 'b': LookupError: no such character"
    assert engine.requests == engine.output_processor.request_states == {}


@pytest.mark.parametrize(("name", "value", "at"), [("temperature", "hot", 3), ("seed", (), 0)])
def test_a_sampler_that_raises_for_one(model, name, value, at):
    """Before anything is drawn, or after r0 has drawn: the others draw what they draw without it."""
    outcomes = []
    for broken in (False, True):
        engine = Engine(model, num_blocks=20, block_size=4)
        for i in range(3):
            engine.add_request([i, 2, 3], SamplingParams(max_tokens=6, seed=i, repetition_penalty=1 + i / 9))
        said = {f"r{i}": [] for i in range(3)}
        for step in range(6):
            if broken and step == at:
                object.__setattr__(engine.requests["r1"].sampling_params, name, value)
            for delta in engine.step():
                said[delta.request_id].append(delta)
        assert not engine.has_work
        outcomes.append(said)
    quiet, said = outcomes
    assert said["r0"] == quiet["r0"] and said["r2"] == quiet["r2"]
    assert said["r1"][:at] == quiet["r1"][:at] and said["r1"][at].finish_reason == "error"
    assert "TypeError" in said["r1"][at].error and len(said["r1"]) == at + 1


@pytest.mark.parametrize("error", [MemoryError, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["sampler", "text", "take"])
def test_a_failure_that_is_no_request_s_own(part, error):
    """Memory that is short, or a time-out that comes once, while tokens are chosen or decoded: it is raised,
    no request ends, and the texts are those of a quiet run."""
    engine = scripted_engine({"a": "hello", "b": "world"})
    for name in "ab":
        engine.add_request("hi", greedy(5), request_id=name)
    said = list(engine.step())
    text = engine.output_processor.request_states["a"].text
    owner, name = {"sampler": (engine, "sampler"), "text": (text, "feed"), "take": (text, "take")}[part]
    works = getattr(owner, name)

    class Once:
        def __call__(self, *args):
            setattr(owner, name, works)
            raise error("for all")

        forget = staticmethod(engine.sampler.forget)

    setattr(owner, name, Once())
    if part == "sampler":
        engine.recovery.sampler, works = Once(), engine.recovery.sampler
        owner, name = engine.recovery, "sampler"
    with pytest.raises(error):
        engine.step()
    said += [delta for deltas in drain(engine).values() for delta in deltas]
    texts = {name: text_of([delta for delta in said if delta.request_id == name]) for name in "ab"}
    assert texts == {"a": "hello", "b": "world"}
    assert {delta.finish_reason for delta in said} == {None, "length"}


def test_memory_that_is_always_short_for_one_is_raised():
    """It may be the others' doing, so no request is ended for it."""
    engine = scripted_engine({"a": "hello"})
    engine.add_request("hi", greedy(5), request_id="a")
    engine.output_processor.request_states["a"].text.feed = lambda token_id: [][MemoryError]

    def short(*args):
        raise MemoryError("no room")

    engine.recovery.sampler = short
    for _ in range(3):
        with pytest.raises(MemoryError, match="no room"):
            engine.step()
    assert list(engine.requests) == ["a"] and engine.abort("a")


def test_the_command_line_says_which_failed(monkeypatch):
    """`generate` prints the texts that there are, then the error, and ends with 2."""
    model = nan_model(byte_tokenizer().encode("!")[0], vocab_size=257)
    monkeypatch.setattr("mini_engine.loading.checkpoint.load", lambda *_: (model, byte_tokenizer()))
    args = ["generate", "-p", "a!", "-p", "ab", "-t", "0", "--max-tokens", "1"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and "request 'r0': its largest logit is nan" in result.stderr
    assert "ab" in result.stdout and "r1" not in result.stderr


# ------------------------------------------------------------------ threads, and calls from inside


def elsewhere(call):
    """Run a call in another thread, to its end."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_second_thread_is_refused():
    """In the middle of a step, by the engine's name; the first call goes on undisturbed."""
    engine, refused = served(), []

    def other():
        for call in (engine.step, lambda: engine.add_request("hi"), lambda: engine.stream("hi")):
            with pytest.raises(EngineBusyError, match="engine is in use by thread 'MainThread'; use it"):
                call()
            refused.append(call)

    during_forward(engine, lambda: elsewhere(other))
    assert text_of(drain(engine)["a"]) == "hello" and len(refused) == 15


def test_one_llm_serves_one_call_at_a_time():
    """generate() in a second thread, between two steps of the first, is refused, and adds no request."""
    llm, refused = LLM.from_engine(scripted_engine({})), []
    step = llm.engine.reader.step

    def other():
        with pytest.raises(EngineBusyError, match="this LLM is in use by thread 'MainThread'"):
            llm.generate("hi", use_tqdm=False)
        refused.append(1)

    llm.engine.reader.step = lambda: [elsewhere(other), step()][-1]
    (output,) = llm.generate("hi", greedy(3), use_tqdm=False)
    assert output.outputs[0].text == "..." and len(refused) == 3 and llm.engine.requests == {}


def test_a_call_from_inside_a_step_is_refused():
    """By name; an abort is not: it takes effect at the end of the step."""
    engine, refused = scripted_engine({"a": "hello", "b": "world"}), []

    class Meddler:
        def add(self, record):
            for call in (engine.step, lambda: engine.add_request("hi")):
                with pytest.raises(EngineBusyError, match="called from inside a step; call it between"):
                    call()
                refused.append(call)
            if record.step == 1:
                assert engine.abort("b") and not engine.abort("unknown")

    engine.scheduler.consumers.append(Meddler())
    for name in "ab":
        engine.add_request("hi", greedy(5), request_id=name)
    said = drain(engine)
    assert text_of(said["a"]) == "hello" and text_of(said["b"]) in ("w", "wo") and len(refused) == 10


def test_a_request_of_generate_that_is_aborted_from_another_thread():
    """Its output says so, with what it had; generate() neither hangs nor fails."""
    engine = scripted_engine({})
    during_forward(engine, lambda: engine.backend.calls == 2 and elsewhere(lambda: engine.abort("r0")))
    llm = LLM.from_engine(engine)
    first, second = llm.generate(["hi", "ho"], [greedy(9), greedy(1)], use_tqdm=False)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("...", "abort")
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == (".", "length")


def test_a_stream_that_is_dropped_in_the_middle_of_a_step():
    """Its request is aborted when the step is over."""
    engine = scripted_engine({"a": "hello", "b": "world"})
    streams = {name: engine.stream("hi", greedy(5), request_id=name) for name in "ab"}
    during_forward(engine, lambda: streams.pop("b", None) and None)
    assert text_of(list(streams["a"])) == "hello" and engine.requests == {} and engine.inboxes == {}
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
