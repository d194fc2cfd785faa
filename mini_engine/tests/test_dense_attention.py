"""The dense reference and the padded backend: the same numbers as alone, whatever is beside them.

The functions of the padded batch are lab-04's: its tests run on the engine's own, with all kinds of rows.
"""

import random

import pytest
import torch

from mini_engine.attention import PagedBackend
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.backends.padded import PaddedBackend, fused_step
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.parts import Parts
from mini_engine.request import Request, SamplingParams
from mini_engine.tests.helpers import dense_logits, row


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 64), k=num)


def solo(model, token_ids: list[int]) -> torch.Tensor:
    """Return the logits behind the last token, computed in one go with nothing beside it."""
    return dense_logits(model, token_ids)[-1]


# ------------------------------------------------------------------------------------------ dense


@pytest.mark.parametrize("cut", [1, 5, 15, 16, 17, 33])
def test_dense_cache_in_chunks_equals_all_at_once(model, cut):
    """Cut anywhere, also across the doublings at 16 and 32 tokens, the logits stay the same."""
    token_ids = tokens(40, 7)
    cache = DenseCache(model.config, torch.float64)
    for start in range(0, 40, cut):
        chunk = torch.tensor(token_ids[start : start + cut])
        hidden = model(chunk, torch.arange(start, start + len(chunk)), dense_attend(cache))
    torch.testing.assert_close(model.logits(hidden[-1]), solo(model, token_ids), rtol=0, atol=1e-9)
    assert len(cache) == 40


def test_dense_cache_grows_by_doubling(model):
    """1,000 appended tokens move the cache six times, not a thousand times."""
    cache, moves = DenseCache(model.config), set()
    one = torch.ones(1, model.config.num_key_value_heads, model.config.head_dim)
    for _ in range(1000):
        for layer in range(model.config.num_hidden_layers):
            cache.append(layer, one, one)
        moves.add(cache.k.shape[1])
    assert moves == {16, 32, 64, 128, 256, 512, 1024}
    assert cache.get(1)[0].sum() == 1000 * one.numel()


# ------------------------------------------------------------------------------------- the backend


def run(model, backend, seed: int, **settings):
    """A random workload with preemptions: tokens by request, logits of every sampled row, trace."""
    rng = random.Random(seed)
    engine = Engine(
        model,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        block_size=4,
        num_blocks=16,
        enable_prefix_caching=False,
        record=True,
        parts=Parts(attend_backend=backend),
        **settings,
    )
    seen, forward = [], engine.backend.forward
    engine.backend.forward = lambda rows: seen.append(forward(rows)) or seen[-1]
    requests = {}
    for _ in range(8):
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 20))
        name = engine.add_request(tokens(rng.randint(1, 30), rng.random()), params)
        requests[name] = engine.requests[name]
    while engine.has_work:
        engine.step()
    return requests, torch.cat(seen), engine.trace


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_engine_on_the_padded_backend_equals_paged_and_solo(model, seed):
    """Same schedule, same tokens, same logits, with chunks, preemption and recomputation."""
    ours, logits, trace = run(model, PaddedBackend, seed)
    theirs, paged_logits, paged_trace = run(model, PagedBackend, seed)
    assert [s.scheduled for s in trace.steps] == [s.scheduled for s in paged_trace.steps]
    assert any(request.num_preemptions for request in ours.values())
    torch.testing.assert_close(logits, paged_logits, rtol=0, atol=1e-9)
    for name, request in ours.items():
        assert request.output_token_ids == theirs[name].output_token_ids
        for end in range(request.num_prompt_tokens, request.num_tokens):
            expected = int(solo(model, request.token_ids(0, end)).argmax())
            assert request.token_ids(end, end + 1) == [expected]


def test_caches_of_finished_requests_are_dropped(model):
    """When the last request has been served, one cache is left at most."""
    backends = []

    def remember(*args, **kwargs):
        backends.append(PaddedBackend(*args, **kwargs))
        return backends[-1]

    run(model, remember, 0)
    assert len(backends[0].caches) == 1


def test_prefix_caching_is_refused(model):
    """Dense caches share nothing, so a cached prefix would be missing: the error says so."""
    with pytest.raises(ValueError, match="enable_prefix_caching=False"):
        PaddedBackend(model, BlockManager(8, 4))


def test_a_request_left_out_of_a_step_is_named(model):
    """A scheduler that skips a running request does not fit this backend."""
    backend = PaddedBackend(model, BlockManager(8, 4, enable_prefix_caching=False))
    first, second = Request("first", tokens(3, 0)), Request("second", tokens(3, 1))
    backend.forward([row(first, 2), row(second, 2)])
    first.num_computed_tokens = second.num_computed_tokens = 2
    backend.forward([row(first, 1)])
    with pytest.raises(ValueError, match="'second' was left out of a step"):
        backend.forward([row(second, 1)])


def test_a_subclass_brings_its_own_step(model):
    calls, request = [], Request("r", tokens(5, 0))

    def own(*args):
        calls.append(args)
        return fused_step(*args)

    backend = type("Own", (PaddedBackend,), {"fused_step": staticmethod(own)})
    logits = backend(model, BlockManager(8, 4, enable_prefix_caching=False)).forward([row(request, 5)])
    assert len(calls) == 1
    torch.testing.assert_close(logits[0], solo(model, request.token_ids()), rtol=0, atol=1e-9)
