"""lab-06's tests. LAB_IMPL chooses what they judge: solution (default), starter or engine."""

import builtins
import sys
from types import ModuleType

import pytest

from labs.kit import assert_drained, judge_random_scripts, load, make_request
from labs.kit.toys.texts import wrong_books, wrong_names

scenarios = load("lab-06", "scenarios")
BASE, make = scenarios.BASE, scenarios.make


def admitted(kv, request_id, prompt, *, computed=None, salt=""):
    """A request that was admitted and has computed its prompt (or `computed` tokens of it)."""
    __tracebackhide__ = True
    request = make_request(request_id, prompt)
    request.cache_salt = salt
    free = kv.num_free_blocks
    let_in = kv.admit(request)  # asserted by its name, so that no request is printed
    assert let_in, f"{request_id}, of {len(prompt)} tokens, was refused, with {free} free blocks"
    request.num_computed_tokens = len(prompt) if computed is None else computed
    kv.cache_blocks(request)
    return request


def must_come_in(kv, request, why):
    __tracebackhide__ = True
    let_in = kv.admit(request)
    assert let_in, f"{request.request_id} was refused, and should be admitted: {why}"


def must_wait(kv, request, why):
    """admit says False; one that says True and then runs out of blocks has not counted its room."""
    __tracebackhide__ = True
    try:
        let_in = kv.admit(request)
    except (LookupError, ValueError, StopIteration) as error:
        raise AssertionError(f"{why}; admit went on, and ran out of blocks") from error
    assert not let_in, f"{request.request_id} was admitted, and should wait: {why}"


def cached_for(kv, prompt, salt="", name="newcomer"):
    """How many tokens of this prompt a newcomer would find, without letting it in."""
    request = make_request(name, prompt)
    request.cache_salt = salt
    return len(list(kv.get_computed_blocks(request))) * kv.block_size


# ------------------------------------------------------------------------------------ hash_block


def test_hash_tells_tokens_apart(lab):
    """Other tokens, another order, other seams between numbers: another hash. Equal ones: the same."""
    blocks = [(1, 23), (12, 3), (23, 1), (1, 2, 3), (123,), (1, 1, 2), (1, 2, 2), (0, 1), (1,), (0, 0), (0,)]
    names = [lab.hash_block(b"", tokens) for tokens in blocks]
    alike = [(a, b) for i, a in enumerate(blocks) for j, b in enumerate(blocks[:i]) if names[i] == names[j]]
    assert not alike, f"{alike[0][0]} and {alike[0][1]} have the same hash"
    assert lab.hash_block(b"", (1, 23)) == names[0] and isinstance(names[0], bytes)


def test_hash_takes_every_token_id(lab):
    """Vocabularies have more than 256 ids, and more than 65,536: all bytes of an id count, and all ids."""
    ids = [7, 7 + 2**8, 7 + 2**16, 7 + 2**24, 151_935, 262_143]
    ids += [2**bits + more for bits in (20, 31, 32, 53) for more in (0, 1)]
    names = [lab.hash_block(b"", (5, token)) for token in ids]
    assert len(set(names)) == len(ids), f"some of the ids {ids} have the same hash"
    long = [tuple(range(512)), (*range(511), 7), (7, *range(1, 512)), tuple(range(511))]
    assert len({lab.hash_block(b"", tokens) for tokens in long}) == 4, (
        "of 512 tokens one differs, or is missing"
    )
    names = [lab.hash_block(b"", (token,)) for token in range(3000)]
    assert len(set(names)) == 3000, "of 3,000 different blocks two have the same hash: it is too short"


SEPARATORS = [",", ", ", " ", "|", ":", ";", "-", "_", "/", ".", "\n", "\0"]


def test_hash_tells_parent_and_tokens_apart(lab):
    """A salt that looks like a token must not pass for it: where the parent ends is part of the name."""

    def written(number):
        parents = [number.to_bytes(width, order) for width in (1, 2, 4, 8) for order in ("little", "big")]
        forms = [form for mark in SEPARATORS for form in (f"{{}}{mark}", f"{mark}{{}}")]
        return parents + [form.format(number).encode() for form in ("{}", "({}, ", "[{}, ", *forms)]

    for before in (b"", b"red"):
        longer = [before + end for end in written(1)]
        both = lab.hash_block(before, (1, 2))
        alike = [parent for parent in longer if lab.hash_block(parent, (2,)) == both]
        assert not alike, f"(2,) behind the parent {alike[0]} has the hash of (1, 2) behind {before}"
    for count in (32, 8192):  # a salt has any length: 256 bytes, or 65,536
        inside, salt = lab.hash_block(b"", (*[1] * count, 2)), (1).to_bytes(8, "little") * count
        assert lab.hash_block(salt, (2,)) != inside, f"a salt of {len(salt)} bytes passes for {count} tokens"
    one, two = written(1), written(2)
    names = [(lab.hash_block(a, (2,)), lab.hash_block(b, (1,))) for a, b in zip(one, two, strict=True)]
    turned = [parent for parent, (name, other) in zip(one, names, strict=True) if name == other]
    assert not turned, f"the parent {turned[0]} and the token 2 can change places"


def test_hash_is_the_same_in_every_run(lab, monkeypatch):
    """In another run of Python hash() of bytes gives another number; a block's name is what it was."""

    def in_run(number):
        """The name in a run of its own: the file is loaded anew, and hash() begins with another number."""

        def differs(value):
            return any(map(differs, value)) if isinstance(value, tuple) else isinstance(value, bytes | str)

        monkeypatch.setattr(builtins, "hash", lambda value: real(value) + number * differs(value))
        anew = ModuleType(f"run_{number}")
        anew.hash_block = lab.hash_block
        monkeypatch.setitem(sys.modules, anew.__name__, anew)  # where a dataclass looks for its module
        exec(getattr(lab, "__source__", ""), vars(anew))
        return anew.hash_block(b"parent", (5, 6))

    real = hash
    names = [in_run(1), in_run(2)]
    monkeypatch.undo()
    assert names[0] == names[1], (
        "in another run of Python the name is another one: hash() and whatever is drawn at random differ "
        "from run to run, hashlib's functions do not"
    )


def test_hash_is_chained(lab):
    """The same tokens behind another parent get another hash."""
    first, other = lab.hash_block(b"", (1, 2)), lab.hash_block(b"", (3, 4))
    assert lab.hash_block(first, (5, 6)) != lab.hash_block(other, (5, 6))
    parents = [b"", b"a", b"b", b"ab", b"ba", b"A", b" a", b"a ", b"a\0", b"\0a", b"\0", b"\xfe", b"\xff"]
    parents += [b"x" * 63 + b"a", b"x" * 63 + b"b", b"a" + b"x" * 63]
    parents += [b"x" * 5000, b"x" * 5000 + b"a", b"x" * 5000 + b"b"]
    seen = {}
    for parent in parents:
        other = seen.setdefault(lab.hash_block(parent, (5, 6)), parent)
        assert other == parent, f"behind the parents {other} and {parent} one name: all of the parent counts"


# ----------------------------------------------------------------------------------- get_computed_blocks


def test_full_equal_blocks_are_found(lab):
    """Eight of nine equal tokens in blocks of four are found: two full blocks."""
    kv = make(lab, 8, 4)
    admitted(kv, "a", BASE)
    assert cached_for(kv, BASE) == 8


def test_the_search_ends_at_the_first_difference(lab):
    """A block that differs ends the prefix, although the one behind it is equal."""
    kv = make(lab, 8, 2)
    admitted(kv, "a", [1, 2, 3, 4, 5, 6, 7])
    assert cached_for(kv, [1, 2, 9, 4, 5, 6, 7]) == 2
    assert cached_for(kv, [9, 2, 3, 4, 5, 6, 7]) == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_something_is_left_to_compute(lab, length):
    """A hit covers at most (num_tokens - 1) // block_size blocks, so that a token is left to compute."""
    kv = make(lab, 8, 4)
    admitted(kv, "a", list(range(12)))
    assert cached_for(kv, list(range(length))) == (length - 1) // 4 * 4


def test_each_block_is_named_after_the_one_before(lab):
    """Each name is what the class's own hash_block gives for the name before (or the salt) and the tokens."""

    def noting(parent, token_ids):
        asked.append((parent, token_ids))
        return repr((parent, token_ids)).encode()

    asked = []
    kv = make(lab, 8, 2, hash_block=noting)
    admitted(kv, "a", [1, 2, 3, 4, 5], salt="red")
    assert cached_for(kv, [1, 2, 3, 4, 5], "red") == 4, "cached and looked up under the same names"
    right = [(b"red", (1, 2)), (noting(b"red", (1, 2)), (3, 4))]
    wrong = [call for call in asked if call not in right]
    assert not wrong, f"hash_block was called with the parent {wrong[0][0]} and the tokens {wrong[0][1]}"
    assert wrong_names(kv, noting) == []


def test_a_name_belongs_to_the_whole_text(lab):
    """Texts that are alike in all but a block, or but an output, have names of their own from there on."""

    def in_words(parent, token_ids):
        return repr((parent, token_ids)).encode()

    kv = make(lab, 24, 2, hash_block=in_words)
    for name, middle, salt in (("a", [3, 4], ""), ("b", [8, 9], ""), ("c", [3, 4], "red")):
        admitted(kv, name, [1, 2, *middle, 5, 6, 7], salt=salt)
        assert cached_for(kv, [1, 2, *middle, 5, 6, 7], salt) == 6
    for name, outputs in (("d", [3, 4, 5]), ("e", [8, 9, 5])):
        request = make_request(name, [0, 1])
        request.output_token_ids += outputs
        must_come_in(kv, request, "there is room enough")
        request.num_computed_tokens = 5
        kv.cache_blocks(request)
        assert cached_for(kv, [0, 1, *outputs]) == 4
    assert wrong_names(kv, in_words) == []


def test_a_long_text_is_found_whole(lab):
    """5,000 tokens in blocks of 16: 312 blocks are cached, and found."""
    kv, text = make(lab, 400, 16), [i % 7 for i in range(5000)]
    kv.free(admitted(kv, "a", text))
    assert (kv.num_cached_blocks, cached_for(kv, text)) == (312, 4992)


def test_a_hash_collision_does_not_hit(lab):
    """With a hash function that gives everything the same name, content and parent still decide."""
    kv = make(lab, 12, 2, hash_block=lambda parent, token_ids: b"all alike")
    admitted(kv, "a", [1, 2, 3, 4, 5])
    assert cached_for(kv, [6, 7, 8, 9, 5]) == 0
    assert cached_for(kv, [1, 2, 8, 9, 5]) == 2, "a's first block goes by this hash, and its second, too"
    admitted(kv, "b", [6, 7, 8, 9, 5, 5, 5])
    assert cached_for(kv, [1, 2, 8, 9, 5]) == 2, "the second block of b has another parent"
    assert cached_for(kv, [6, 7, 8, 9, 5]) == 4, "the blocks of b go by the same hash as those of a"
    admitted(kv, "c", [1, 2, 8, 9, 0, 0, 0])
    assert cached_for(kv, [6, 7, 8, 9, 0, 0, 0]) == 4, "the third block of c has another grandparent"


def test_salts_separate_tenants(lab):
    """Requests with another cache salt find nothing of it, those with the same salt everything."""
    kv = make(lab, 8, 4)
    admitted(kv, "a", BASE, salt="red")
    found = {salt: cached_for(kv, BASE, salt) for salt in ("red", "blue", "")}
    assert found == {"red": 8, "blue": 0, "": 0}


SALTS = ["", " ", "0", "1", "11", "red", "Red", "red ", "é", "e\u0301", "\x01\0\0\0\0\0\0\0"]


@pytest.mark.parametrize("hash_block", ["its own", "all alike", "tokens only"])
def test_each_salt_has_its_own_cache(lab, hash_block):
    """Whatever the salts look like and however weak the hash is, prompts and outputs stay with their salt."""
    functions = {
        "all alike": lambda parent, tokens: b"x",
        "tokens only": lambda parent, tokens: bytes(tokens),
    }
    settings = {"hash_block": functions[hash_block]} if hash_block in functions else {}
    kv = make(lab, 4 * len(SALTS), 2, **settings)
    for number, salt in enumerate(SALTS):
        assert cached_for(kv, [1, 1, 1, 11, 7], salt) == 0, (
            f"the salt {salt!r} finds what another has computed"
        )
        request = admitted(kv, f"r{number}", [1, 1, 1], salt=salt)
        for token in (11, 5, 5):
            request.output_token_ids.append(token)
            assert kv.allocate(request, 1), "there is room for a token"
            request.num_computed_tokens += 1
            kv.cache_blocks(request)
    assert [cached_for(kv, [1, 1, 1, 11, 7], salt) for salt in SALTS] == [4] * len(SALTS)
    assert cached_for(kv, [1, 1, 1, 11, 7], "blue") == 0
    for salt, found in (("blue", 0), ("red", 4)):
        resumed = make_request(f"resumed {salt}", [1, 1, 1])
        resumed.cache_salt, resumed.num_preemptions = salt, 1
        resumed.output_token_ids += [11, 5]
        must_come_in(kv, resumed, "there is room enough")
        assert resumed.num_cached_tokens == found, f"a resumed request with the salt {salt!r}"


def test_looking_changes_nothing(lab):
    """get_computed_blocks sets no number of the request, and takes no block."""
    kv = make(lab, 8, 4)
    kv.free(admitted(kv, "a", BASE))
    request = make_request("b", BASE)
    request.num_cached_tokens, request.num_preemptions = 4, 1  # of an earlier admission
    before = {name: value for name, value in vars(request).items() if name != "block_hashes"}
    assert len(list(kv.get_computed_blocks(request))) == 2
    changed = [name for name, value in before.items() if getattr(request, name) != value]
    assert not changed, f"get_computed_blocks changed {changed[0]} of the request"
    cached_for(kv, [7] * 9)
    assert wrong_books(kv) == "nothing", "after a look at a text that is not there"
    assert (kv.num_free_blocks, kv.num_cached_blocks, list(kv.block_table(request))) == (8, 2, [])


def test_looking_is_not_using(lab):
    """A request that waits is looked up in every step, and the same blocks are evicted as if it were not."""
    left = []
    for looks in (0, 3):
        kv = make(lab, 4, 4)
        for name, prompt in (("a", [1] * 5), ("b", [2] * 5)):
            kv.free(admitted(kv, name, prompt))
        for _ in range(looks):
            cached_for(kv, [1] * 5)
        admitted(kv, "c", [3] * 12, computed=0)
        left.append((cached_for(kv, [1] * 5), cached_for(kv, [2] * 5)))
    assert left[1] == left[0], "another block is evicted when the prefix was looked up"


def test_switched_off_it_finds_nothing(lab):
    """enable_prefix_caching=False: no hits, nothing cached."""
    kv = make(lab, 8, 4, enable_prefix_caching=False)
    admitted(kv, "a", BASE)
    assert cached_for(kv, BASE) == 0
    assert kv.num_cached_blocks == 0, "blocks were cached"


# --------------------------------------------------------------------------------------- cache_blocks


def test_nothing_is_found_before_it_is_computed(lab):
    """An admitted prompt has room, but no keys and values yet: no request may read from it."""
    kv = make(lab, 8, 4)
    admitted(kv, "a", BASE, computed=0)
    assert cached_for(kv, BASE) == 0


def test_blocks_appear_chunk_by_chunk(lab):
    """After each chunk exactly the full computed blocks can be found."""
    kv = make(lab, 8, 4)
    request = admitted(kv, "a", list(range(13)), computed=3)
    found = []
    for computed in (3, 4, 7, 8, 11, 13):
        request.num_computed_tokens = computed
        kv.cache_blocks(request)
        found.append(cached_for(kv, list(range(13))))
    assert found == [0, 4, 4, 8, 8, 12]
    assert kv.num_cached_blocks == 3, "a block that has its name is not entered again"


def test_a_partly_filled_block_is_not_published(lab):
    """The ninth token stands alone in its block, which will still change."""
    kv = make(lab, 8, 4)
    admitted(kv, "a", BASE)
    assert kv.num_cached_blocks == 2


def test_outputs_are_published_too(lab):
    """A block that a request fills while it decodes is as good as one of a prompt."""
    kv = make(lab, 8, 4)
    request = admitted(kv, "a", BASE[:7])
    request.output_token_ids += [50, 51]
    assert kv.allocate(request, 1), "there is room for a token"
    request.num_computed_tokens = 8
    kv.cache_blocks(request)
    assert cached_for(kv, [*BASE[:7], 50, 99]) == 8


def test_behind_a_hit_the_chain_goes_on(lab):
    """A block computed behind a hit is named after the hit, and found by the next request with both."""
    kv = make(lab, 8, 4)
    admitted(kv, "a", BASE[:5])
    admitted(kv, "b", BASE)
    assert cached_for(kv, BASE) == 8


def test_an_id_that_comes_again_is_another_text(lab):
    """Nothing is remembered of a request by its id: the same id may come again with another prompt."""
    kv = make(lab, 8, 4)
    kv.free(admitted(kv, "a", BASE))
    kv.free(admitted(kv, "a", [1] * 9))
    for name in ("newcomer", "another"):
        found = {"the second text": cached_for(kv, [1] * 9, name=name), "the first": cached_for(kv, BASE)}
        assert found == {"the second text": 8, "the first": 8}, f"the tokens that {name} finds"


@pytest.mark.parametrize("first", ["a", "b"])
def test_one_copy_stays_when_the_other_is_evicted(lab, first):
    """Two copies of a block; one owner goes and its copy is written over: the other can be found."""
    kv = make(lab, 4, 4)
    owners = {name: make_request(name, BASE[:5]) for name in "ab"}
    for request in owners.values():
        must_come_in(kv, request, "it needs two blocks, and two are free")
    for request in owners.values():
        request.num_computed_tokens = 5
        kv.cache_blocks(request)
    kv.free(owners[first])
    admitted(kv, "c", [7] * 8, computed=0)
    assert cached_for(kv, BASE[:5]) == 4, "the copy that is still held can be found"


# ----------------------------------------------------------------------------------------- admit


def test_a_request_that_holds_blocks_is_not_admitted_again(lab):
    """A second admission is a ValueError with the request's id; pool and progress are as they were."""
    kv = make(lab, 8, 4)
    request = admitted(kv, "greta", BASE, computed=6)
    table = list(kv.block_table(request))
    for other in (request, make_request("greta", [7])):
        with pytest.raises(ValueError, match="greta"):
            kv.admit(other)
    assert (kv.num_free_blocks, kv.num_cached_blocks, list(kv.block_table(request))) == (5, 1, table)
    assert request.num_computed_tokens == 6
    kv.free(request)
    assert kv.num_free_blocks == 8


def test_a_hit_shares_the_block(lab):
    """The newcomer's table begins with the very blocks of the other; only the rest is new."""
    kv = make(lab, 8, 4)
    first = admitted(kv, "a", BASE)
    second = make_request("b", BASE)
    must_come_in(kv, second, "it needs one block, and five are free")
    assert kv.block_table(second)[:2] == kv.block_table(first)[:2]
    assert kv.block_table(second)[2] != kv.block_table(first)[2]
    assert kv.num_free_blocks == 4


def test_progress_begins_behind_the_hit(lab):
    """num_computed_tokens is what this admission found, so that the step pays for the rest only."""
    kv = make(lab, 8, 4)
    kv.free(admitted(kv, "a", BASE))
    second = make_request("b", BASE)
    must_come_in(kv, second, "all eight blocks are free")
    progress = "num_computed_tokens, num_cached_tokens, num_new_tokens"
    assert (second.num_computed_tokens, second.num_cached_tokens, second.num_new_tokens) == (8, 8, 1), (
        progress
    )
    kv.free(second)  # preempted, and everything it knew is evicted
    second.num_preemptions = 1
    kv.free(admitted(kv, "c", list(range(32)), computed=0))
    must_come_in(kv, second, "all eight blocks are free")
    assert (second.num_computed_tokens, second.num_cached_tokens, second.num_new_tokens) == (0, 0, 9), (
        progress
    )


def test_a_hit_on_a_free_block_takes_it(lab):
    """A cached block that lay free is held again, and can no longer be given to another request."""
    kv = make(lab, 4, 4)
    kv.free(admitted(kv, "a", BASE))
    second = make_request("b", BASE)
    must_come_in(kv, second, "all four blocks are free")
    assert kv.num_free_blocks == 1
    third = make_request("c", [7, 7, 7])
    must_come_in(kv, third, "it needs one block, and one is free; the watermark is 0")
    assert not set(kv.block_table(third)) & set(kv.block_table(second))


def test_an_admission_that_fails_changes_nothing(lab):
    """Too little room: no reference, no block, no progress, and the cache as it was."""
    kv = make(lab, 4, 4)
    first = admitted(kv, "a", BASE)
    second = make_request("b", [*BASE, *range(8)])
    must_wait(kv, second, "it needs three new blocks, and one is free")
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (1, 2)
    assert (second.num_computed_tokens, second.num_cached_tokens) == (0, 0), "the request was refused"
    assert len(kv.block_table(second)) == 0, "the request was refused"
    kv.free(first)
    assert kv.num_free_blocks == 4
    assert wrong_books(kv) == "nothing"
    assert kv.reset_prefix_cache(), "no request holds anything, least of all the one that was never admitted"


def test_an_admission_that_fails_leaves_the_free_as_they_were(lab):
    """It evicts nothing, and its hits are no younger for having been looked at."""
    kv = make(lab, 4, 4)
    for name, prompt in (("a", [1] * 5), ("b", [2] * 5)):
        kv.free(admitted(kv, name, prompt))
    holder = admitted(kv, "holder", [7])
    must_wait(kv, make_request("c", [1] * 5 + [9] * 8), "it needs three new blocks, and two are left")
    found = {"its hit": cached_for(kv, [1] * 5), "the block that was freed after it": cached_for(kv, [2] * 5)}
    assert found == {"its hit": 4, "the block that was freed after it": 4}, "after the refusal"
    admitted(kv, "d", [3] * 8, computed=0)
    found = {"its hit": cached_for(kv, [1] * 5), "the block that was freed after it": cached_for(kv, [2] * 5)}
    assert found == {"its hit": 0, "the block that was freed after it": 4}, "one had to go: the older one"
    assert len(kv.block_table(holder)) == 1


def test_its_own_hits_are_not_room(lab):
    """Four free blocks, two of them hits, three new ones wanted: that is one too many."""
    kv = make(lab, 4, 4)
    kv.free(admitted(kv, "a", BASE))
    must_wait(kv, make_request("b", [*BASE, *range(10)]), "of four free blocks two are its hits")
    must_come_in(kv, make_request("c", [*BASE, *range(7)]), "two new blocks, and two besides its hits")


def test_its_new_blocks_do_not_evict_its_hits(lab):
    """When the hits are the oldest of the free blocks, the new ones still come out of the others."""
    kv = make(lab, 4, 4)
    kv.free(admitted(kv, "a", BASE))
    kv.free(admitted(kv, "b", [1, 2, 3, 4, 5]))
    third = make_request("c", [*BASE, *range(7)])
    must_come_in(kv, third, "two new blocks, and two besides its hits")
    assert len(set(kv.block_table(third))) == 4
    assert cached_for(kv, BASE) == 8


def test_the_watermark_is_for_the_running(lab):
    """A reserve of one block stops an admission while a request runs, and none when nothing runs."""
    kv = make(lab, 4, 4, watermark=1)
    for prompt in (list(range(16)), [7] * 16):
        first = admitted(kv, "a", prompt)  # nothing runs, so the whole pool may be used, cached or not
        kv.free(first)
    admitted(kv, "b", [1, 2, 3])
    must_wait(kv, make_request("c", list(range(12))), "three free blocks, and one must stay free")
    must_come_in(kv, make_request("d", list(range(8))), "two of three free blocks; one stays free")


def test_its_own_hits_are_no_reserve(lab):
    """Five free blocks, two of them hits, two to stay free: one new block is possible, two are not."""
    kv = make(lab, 6, 4, watermark=2)
    kv.free(admitted(kv, "a", BASE))
    admitted(kv, "b", [1, 2, 3])
    must_wait(kv, make_request("c", [*BASE, *range(7)]), "only one block would stay free besides its hits")
    must_come_in(kv, make_request("d", [*BASE, *range(3)]), "two blocks stay free besides its hits")


def test_blocks_that_it_shares_are_others_blocks(lab):
    """All that the others hold are this request's hits: they run all the same, and the reserve stays."""
    kv = make(lab, 6, 4, watermark=2)
    admitted(kv, "a", BASE[:8])
    must_wait(kv, make_request("b", [*BASE[:8], *[7] * 9]), "three new blocks of four, and two stay free")
    must_come_in(kv, make_request("c", [*BASE[:8], *[7] * 8]), "two new blocks; two stay free")


# ------------------------------------------------------------------------------------------ take


def test_content_is_kept_while_there_is_other_room(lab):
    """A cached block is not evicted while a free one exists that holds nothing."""
    kv = make(lab, 8, 4)
    kv.free(admitted(kv, "a", BASE))
    admitted(kv, "b", list(range(20)), computed=0)
    assert cached_for(kv, BASE) == 8


def test_least_recently_used_goes_first(lab):
    """The block that was freed (or hit and freed again) last stays longest."""
    kv = make(lab, 4, 4)
    for name, prompt in (("a", [1] * 5), ("b", [2] * 5)):
        kv.free(admitted(kv, name, prompt))
    kv.free(admitted(kv, "again", [1] * 5))
    admitted(kv, "c", [3] * 12, computed=0)
    found = {"freed last": cached_for(kv, [1] * 5), "freed before": cached_for(kv, [2] * 5)}
    assert found == {"freed last": 4, "freed before": 0}


def test_an_evicted_block_is_found_no_more(lab):
    """Its content is written over: it loses its hash at once, and is cached anew under its new one."""
    kv = make(lab, 3, 4)
    kv.free(admitted(kv, "a", BASE))
    newcomer = admitted(kv, "b", list(range(12)), computed=0)
    assert cached_for(kv, BASE) == 0, "its blocks belong to b now"
    assert kv.num_cached_blocks == 0
    assert wrong_books(kv) == "nothing"
    newcomer.num_computed_tokens = 12
    kv.cache_blocks(newcomer)
    assert cached_for(kv, list(range(12))) == 8
    assert cached_for(kv, BASE) == 0


# ------------------------------------------------------------------------------------------ free


def test_a_shared_block_survives_one_owner(lab):
    """When one owner goes, the others still hold the block, and no other request can get it."""
    kv = make(lab, 6, 4)
    owners = [admitted(kv, name, BASE) for name in "abc"]
    assert kv.num_free_blocks == 1, "two blocks that are shared, and one more for each"
    table = list(kv.block_table(owners[2]))
    kv.free(owners[0])
    kv.free(owners[1])
    assert kv.num_free_blocks == 3, "the two shared blocks are still held"
    newcomer = admitted(kv, "d", [7] * 12, computed=0)
    assert not set(kv.block_table(newcomer)) & set(table)
    kv.free(newcomer)
    kv.free(owners[2])
    assert kv.num_free_blocks == 6, "the last owner has gone"


def test_freed_content_can_still_be_found(lab):
    """A finished request's text is there for the next request that begins with it."""
    kv = make(lab, 8, 4)
    kv.free(admitted(kv, "a", BASE))
    assert kv.num_free_blocks == 8
    assert cached_for(kv, BASE) == 8


def test_the_tail_is_evicted_before_the_head(lab):
    """The last block of a cached sequence goes first: without its head a tail is never found."""
    kv = make(lab, 4, 4)
    kv.free(admitted(kv, "a", list(range(16))))
    admitted(kv, "b", [7] * 4, computed=0)
    assert cached_for(kv, list(range(17))) == 12, "one block of four is evicted: the last of the four"


def test_a_request_that_comes_back_finds_its_outputs_too(lab):
    """A preempted request counts as a whole, prompt and outputs: all its full blocks but the last token's."""
    kv = make(lab, 8, 4)
    request = admitted(kv, "a", BASE[:5])
    request.output_token_ids += range(50, 57)
    assert kv.allocate(request, 6), "there is room for six tokens"
    request.num_computed_tokens = 11
    kv.cache_blocks(request)
    kv.free(request)
    request.num_computed_tokens = 0
    must_come_in(kv, request, "all eight blocks are free")
    assert (request.num_computed_tokens, request.num_new_tokens) == (8, 4), "8 of 12 tokens are found"
    request.num_computed_tokens = 12
    kv.cache_blocks(request)
    kv.free(request)
    request.output_token_ids.append(57)
    request.num_computed_tokens = 0
    must_come_in(kv, request, "all eight blocks are free")
    assert (request.num_computed_tokens, request.num_new_tokens) == (12, 1), "12 of 13 tokens are found"


# ----------------------------------------------------------------------------------------- reset


def test_reset_waits_until_no_block_is_held(lab):
    """While a request holds anything it is refused and changes nothing; afterwards it clears everything."""
    kv = make(lab, 8, 4)
    assert kv.reset_prefix_cache(), "no request holds anything"
    kv.free(admitted(kv, "a", BASE))
    request = admitted(kv, "r", [7] * 5, computed=0)  # its keys would be of the old weights
    assert not kv.reset_prefix_cache()
    left = {"tokens found": cached_for(kv, BASE), "cached blocks": kv.num_cached_blocks}
    assert (left, kv.num_free_blocks) == ({"tokens found": 8, "cached blocks": 2}, 6), "the reset was refused"
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert (cached_for(kv, BASE), kv.num_cached_blocks, kv.num_free_blocks) == (0, 0, 8)
    second = admitted(kv, "b", list(range(32)))  # all blocks are there to be used,
    assert cached_for(kv, list(range(32))) == 28, "a block is cached after the reset as before it"
    kv.free(second)
    assert cached_for(kv, BASE) == 0
    assert wrong_books(kv) == "nothing"


# ----------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda s: s["name"])
def test_every_position_holds_its_own_text(lab, scenario):
    """Whatever is admitted, evicted and shared, each request reads only what its own text would compute."""
    assert_drained(scenarios.run(lab, scenario))


def test_the_budget_pays_for_uncached_tokens_only(lab):
    """A newcomer whose eight of eleven tokens are cached is scheduled for three."""
    trace = scenarios.run(lab, scenarios.NAMED["shared beginnings under a scheduler"])
    first = {}
    for record in trace.steps:
        for request_id, num_tokens in record.scheduled.items():
            first.setdefault(request_id, num_tokens)
    assert first == {"a": 9, "b": 3, "c": 2, "d": 1}


def test_random_scripts(lab):
    """Drawn scripts of admissions, steps and departures: each answer is that of a plain, slow model."""
    judge_random_scripts("lab-06", lab)
