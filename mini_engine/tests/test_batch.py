"""The flat batch of a step: every row's token, position and slot, and the attention plan."""

import pytest
import torch

from mini_engine.attention import AttentionPlan
from mini_engine.batch import build_batch
from mini_engine.block_manager import BlockManager
from mini_engine.scheduler import next_chunk
from mini_engine.tests.helpers import make_request, row


def admitted(kv, request_id, prompt, num_computed=0, outputs=()):
    request = make_request(request_id, prompt)
    request.output_token_ids = list(outputs)
    assert kv.admit(request)
    request.num_computed_tokens = num_computed
    return request


@pytest.fixture
def step():
    """(kv, rows): an inner chunk, a decode, a last chunk, and a prompt of one token."""
    kv = BlockManager(40, 4)
    return kv, [
        row(admitted(kv, "inner", list(range(10, 20)), 3), 4),
        row(admitted(kv, "decode", [30, 31, 32, 33], 5, [34, 35]), 1),
        row(admitted(kv, "last", list(range(40, 46)), 4), 2),
        row(admitted(kv, "one", [50]), 1),
    ]


def test_rows_lie_one_behind_the_other(step):
    """Tokens at their absolute positions, in schedule order, without padding."""
    kv, rows = step
    batch = build_batch(rows, kv)
    assert batch.token_ids.tolist() == [13, 14, 15, 16, 35, 44, 45, 50]
    assert batch.positions.tolist() == [3, 4, 5, 6, 5, 4, 5, 0]
    assert batch.query_lens == [4, 1, 2, 1]
    assert batch.seq_lens == [7, 6, 6, 1]
    assert batch.last_rows == [4, 6, 7], "the inner chunk is not sampled"
    for tensor in (batch.token_ids, batch.positions, batch.slot_mapping, batch.block_tables):
        assert tensor.dtype == torch.int64


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_are_those_of_the_block_manager(block_size):
    kv = BlockManager(60, block_size)
    rows = [row(admitted(kv, "a", list(range(17)), 2), 15), row(admitted(kv, "b", list(range(9))), 5)]
    expected = kv.slot_mapping(rows[0][0], 2, 17) + kv.slot_mapping(rows[1][0], 0, 5)
    assert build_batch(rows, kv).slot_mapping.tolist() == expected and len({*expected}) == 20


def test_block_tables_are_padded_to_the_longest(step):
    kv, rows = step
    tables = build_batch(rows, kv).block_tables.tolist()
    for (request, *_), padded in zip(rows, tables, strict=True):
        table = kv.block_table(request)
        assert padded == table + [0] * (3 - len(table))


def test_the_plan_splits_single_rows_from_chunks(step):
    """Single tokens attend together, longer chunks by themselves, each to its own positions."""
    kv, rows = step
    plan = AttentionPlan(build_batch(rows, kv))
    ((single_rows, tables, mask),) = plan.decodes
    assert single_rows.tolist() == [4, 7]
    assert tables.tolist() == [kv.block_table(rows[1][0])[:2], [kv.block_table(rows[3][0])[0], 0]]
    assert mask[:, 0, 0].sum(-1).tolist() == [6, 1]
    spans = [(start, end, table.tolist()) for start, end, table, _ in plan.chunks]
    assert spans == [(0, 4, kv.block_table(rows[0][0])[:2]), (5, 7, kv.block_table(rows[2][0]))]
    inner, last = (mask for *_, mask in plan.chunks)
    assert inner.sum(-1).tolist() == [4, 5, 6, 7], "each token sees itself and what is before it"
    assert last.sum(-1).tolist() == [5, 6]
    for mask in (inner, last):
        assert all(seen == sorted(seen, reverse=True) for seen in mask.tolist()), "from the first on, no gaps"
    additive = AttentionPlan(build_batch(rows, kv), additive=torch.float32)
    for (*_, seen), (*_, added) in zip(
        plan.chunks + plan.decodes, additive.chunks + additive.decodes, strict=True
    ):
        assert torch.equal(added, torch.where(seen, 0.0, -torch.inf))


def test_a_step_of_decodes_needs_no_row_numbers():
    """When every request brings one token the flat batch itself is the attention batch."""
    kv = BlockManager(40, 4)
    rows = [row(admitted(kv, str(i), [i] * 4, 4, [9]), 1) for i in range(3)]
    for request, *_ in rows:
        kv.allocate(request, 1)
    plan = AttentionPlan(build_batch(rows, kv))
    assert plan.decodes[0][0] == slice(None) and plan.chunks == []


def test_a_first_chunk_needs_no_mask():
    kv = BlockManager(40, 4)
    plan = AttentionPlan(build_batch([row(admitted(kv, "a", [1] * 9), 9)], kv))
    assert plan.decodes == [] and [mask for *_, mask in plan.chunks] == [None]


def test_the_chunks_it_is_given_are_used(step):
    """The batch holds the tokens of the chunks it is given; what is sampled is for the rows to say."""
    kv, rows = step
    chunks = [next_chunk(request, n)._replace(token_ids=[99] * n, is_last=True) for request, n, _ in rows]
    batch = build_batch(rows, kv, chunks=chunks)
    assert set(batch.token_ids.tolist()) == {99}
    assert batch.last_rows == [4, 6, 7]
