"""The dense reference and the padded backend: the same numbers as alone, whatever is beside them.

The functions of the padded batch are lab-04's: its tests, with mixed steps and pads that would show, run on
the engine's own too (`labs check`).
"""

import random

import pytest
import torch

from mini_engine.backends import padded as dense_attention
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.backends.padded import PaddedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.request import Request
from mini_engine.tests import test_isolation as isolation
from mini_engine.tests.helpers import dense_logits, row, tiny_model


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


def test_dense_cache_grows_by_doubling():
    """1,000 appended tokens move the cache six times, not a thousand times."""
    config, moves = tiny_model().config, set()
    cache = DenseCache(config)
    one = torch.ones(1, config.num_key_value_heads, config.head_dim)
    for _ in range(1000):
        for layer in range(config.num_hidden_layers):
            cache.append(layer, one, one)
        moves.add(cache.k.shape[1])
    assert moves == {16, 32, 64, 128, 256, 512, 1024}
    assert cache.get(1)[0].sum() == 1000 * one.numel()


# ------------------------------------------------------------------------------------- the backend


class Noting(isolation.Noting, PaddedBackend):
    pass


@pytest.mark.parametrize("block_size", [4, 16])
def test_engine_on_the_padded_backend(model, block_size):
    """Tokens and logits are those of each request alone, the schedule that of the paged backend."""
    runs = []
    for backend in (Noting, isolation.Watched):
        engine, requests = isolation.run(
            model,
            num_blocks=64 // block_size,
            block_size=block_size,
            max_num_batched_tokens=12,
            max_num_seqs=6,
            policy="priority",
            enable_prefix_caching=False,
            record=True,
            backend=backend,
        )
        assert isolation.num_preemptions(requests) > 0
        runs.append([record.scheduled for record in engine.trace.steps])
        if backend is Noting:
            assert len(engine.backend.caches) == 1, "those of all others are dropped"
    assert runs[0] == runs[1]


def test_prefix_caching_is_refused(model):
    """Dense caches share nothing, so a cached prefix would be missing."""
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


@pytest.mark.parametrize(
    "name", ["fused_attention_mask", "assemble_fused_batch", "disassemble_fused_cache", "fused_step"]
)
def test_own_functions_are_used(model, monkeypatch, name):
    """The step is made of the four: fused_step calls the others, and a subclass brings its own."""
    ours, calls = getattr(dense_attention, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        return ours(*args, **kwargs)

    kv = BlockManager(8, 4, enable_prefix_caching=False)
    request = Request("r", tokens(5, 0))
    if name == "fused_step":
        backend = type("Own", (PaddedBackend,), {name: staticmethod(counted)})
    else:
        monkeypatch.setattr(dense_attention, name, counted)
        backend = PaddedBackend
    logits = backend(model, kv).forward([row(request, 5)])
    assert calls == [name]
    torch.testing.assert_close(logits[0], solo(model, request.token_ids()), rtol=0, atol=1e-9)
