"""The dense reference and the padded backend: the same numbers as alone, whatever is beside them.

The functions of the padded batch are lab-04's, whose tests run on the engine's own, too.
"""

import random

import pytest
import torch

from mini_engine.backends import padded as dense_attention
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.backends.padded import PaddedBackend, fused_attention_mask, fused_step
from mini_engine.block_manager import BlockManager
from mini_engine.request import Request
from mini_engine.tests import test_isolation as isolation
from mini_engine.tests.helpers import dense_logits, row, tiny_model


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 64), k=num)


def solo(model, token_ids: list[int]) -> torch.Tensor:
    """Return the logits behind the last token, computed in one go with nothing beside it."""
    return dense_logits(model, token_ids)[-1]


def mid_flight(model, past: int, new: int, seed: int, name: str) -> tuple[Request, DenseCache]:
    """A request with `past` computed tokens, in its cache, and `new` more that are known."""
    request = Request(name, tokens(past + new, seed))
    cache = DenseCache(model.config, model.dtype)
    if past:
        model(torch.tensor(request.token_ids(0, past)), torch.arange(past), dense_attend(cache))
    request.num_computed_tokens = past
    return request, cache


def fleet(model, shapes: list[tuple[int, int]]) -> tuple[list, dict[str, DenseCache]]:
    made = [mid_flight(model, past, new, i, f"r{i}") for i, (past, new) in enumerate(shapes)]
    return [row(r, r.num_new_tokens) for r, _ in made], {r.request_id: cache for r, cache in made}


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


# ----------------------------------------------------------------------------------- the rectangle


SHAPES = {
    "decodes only": [(21, 1), (14, 1), (8, 1)],
    "one chunk only": [(0, 8)],
    "several first chunks": [(0, 8), (0, 3), (0, 1)],
    "later chunks and decodes": [(21, 1), (5, 6), (14, 1), (0, 9), (30, 2)],
    "no past beside a long one": [(40, 1), (0, 1)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_fused_step_equals_each_request_alone(model, name):
    """Rows of different length, mixed in one call, give the logits that each gives alone."""
    rows, caches = fleet(model, SHAPES[name])
    logits = fused_step(model, rows, caches)
    assert list(logits) == [request.request_id for request, *_ in rows]
    for request, *_ in rows:
        expected = solo(model, request.token_ids())
        torch.testing.assert_close(logits[request.request_id], expected, rtol=0, atol=1e-9)


def test_poisoned_pads_change_nothing(model, monkeypatch):
    """Pads of the past at 1e4 and pads of the new tokens at another token and position: same logits."""
    shapes = SHAPES["later chunks and decodes"]
    rows, caches = fleet(model, shapes)
    clean = fused_step(model, rows, caches)

    def poisoned(sequences):
        integer = not sequences[0].is_floating_point()
        return torch.nn.utils.rnn.pad_sequence(
            list(sequences), batch_first=True, padding_side="left", padding_value=63 if integer else 1e4
        )

    monkeypatch.setattr(dense_attention, "pad_left", poisoned)
    rows, caches = fleet(model, shapes)
    dirty = fused_step(model, rows, caches)
    for name, logits in clean.items():
        torch.testing.assert_close(dirty[name], logits, rtol=0, atol=1e-9)


def test_an_unmasked_new_pad_would_show(model, monkeypatch):
    """The check has teeth: letting the new pads be seen moves a decode's logits by more than 0.1."""
    rows, caches = fleet(model, [(21, 1), (0, 8)])

    def leaky(past_lens, num_new):
        mask = fused_attention_mask(past_lens, num_new)
        mask[0, :, :, int(past_lens.max()) :] = True
        return mask

    monkeypatch.setattr(dense_attention, "fused_attention_mask", leaky)
    logits = fused_step(model, rows, caches)
    assert (logits["r0"] - solo(model, rows[0][0].token_ids())).abs().max() > 0.1


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
