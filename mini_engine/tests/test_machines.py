"""State machines: hypothesis draws calls of block manager, scheduler and engine, and shrinks what fails.

Each is looked at after every call: by the monitor, by a ledger of all writes, by the tokens that each
request has alone. Drawn alike in every `make test`; `make soak` draws other and longer ones.
"""

import os
import random
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from labs.kit.judge import loading
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.invariants import watch
from mini_engine.request import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.tests.helpers import VOCAB, alone, make_request, random_workload, record_run, tiny_model
from mini_engine.tests.soak import SOAK, count
from mini_engine.tests.test_conformance import FreesTooMuch, SharesToo
from mini_engine.tests.test_invariants import KeepsFinished, ThrowsOutTheFirst
from mini_engine.trace import VirtualClock, decisions

HEADS = [[0, 1, 2, 3, 4] * 3, [0, 1, 2, 3, 1] * 3]  # prompts begin like one of these
PROMPTS = st.builds(
    lambda head, length, tail: head[:length] + tail,
    st.sampled_from(HEADS),
    st.integers(1, 15),
    st.lists(st.integers(0, 1), max_size=6),
)
SALTS = st.sampled_from(["", "", "", "red"])


def draw(machine, examples, in_soak, steps=40, **options):
    """Run a machine: in `make test` the same examples each time, in the soak many others."""
    number = in_soak if SOAK else examples
    options = settings(
        **options,
        max_examples=number,
        stateful_step_count=steps,
        derandomize=not SOAK,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(machine, settings=options)
    count("state machine runs", number)


# --------------------------------------------------------------------------- the block manager


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests come, compute, grow and go. A ledger notes which text was written to each slot."""

    held = Bundle("held")

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        watermark=st.integers(0, 2),
        caching=st.sampled_from([True, True, True, False]),
        colliding=st.sampled_from([False, False, True]),
    )
    def start(self, num_blocks, block_size, watermark, caching, colliding):
        others = {"hash_block": lambda parent, token_ids: b"one for all"} if colliding else {}
        watermark = min(watermark, num_blocks - 1)
        self.kv = BlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, watermark=watermark, **others
        )
        self.requests, self.ledger, self.number = [], {}, 0
        self.known = set()  # (salt, text) of all that was ever published

    def text(self, request, end):
        return request.cache_salt, tuple(request.token_ids(0, end))

    @rule(target=held, prompt=PROMPTS, salt=SALTS)
    def admit(self, prompt, salt):
        request = make_request(f"r{self.number}", prompt, cache_salt=salt)
        self.number += 1
        free, size = self.kv.num_free_blocks, self.kv.block_size
        hits = self.kv.get_computed_blocks(request)
        held = {block for other in self.requests for block in self.kv.block_table(other)}
        needs = -(-request.num_tokens // size) - len(held.intersection(hits))
        fits = needs + (self.kv.watermark if self.requests else 0) <= free
        assert self.kv.admit(request) is fits
        if not fits:
            assert (self.kv.num_free_blocks, request.num_computed_tokens) == (free, 0)
            return multiple()
        assert request.num_computed_tokens == len(hits) * size < request.num_tokens
        assert self.kv.num_free_blocks == free - needs
        assert (
            not request.num_computed_tokens or self.text(request, request.num_computed_tokens) in self.known
        )
        self.requests.append(request)
        return request

    @rule(request=held, num_tokens=st.integers(1, 9))
    def compute(self, request, num_tokens):
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        for position, slot in enumerate(self.kv.slot_mapping(request, start, end), start):
            self.ledger[slot] = self.text(request, position + 1)
        request.num_computed_tokens = end
        self.kv.cache_blocks(request)
        if self.kv.enable_prefix_caching:
            size = self.kv.block_size
            self.known.update(self.text(request, full) for full in range(size, end + 1, size))

    @rule(request=held, token_id=st.integers(0, VOCAB - 1))
    def grow(self, request, token_id):
        """A decode; it may run short."""
        if request.num_new_tokens > 0:
            self.compute(request, request.num_new_tokens)
        request.output_token_ids.append(token_id)
        needs, free = self.kv.num_new_blocks(request, 1), self.kv.num_free_blocks
        table = list(self.kv.block_table(request))
        assert needs == (request.num_tokens > len(table) * self.kv.block_size)
        assert self.kv.allocate(request, 1) is (needs <= free)
        assert self.kv.num_free_blocks == free - (needs if needs <= free else 0)
        assert self.kv.block_table(request)[: len(table)] == table
        if needs > free:
            request.output_token_ids.pop()

    @rule(request=consumes(held))
    def free(self, request):
        self.kv.free(request)
        self.kv.free(request)  # twice is once
        assert self.kv.block_table(request) == []
        self.requests.remove(request)

    @rule()
    def reset(self):
        assert self.kv.reset_prefix_cache() is (not self.requests)
        if not self.requests:
            assert self.kv.num_cached_blocks == 0
            self.known.clear()

    @invariant()
    def holds(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        held = {block for request in self.requests for block in self.kv.block_table(request)}
        assert len(held) + self.kv.num_free_blocks == self.kv.num_blocks
        assert self.kv.enable_prefix_caching or self.kv.num_cached_blocks == 0
        for request in self.requests:
            end = request.num_computed_tokens
            for position, slot in enumerate(self.kv.slot_mapping(request, 0, end)):
                assert self.ledger[slot] == self.text(request, position + 1), "it would read another's text"

    def teardown(self):
        if hasattr(self, "kv"):
            for request in self.requests:
                self.kv.free(request)
            assert self.kv.num_free_blocks == self.kv.num_blocks


def test_block_manager():
    """Whatever comes and goes, each slot that a request reads holds its own text, and nothing is lost."""
    draw(BlockManagerMachine, 20, 3000)


# ------------------------------------------------------------------------------- the scheduler


class SchedulerMachine(RuleBasedStateMachine):
    """A watched scheduler, beside the slow model of lab-03 on a block manager of its own."""

    names = Bundle("names")

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        watermark=st.integers(0, 1),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_num_seqs=st.integers(1, 4),
        more=st.sampled_from([0, 1, 5, 40]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 3]),
    )
    def start(self, num_blocks, block_size, caching, watermark, more, **settings):
        settings["max_num_batched_tokens"] = settings["max_num_seqs"] + more
        self.pair = [
            kind(
                BlockManager(num_blocks, block_size, enable_prefix_caching=caching, watermark=watermark),
                **settings,
            )
            for kind in (Scheduler, loading.load("lab-03", "oracle").Scheduler)
        ]
        self.ours = self.pair[0]
        self.watching = watch(self.ours)
        self.monitor = self.watching.__enter__()
        self.number, self.came = 0, []

    @rule(
        target=names,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=SALTS,
        stop=st.sampled_from([(), (), (3,)]),
    )
    def add(self, prompt, max_tokens, priority, salt, stop):
        name = f"r{self.number}"
        self.number += 1
        fits = len(prompt) + max_tokens - 1 <= self.ours.kv.num_blocks * self.ours.kv.block_size
        for scheduler in self.pair:
            request = make_request(
                name, prompt, max_tokens, priority=priority, cache_salt=salt, stop_token_ids=stop
            )
            if fits:
                scheduler.add(request)
                self.came.append(request)
            else:
                with pytest.raises(ValueError, match=name):
                    scheduler.add(request)
        return name if fits else multiple()

    @rule(name=names)
    def abort(self, name):
        a, b = (scheduler.abort(name) for scheduler in self.pair)
        assert a is b

    @precondition(lambda self: self.ours.has_work)
    @rule(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), leaves=st.booleans())
    def step(self, tokens, leaves):
        """One step of both; in the middle of it the first row may be aborted."""
        scheduled, theirs = (list(scheduler.schedule().items()) for scheduler in self.pair)
        assert scheduled == theirs
        if leaves and tokens[0] == 0:
            self.abort(scheduled[0][0])
        amounts = dict(scheduled)
        rows = [request for request in self.ours.running if request.request_id in amounts]
        ending = [r.request_id for r in rows if r.num_new_tokens == amounts[r.request_id]]
        sampled = {name: [tokens[i % len(tokens)]] for i, name in enumerate(ending)}
        stopped = ending[-1:] if tokens == [4] else []
        finished = [
            [(r.request_id, r.finish_reason) for r in scheduler.update(dict(amounts), dict(sampled), stopped)]
            for scheduler in self.pair
        ]
        assert finished[0] == finished[1]

    @precondition(lambda self: self.ours.running)
    @rule(index=st.integers(0, 3))
    def preempt(self, index):
        name = self.ours.running[index % len(self.ours.running)].request_id
        for scheduler in self.pair:
            scheduler.preempt(next(r for r in scheduler.running if r.request_id == name))

    @invariant()
    def alike(self):
        if hasattr(self, "pair"):
            ours, theirs = map(self.seen, self.pair)
            assert ours == theirs

    def seen(self, scheduler):
        lists = [[r.request_id for r in some] for some in (scheduler.waiting, scheduler.running)]
        counts = [(r.num_computed_tokens, r.output_token_ids) for r in scheduler.running]
        return lists, counts, scheduler.kv.num_free_blocks, scheduler.kv.num_cached_blocks

    def teardown(self):
        if hasattr(self, "pair"):
            for _ in range(2000):
                if not self.ours.has_work:
                    break
                self.step([1, 2, 0, 3], False)
            assert not self.ours.has_work and self.monitor.known == {}
            assert self.ours.kv.num_free_blocks == self.ours.kv.num_blocks
            assert all(request.finish_reason for request in self.came)
            count("scheduler steps", self.monitor.step)
            self.watching.__exit__(None, None, None)


def test_scheduler():
    """It decides as the slow model does in every step, and breaks no rule."""
    draw(SchedulerMachine, 10, 1500)


@pytest.mark.parametrize(
    ("name", "wrong", "machine"),
    [
        ("BlockManager", SharesToo, BlockManagerMachine),
        ("BlockManager", FreesTooMuch, BlockManagerMachine),
        ("Scheduler", ThrowsOutTheFirst, SchedulerMachine),
        ("Scheduler", KeepsFinished, SchedulerMachine),
    ],
)
def test_a_machine_finds_what_is_wrong(name, wrong, machine, monkeypatch):
    monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        draw(machine, 500, 5000, phases=[Phase.generate])  # it ends with the first that fails


STEPS = int(os.environ.get("SOAK_STEPS", "1000000"))
PARTS = 8 if SOAK else 2  # so that they spread over pytest's workers


@pytest.mark.parametrize("part", range(PARTS))
def test_many_scheduler_steps(part):
    """Random workloads on tight pools, watched, each decision compared with the slow model's."""
    model, steps, number = loading.load("lab-03", "oracle"), 0, 0
    most = STEPS // PARTS if SOAK else 300
    while steps < most:
        steps += side_by_side(model, f"{part} {number}")
        number += 1
    count("scheduler steps", steps)
    count("scheduler workloads", number)


def side_by_side(model, seed):
    """Run a random workload through both schedulers, with aborts; return the number of steps."""
    rng = random.Random(f"aborts of {seed}")
    runs, aborts = [], {rng.randint(1, 30): f"q{rng.randint(0, 9)}" for _ in range(2)}
    for kind in (Scheduler, model.Scheduler):
        options, arrivals = random_workload(seed)
        size, caching = options.pop("block_size"), options.pop("caching")
        pool, watermark = options.pop("num_blocks"), options.pop("watermark")
        kv = BlockManager(pool, size, enable_prefix_caching=caching, watermark=watermark)
        scheduler = kind(kv, **options)
        vars(scheduler).update(options)  # the Recorder reads them, and the oracle keeps them elsewhere
        with watch(scheduler, seed) if kind is Scheduler else nullcontext():
            trace = record_run(
                scheduler,
                arrivals,
                token=lambda request: (request.num_tokens * 7 + request.arrival) % VOCAB,
                before=lambda recorder: recorder.abort(aborts.get(recorder.step, "")),
                clock=VirtualClock(),
            )
        runs.append([(decisions(record), record.num_free_blocks) for record in trace.steps])
    for step, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        assert ours == theirs, f"workload {seed!r}, step {step}"
    return len(runs[0])


# ---------------------------------------------------------------------------------- the engine


FEW = [
    HEADS[0][:n] + tail for n, tail in [(0, [3]), (3, [1]), (4, [2]), (8, [0, 0]), (9, [4]), (5, [1, 2, 3])]
]
FEW.append(HEADS[1][:9])
MODEL = tiny_model(vocab_size=VOCAB)


class EngineMachine(RuleBasedStateMachine):
    """A watched engine on a tiny model: requests, aborts, streams that are dropped, steps."""

    ids = Bundle("ids")
    streams = Bundle("streams")

    @initialize(
        num_blocks=st.integers(8, 14),
        block_size=st.integers(2, 4),
        max_num_batched_tokens=st.integers(3, 20),
        max_num_seqs=st.integers(1, 3),
        enable_prefix_caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 2]),
        fast=st.sampled_from([True, False]),
    )
    def start(self, **settings):
        self.engine = Engine(MODEL, **settings)
        self.watching = watch(self.engine)
        self.monitor = self.watching.__enter__()
        self.requests, self.got = {}, {}

    REQUEST = dict(
        prompt=st.sampled_from(FEW),  # what each says alone is worked out once
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 1),
        temperature=st.sampled_from([0.0, 0.0, 1.5]),
    )

    def params(self, max_tokens, temperature):
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5)

    @rule(target=ids, **REQUEST)
    def add(self, prompt, max_tokens, priority, temperature):
        name = self.engine.add_request(prompt, self.params(max_tokens, temperature), priority=priority)
        self.requests[name] = self.engine.requests[name]
        return name

    @rule(target=streams, **REQUEST)
    def stream(self, prompt, max_tokens, priority, temperature):
        stream = self.engine.stream(prompt, self.params(max_tokens, temperature), priority=priority)
        request = stream._request
        self.requests[request.request_id] = request
        return stream

    @rule(stream=streams)
    def read(self, stream):
        next(stream, None)

    @rule(stream=consumes(streams))
    def drop(self, stream):
        stream.close()
        assert stream._request.finish_reason and stream._request.request_id not in self.engine.inboxes
        assert next(stream, None) is None

    @rule(name=consumes(ids))
    def abort(self, name):
        here = name in self.engine.requests
        assert self.engine.abort(name) is here

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def step(self):
        said = {}  # what streams have computed since the last step comes, too
        for delta in self.engine.step():
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
        for name, token_ids in said.items():
            assert self.requests[name].output_token_ids[-len(token_ids) :] == token_ids != []

    @invariant()
    def whole(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        live = {request.request_id for request in (*scheduler.waiting, *scheduler.running)}
        assert set(self.engine.requests) == live == set(self.monitor.known)
        for request in self.requests.values():
            outputs = request.output_token_ids
            expected = alone(MODEL, request.prompt_token_ids, request.sampling_params)
            assert outputs == expected[: len(outputs)], request
            if request.finish_reason == "length":
                assert outputs == expected

    def teardown(self):
        if hasattr(self, "engine"):
            while self.engine.has_work:
                self.step()
            self.whole()
            kv = self.engine.scheduler.kv
            assert kv.num_free_blocks == kv.num_blocks and not self.engine.requests
            assert all(request.finish_reason for request in self.requests.values())
            assert not self.engine.sampler._numbers
            count("engine steps", self.monitor.step)
            self.watching.__exit__(None, None, None)


def test_engine():
    """Whatever is added, read, dropped and aborted: each request has the tokens that it has alone."""
    draw(EngineMachine, 4, 500, steps=25)
