"""BlockManager by itself: tables, slots, room, settings, and the check that guards them."""

import pytest

from mini_engine.block_manager import BlockManager, hash_block
from mini_engine.prefix_cache import PrefixCacheStats
from mini_engine.tests.helpers import computed, make_request


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_blocks=0), "num_blocks must be at least 1, but is 0"),
        (dict(block_size=0), "block_size must be at least 1, but is 0"),
        (dict(watermark=-1), "watermark must be 0 to 7 blocks, but is -1"),
        (dict(watermark=8), "watermark must be 0 to 7 blocks, but is 8"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BlockManager(**{"num_blocks": 8, "block_size": 4, **settings})


def test_the_default_watermark_is_one_percent():
    assert [BlockManager(n, 4).watermark for n in (8, 99, 100, 1000)] == [0, 0, 1, 10]


@pytest.mark.parametrize("span", [(0, 13), (-1, 2), (5, 4)])
def test_slots_beyond_the_table_are_refused(span):
    kv, request = BlockManager(20, 4), make_request("a", 10)
    kv.admit(request)
    with pytest.raises(ValueError, match=r"'a' has room for positions 0 to 11, but \["):
        kv.slot_mapping(request, *span)


def test_num_new_blocks_is_what_allocate_takes():
    """For any growth, and 0 for what admission has claimed."""
    kv, request = BlockManager(20, 4), make_request("a", 6)
    assert kv.num_new_blocks(request, 6) == 2
    kv.admit(request)
    assert [kv.num_new_blocks(request, n) for n in (0, 1, 6, 8, 9, 12, 13)] == [0, 0, 0, 0, 1, 1, 2]
    free = kv.num_free_blocks
    assert kv.allocate(request, 8) and kv.num_free_blocks == free
    assert kv.allocate(request, 13) and kv.num_free_blocks == free - 2
    assert len(kv.block_table(request)) == 4
    kv.check()


def test_admitting_twice_is_refused():
    kv, request = BlockManager(20, 4), make_request("a", 6)
    kv.admit(request)
    with pytest.raises(ValueError, match="'a' holds blocks already"):
        kv.admit(request)


def test_the_watermark_keeps_blocks_for_those_that_run():
    """Waived for the first, kept from the second; growth of the running may use it."""
    kv = BlockManager(10, 4, watermark=3)
    a, b, c = make_request("a", 16), make_request("b", 13), make_request("c", 12)
    assert kv.admit(a)
    assert not kv.admit(b), "4 blocks and 3 to keep, of 6"
    assert kv.admit(c)
    a.num_computed_tokens = 16
    assert kv.allocate(a, 12) and kv.num_free_blocks == 0


def test_a_preempted_request_publishes_its_outputs_too():
    """Blocks of generated tokens are found like those of a prompt."""
    kv, request = BlockManager(10, 4), make_request("a", [1, 2, 3])
    kv.admit(request)
    request.output_token_ids = [4, 5, 6]
    kv.allocate(request, 6)
    request.num_computed_tokens = 5
    kv.cache_blocks(request)
    kv.free(request)
    assert len(kv.get_computed_blocks(make_request("b", [1, 2, 3, 4, 9]))) == 1
    assert len(kv.get_computed_blocks(make_request("b", [1, 2, 3, 5, 9]))) == 0


def test_blocks_are_published_in_any_portions_and_looked_for_up_to_the_first_miss():
    kv, request = BlockManager(8, 2), make_request("a", list(range(7)))
    assert kv.admit(request)
    for num_computed in (2, 6):
        request.num_computed_tokens = num_computed
        kv.cache_blocks(request)
    assert kv.get_computed_blocks(make_request("b", list(range(7)))) == kv.block_table(request)[:3]
    other = make_request("c", [0, 1, 9, 9, 4, 5, 6])
    assert len(kv.get_computed_blocks(other)) == 1 and len(other.block_hashes) == 2


def test_hash_block():
    """It depends on the tokens, their order and the parent, and on nothing else."""
    assert hash_block(b"p", (1, 2)) == hash_block(b"p", (1, 2))
    others = [hash_block(b"q", (1, 2)), hash_block(b"p", (2, 1)), hash_block(b"p", (1, 2, 0))]
    assert len({hash_block(b"p", (1, 2)), *others}) == 4
    hash_block(b"", (2**31, 2**40))  # ids of any vocabulary


def test_allocation_does_not_search():
    """Taking and giving back a block costs the same in a pool of 100 and of 100,000."""
    import time

    def seconds(num_blocks):
        kv, best = BlockManager(num_blocks, 1), 1.0
        for _ in range(20):
            requests = [make_request(str(i), [i] * 8) for i in range(10)]
            start = time.perf_counter()
            for request in requests:
                kv.admit(request)
            for request in requests:
                kv.free(request)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(100_000) < 20 * seconds(100)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kv: kv._free.append(kv._free[0]), "free twice"),
        (lambda kv: kv._req_to_blocks["a"].append(kv._req_to_blocks["a"][0]), "'a' holds a block twice"),
        (lambda kv: kv._ref_cnts.__setitem__(kv._req_to_blocks["a"][0], 2), "counts 2 of 1 owners"),
        (lambda kv: kv._free.append(kv._req_to_blocks["a"][0]), "free and unowned blocks differ"),
        (lambda kv: kv._free.pop(), "free and unowned blocks differ"),
        (lambda kv: kv._cache.block_hashes.__setitem__(kv._free[0], b"x"), "uncached free block has a hash"),
        (lambda kv: kv._cache._named.clear(), "hash map is stale"),
        (lambda kv: kv._free_cached.setdefault(kv._free.pop()), "without content is kept as cached"),
        (lambda kv: setattr(kv._cache, "num_blocks", 0), "count of cached blocks is off"),
    ],
)
def test_check_is_able_to_fail(damage, message):
    """Each invariant, broken by hand, is named."""
    kv, request = BlockManager(6, 4), make_request("a", 9)
    computed(kv, request)
    kv.check()
    damage(kv)
    with pytest.raises(RuntimeError, match=message):
        kv.check()


def test_what_is_refused_is_refused_with_false():
    """A caller may ask `is False`; what is larger than the pool is refused by an empty one too."""
    kv = BlockManager(4, 4)
    assert kv.admit(make_request("big", 17)) is False
    request = make_request("a", 16)
    assert kv.admit(request) is True
    assert kv.allocate(request, 17) is False
    assert kv.reset_prefix_cache() is False
    kv.free(request)
    assert kv.reset_prefix_cache() is True


def test_blocks_that_came_without_an_admission_are_published_from_the_first_on():
    kv, request = BlockManager(4, 2), make_request("a", [1, 2, 3, 4])
    assert kv.allocate(request, 4)
    request.num_computed_tokens = 4
    kv.cache_blocks(request)
    kv.check()
    assert kv.num_cached_blocks == 2
    assert len(kv.get_computed_blocks(make_request("b", [1, 2, 3, 4, 5]))) == 2


def test_while_a_step_is_decided_its_blocks_can_be_found_and_do_not_count_as_cached():
    """Until the step is computed; and a row that fills no block counts for nothing."""
    kv, request = BlockManager(8, 2), make_request("a", [1, 2, 3, 4, 5])
    kv.caches_scheduled = True
    kv.admit(request)
    for computed_before, num_tokens, findable in ((0, 4, 2), (4, 1, 2)):
        request.num_computed_tokens = computed_before
        kv.cache_scheduled_blocks(request, num_tokens)
        assert len(kv.get_computed_blocks(make_request("b", [1, 2, 3, 4, 5]))) == findable
        assert kv.num_cached_blocks == computed_before // 2
        request.num_computed_tokens += num_tokens
        kv.cache_blocks(request)
        assert kv.num_cached_blocks == 2


# ------------------------------------------------------------------- a step that is taken back


def test_what_counts_as_computed_stays_in_the_cache_and_what_does_not_comes_back():
    """For a request that was admitted, and for one whose blocks came without an admission."""
    for enter in (BlockManager.admit, lambda kv, request: kv.allocate(request, 6)):
        kv, request = BlockManager(8, 2), make_request("a", [1, 2, 3, 4, 5, 6])
        enter(kv, request)
        for num_computed, num_kept in ((4, 0), (6, 2), (3, 1), (6, 1)):
            request.num_computed_tokens = num_computed
            kv.uncache_blocks(request)
            kv.check()
            assert kv.num_cached_blocks == num_kept
            kv.cache_blocks(request)
            kv.check()
            assert kv.num_cached_blocks == num_computed // 2


def test_shrink_gives_back_what_allocate_took_and_no_more():
    """Nothing of what admission claimed, nothing that has been computed since, and nothing twice."""
    kv, request = BlockManager(8, 2), make_request("a", 4)
    kv.admit(request)
    kv.shrink(request)
    assert len(kv.block_table(request)) == 2
    request.num_computed_tokens = 4
    table = list(kv.block_table(request))
    assert kv.allocate(request, 5) and kv.num_free_blocks == 3
    for _ in range(2):
        kv.shrink(request)
        assert kv.block_table(request) == table and kv.num_free_blocks == 6
    kv.allocate(request, 1)
    request.num_computed_tokens = 5
    kv.shrink(request)
    assert len(kv.block_table(request)) == 3
    kv.check()


def test_shrink_knows_nothing_of_an_earlier_life():
    """A request that had grown, was preempted and is admitted again, as far as it had come."""
    kv, request = BlockManager(8, 2), make_request("a", [1, 2, 3, 4])
    computed(kv, request)
    request.output_token_ids = [5]
    assert kv.allocate(request, 1)
    kv.free(request)
    assert kv.admit(request) and request.num_computed_tokens == 4
    kv.shrink(request)
    assert len(kv.block_table(request)) == 3
    kv.free(request)
    request.num_computed_tokens = 0
    assert kv.allocate(request, 4)  # this time without an admission, which would have claimed them
    kv.shrink(request)
    assert not kv.block_table(request) and kv.num_free_blocks == 8


def test_shrink_takes_all_back_where_nothing_was_admitted():
    kv, request = BlockManager(8, 2), make_request("a", 4)
    assert kv.allocate(request, 4)
    kv.shrink(request)
    assert not kv.block_table(request) and kv.num_free_blocks == 8


@pytest.mark.parametrize("num_preemptions", [0, 1])
def test_what_was_not_admitted_after_all_is_not_counted(num_preemptions):
    kv, prompt = BlockManager(8, 2), [1, 2, 3, 4, 5]
    first, second = make_request("a", prompt), make_request("b", prompt)
    computed(kv, first)
    kv.stats, second.num_preemptions = PrefixCacheStats(), num_preemptions
    free = kv.num_free_blocks
    assert kv.admit(second) and second.num_cached_tokens == 4
    stats = kv.stats
    found = (
        (stats.preempted_queries, stats.preempted_hits) if num_preemptions else (stats.queries, stats.hits)
    )
    assert found == (5, 4)
    kv.unadmit(second)
    assert kv.stats == PrefixCacheStats() and kv.num_free_blocks == free
    kv.check()


def test_evicted_blocks_are_found_no_more():
    """A request has a shared first block and a last one that is not full: its own two are evicted."""
    kv = BlockManager(8, 2)
    a, b = make_request("a", [1, 2, 3]), make_request("b", [1, 2, 5, 6, 7])
    for request in (a, b):
        computed(kv, request)
    assert len(kv.get_computed_blocks(make_request("c", [1, 2, 5, 6, 7]))) == 2
    assert kv.evict_blocks(b) == kv.block_table(b)[1:]
    assert kv.get_computed_blocks(make_request("d", [1, 2, 5, 6, 7])) == kv.block_table(b)[:1]
    kv.check()
