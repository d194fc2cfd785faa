"""A request's tokens and logits do not depend on what runs beside it.

In float64, against a plain dense pass over the request alone. Every KV slot that holds nothing of
use is poisoned with 1e4 before each step: a read of anything but the request's own shows at once.
"""

import random

import pytest
import torch

from mini_engine.attention import PagedBackend
from mini_engine.engine import Engine
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import alone, dense_logits, every_third

POISON = 1e4  # not NaN: a masked NaN still poisons the sum, since 0 times NaN is NaN
TOLERANCE = 1e-9


class Noting:
    """Notes the logits of every sampled row; a base beside a backend."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.logits = {}

    def forward(self, rows):
        logits = super().forward(rows)
        ending = [row.request for row in rows if row.is_last]
        for request, row in zip(ending, logits, strict=True):
            self.logits[request.request_id, request.num_tokens] = row
        return logits


class Watched(Noting, PagedBackend):
    """The engine's backend with a poisoned pool."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_poisoned = 0
        self.pool.k.fill_(POISON)
        self.pool.v.fill_(POISON)

    def forward(self, rows):
        kv, running = self.kv, [row.request for row in rows]
        useless = [b * kv.block_size + i for b in kv._free for i in range(kv.block_size)]
        for request in running:
            room = len(kv.block_table(request)) * kv.block_size
            useless += kv.slot_mapping(request, request.num_computed_tokens, room)
        self.num_poisoned += len(useless)
        for cache in (self.pool.k, self.pool.v):
            cache.flatten(1, 2)[:, useless] = POISON
        return super().forward(rows)


SHARED = [(7 * i) % 64 for i in range(34)]  # two blocks of 16 and a bit
GREEDY, RANDOM = {"temperature": 0}, {"temperature": 1.3, "top_k": 20}


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Long and short, alike and different, greedy and random; the same in every test."""
    rng = random.Random(5)

    def own(n):
        return [rng.randrange(64) for _ in range(n)]

    prompts = [own(3), SHARED + own(1), own(17), SHARED]
    prompts += [SHARED[:20] + own(4), own(1), SHARED + own(6), own(9)]
    limits = [15, 6, 8, 7, 10, 6, 8, 12]  # some grow past a multiple of 16
    return [
        (prompt, SamplingParams(max_tokens=limit, seed=i, **(RANDOM if i % 3 == 2 else GREEDY)))
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def check(engine, backend, requests, model):
    """All tokens are those of the request alone, all logits those of a dense pass."""
    for request in requests:
        expected = alone(model, request.prompt_token_ids, request.sampling_params)
        if request.finish_reason == "abort":
            expected = expected[: len(request.output_token_ids)]
        assert request.output_token_ids == expected, request.request_id
        if request.output_token_ids:
            logits = dense_logits(model, request.token_ids())
            for n in range(request.num_prompt_tokens, request.num_tokens):
                found = backend.logits[request.request_id, n]
                assert (found - logits[n - 1]).abs().max() < TOLERANCE, (request.request_id, n)


def run(model, *, arrivals=None, aborts=(), backend=Watched, **settings):
    """Serve the workload, request i arriving at step arrivals[i]; aborts are (step, i)."""
    engine = Engine(model, parts=Parts(attend_backend=backend), **settings)
    kv, step, requests = engine.scheduler.kv, 0, {}
    left = sorted(zip(arrivals or [0] * 8, range(8), workload(), strict=True))
    while left or engine.has_work:
        while left and left[0][0] <= step:
            _, i, (prompt, sampling) = left.pop(0)
            request_id = engine.add_request(prompt, sampling, request_id=f"q{i}", priority=i % 3)
            requests[i] = engine.requests[request_id]
        for at, i in aborts:
            if at == step:
                engine.abort(f"q{i}")
        if engine.has_work:
            engine.step()
            kv.check()
        step += 1
        assert step < 1000, "no end"
    assert kv.num_free_blocks == kv.num_blocks
    assert backend is not Watched or engine.backend.num_poisoned
    check(engine, engine.backend, requests.values(), model)
    return engine, requests


def num_preemptions(requests):
    return sum(request.num_preemptions for request in requests.values())


# budget, threshold, slots, policy
BUDGETS = [(4, 0, 4, "fcfs"), (9, 3, 6, "priority"), (16, 0, 8, "fcfs"), (100, 5, 8, "priority")]


@every_third("block_size", [3, 1, 16, 4], "caching", [True, False])
def test_tight_pools(model, block_size, caching):
    """Over policies, budgets, thresholds and arrival times, with a pool that forces preemptions."""
    preempting = hits = 0
    for seed, (budget, threshold, slots, policy) in enumerate(BUDGETS):
        rng = random.Random(seed)
        engine, requests = run(
            model,
            # The longest needs 47 tokens of room; its neighbours have to go when they grow.
            num_blocks=-(-(50 if block_size < 16 else 64) // block_size),
            block_size=block_size,
            arrivals=[rng.randrange(4 * seed + 1) for _ in range(8)],
            policy=policy,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            max_num_seqs=slots,
            enable_prefix_caching=caching,
        )
        preempting += num_preemptions(requests) > 0
        hits += engine.scheduler.kv.stats.hits
    assert preempting >= 2, "of four runs"
    assert (hits > 0) == caching


@every_third("block_size", [3, 1, 16, 4], "caching", [True, False])
def test_aborts_in_mid_run(model, block_size, caching):
    """Requests that vanish in any phase leave the others as they were, and no block behind."""
    phases = set()
    for seed in range(3):
        rng = random.Random(seed)
        aborts = [(rng.randrange(1, 30), i) for i in rng.sample(range(8), 4)]
        _, requests = run(
            model,
            num_blocks=-(-64 // block_size),
            block_size=block_size,
            aborts=aborts,
            arrivals=[rng.randrange(6) for _ in range(8)],
            max_num_batched_tokens=10,
            max_num_seqs=6,
            enable_prefix_caching=caching,
        )
        for _, i in aborts:
            if requests[i].finish_reason == "abort":
                phases.add((bool(requests[i].output_token_ids), requests[i].num_preemptions > 0))
    assert {(False, False), (True, False)} <= phases


def read_past_the_end(monkeypatch):
    """Let each decode attend to one position more than there is."""
    from mini_engine.attention import AttentionPlan

    init = AttentionPlan.__init__

    def wrong(self, batch):
        init(self, batch)
        for _, _, mask in self.decodes:
            mask[..., 1:] |= mask[..., :-1].clone()

    monkeypatch.setattr(AttentionPlan, "__init__", wrong)


def write_elsewhere(monkeypatch):
    """Store the last key of each step where the first belongs."""
    from mini_engine import attention as paged_attention

    write = paged_attention.write_kv

    def wrong(k_cache, v_cache, slots, k, v):
        write(k_cache, v_cache, torch.cat((slots[:-1], slots[:1])), k, v)

    monkeypatch.setattr(
        PagedBackend.__init__, "__kwdefaults__", PagedBackend.__init__.__kwdefaults__ | {"write_kv": wrong}
    )


@pytest.mark.parametrize("break_it", [read_past_the_end, write_elsewhere])
def test_the_check_is_able_to_fail(model, monkeypatch, break_it):
    """A batch that reads or writes a single wrong slot is caught."""
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        run(model, num_blocks=60, block_size=4, max_num_batched_tokens=30, max_num_seqs=6)
