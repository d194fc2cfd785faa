"""Words for the sentences: numbers with their nouns, lists, and the places at which two values part."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from textwrap import shorten
from typing import Any

from labs.kit.judge.compare import same

LONGEST = 60  # characters of one value in a sentence
NOTHING = "nothing"  # where one of the two has no such entry


def count(number: object, noun: str) -> str:
    """Return "1 token" or "3 tokens"; whatever stands where a number should be, by its repr."""
    return f"{value(number)} {noun}{'' if number == 1 else 's'}"


def are(number: object, noun: str) -> str:
    """Return "1 block is" or "3 blocks are"."""
    return f"{count(number, noun)} {'is' if number == 1 else 'are'}"


def value(thing: Any) -> str:
    """Return a value as it stands in a sentence, short: of a request its id, of a list its items."""
    if isinstance(thing, float):
        return f"{thing:.4g}"
    if isinstance(thing, str):
        shown = thing if thing.replace("_", "").isalnum() else repr(thing)
        return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
    if isinstance(thing, list | tuple):
        return shorten(f"[{', '.join(map(value, thing))}]", LONGEST, placeholder=" ...]")
    if isinstance(thing, dict):
        items = (f"{key}: {value(one)}" for key, one in thing.items())
        return shorten(f"{{{', '.join(items)}}}", LONGEST, placeholder=" ...}")
    return shorten(str(thing), LONGEST, placeholder=" ...")


def pair(yours: Any, reference: Any) -> tuple[str, str]:
    """Return two values so that their difference shows: of long lists and texts the first place."""
    both = value(yours), value(reference)
    if both[0] != both[1]:
        return both
    if isinstance(yours, list | str) and type(yours) is type(reference):
        for number, (a, b) in enumerate(zip(yours, reference, strict=False)):
            if a != b:
                return f"{value(a)} at place {number}", f"{value(b)}"
        parts = "entries" if isinstance(yours, list) else "characters"
        return f"{len(yours)} {parts}", f"{len(reference)}"
    return shorten(repr(yours), 150, placeholder=" ..."), shorten(repr(reference), 150, placeholder=" ...")


def listing(names: Iterable[object]) -> str:
    """Return "a", "a and b" or "a, b and c"; "none" of nothing."""
    return joined(list(map(value, names)) or ["none"])


def joined(texts: list[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def places(
    yours: Any, reference: Any, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], Any, Any]]:
    """Yield (path, yours, the reference's) for each place at which two values differ, in dicts and lists.

    Lists of names and of token ids are compared whole: their order and their members say more.
    """
    both = [*yours, *reference] if isinstance(yours, list) and isinstance(reference, list) else []
    if isinstance(yours, dict) and isinstance(reference, dict):
        for key in dict.fromkeys([*reference, *yours]):
            yield from places(yours.get(key, NOTHING), reference.get(key, NOTHING), (*path, key))
    elif any(isinstance(one, list | dict | float) for one in both):  # each of these is looked at by itself
        for number, (a, b) in enumerate(zip_longest(yours, reference, fillvalue=NOTHING)):
            yield from places(a, b, (*path, number))
    elif not same(yours, reference):
        yield path, yours, reference


def place(path: tuple[object, ...]) -> str:
    """Return a path into nested values in words: "status of r1", "mask, 3"."""
    if len(path) == 2 and isinstance(path[1], str):
        return f"{path[0]} of {path[1]}"
    return ", ".join(f"place {part}" if isinstance(part, int) else str(part) for part in path)
