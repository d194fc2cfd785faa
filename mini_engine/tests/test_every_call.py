"""An error at every call of every part, one at a time: the engine is as before the step, or the step is done.

A quiet run notes the calls; then the run is repeated for each of them, which raises before it does anything,
and once more, which raises when it has done all. Every token is delivered once, no block is lost, and the
tokens, texts and trace are those of the quiet run. In place of all, the ordinary suite takes of each method
the first call before and the last after it is done, in three workloads in place of SOAK=1's forty.
"""

import random
from functools import partial

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.outputs import Reader, Stream
from mini_engine.request import SamplingParams
from mini_engine.request_queue import RequestQueue
from mini_engine.sampler import Sampler
from mini_engine.scheduler import Scheduler
from mini_engine.tests.helpers import byte_tokenizer, scripted_engine, text_of, tokens_of
from mini_engine.tests.soak import SOAK, count
from mini_engine.text.output_text import OutputText
from mini_engine.trace import Recorder, VirtualClock, read_trace, replay, write_trace

# Workloads with a stream, with drafts, and with a fork that copies, each of which makes this call.
CHOSEN = {0: "Reader.step", 5: "Drafts.propose", 7: "Scripted.copy_block"}
SEEDS = range(40) if SOAK else CHOSEN

PARTS = {
    BlockManager: [
        "admit",
        "allocate",
        "num_new_blocks",
        "cache_blocks",
        "free",
        "block_table",
        "slot_mapping",
    ]
    + ["unadmit", "shrink", "cache_scheduled_blocks", "uncache_blocks", "evict_blocks", "fork"],
    Scheduler: ["add", "abort", "schedule", "update", "make_room", "preempt", "take_back", "fail"],
    RequestQueue: ["push", "peek", "pop", "remove", "__len__", "__iter__"],
    Sampler: ["__call__", "forget"],
    OutputText: ["feed", "flush", "take"],
    Recorder: ["add", "abort", "schedule", "update", "take_back", "fail"],
    VirtualClock: ["now", "advance"],
    Stream: ["__init__"],
    Reader: ["step"],
}


class InjectedError(Exception):
    pass


class Calls:
    """Notes the calls of all parts; the one with number `at` raises, before or after it does its work."""

    def __init__(self):
        self.num, self.at, self.after, self.names = 0, None, False, []
        self.fired = ""  # the call that raised
        self.on = False  # in a call of the engine's: what a test looks at is not counted

    def wrap(self, owner, name):
        method, owner_name = getattr(owner, name), getattr(owner, "__name__", type(owner).__name__)

        def wrapped(*args, **kwargs):
            if not self.on:
                return method(*args, **kwargs)
            self.num += 1
            mine = self.num == self.at
            if self.at is None:
                self.names.append(f"{owner_name}.{name}")
            if mine and not self.after:
                self.fired = f"{owner_name}.{name}"
                raise InjectedError(self.fired)
            result = method(*args, **kwargs)
            if mine:  # and it did not raise by itself, as `remove` may
                self.fired = f"{owner_name}.{name}, when it was done"
                raise InjectedError(self.fired)
            return result

        return wrapped


def workload(seed):
    """Settings of a tight pool, and requests: (step, name, prompt, params, script, streamed or not)."""
    rng = random.Random(seed)
    block_size, requests = rng.choice([1, 2, 3]), []
    shared = [rng.randrange(200) for _ in range(6)]
    for i in range(rng.randint(3, 4)):
        prompt = shared[: rng.choice([0, 3, 6])] + [rng.randrange(200) for _ in range(rng.randint(1, 4))]
        stop = rng.choice([(), ("lo",), ("o<",)])
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(2, 6), stop=stop, logprobs=rng.choice([None, 1])
        )
        requests.append(
            (rng.randint(0, 3), f"q{i}", prompt, params, rng.choice(["hello<>", "aé<b>", "xyz"]), i == 1)
        )
    longest = max(len(prompt) + params.max_tokens - 1 for _, _, prompt, params, *_ in requests)
    settings = dict(
        num_blocks=-(-longest // block_size) + rng.randint(0, 2),
        block_size=block_size,
        max_num_seqs=3,
        max_num_batched_tokens=rng.choice([5, 9, 30]),
        long_prefill_token_threshold=rng.choice([0, 3]),
        policy=rng.choice(["fcfs", "priority"]),
        watermark=0,
    )
    return settings, sorted(requests, key=lambda request: request[0])


def drafts(scripts, requests):
    """Return for each request the next two tokens of its script, the second of them now and then wrong."""
    encode, proposed = byte_tokenizer().encode, []
    for request in requests:
        done = len(request.output_token_ids)
        proposed.append(encode(scripts[request.request_id])[done : done + 2])
        if done % 3 == 1:
            proposed[-1][1:] = [9]
    return proposed


class Run:
    """A workload to its end; whatever raises InjectedError is called again.

    The last request is aborted at its second token, if it is seen to have two: after an error steps and reads
    fall together in another way, so what the quiet run did is done as soon as it has two or more.
    """

    def __init__(self, seed, calls, quiet=None):
        self.calls, self.quiet, self.aborts = calls, quiet, quiet is not None and quiet.aborts
        self.settings, self.requests = workload(seed)
        scripts = {name: script for _, name, _, _, script, _ in self.requests}
        # A second answer to the first prompt, which comes when the first has a token.
        self.first, twin = self.requests[0][1], "twin"
        scripts[twin] = scripts[self.first][::-1]
        Drafts = type("Drafts", (), {"propose": staticmethod(partial(drafts, scripts))})
        parts = {"propose": calls.wrap(Drafts, "propose")} if seed % 2 else {}
        self.engine = scripted_engine(scripts, clock=VirtualClock(), parts=parts, **self.settings)
        self.engine.backend.forward = calls.wrap(self.engine.backend, "forward")
        kv = self.engine.scheduler.kv
        kv.copy_block = calls.wrap(self.engine.backend, "copy_block")
        self.said = {name: [] for name in scripts}
        self.siblings = []
        self.streams = {}
        self.raised = []

    def attempt(self, call):
        self.calls.on = True
        try:
            return call()
        except InjectedError as error:
            self.raised.append(str(error))
            return None
        finally:
            self.calls.on = False

    def add_twin(self):
        """Add the second answer, as LLM.generate does when the first has begun."""
        _, _, prompt, params, *_ = self.requests[0]
        self.add("twin", prompt, params, False)
        self.siblings.append(self.engine.requests["twin"])
        self.siblings[1].siblings = self.siblings

    def add(self, name, prompt, params, streamed):
        engine, options = self.engine, {"request_id": name, "priority": len(self.said) % 2}
        while name not in self.streams if streamed else name not in engine.requests:
            if streamed:
                if stream := self.attempt(lambda: engine.stream(prompt, params, **options)):
                    self.streams[name] = stream
            else:
                self.attempt(lambda: engine.add_request(prompt, params, **options))
            if name not in self.streams and streamed:
                assert name not in engine.requests and name not in engine.inboxes
            self.check()
        if name == self.first:
            self.siblings = engine.requests[name].siblings = [engine.requests[name]]

    def play(self):
        left, step = list(self.requests), 0
        while left or self.engine.has_work or self.streams:
            while left and left[0][0] <= step:
                _, name, prompt, params, _, streamed = left.pop(0)
                self.add(name, prompt, params, streamed)
            if step % 2 and self.streams:
                name, stream = next(iter(self.streams.items()))
                if (delta := self.attempt(lambda s=stream: next(s, None))) is not None:
                    self.said[name].append(delta)
                    if delta.finish_reason:
                        del self.streams[name]
            elif self.engine.has_work:
                for delta in self.attempt(self.engine.step) or ():
                    self.said[delta.request_id].append(delta)
            if len(self.siblings) == 1 and self.said[self.first]:
                self.add_twin()
            last, streamed = self.requests[-1][1], self.requests[-1][5]
            if self.quiet is None and len(tokens_of(self.said[last])) == 2 and not streamed:
                self.aborts |= last in self.engine.requests
            while self.aborts and len(tokens_of(self.said[last])) >= 2 and last in self.engine.requests:
                self.attempt(partial(self.engine.abort, last))
            self.check()
            step += 1
            assert step < 200, "no end"
        return self

    def check(self):
        engine = self.engine
        kv, there = engine.scheduler.kv, [*engine.scheduler.waiting, *engine.scheduler.running]
        kv.check()
        assert sorted(r.request_id for r in there) == sorted(engine.requests)
        assert set(engine.requests) == set(engine.output_processor.request_states)

    def outcome(self):
        """Return by name what was said; of a request that is aborted, the two tokens that it has at least."""
        said = dict(self.said)
        aborted = {name: tokens_of(said.pop(name))[:2] for name in [self.requests[-1][1]] if self.aborts}
        return aborted | {
            name: (
                tokens_of(deltas),
                text_of(deltas),
                [x for d in deltas for x in d.logprobs or ()],
                deltas[-1].finish_reason,
            )
            for name, deltas in said.items()
        }


def check_trace(run, path):
    engine = run.engine
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert engine.requests == engine.inboxes == engine.sampler._numbers == {} and not engine._ready
    write_trace(path, engine.trace)
    found = {name: [] for name in run.said}
    trace = read_trace(path)
    for record, views in replay(trace):
        for name, token_ids in record.new_tokens.items():
            found[name] += token_ids
        held = [b for view in views.values() if view.running for b in view.blocks]
        assert len(set(held)) == trace.header.config["num_blocks"] - record.num_free_blocks
    assert found == {name: tokens_of(said) for name, said in run.said.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_at_every_call(seed, monkeypatch, tmp_path):
    """Each call of a KV manager, scheduler, queue, sampler, text, recorder, clock or stream fails once."""
    calls = Calls()
    for owner, names in PARTS.items():
        for name in names:
            monkeypatch.setattr(owner, name, calls.wrap(owner, name))

    def play(at, after=False, quiet=None):
        calls.num, calls.at, calls.after, calls.fired = 0, at, after, ""
        run = Run(seed, calls, quiet).play()
        check_trace(run, tmp_path / "run.jsonl")
        return run

    quiet, places = play(None), {}
    for at, name in enumerate(calls.names, 1):
        places.setdefault(name, []).append(at)
    assert len(calls.names) > 150 and len(places) > 20, places
    assert CHOSEN.get(seed, "BlockManager.admit") in places
    chosen = {(at, after) for at in range(1, len(calls.names) + 1) for after in (False, True)}
    if not SOAK:
        chosen = {one for ats in places.values() for one in ((ats[0], False), (ats[-1], True))}
    for at, after in sorted(chosen):
        try:
            run = play(at, after, quiet)
            assert run.outcome() == quiet.outcome()
            assert run.raised == [calls.fired] * bool(calls.fired), "it is raised, once"
        except Exception as error:
            raise AssertionError(f"workload {seed}, call {at}, {after=}") from error
    count("faults: an error at a call of a part", len(chosen))
