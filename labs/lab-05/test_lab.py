"""Tests of paged KV memory: the books first (no torch), then writing and attending through them."""

import random
from functools import partial

import pytest

from labs.kit import (
    Owner,
    assert_close,
    assert_drained,
    assert_rows,
    assert_texts_alone,
    judge_random_scripts,
    load,
    make_request,
    tokens_of,
)
from labs.kit.toys.ledger import work_in_a_pool
from labs.kit.toys.plays import Play

scenarios = load("lab-05", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}
STEPS = scenarios.STEPS
BLOCK_SIZES = (1, 3, 4, 16)  # not only powers of two, and the smallest there is


def pool(lab, num_blocks, block_size, watermark=0):
    return scenarios.Pool(lab, num_blocks, block_size, watermark)


def admitted(kv, request_id, num_tokens):
    """A request that has just been admitted."""
    request, free = make_request(request_id, num_tokens), kv.num_free_blocks
    answer = kv.admit(request)
    assert answer is True, (
        f"{request_id} with {num_tokens} tokens was not admitted: {free} of {kv.num_blocks} blocks "
        f"were free, of {kv.block_size} slots each, and the watermark is {kv.watermark}"
    )
    return request


def must_wait(kv, request, why):
    """admit says False; asserted by its name, so that no request is printed."""
    free, answer = kv.num_free_blocks, kv.admit(request)
    assert answer is False, f"with {free} free blocks {request.request_id} should wait: {why}"


def must_come_in(kv, request, why):
    free, answer = kv.num_free_blocks, kv.admit(request)
    assert answer is True, f"with {free} free blocks {request.request_id} should be admitted: {why}"


def assert_room(kv, request, num_new_tokens, expected=True, why=""):
    """allocate says so: there is room for so many tokens more, or there is none."""
    free, answer = kv.num_free_blocks, kv.allocate(request, num_new_tokens)
    there, held = ("room" if expected else "no room"), len(table_of(kv, request.request_id))
    assert answer is expected, (
        f"with {free} free blocks, and {held} held now, {request.request_id} should find {there} "
        f"for {num_new_tokens} more tokens {why}"
    )


def table_of(kv, name):
    return list(kv.block_table(make_request(name, 1)))


def slots_of(kv, name, start, end):
    return list(kv.slot_mapping(make_request(name, 1), start, end))


def assert_free(kv, num_blocks, when):
    assert kv.num_free_blocks == num_blocks, (
        f"{when} {num_blocks} blocks must be free, but num_free_blocks is {kv.num_free_blocks}"
    )


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


def test_a_pool_knows_its_sizes(lab):
    """A new pool of 6 blocks of 4 tokens says so, and still says so when another is made."""
    kv = lab.BlockManager(6, 4)
    lab.BlockManager(3, 2, watermark=1)
    assert (kv.num_blocks, kv.block_size, kv.watermark) == (6, 4, 0)


def test_two_pools_share_nothing(lab):
    """A change in one pool is not seen in another, be it older or newer."""
    before, kv = pool(lab, 4, 4), pool(lab, 4, 4)
    admitted(kv, "a", 16)
    for other in (before, pool(lab, 4, 4)):
        assert table_of(other, "a") == [], "a has blocks of one pool, but another shows some too"
        assert_free(other, 4, "in a pool that a is not in")
        admitted(other, "a", 16)
    assert_free(kv, 0, "in the pool that a fills")


def test_one_percent_is_the_default_watermark(lab):
    """Without a watermark one block in a hundred is held back at admission, rounded down; 0 given is 0."""
    assert [lab.BlockManager(n, 16).watermark for n in (50, 100, 1999)] == [0, 1, 19]
    assert lab.BlockManager(1999, 16, watermark=0).watermark == 0


@pytest.mark.parametrize(
    "sizes", [(0, 4, 0), (-1, 4, 0), (6, 0, 0), (6, -2, 0), (6, 4, -1), (6, 4, 6), (6, 4, 7)]
)
def test_senseless_sizes_are_refused(lab, sizes):
    """No blocks, no slots, or a watermark that is negative or not below the pool: a ValueError at once."""
    num_blocks, block_size, watermark = sizes
    with pytest.raises(ValueError):
        lab.BlockManager(num_blocks, block_size, watermark=watermark)


def test_a_stranger_has_an_empty_table(lab):
    """The table of a request that was never admitted is the empty list, and asking makes it no holder."""
    kv = pool(lab, 6, 4, watermark=2)
    assert [table_of(kv, "stranger") for _ in range(2)] == [[], []]
    assert kv.num_free_blocks == 6
    must_come_in(kv, make_request("stranger", 24), "only its table was asked for before: it held no block")


# ------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_for_lengths_around_an_edge(lab, block_size):
    """kB - 1 and kB tokens need k blocks, kB + 1 need k + 1, for block sizes 1, 3, 4 and 16."""
    kv = pool(lab, 8, block_size)
    for num_tokens, blocks in edges(block_size):
        needed = kv.num_new_blocks(make_request("a", num_tokens), num_tokens)
        assert needed == blocks, f"{num_tokens} tokens in blocks of {block_size} need {blocks}, not {needed}"


def test_what_is_held_is_not_counted_again(lab):
    """num_new_blocks counts from the tokens computed, takes off what is held, and is never negative."""
    kv = pool(lab, 8, 4)
    outside = kv.num_new_blocks(make_request("outside", 9), 5)
    assert outside == 2, f"5 tokens need 2 blocks, however long the prompt is, but the answer is {outside}"
    request = admitted(kv, "a", 9)
    assert [kv.num_new_blocks(request, n) for n in (0, 9, 12, 13, 17)] == [0, 0, 0, 1, 2]
    request.num_computed_tokens = 9
    assert [kv.num_new_blocks(request, n) for n in (1, 3, 4, 8)] == [0, 0, 1, 2]
    assert kv.num_free_blocks == 5


def test_large_pools_and_long_sequences(lab):
    """70,000 blocks, 100,000 tokens, 5,000 more, blocks of 32,768: sizes change nothing in the counting."""
    kv = pool(lab, 70_000, 16, watermark=None)
    assert kv.watermark == 700
    request = admitted(kv, "long", 100_000)
    assert_free(kv, 70_000 - 6250, "beside 100,000 tokens")
    request.num_computed_tokens = 100_000
    needed = [kv.num_new_blocks(request, n) for n in (5000, 2**20 + 1, 2**32 + 1)]
    assert needed == [313, 65_537, 2**28 + 1]
    assert_room(kv, request, 5000)
    table = table_of(kv, "long")
    expected = [table[p // 16] * 16 + p % 16 for p in range(105_000)]
    same = slots_of(kv, "long", 0, 105_000) == expected  # pytest would compare the lists for seconds
    assert same, "some of the 105,000 slots are wrong"
    admitted(kv, "rest", 16 * (70_000 - 6563) - 16 * 700)
    kv.free(request)
    assert_free(kv, 6563 + 700, "when the long one has gone")
    admitted(large := pool(lab, 3, 2**15), "just over", 2**15 + 1)
    assert_free(large, 1, "beside 32,769 tokens in blocks of 32,768")


def test_what_is_needed_may_be_more_than_there_is(lab):
    """The answer does not look at what is free: 13 tokens need 4 blocks also where 1 is free, or none."""
    kv = pool(lab, 4, 4)
    request = make_request("late", 13)
    for held in (0, 3, 4):
        if held:
            admitted(kv, f"holds {held}", 4 * (kv.num_free_blocks - (4 - held)))
        needed = kv.num_new_blocks(request, 13)
        assert needed == 4, f"13 tokens need 4 blocks, but the answer is {needed} with {4 - held} free"
    assert_room(kv, request, 13, False)


# ------------------------------------------------------------------------------------- admission


def test_admission_claims_the_whole_sequence(lab):
    """Two 15-token prompts in a pool of 20 slots: the second is refused though nothing is computed."""
    kv = pool(lab, 5, 4)
    admitted(kv, "a", 15)
    must_wait(kv, make_request("b", 15), "it needs 4 blocks, and a has claimed 4 of 5")


def test_outputs_need_room_too(lab):
    """A preempted request, 6 prompt tokens and 7 outputs, claims room for 13, and starts at 0 computed."""
    kv = pool(lab, 8, 4)
    request = make_request("back", 6)
    request.output_token_ids = list(range(7))
    request.num_computed_tokens = 12
    must_come_in(kv, request, "its 13 tokens need 4 of 8 blocks")
    assert (len(table_of(kv, "back")), request.num_computed_tokens) == (4, 0), "blocks, computed tokens"


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
    must_wait(kv, large, "it needs 2 blocks")
    assert (kv.num_free_blocks, table_of(kv, "large"), large.num_computed_tokens) == (1, [], 3)
    admitted(kv, "small", 4)


def test_the_watermark_stays_free_at_admission(lab):
    """With a watermark of 2 of 8 blocks, a request that would leave fewer is refused beside others."""
    kv = pool(lab, 8, 4, watermark=2)
    admitted(kv, "a", 12)
    must_wait(kv, make_request("b", 13), "it needs 4 of 5 free blocks, and 2 must stay free")
    admitted(kv, "c", 12)
    back = make_request("back", 2)
    back.output_token_ids, back.num_preemptions = [7], 1
    must_wait(kv, back, "one block, and preempted before, but an admission like any other")
    assert kv.num_free_blocks == 2


def test_an_empty_pool_has_no_watermark(lab):
    """Alone in the pool a request may have every block, and not one more; a refused one holds none."""
    kv = pool(lab, 8, 4, watermark=2)
    must_wait(kv, make_request("too large", 33), "it needs 9 blocks, and the pool has 8")
    admitted(kv, "a", 32)


def test_admitting_twice_is_an_error(lab):
    """A second admission would lose the first one's blocks: a ValueError with the id; nothing changes."""
    kv = pool(lab, 8, 4)
    request = admitted(kv, "twice", 6)
    request.num_computed_tokens, table = 5, table_of(kv, "twice")
    for one in (request, make_request("twice", 3)):  # the id counts, not the object
        with pytest.raises(ValueError, match="twice"):
            kv.admit(one)
    assert kv.num_free_blocks == 6
    assert (table_of(kv, "twice"), request.num_computed_tokens) == (table, 5)


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


def test_allocating_nothing_leaves_nothing(lab):
    """Room for 0 tokens is no room: a request that asks for it holds no block, and can be admitted."""
    kv = pool(lab, 4, 4)
    stranger = make_request("stranger", 3)
    assert_room(kv, stranger, 0)
    assert (table_of(kv, "stranger"), kv.num_free_blocks) == ([], 4)
    admitted(kv, "alone in the pool", 16)
    assert_room(kv, stranger, 0, why="(also in a full pool)")
    must_wait(kv, stranger, "it holds no block, so it is refused, and without an error")


def test_chunks_of_an_admitted_prompt_take_nothing(lab):
    """Claimed blocks are not allocated again: three chunks of a 30-token prompt take no block."""
    kv = pool(lab, 10, 4)
    request = admitted(kv, "long", 30)
    for start in (0, 10, 20):
        request.num_computed_tokens = start
        assert_room(kv, request, 10)
        assert kv.num_free_blocks == 2


def test_a_table_only_grows_at_its_end(lab):
    """Growing leaves the blocks that a request has where they are: its tokens are in them."""
    kv = pool(lab, 10, 2)
    gone, request = admitted(kv, "gone", 4), admitted(kv, "a", 5)
    before = table_of(kv, "a")
    admitted(kv, "b", 10)
    kv.free(gone)  # whose blocks come behind those of a now, though they were given out first
    request.num_computed_tokens = 5
    assert_room(kv, request, 4)
    after = table_of(kv, "a")
    assert after[:3] == before, f"the table was {before}, and grew to {after}"
    assert len(after) == 5, f"9 tokens in blocks of 2 need 5, but the table is {after}"


def test_a_refused_allocation_changes_nothing(lab):
    """Three blocks asked for, two there: False, both still free, the table untouched."""
    kv = pool(lab, 4, 4)
    request = admitted(kv, "a", 8)
    before = table_of(kv, "a")
    request.num_computed_tokens = 8
    assert_room(kv, request, 12, False)
    assert (kv.num_free_blocks, table_of(kv, "a")) == (2, before)
    stranger = make_request("stranger", 4)
    assert_room(kv, stranger, 12, False)
    must_come_in(kv, stranger, "it was refused by allocate, so it held no block")
    kv.free(stranger)
    assert_room(kv, request, 8)


def test_decodes_may_use_the_watermark(lab):
    """The watermark is kept for the requests that run: a decode takes the very last block."""
    kv = pool(lab, 4, 4, watermark=1)
    request = admitted(kv, "a", 8)
    admitted(kv, "b", 4)
    decode(request)
    assert_room(kv, request, 1)
    assert kv.num_free_blocks == 0


# ----------------------------------------------------------------------------------- giving back


def test_a_freed_request_holds_nothing(lab):
    """Its table is empty, all its blocks are free, the half-filled last one too, and it needs them anew."""
    kv = pool(lab, 4, 4)
    request = admitted(kv, "a", 7)
    request.num_computed_tokens = 7
    kv.free(request)
    assert table_of(kv, "a") == []
    assert_free(kv, 4, "when it is freed")
    assert request.num_computed_tokens == 7, "the scheduler counts num_computed_tokens, free does not"
    request.num_computed_tokens = 0
    needed = kv.num_new_blocks(request, 7)
    assert needed == 2, f"it holds nothing, so 7 tokens need 2 blocks, not {needed}"


def test_freeing_twice_gives_nothing_twice(lab):
    """To free a request again, or one that never came in, is harmless: no block is free twice."""
    kv = pool(lab, 4, 4)
    a = admitted(kv, "a", 7)
    kv.free(a)
    kv.free(a)
    kv.free(make_request("stranger", 3))
    assert_free(kv, 4, "when a was freed twice and a stranger once")
    admitted(kv, "b", 8)
    admitted(kv, "c", 8)
    kv.check()


def test_the_last_one_leaves_an_empty_pool(lab):
    """When all are gone the watermark is waived again: the next request may have every block."""
    kv = pool(lab, 8, 4, watermark=2)
    requests = [admitted(kv, "a", 12), admitted(kv, "b", 12)]
    for request in requests:
        kv.free(request)
    admitted(kv, "c", 32)


def test_a_request_may_come_again(lab):
    """A preempted request, and another with the id of one that is gone, are admitted and freed like any."""
    kv = pool(lab, 4, 4)
    request = admitted(kv, "again", 7)
    for _ in range(2):
        kv.free(request)
        must_come_in(kv, request, "the pool is empty")
    kv.free(make_request("again", 1))  # the id counts, not the object
    assert_free(kv, 4, "when another object with its id was freed")
    request = admitted(kv, "again", 13)
    kv.free(request)
    assert (table_of(kv, "again"), kv.num_free_blocks) == ([], 4)


def test_no_block_is_searched_for(lab):
    """Each method does no more work in a pool of 2,048 blocks than in one of 64: O(1) a block."""
    small, large = (work_in_a_pool(lab, num_blocks) for num_blocks in (64, 2048))
    for name, steps in large.items():
        assert steps <= 5 * small[name], f"{name} takes {steps} steps of Python instead of {small[name]}"


# ------------------------------------------------------------------------------------ whole books


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_books_balance(lab, name):
    """After each operation free plus held is all, and no block has two owners."""
    scenarios.run(lab, SCENARIOS[name])


# --------------------------------------------------------------------------- tables and slots


def test_slots_follow_the_table(lab):
    """Position p lies in block p // 4 of the table, at offset p % 4, wherever that block is."""
    kv = pool(lab, 6, 4)
    request, other = admitted(kv, "a", 4), admitted(kv, "other", 4)
    for grown in (other, request, other, request):  # in turn, so that no table is in a row
        grown.num_computed_tokens = 4 * len(kv.block_table(grown))
        assert_room(kv, grown, 3)
    table = table_of(kv, "a")
    expected = [table[p // 4] * 4 + p % 4 for p in range(11)]
    assert slots_of(kv, "a", 0, 11) == expected
    assert slots_of(kv, "a", 3, 9) == expected[3:9]
    assert slots_of(kv, "a", 5, 5) == []
    assert slots_of(kv, "a", 12, 12) == [], "no position is asked for, also at the room's end"


def test_positions_without_room_are_refused(lab):
    """A position after the last block, below 0, or of a stranger is a ValueError with the request's id."""
    kv = pool(lab, 4, 4)
    request = admitted(kv, "short", 6)
    assert len(slots_of(kv, "short", 0, 8)) == 8
    for start, end in ((6, 9), (8, 9), (-1, 2), (-2, 0)):
        with pytest.raises(ValueError, match="short"):
            kv.slot_mapping(request, start, end)
    with pytest.raises(ValueError, match="stranger"):
        kv.slot_mapping(make_request("stranger", 3), 0, 1)


def test_slots_of_a_used_pool(lab):
    """When requests have come and gone and come again, each position is where the table of now says."""
    kv = pool(lab, 8, 2)
    first = [admitted(kv, name, 4) for name in "abcd"]
    before = {name: slots_of(kv, name, 0, 4) for name in "abcd"}
    for request in (first[2], first[0], first[3]):
        kv.free(request)
    with pytest.raises(ValueError):
        kv.slot_mapping(first[2], 0, 1)
    again = [admitted(kv, "d", 5), admitted(kv, "a", 3)]
    for request in again:
        name, table = request.request_id, table_of(kv, request.request_id)
        expected = [table[p // 2] * 2 + p % 2 for p in range(request.num_tokens)]
        assert slots_of(kv, name, 0, request.num_tokens) == expected
    assert slots_of(kv, "b", 0, 4) == before["b"]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_whole_runs_on_your_blocks(lab, block_size):
    """Scheduled, chunked, preempted: every text is that of a run alone, and all blocks come back."""
    for seed in range(2):
        scenario = scenarios.workload(seed, block_size)
        trace = assert_texts_alone(scenario, partial(scenarios.serve, lab))
        assert trace.end.num_free_blocks == scenario["config"]["num_blocks"]


# ------------------------------------------------------------------------------------- write_kv


@pytest.mark.parametrize("block_size", [4, 1, 5])
def test_keys_and_values_go_to_their_slots(lab, block_size):
    """Four tokens of two requests land in the slots they are mapped to, keys and values apart, unrounded."""
    import torch

    from labs.kit.tensor_toys.paged import POISON

    caches = torch.full((2, 20 // block_size, block_size, 2, 8), POISON, dtype=torch.float64)
    k = (torch.arange(4 * 16, dtype=torch.float64).view(4, 2, 8) + 1) / 3
    slots, owners = [13, 14, 6, 19], [*(Owner("a", p) for p in (5, 6, 7)), Owner("b", 0)]
    for mapped in ([0], slots):  # a token alone, and four
        before = caches.clone()
        lab.write_kv(*caches, torch.tensor(mapped), k[: len(mapped)], -k[: len(mapped)])
    for name, cache, old, new in zip(("keys", "values"), caches, before, (k, -k), strict=True):
        rows = cache.flatten(0, 1)[slots]
        what = f"the {name} in the slots {slots}"
        assert_rows(rows, new, what, owners, pool=(old, cache), atol=0)


def test_all_other_slots_stay_as_they_are(lab):
    """Writing three slots of one layer leaves the 17 others, and the other layers, untouched."""
    import torch

    caches = torch.full((2, 3, 5, 4, 2, 8), 7.0)
    before, slots = caches.clone(), [9, 0, 10]
    given = torch.tensor(slots), torch.ones(3, 2, 8), torch.full((3, 2, 8), 2.0)
    kept = [tensor.clone() for tensor in given]
    lab.write_kv(caches[0, 1], caches[1, 1], *given)
    words = [f"layer {layer}, slot {slot}" for layer in range(3) for slot in range(20)]
    for name, cache, old, new in zip(("keys", "values"), caches, before, kept[1:], strict=True):
        expected = old.clone().flatten(1, 2)
        expected[1, slots] = new
        pools = old, cache
        assert_rows(cache.reshape(60, -1), expected.reshape(60, -1), name, words, pool=pools, atol=0)
    for name, now, then in zip(("slot_mapping", "k", "v"), given, kept, strict=True):
        assert_close(now, then, f"{name} after the call, which is only to be read", atol=0)


def test_loading_needs_no_torch(lab):
    """A program without torch can load your file: torch is imported inside the two tensor functions."""
    import torch

    lab.write_kv(*torch.zeros(2, 1, 1, 1, 1), torch.tensor([0]), *torch.ones(2, 1, 1, 1))  # it is written
    names = Play(lab).names_that_need_torch()
    assert not names, f"{names[0]} loads torch with the file; import it inside write_kv and paged_attention"


# ------------------------------------------------------------------------------ paged_attention


def owners_of(batch):
    """Return the owners of the rows, for the message of a failure."""
    positions, owners = iter(batch.positions.tolist()), []
    for r, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        owners += [Owner(f"r{r}", next(positions), past=seq_len - query_len) for _ in range(query_len)]
    return owners


def assert_attends(lab, step, what, atol=1e-9):
    """The lab's attention over one step is the dense one, and has only read what it was given."""
    __tracebackhide__ = True
    q, k_cache, v_cache, batch, expected = step
    before, owners = k_cache.clone(), owners_of(batch)
    ours = lab.paged_attention(q, k_cache, v_cache, batch)
    assert ours.dtype == q.dtype, f"{q.dtype} went in and {ours.dtype} came out"
    assert_rows(ours, expected, what, owners, pool=(before, k_cache), atol=atol)


@pytest.mark.parametrize("name", STEPS)
def test_paged_equals_dense(lab, name):
    """Through tables out of order, all other slots poisoned, attention is the dense one to 1e-9."""
    assert_attends(lab, scenarios.step_tensors(STEPS[name], num_kv_heads=4), f"attention of {name}")


def test_a_long_past_beside_many_requests(lab):
    """A decode with 4,100 tokens in the pool, a chunk of 600 and forty short ones: nothing is left out."""
    step = [(4100, 1, [*range(300, 43, -1)]), (3, 600, [*range(301, 339)])]
    step += [(3, 1, [block]) for block in range(40)]
    tensors = scenarios.step_tensors(step, block_size=16, num_blocks=340, num_heads=2, num_kv_heads=2)
    assert_attends(lab, tensors, "attention of 42 requests")


def test_a_long_chunk_is_written_whole(lab):
    """The keys and values of 600 tokens go to 600 slots."""
    import torch

    caches, slots = torch.zeros(2, 200, 4, 1, 2, dtype=torch.float64), torch.arange(700, 100, -1)
    k = torch.arange(1200, dtype=torch.float64).view(600, 1, 2) + 1
    lab.write_kv(*caches, slots, k, -k)
    for name, cache, new in zip(("keys", "values"), caches, (k, -k), strict=True):
        assert_rows(cache.flatten(0, 1)[slots], new, name, [Owner("a", p) for p in range(600)], atol=0)


@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 1, 16), (6, 2, 4)])
def test_grouped_queries(lab, heads):
    """One query a key, four, or three, and heads of other widths: each finds its own keys."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    step = scenarios.step_tensors(STEPS["a mixture"], seed=1, **dict(zip(names, heads, strict=True)))
    assert_attends(lab, step, f"attention of (heads, kv heads, width) {heads}")


def test_a_result_is_of_the_dtype_of_its_queries(lab):
    """A model in float32, as most are, gets float32 back, and right to 1e-4."""
    q, k_cache, v_cache, batch, expected = scenarios.step_tensors(STEPS["a mixture"], num_kv_heads=4)
    owners = owners_of(batch)
    ours = lab.paged_attention(q.float(), k_cache.float(), v_cache.float(), batch)
    assert str(ours.dtype) == "torch.float32", f"float32 went in and {ours.dtype} came out"
    assert_rows(ours, expected, "attention in float32", owners, atol=1e-4)


def test_attention_only_reads(lab):
    """Queries, pool and batch are afterwards what they were before: nothing is scaled or wiped in place."""
    q, k_cache, v_cache, batch, _ = scenarios.step_tensors(STEPS["a mixture"])
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {f"batch.{name}": getattr(batch, name) for name in ("positions", "block_tables", "slot_mapping")}
    before = {name: tensor.clone() for name, tensor in given.items()}
    lengths = [*batch.query_lens], [*batch.seq_lens]
    lab.paged_attention(q, k_cache, v_cache, batch)
    for name, tensor in given.items():
        assert_close(tensor, before[name], f"{name} after the call, which is only to be read", atol=0)
    assert (batch.query_lens, batch.seq_lens) == lengths, "paged_attention changed query_lens or seq_lens"


def test_a_model_on_your_pages(lab):
    """A two-layer model on your blocks, your write_kv and your attention says what it says alone."""
    from labs.kit.tensor_toys.models import text_alone
    from labs.kit.tensor_toys.paged import PagedModel

    scenario = scenarios.workload(3, block_size=4)
    trace = scenarios.serve(lab, scenario, partial(PagedModel, lab))
    assert_drained(trace)
    for request in scenario["requests"]:
        expected = text_alone(request["id"], request["prompt"], request["max_tokens"])
        assert tokens_of(trace, request["id"]) == expected


# ------------------------------------------------------------------------------------- all of it


def test_random_scripts(lab):
    """Drawn scripts of calls: each answer, and what can be seen after it, is that of a plain, slow model."""
    judge_random_scripts("lab-05", lab)
