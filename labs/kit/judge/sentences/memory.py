"""Sentences on memory: blocks and books, what the cache holds, and the names of blocks."""

from itertools import zip_longest
from typing import Any

from labs.kit.judge.sentences.calls import Found, Parting
from labs.kit.judge.sentences.words import NOTHING, are, count, listing, pair, places, value

PUBLISHED = "published (id, num_computed_tokens, blocks)"  # what cache_blocks was called with
OTHER_TEXT = "positions that hold another text"
SIZES = ("num_blocks", "block_size", "watermark")  # of "the pool"


def books(at: Parting) -> Found:
    """Books that contradict themselves, as the check of a block manager found them."""
    wrong, right = at.seen("wrong in the books")
    if wrong != right and right == NOTHING:
        yield "memory", f"{at.after} your books contradict themselves: {wrong}", "the reference's agree"


def blocks(at: Parting) -> Found:
    """Free, held and cached blocks."""
    for key in ("num_free_blocks", "free blocks", "num_cached_blocks", "cached blocks"):
        a, b = at.seen(key)
        if a != b:
            there = f"{are(a, 'block')} free" if "free" in key else f"the cache holds {count(a, 'block')}"
            yield "memory", f"{at.after} {there}", f"in the reference {value(b)}"
    for key in ("blocks held", "lengths"):
        for path, a, b in places(*at.seen(key)):
            holds = f"{at.after} {listing(path)} holds {count(a, 'block')}"
            yield "memory", holds, f"in the reference {value(b)}"
    for path, a, b in places(*at.seen("block tables (renamed)")):
        mine, other = pair(a, b)
        of = f"{at.after} the blocks of {listing(path)} are {mine}, renamed"
        yield "memory", of, f"in the reference {other}"
    a, b = at.seen("the pool")
    for name, mine, other in zip(SIZES, a or (), b or (), strict=False):
        if mine != other:
            yield "memory", f"{at.after} {name} is {value(mine)}", f"in the reference {value(other)}"


def published(at: Parting) -> Found:
    """The calls of cache_blocks: for whom, and when."""
    a, b = at.seen(PUBLISHED)
    if a == b or a is None or b is None:
        return
    yours, theirs = ([name for name, *_ in seen] for seen in (a, b))
    if yours != theirs:
        called = f"{at.call} calls cache_blocks for {listing(yours)}"
        yield "cached", called, f"the reference for {listing(theirs)}"
    for mine, other in zip(a, b, strict=True):
        for number, noun, verb in ((1, "computed token", "has"), (2, "block", "holds")):
            if mine[number] != other[number]:
                when = f"{at.call} calls cache_blocks when {mine[0]} {verb} {count(mine[number], noun)}"
                yield "cached", when, f"in the reference it {verb} {value(other[number])}"


def cached(at: Parting) -> Found:
    """Differences in the blocks that are found, the texts in the slots, and the names given to hash_block."""
    for (name, *_), mine, other in places(*at.seen("blocks found")):
        yield "cached", f"{at.after} {are(mine, 'block')} found of {name}", f"in the reference {value(other)}"
    for path, mine, other in places(*at.seen(OTHER_TEXT)):
        positions = f"{at.after} positions {listing(mine)} of {listing(path)} hold another text"
        yield "cached", positions, f"in the reference {listing(other)}"
    mine, other = at.seen("hash_block was misused")
    if mine and other and mine[0] != other[0]:
        asked = next((call for call in mine[0] if call not in other[0]), NOTHING)
        misused = f"{at.call} calls hash_block{asked}, which names no block"
        yield "cached", misused, "the reference never does so"
    if mine and other and mine[1] != other[1]:
        wrong = f"{at.after} {count(mine[1], 'cached block')} have a name that hash_block does not give them"
        yield "cached", wrong, f"in the reference {other[1]}"


def named(at: Parting) -> Found:
    """The names that hash_block gives: [type, number of the first call that gave it]."""
    yours, theirs = at.yours.returned, at.theirs.returned
    if at.yours.op[0] != "hash_block" or yours == theirs or not is_name(yours) or not is_name(theirs):
        return
    if yours[0] != theirs[0]:
        yield "returned", f"{at.call} returns a {yours[0]}", f"the reference {theirs[0]}"
    elif yours[1] < theirs[1]:
        another = f"{at.call} returns the name of another block"
        yield "returned", another, "the reference one that no other has"
    else:
        yield "returned", f"{at.call} returns a new name", "the reference the one it gave this block before"


def is_name(returned: Any) -> bool:
    return isinstance(returned, list) and len(returned) == 2 and isinstance(returned[1], int)


def requests(at: Parting) -> Found:
    """A request in words: of its pieces the first that differs."""
    for (name, *_), *both in places(*at.seen("requests")):
        for a, b in zip_longest(*(str(text).split(", ") for text in both), fillvalue=NOTHING):
            if a != b:
                yield "counter", f"{at.after} the record of {name} says '{a}'", f"in the reference '{b}'"
