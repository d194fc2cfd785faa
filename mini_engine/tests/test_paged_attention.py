"""Writing to and reading from the paged pool, against attention over a plain sequence."""

import math
import mmap
import os
from pathlib import Path

import pytest
import torch

from mini_engine.attention import KVPool, PagedBackend, paged_attention, write_kv
from mini_engine.batch import build_batch
from mini_engine.block_manager import BlockManager
from mini_engine.tests.helpers import dense_logits, make_request, row, spy, tiny_model

HEADS, KV_HEADS, DIM = 4, 2, 6


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_pool_has_the_shape_of_the_model():
    shape = dict(num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3)
    model = tiny_model(dtype="float32", **shape)
    pool = KVPool(model.config, 7, 5, torch.float32, "cpu")
    assert pool.k.shape == pool.v.shape == (4, 7, 5, 3, DIM)
    assert pool.k.untyped_storage().nbytes() == pool.k.nbytes, "and not a byte more"
    assert KVPool(model.config, 7, 5, torch.float32, "meta").v.shape == pool.v.shape
    bytes_per_token = KVPool.bytes_per_token(model.config, torch.float32)
    assert bytes_per_token == 2 * 4 * 3 * DIM * 4
    assert bytes_per_token * 7 * 5 == pool.k.nbytes + pool.v.nbytes
    assert KVPool.bytes_per_token(model.config, torch.bfloat16) * 2 == bytes_per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_pool_is_zero_and_takes_memory_only_where_it_is_written(dtype):
    """Padding is read before anything is written there, and masked: 0 times NaN would be NaN."""

    def resident_mib() -> float:
        statm = Path("/proc/self/statm")
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE / 2**20 if statm.exists() else 0.0

    before, blocks = resident_mib(), 2**29 // (2 * 2 * 16 * KV_HEADS * DIM * dtype.itemsize)  # half a GiB
    pool = KVPool(tiny_model().config, blocks, 16, dtype, "cpu")
    pool.k[:, 7] = 1.0
    assert pool.k.dtype == dtype and pool.k[:, 6:9].sum() == 2 * 16 * KV_HEADS * DIM
    assert not pool.v[:, ::1000].any()
    assert resident_mib() - before < 128


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_has_a_pool_of_its_own():
    pool = KVPool(tiny_model().config, 2, 4, torch.float64, "cpu")
    if (child := os.fork()) == 0:
        pool.k[:, 0] = 1.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and not pool.k.any()


def test_clearing_is_for_these_slots_of_every_layer():
    """Slot s is block s // block_size, offset s % block_size."""
    backend = PagedBackend(tiny_model(), BlockManager(3, 4))
    for pool in (backend.pool.k, backend.pool.v):
        pool.fill_(7.0)
    backend.clear([5, 0, 11])
    for pool in (backend.pool.k, backend.pool.v):
        assert not pool[:, 1, 1].any() and not pool[:, 0, 0].any() and not pool[:, 2, 3].any()
        assert (pool == 7.0).sum() == 9 * 2 * KV_HEADS * DIM
    assert backend.name == "paged", "as traces call it"


def by_hand(q, k, v):
    """Attention of one query (heads, d) over keys and values (T, kv_heads, d), by the formula."""
    out = torch.empty_like(q)
    for head in range(len(q)):
        kv_head = head // (HEADS // KV_HEADS)
        weights = (k[:, kv_head] @ q[head] / math.sqrt(DIM)).softmax(0)
        out[head] = weights @ v[:, kv_head]
    return out


CASES = {
    "decodes": [(9, 1), (4, 1), (17, 1)],
    "one chunk": [(0, 7)],
    "chunks": [(0, 5), (6, 3), (8, 8)],
    "mixed": [(3, 4), (9, 1), (0, 6), (0, 1), (12, 1)],
}


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_paged_attention_is_attention_over_the_requests_own(case, block_size):
    """Each row equals the formula over its request's keys up to itself; all other slots hold 1e4."""
    kv = BlockManager(80, block_size, enable_prefix_caching=False)
    k_cache, v_cache = (torch.full((80, block_size, KV_HEADS, DIM), 1e4).double() for _ in "kv")
    rows, truth = [], []
    for i, (past, new) in enumerate(CASES[case]):
        request = make_request(str(i), [1] * (past + new))
        kv.admit(request)
        kv.block_table(request).reverse()  # not in order of block ids
        k, v = rand(past + new, KV_HEADS, DIM, seed=2 * i), rand(past + new, KV_HEADS, DIM, seed=2 * i + 1)
        write_kv(k_cache, v_cache, torch.tensor(kv.slot_mapping(request, 0, past + new)), k, v)
        request.num_computed_tokens = past
        rows.append(row(request, new))
        truth += [(k[: n + 1], v[: n + 1]) for n in range(past, past + new)]
    batch = build_batch(rows, kv)
    q = rand(len(truth), HEADS, DIM, seed=99)
    out = paged_attention(q, k_cache, v_cache, batch)
    for query, (k, v), found in zip(q, truth, out, strict=True):
        assert torch.allclose(found, by_hand(query, k, v), atol=1e-10)


def test_the_backend_returns_logits_of_ending_rows_only():
    """A step of an inner chunk alone gives no logits; the model runs once a step."""
    model = tiny_model()
    calls = spy(model, "forward")
    kv = BlockManager(20, 4)
    backend = PagedBackend(model, kv)
    a, b = make_request("a", [5, 6, 7, 8, 9, 10]), make_request("b", [11, 12])
    assert kv.admit(a) and kv.admit(b)
    with torch.inference_mode():
        assert backend.forward([row(a, 4)]).shape == (0, 64)
        a.num_computed_tokens = 4
        logits = backend.forward([row(a, 2), row(b, 2)])
    assert len(calls) == 2
    assert torch.allclose(logits[0], dense_logits(model, a.prompt_token_ids)[-1], atol=1e-9)
    assert torch.allclose(logits[1], dense_logits(model, b.prompt_token_ids)[-1], atol=1e-9)


def test_a_request_computed_alone_reads_its_own_tokens_only():
    """NaN in every other slot, those at the end of its last block among them, does not reach its logits."""
    model, kv = tiny_model(), BlockManager(4, 4)
    backend, request = PagedBackend(model, kv), make_request("a", [5, 6, 7, 8, 9, 10])
    assert kv.admit(request)
    for pool in (backend.pool.k, backend.pool.v):
        pool.fill_(math.nan)
    with torch.inference_mode():
        backend.forward([row(request, 4)])
        request.num_computed_tokens = 4
        logits = backend.compute_alone(request)
    assert torch.allclose(logits, dense_logits(model, request.prompt_token_ids)[-1], atol=1e-9)
