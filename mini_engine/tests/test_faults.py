"""What goes wrong in the middle of things: errors of the model, Ctrl-C, SIGTERM, requests that cannot go on.

A step is done or has not begun, and no request is harmed by another. Shown on chosen faults, and on random
ones at random points; SOAK=1 tries 10,000 of those.
"""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import (
    byte_tokenizer,
    drain,
    scripted_engine,
    spy,
    text_of,
    tiny_model,
    tokens_of,
)
from mini_engine.text.output_text import OutputText
from mini_engine.trace import VirtualClock, read_trace, replay, write_trace
from mini_engine.turn import EngineBusyError

SEEDS = range(1400) if os.environ.get("SOAK") else range(40)
FAULTS = 8  # of a workload


def greedy(max_tokens=8, **kwargs):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)


class Terminated(BaseException):
    """What SIGTERM raises here."""


@contextmanager
def sigterm_raises():
    def stop(*_):
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    """A workload on an engine that is disturbed: by `faults` of random kinds at random points."""

    def __init__(self, seed, faults):
        self.rng = random.Random(f"faults of {seed}")
        settings, self.requests = workload(seed)
        model = MODELS["float32" if seed % 4 == 0 else "float64"]  # float32 on the CPU is computed by fast/
        tokenizer = byte_tokenizer()
        self.engine = Engine(model, tokenizer, record=True, clock=VirtualClock(), **settings)
        self.num_points = {}  # that a call of this name has had
        self.done, self.num_faults = Counter(), faults
        self.said = {}

    def disturbed(self, name, call):
        """The result of a call that may be disturbed; None if it was ended by that."""
        kind = self.rng.choice(["none", "none", "error", "ctrl-c", "sigterm", "twice"])
        if kind == "none" or self.done.total() >= self.num_faults or (kind == "error" and name != "step"):
            return call()
        key = (name, kind == "error")
        points = [self.rng.randint(1, self.num_points.get(key, 300)) for _ in range(1 + (kind == "twice"))]
        what = {"error": ModelError, "sigterm": signal.SIGTERM}.get(kind, signal.SIGINT)
        fault = Fault(what, *points)
        try:
            return fault(call)
        except (ModelError, KeyboardInterrupt, Terminated):
            return None
        finally:
            self.num_points[key] = max(20, fault.num_points)
            if fault.fired:
                self.done[kind] += 1
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler or not settled(self.engine)

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

    def check(self):
        engine = self.engine
        there = [*engine.scheduler.waiting, *engine.scheduler.running]
        ready = {delta.request_id for delta in engine._ready}
        assert {r.request_id for r in there} == set(engine.requests) == set(engine._outputs)
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
            name: (tokens_of(deltas), text_of(deltas), deltas[-1].finish_reason, rounded(deltas))
            for name, deltas in self.said.items()
        }


def settled(engine):
    return engine._turn._lock.locked() is False


def rounded(deltas):
    return [{i: round(p, 4) for i, p in d.items()} for delta in deltas for d in delta.logprobs or ()]


def check_trace(engine, outcome, path):
    """It can be read, and says of each request what was given out: queued once, finished once."""
    write_trace(path, engine.trace)
    trace = read_trace(path)
    events = [event for record in trace.steps for event in record.events] + trace.end.events
    queued = Counter(event.id for event in events if event.type == "QUEUED")
    finished = {event.id: event.reason for event in events if event.type == "FINISHED"}
    assert queued == Counter(list(outcome))
    assert finished == {name: reason for name, (_, _, reason, _) in outcome.items()}
    told = {name: [] for name in outcome}
    for record, views in replay(trace):
        for name, token_ids in record.new_tokens.items():
            told[name] += token_ids
        assert all(views[name].running for name in record.scheduled)
        held = [b for view in views.values() if view.running for b in view.blocks]
        assert len(set(held)) == trace.header.config["num_blocks"] - record.num_free_blocks
    assert told == {name: token_ids for name, (token_ids, *_) in outcome.items()}


def storm(seed, path):
    """How many faults of each kind a workload was disturbed by, without effect on what it gave."""
    quiet = Run(seed, 0).play().outcome()
    run = Run(seed, FAULTS).play()
    outcome = run.outcome()
    assert outcome == quiet
    check_trace(run.engine, outcome, path)
    assert run.engine.sampler._generators == {} and run.engine.inboxes == {}
    return run.done


def test_random_faults(tmp_path):
    """Errors in the model, Ctrl-C (once, twice) and SIGTERM, wherever Python looks for signals, in steps and
    in add_request: the tokens, the texts and the trace are those of a quiet run, and nothing is leaked."""
    done = Counter()
    with sigterm_raises():
        for seed in SEEDS:
            try:
                done += storm(seed, tmp_path / "run.jsonl")
            except Exception as error:
                raise AssertionError(f"seed {seed}: replay it with storm({seed}, path)") from error
    print(f"{done.total()} faults in {len(SEEDS)} workloads: {dict(done)}")
    assert done.total() > 5 * len(SEEDS) and min(done.values()) > len(SEEDS) / 2
