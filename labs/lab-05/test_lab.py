"""What paged KV memory must do: the books first (no torch), then writing and attending through them."""

import random
import time

import pytest

from labs.kit import assert_close, assert_drained, load, make_request

scenarios = load("lab-05", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}
STEPS = scenarios.STEPS
BLOCK_SIZES = (1, 3, 4, 16)  # not only powers of two, and the smallest there is


def pool(lab, num_blocks, block_size, watermark=0):
    return scenarios.Pool(lab, num_blocks, block_size, watermark)


def admitted(kv, request_id, num_tokens):
    """A request that has just been admitted."""
    request = make_request(request_id, num_tokens)
    assert kv.admit(request) is True, f"{request_id} with {num_tokens} tokens was not admitted"
    return request


def decode(request):
    """The request has sampled a token, and all before it is computed: what a step of decoding finds."""
    request.output_token_ids.append(7)
    request.num_computed_tokens = request.num_tokens - 1


def edges(block_size):
    """Lengths around the edges of a block, kB - 1, kB, kB + 1, each with the blocks that it needs."""
    for k in (1, 2, 3):
        if block_size > 1:  # else kB - 1 tokens are (k - 1)B
            yield k * block_size - 1, k
        yield k * block_size, k
        yield k * block_size + 1, k + 1


# ---------------------------------------------------------------------------------- an empty pool


def test_a_fresh_pool_is_free(lab):
    """A new pool of 6 blocks of 4 tokens says so, and all 6 are free."""
    kv = lab.BlockManager(6, 4)
    assert (kv.num_blocks, kv.block_size, kv.num_free_blocks) == (6, 4, 6)


def test_one_percent_is_the_default_watermark(lab):
    """Without a watermark one block in a hundred is held back at admission, rounded down; 0 given is 0."""
    assert [lab.BlockManager(n, 16).watermark for n in (50, 100, 1999)] == [0, 1, 19]
    assert lab.BlockManager(1999, 16, watermark=0).watermark == 0


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (6, 0), (6, -2)])
def test_senseless_sizes_are_refused(lab, sizes):
    """A pool without blocks, and blocks without slots, are a ValueError at once."""
    with pytest.raises(ValueError):
        lab.BlockManager(*sizes)


@pytest.mark.parametrize("watermark", [-1, 6, 7])
def test_a_senseless_watermark_is_refused(lab, watermark):
    """A watermark as large as the pool would admit nobody beside anybody: a ValueError at once."""
    with pytest.raises(ValueError):
        lab.BlockManager(6, 4, watermark=watermark)


def test_who_holds_nothing_has_an_empty_table(lab):
    """The table of somebody who was never admitted is the empty list, and asking takes no block."""
    kv = pool(lab, 6, 4)
    assert (kv.block_table(make_request("stranger", 3)), kv.num_free_blocks) == ([], 6)


# ------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_for_lengths_around_an_edge(lab, block_size):
    """kB - 1 and kB tokens need k blocks, kB + 1 need k + 1, for block sizes 1, 3, 4 and 16."""
    kv = pool(lab, 8, block_size)
    for num_tokens, blocks in edges(block_size):
        assert kv.num_new_blocks(make_request("a", num_tokens), num_tokens) == blocks


def test_what_is_held_is_not_counted_again(lab):
    """num_new_blocks counts from the tokens computed, takes off what is held, and is never negative."""
    kv = pool(lab, 8, 4)
    assert kv.num_new_blocks(make_request("outside", 9), 5) == 2  # what the 5 need, not the whole prompt
    request = admitted(kv, "a", 9)
    assert [kv.num_new_blocks(request, n) for n in (0, 9, 12, 13, 17)] == [0, 0, 0, 1, 2]
    request.num_computed_tokens = 9
    assert [kv.num_new_blocks(request, n) for n in (1, 3, 4, 8)] == [0, 0, 1, 2]
    assert kv.num_free_blocks == 5


def test_the_count_of_free_blocks_follows(lab):
    """Admission, growth and departure each change num_free_blocks by exactly their blocks."""
    kv, counts = pool(lab, 8, 4), []
    a, b = admitted(kv, "a", 8), admitted(kv, "b", 3)
    counts.append(kv.num_free_blocks)
    decode(a)
    kv.allocate(a, 6)  # a token and five to come
    counts.append(kv.num_free_blocks)
    kv.free(b)
    counts.append(kv.num_free_blocks)
    kv.free(a)
    assert [*counts, kv.num_free_blocks] == [5, 3, 4, 8]


# ------------------------------------------------------------------------------------- admission


def test_admission_claims_the_whole_sequence(lab):
    """Two 15-token prompts in a pool of 20 slots: the second is refused though nothing is computed."""
    kv = pool(lab, 5, 4)
    admitted(kv, "a", 15)
    assert kv.admit(make_request("b", 15)) is False


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_admission_takes_the_blocks_it_needs(lab, block_size):
    """The same lengths around an edge: as many blocks are in the table, and no longer free."""
    for num_tokens, blocks in edges(block_size):
        kv = pool(lab, 8, block_size)
        request = admitted(kv, "a", num_tokens)
        assert (len(kv.block_table(request)), kv.num_free_blocks) == (blocks, 8 - blocks)


def test_no_block_has_two_owners(lab):
    """Tables are lists of the pool's block ids, and those of different requests have none in common."""
    kv = pool(lab, 9, 4)
    tables = [kv.block_table(admitted(kv, name, 12)) for name in "abc"]
    assert all(isinstance(table, list) for table in tables), "block_table must return a list"
    assert sorted(block for table in tables for block in table) == list(range(9))


def test_outputs_need_room_too(lab):
    """A preempted request, 6 prompt tokens and 7 outputs, claims room for 13, and starts at 0 computed."""
    kv = pool(lab, 8, 4)
    request = make_request("back", 6)
    request.output_token_ids = list(range(7))
    request.num_computed_tokens = 12
    assert kv.admit(request) is True
    assert (len(kv.block_table(request)), request.num_computed_tokens) == (4, 0)


def test_the_last_block_can_be_had(lab):
    """A request that needs exactly what is free is admitted, and the pool is empty then."""
    kv = pool(lab, 5, 4)
    admitted(kv, "a", 9)
    admitted(kv, "b", 8)
    assert kv.num_free_blocks == 0


def test_a_refused_admission_changes_nothing(lab):
    """No room: free count, table and num_computed_tokens are as before, and a smaller one fits."""
    kv = pool(lab, 4, 4)
    admitted(kv, "a", 9)
    large = make_request("large", 5)
    large.num_computed_tokens = 3
    assert kv.admit(large) is False
    assert (kv.num_free_blocks, list(kv.block_table(large)), large.num_computed_tokens) == (1, [], 3)
    admitted(kv, "small", 4)


def test_the_watermark_stays_free_at_admission(lab):
    """With a watermark of 2 of 8 blocks, whoever would leave fewer is refused while somebody runs."""
    kv = pool(lab, 8, 4, watermark=2)
    admitted(kv, "a", 12)
    assert kv.admit(make_request("b", 13)) is False
    admitted(kv, "c", 12)
    back = make_request("back", 2)
    back.output_token_ids = [7]
    assert kv.admit(back) is False, "one block, and preempted before, but an admission like any other"
    assert kv.num_free_blocks == 2


def test_nobody_to_protect_no_watermark(lab):
    """Alone in the pool a request may have every block, and not one more; a refused one is not somebody."""
    kv = pool(lab, 8, 4, watermark=2)
    assert kv.admit(make_request("too large", 33)) is False
    request = admitted(kv, "a", 32)
    kv.free(request)
    admitted(kv, "b", 32)


def test_admitting_twice_is_an_error(lab):
    """A second admission would lose the first one's blocks: a ValueError that names the request."""
    kv = pool(lab, 8, 4)
    request = admitted(kv, "twice", 6)
    with pytest.raises(ValueError, match="twice"):
        kv.admit(request)
    assert kv.num_free_blocks == 6


def test_waste_is_below_a_block_a_request(lab):
    """Forty sequences waste less than a block each; reserving 512 tokens for each wastes most of them."""
    rng = random.Random(0)
    block_size, longest, num_slots = 16, 512, 16384
    kv = pool(lab, num_slots // block_size, block_size)
    requests = [admitted(kv, f"r{i}", rng.randint(10, 300)) for i in range(40)]
    used = sum(request.num_tokens for request in requests)
    held = [len(kv.block_table(request)) * block_size for request in requests]
    for request, slots in zip(requests, held, strict=True):
        assert 0 <= slots - request.num_tokens < block_size
    while kv.admit(make_request(f"r{len(requests)}", rng.randint(10, 300))):
        requests.append(None)
    print(
        f"40 sequences, {used} tokens. Blocks of {block_size}: {sum(held)} slots, "
        f"{100 - 100 * used / sum(held):.1f} % wasted. Reserving {longest} each: {40 * longest} slots, "
        f"{100 - 100 * used / (40 * longest):.1f} % wasted.\n"
        f"A pool of {num_slots} slots has room for {len(requests)} of them in blocks, "
        f"for {num_slots // longest} by reservation."
    )
    assert len(requests) > 2 * (num_slots // longest)


# -------------------------------------------------------------------------------------- growth


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_block_is_taken_when_the_last_one_is_full(lab, block_size):
    """Decoding from 1 token to 3 blocks and one more: a new block exactly at 1 over each edge."""
    kv = pool(lab, 4, block_size)
    request = admitted(kv, "a", 1)
    lengths = []
    while request.num_tokens <= 3 * block_size:
        decode(request)
        taken = kv.allocate(request, 1)
        assert taken is True, f"no room for token {request.num_tokens}, with {lengths} blocks held so far"
        lengths.append(len(kv.block_table(request)))
    assert lengths == [1 + (n - 1) // block_size for n in range(2, 3 * block_size + 2)]


def test_chunks_of_an_admitted_prompt_take_nothing(lab):
    """What admission claimed is not allocated again: three chunks of a 30-token prompt take no block."""
    kv = pool(lab, 10, 4)
    request = admitted(kv, "long", 30)
    for start in (0, 10, 20):
        request.num_computed_tokens = start
        assert kv.allocate(request, 10) is True
        assert kv.num_free_blocks == 2


def test_a_table_only_grows_at_its_end(lab):
    """Growing leaves the blocks that a request has where they are: its tokens are in them."""
    kv = pool(lab, 10, 2)
    request = admitted(kv, "a", 5)
    before = list(kv.block_table(request))
    admitted(kv, "b", 4)
    request.num_computed_tokens = 5
    assert kv.allocate(request, 4) is True
    assert list(kv.block_table(request))[:3] == before
    assert len(kv.block_table(request)) == 5


def test_a_refused_allocation_changes_nothing(lab):
    """Three blocks asked for, two there: False, both still free, the table untouched."""
    kv = pool(lab, 4, 4)
    request = admitted(kv, "a", 8)
    before = list(kv.block_table(request))
    request.num_computed_tokens = 8
    assert kv.allocate(request, 12) is False
    assert (kv.num_free_blocks, list(kv.block_table(request))) == (2, before)
    assert kv.allocate(request, 8) is True


def test_decodes_may_use_the_watermark(lab):
    """The watermark is kept for those who run: a decode takes the very last block."""
    kv = pool(lab, 4, 4, watermark=1)
    request = admitted(kv, "a", 8)
    admitted(kv, "b", 4)
    decode(request)
    assert kv.allocate(request, 1) is True
    assert kv.num_free_blocks == 0


# ----------------------------------------------------------------------------------- giving back


def test_freed_blocks_are_used_at_once(lab):
    """What a finished request held serves the next admission, block for block."""
    kv = pool(lab, 4, 4)
    a = admitted(kv, "a", 13)
    blocks = set(kv.block_table(a))
    kv.free(a)
    b = admitted(kv, "b", 16)
    assert set(kv.block_table(b)) == blocks == set(range(4))
    assert list(kv.block_table(a)) == []


def test_freeing_twice_gives_nothing_twice(lab):
    """Freeing again, or somebody who never came in, is harmless: no block is free twice."""
    kv = pool(lab, 4, 4)
    a = admitted(kv, "a", 7)
    kv.free(a)
    kv.free(a)
    kv.free(make_request("stranger", 3))
    assert kv.num_free_blocks == 4
    admitted(kv, "b", 8)
    admitted(kv, "c", 8)
    kv.check()


def test_the_books_balance(lab):
    """Over 30 drawn sequences of operations free plus held is all, and no block has two owners."""
    for scenario in [*SCENARIOS.values(), *scenarios.draw(seed=1, count=30)]:
        scenarios.run(lab, scenario)


def test_taking_a_block_does_not_search_the_pool(lab):
    """Admitting, growing and freeing costs the same in a pool of 100,000 blocks as in one of 64: O(1)."""
    times = seconds_a_turn(lab, 100_000) / seconds_a_turn(lab, 64)
    assert times < 10, "in a pool of 100,000 blocks it takes more than 10 times as long"


def seconds_a_turn(lab, num_blocks):
    """The best of some measurements of: admit eight blocks, take eight more, free them, beside others."""
    kv = lab.BlockManager(num_blocks, 1, watermark=0)
    kv.admit(make_request("others", num_blocks // 25))  # few: who searches must fail here, not time out
    request = make_request("a", 8)
    measured = []
    while len(measured) < 20 and sum(measured) < 1:
        start = time.perf_counter()
        for _ in range(10):
            kv.admit(request)
            kv.num_free_blocks  # noqa: B018  the scheduler looks in every step
            kv.allocate(request, 16)
            kv.free(request)
        measured.append(time.perf_counter() - start)
    return min(measured)


# --------------------------------------------------------------------------- tables and slots


def test_slots_follow_the_table(lab):
    """Position p lies in block p // 4 of the table, at offset p % 4, wherever that block is."""
    kv = pool(lab, 6, 4)
    first, last = admitted(kv, "first", 4), admitted(kv, "last", 8)
    admitted(kv, "other", 8)
    kv.free(first)
    request = last
    request.num_computed_tokens = 8
    assert kv.allocate(request, 3) is True
    table = list(kv.block_table(request))
    expected = [table[p // 4] * 4 + p % 4 for p in range(11)]
    assert list(kv.slot_mapping(request, 0, 11)) == expected
    assert list(kv.slot_mapping(request, 3, 9)) == expected[3:9]
    assert list(kv.slot_mapping(request, 5, 5)) == []


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_no_two_tokens_share_a_slot(lab, block_size):
    """All tokens of all requests, at every length around an edge, have slots of their own."""
    for num_tokens, blocks in edges(block_size):
        kv = pool(lab, 3 * blocks, block_size)
        requests = [admitted(kv, name, num_tokens) for name in "abc"]
        slots = [slot for request in requests for slot in kv.slot_mapping(request, 0, num_tokens)]
        assert len(set(slots)) == 3 * num_tokens
        assert all(0 <= slot < 3 * blocks * block_size for slot in slots)


def test_positions_without_room_are_refused(lab):
    """A position behind the last block, below 0, or of a freed request is a ValueError with the name."""
    kv = pool(lab, 4, 4)
    request = admitted(kv, "short", 6)
    assert len(kv.slot_mapping(request, 0, 8)) == 8
    for start, end in ((6, 9), (-1, 2)):
        with pytest.raises(ValueError, match="short"):
            kv.slot_mapping(request, start, end)
    kv.free(request)
    with pytest.raises(ValueError, match="short"):
        kv.slot_mapping(request, 0, 1)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_whole_runs_on_your_blocks(lab, block_size):
    """Scheduled, chunked, preempted: every text is that of a run alone, and all blocks come back."""
    for seed in range(2):
        scenario = scenarios.workload(seed, block_size)
        trace = scenarios.serve(lab, scenario)
        assert_drained(trace)
        assert trace.end.num_free_blocks == scenario["config"]["num_blocks"]
        for request in scenario["requests"]:
            alone = scenarios.serve(lab, scenario | {"requests": [request | {"at": 0}]})
            assert text(trace, request["id"]) == text(alone, request["id"])


def text(trace, request_id):
    return [token for step in trace.steps for token in step.new_tokens.get(request_id, ())]


# ------------------------------------------------------------------------------------- write_kv


@pytest.mark.parametrize("block_size", [4, 1, 5])
def test_keys_and_values_go_to_their_slots(lab, block_size):
    """Four tokens of two requests land in the slots they are mapped to, keys and values apart, unrounded."""
    import torch

    k_cache, v_cache = torch.zeros(2, 20 // block_size, block_size, 2, 8, dtype=torch.float64)
    k = (torch.arange(4 * 16, dtype=torch.float64).view(4, 2, 8) + 1) / 3
    slots = [13, 14, 6, 19]
    lab.write_kv(k_cache, v_cache, torch.tensor(slots), k, -k)
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, block_size)
        assert_close(k_cache[block, offset], k[row], f"the key of token {row}, slot {slot}", atol=0)
        assert_close(v_cache[block, offset], -k[row], f"the value of token {row}, slot {slot}", atol=0)


def test_all_other_slots_stay_as_they_are(lab):
    """Writing three slots of one layer leaves the 17 others, and the other layers, untouched."""
    import torch

    pool_k, pool_v = torch.full((2, 3, 5, 4, 2, 8), 7.0)
    ones = torch.ones(3, 2, 8)
    lab.write_kv(pool_k[1], pool_v[1], torch.tensor([9, 0, 10]), ones, ones)
    for cache in (pool_k, pool_v):
        written = (cache == 1).flatten(3).all(dim=-1).nonzero().tolist()
        assert written == [[1, 0, 0], [1, 2, 1], [1, 2, 2]]
        assert int((cache == 7).sum()) == cache.numel() - 3 * 16


# ------------------------------------------------------------------------------ paged_attention


@pytest.mark.parametrize("name", STEPS)
def test_paged_equals_dense(lab, name):
    """Through tables out of order, all other slots poisoned, attention is the dense one to 1e-9."""
    q, k_cache, v_cache, batch, expected = scenarios.step_tensors(STEPS[name])
    assert_close(lab.paged_attention(q, k_cache, v_cache, batch), expected, f"attention of {name}")


@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 1, 16), (6, 2, 4)])
def test_grouped_queries(lab, heads):
    """One query a key, four, or three, and heads of other widths: each finds its own keys."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    step = scenarios.step_tensors(STEPS["a mixture"], seed=1, **dict(zip(names, heads, strict=True)))
    assert_close(lab.paged_attention(*step[:4]), step[4], f"attention of (heads, kv heads, width) {heads}")


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_block_size(lab, block_size):
    """Blocks of 1, 3 and 16 tokens, tables shuffled over the pool, give the same attention."""
    rng = random.Random(block_size)
    ids = rng.sample(range(80), 80)
    requests = []
    for past, new in ((17, 1), (0, 16), (15, 2), (5, 6)):
        blocks = -(-(past + new) // block_size)
        requests.append((past, new, [ids.pop() for _ in range(blocks)]))
    step = scenarios.step_tensors(requests, block_size=block_size, num_blocks=80, seed=2)
    assert_close(lab.paged_attention(*step[:4]), step[4], f"attention with blocks of {block_size}")


def test_a_result_is_of_the_dtype_of_its_queries(lab):
    """A model in float32, as most are, gets float32 back, and right to 1e-4."""
    q, k_cache, v_cache, batch, expected = scenarios.step_tensors(STEPS["a mixture"])
    ours = lab.paged_attention(q.float(), k_cache.float(), v_cache.float(), batch)
    assert str(ours.dtype) == "torch.float32", f"float32 went in and {ours.dtype} came out"
    assert_close(ours, expected, "attention in float32", atol=1e-4)


def test_nobody_reads_what_is_not_theirs(lab):
    """Whatever lies in freed blocks and behind a sequence's end, the result does not move by a bit."""
    q, k_cache, v_cache, batch, _ = scenarios.step_tensors(STEPS["a mixture"])
    clean = lab.paged_attention(q.clone(), k_cache.clone(), v_cache.clone(), batch)
    foreign = k_cache == scenarios.POISON
    k_cache[foreign], v_cache[foreign] = -3.0, 5.0
    assert_close(lab.paged_attention(q, k_cache, v_cache, batch), clean, "attention", atol=0)


def test_attention_only_reads(lab):
    """The queries and the pool are afterwards what they were before: nothing is scaled or wiped in place."""
    q, k_cache, v_cache, batch, _ = scenarios.step_tensors(STEPS["a mixture"])
    before = [tensor.clone() for tensor in (q, k_cache, v_cache)]
    lab.paged_attention(q, k_cache, v_cache, batch)
    for what, now, then in zip(("q", "k_cache", "v_cache"), (q, k_cache, v_cache), before, strict=True):
        assert_close(now, then, f"{what} after the call", atol=0)


def test_a_model_on_your_pages(lab):
    """A two-layer model on your blocks, your write_kv and your attention says what it says alone."""
    scenario = scenarios.workload(3, block_size=4)
    trace = scenarios.serve(lab, scenario, scenarios.paged_model(lab))
    assert_drained(trace)
    for request in scenario["requests"]:
        expected = scenarios.text_alone(request["id"], request["prompt"], request["max_tokens"])
        assert text(trace, request["id"]) == expected
