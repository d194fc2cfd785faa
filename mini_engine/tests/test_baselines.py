"""The baselines: the same tokens as the engine, and the weakness that each one shows."""

import random

import pytest

from mini_engine.backends.two_pass import baseline_parts
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.parts import Parts
from mini_engine.request import Request, SamplingParams
from mini_engine.sim.baselines import BASELINES, OverCommit
from mini_engine.sim.cost_model import CostModel, LoadMeter, StepLoad, step_loads
from mini_engine.tests.helpers import record_run
from mini_engine.tests.soak import SOAK
from mini_engine.trace import replay


def request(name: str, prompt: int, max_tokens: int, priority: int = 0) -> Request:
    tokens = random.Random(name).choices(range(64), k=prompt)
    return Request(name, tokens, SamplingParams(temperature=0, max_tokens=max_tokens), priority)


def run(scheduler, requests, after=lambda recorder: recorder.kv.check(), **options):
    """Return the trace of requests that are all there at the start."""
    return record_run(scheduler, [(0, request) for request in requests], after=after, **options)


def make(name: str, *, num_blocks=64, block_size=4, caching=False, **settings):
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4, **settings}
    kv = BlockManager(num_blocks, block_size, enable_prefix_caching=caching, watermark=0)
    return BASELINES[name](kv, **settings)


def token_steps(trace, name: str) -> list[int]:
    """Return the steps in which a request got a token."""
    return [record.step for record in trace.steps if name in record.new_tokens]


def slot_utilisation(trace, max_num_seqs: int) -> float:
    """Return the share of slot-steps that gave a token."""
    return sum(len(r.new_tokens) for r in trace.steps) / (max_num_seqs * len(trace.steps))


# ------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("seed", range(9 if SOAK else 1))
def test_same_tokens_as_the_engine(model, seed):
    """Random prompts and lengths, arriving while others run, in a pool that is too small for all."""

    def serve(parts) -> dict[str, list[int]]:
        rng = random.Random(seed)
        limits = {"max_num_batched_tokens": 64, "max_num_seqs": 5, "block_size": 2, "num_blocks": 40}
        engine = Engine(model, **limits, enable_prefix_caching=False, parts=parts)
        prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 30))] for _ in range(9)]
        params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 25)) for _ in prompts]
        requests = []
        while len(requests) < 9 or engine.has_work:
            if len(requests) < 9 and (rng.random() < 0.3 or not engine.has_work):
                name = engine.add_request(prompts[len(requests)], params[len(requests)])
                requests.append(engine.requests[name])
            engine.step()
            engine.scheduler.kv.check()
        assert engine.scheduler.kv.num_free_blocks == 40
        return {r.request_id: r.output_token_ids for r in requests}

    reference = serve(None)
    assert all(reference.values())
    for name in BASELINES:
        assert serve(Parts(**baseline_parts(name))) == reference, name


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [False, True])
def test_invariants_over_random_workloads(name, policy, caching):
    """Everything finishes, budget and slots hold in every step, and at the end all blocks are free."""
    for seed in range(50 if SOAK else 6):
        rng = random.Random(seed)
        requests = [
            request(f"r{i}", rng.randint(1, 20), rng.randint(1, 20), rng.randint(0, 2)) for i in range(12)
        ]
        scheduler = make(name, num_blocks=24, caching=caching, policy=policy, max_num_batched_tokens=40)
        trace = run(scheduler, requests)
        assert [len(r.output_token_ids) for r in requests] == [r.max_tokens for r in requests]
        assert trace.end.num_free_blocks == 24
        for record in trace.steps:
            assert record.num_batched_tokens <= 40
            assert record.num_running <= 4


# ------------------------------------------------------------------------ one at a time and static


def test_one_at_a_time_takes_a_step_for_every_token():
    """Five requests of six tokens take thirty steps, and no two run together."""
    trace = run(make("one-at-a-time"), [request(f"r{i}", 5, 6) for i in range(5)])
    assert len(trace.steps) == 30
    assert {record.num_running for record in trace.steps} == {1}


CLASSIC = [500] + [10] * 7


def classic(num_batches: int) -> list[Request]:
    return [request(f"b{b}-{i}", 1, n) for b in range(num_batches) for i, n in enumerate(CLASSIC)]


def test_the_classic_case():
    """8 requests, one of 500 tokens and seven of 10: a static batch uses 570 of its 4000 slot-steps, because
    a free slot stays empty until the batch is done. With forty such batches waiting, continuous batching
    fills the slots: over 6 times the speed."""
    trace = run(make("static", num_blocks=400, max_num_seqs=8), classic(1))
    assert len(trace.steps) == 500
    assert slot_utilisation(trace, 8) == 570 / 4000 == 0.1425
    # Without waiting requests continuous batching cannot fill the empty slots.
    assert len(run(make("mixed", num_blocks=400, max_num_seqs=8), classic(1)).steps) == 500
    static, mixed = (
        run(make(name, num_blocks=1200, max_num_seqs=8), classic(number), after=None)
        for name, number in (("static", 4), ("mixed", 40))
    )
    assert slot_utilisation(static, 8) == 0.1425 and len(static.steps) == 4 * 500
    assert slot_utilisation(mixed, 8) > 0.9
    assert 6 < 40 * 500 / len(mixed.steps) < 1 / 0.1425


def test_static_batching_reserves_the_full_length():
    """Prompts of 4 that grow to 12 in a pool of 24: two are admitted, not six, and none is preempted."""
    requests = [request(f"r{i}", 4, 9) for i in range(6)]
    trace = run(make("static", num_blocks=24, block_size=1, max_num_seqs=6), requests)
    assert trace.steps[0].num_running == 2 and trace.steps[0].num_free_blocks == 0
    assert sum(r.num_preemptions for r in requests) == 0


# ----------------------------------------------------------------------------------- prefill first


def test_prefill_first_makes_decodes_wait():
    """While one prompt after the other arrives, a running decode gets nothing; the engine never does that."""

    def worst_gap(name: str) -> int:
        late = [(step, request(f"late{step}", 30, 2)) for step in (2, 3, 4)]
        trace = record_run(make(name), [(0, request("stream", 4, 10)), *late])
        for record, views in replay(trace):
            states = {views[i].state for i in record.scheduled}
            assert name == "mixed" or len(states) == 1, "a step is prefill or decode, never both"
        steps = token_steps(trace, "stream")
        assert len(steps) == 10
        return max(b - a for a, b in zip(steps, steps[1:], strict=False))

    assert worst_gap("prefill-first") == 4
    assert worst_gap("mixed") == 1


@pytest.mark.parametrize(("budget", "admitted"), [(30, ["second", "third", "fourth"]), (21, ["second"])])
def test_prefill_first_checks_the_full_length_but_charges_the_rest(budget, admitted):
    """Prompts of 20 with 16 cached cost 4 tokens each. 4 + 20 and 8 + 20 fit a budget of 30, but 4 + 20 not
    one of 21, although only 4 more would be computed."""
    scheduler = make("prefill-first", caching=True, max_num_batched_tokens=budget)
    run(scheduler, [shared := request("first", 20, 1)])
    for name in ("second", "third", "fourth"):
        scheduler.add(Request(name, shared.prompt_token_ids, SamplingParams(max_tokens=2)))
    assert scheduler.schedule() == dict.fromkeys(admitted, 4)


def test_prefill_first_evicts_the_youngest_to_the_front():
    """A request that cannot grow preempts the youngest, which is first in the queue again."""
    scheduler = make("prefill-first", num_blocks=9, block_size=1, max_num_seqs=3)
    requests = {name: request(name, 3, 5) for name in ("old", "mid", "young")}
    for r in requests.values():
        scheduler.add(r)
    scheduler.add(request("later", 1, 1))
    scheduled = scheduler.schedule()
    assert scheduled == {"old": 3, "mid": 3, "young": 3}
    scheduler.update(scheduled, {name: [0] for name in scheduled})
    assert scheduler.schedule() == {"old": 1, "mid": 1}
    assert [r.request_id for r in scheduler.waiting] == ["young", "later"]
    assert requests["young"].num_preemptions == 1 and requests["young"].output_token_ids == [0]


# ------------------------------------------------------------------------- two passes, and padding


def test_two_pass_prefills_one_prompt_at_a_time():
    """Three prompts under a budget for all: one is admitted per step, and the decodes always run."""
    scheduler = make("two-pass", max_num_batched_tokens=20)
    trace = run(scheduler, [request(f"r{i}", 30, 8) for i in range(3)])
    expected = [{"r0": 20}, {"r0": 10}, {"r0": 1, "r1": 19}, {"r0": 1, "r1": 11}]
    assert [record.scheduled for record in trace.steps[:4]] == expected


@pytest.mark.parametrize("name", ["two-pass", "over-commit"])
def test_one_prompt_in_flight_though_all_would_fit(name):
    """Three prompts of five tokens fit the budget together; still only one is admitted per step."""
    trace = run(make(name), [request(f"r{i}", 5, 4) for i in range(3)])
    assert [record.num_running for record in trace.steps[:3]] == [1, 2, 3]
    trace = run(make(name, max_num_batched_tokens=8), [request("long", 20, 4), request("short", 2, 4)])
    assert token_steps(trace, "short")[0] == 3, "the short prompt waits for three chunks of the long one"


def test_two_pass_calls_the_model_twice(model):
    """Steps with decodes and a chunk make two model calls, and the cost model knows it."""
    calls, per_step, limits = [], [], {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    engine = Engine(model, **limits, parts=Parts(**baseline_parts("two-pass")), record=True)
    for i in range(3):
        engine.add_request([i + 1] * 10, SamplingParams(temperature=0, max_tokens=6))
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        while engine.has_work:
            calls.clear()
            engine.step()
            per_step.append(len(calls))
    finally:
        handle.remove()
    assert set(per_step) == {1, 2}
    assert engine.trace.header.backend == "two-pass"
    assert per_step == [load.num_forwards for load in step_loads(engine.trace)]


def test_padding_costs_time():
    """A 12-token chunk beside three decodes is a rectangle of 4 by 12, and of 4 by the longest past."""
    scheduler = make("padded", max_num_batched_tokens=16)
    trace = run(scheduler, [request(f"r{i}", 4, 6) for i in range(3)] + [request("long", 16, 1)])
    # Step 0: three prompts of 4 and 4 tokens of the long one. Step 1: three decodes and the other 12.
    assert trace.steps[1].scheduled == {"r0": 1, "r1": 1, "r2": 1, "long": 12}
    assert list(step_loads(trace, "padded"))[:2] == [StepLoad(1, 16, 16), StepLoad(1, 48, 4 * (4 + 12))]
    meter = LoadMeter()
    assert list(map(meter, trace.steps[:2])) == [StepLoad(1, 16, 16), StepLoad(1, 15, 16 + 15)]
    assert list(map(meter, trace.steps[2:])) == list(step_loads(trace))[2:]
    assert not meter.fold.settle(), "finished requests are forgotten"


# ------------------------------------------------------------------------------------- over-commit


def test_over_commit_exceeds_its_limit_for_one_step_at_most():
    """Two prompts of 10 under 22 tokens: a step ends at 23, the next one starts with a preemption."""
    requests = [request("low", 10, 10, priority=2), request("high", 10, 5, priority=0)]
    scheduler = make("over-commit", num_blocks=22, block_size=1, max_num_batched_tokens=16, policy="priority")
    levels = []
    trace = run(scheduler, requests, after=lambda _: levels.append(scheduler.num_kv_tokens))
    assert max(levels) == 23
    over = [i for i, level in enumerate(levels) if level > 22]
    assert over and all(b - a > 1 for a, b in zip(over, over[1:], strict=False))
    preempted = [e.id for r in trace.steps for e in r.events if e.type == "PREEMPTED"]
    assert preempted == ["low"]
    assert all(record.num_free_blocks >= 0 for record in trace.steps)


def test_requests_and_limits_that_cannot_work_are_refused():
    """A prompt above the budget of prefill-first would block the queue forever. Over-commit refuses a limit
    above what the pool can guarantee, and a request above the limit."""
    with pytest.raises(ValueError, match="'big' may have to prefill 65 tokens at once"):
        make("prefill-first").add(request("big", 60, 6))
    make("prefill-first").add(request("fits", 60, 5))
    kv = BlockManager(10, 4, watermark=0)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with pytest.raises(ValueError, match="max_kv_tokens must be 1 to 28 .* but is 29"):
        OverCommit(kv, max_kv_tokens=29, **settings)
    with pytest.raises(ValueError, match="'big' grows to 29 tokens, but max_kv_tokens is 28"):
        OverCommit(kv, **settings).add(request("big", 20, 10))


# --------------------------------------------------------------------------------------- cost model


def test_step_time_is_the_sum_and_needs_a_known_backend():
    cost = CostModel(per_forward=5, per_token=0.5, per_kv_token=0.01)
    assert cost.step_time(StepLoad(2, 10, 100)) == 10 + 5 + 1
    with pytest.raises(ValueError, match="backend must be one of paged, two-pass, padded, but is 'sparse'"):
        CostModel().clock("sparse")
