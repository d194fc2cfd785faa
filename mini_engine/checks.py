"""Checks of what is given from outside: texts, numbers, token ids, and values as error messages show them."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from operator import index
from reprlib import Repr
from typing import Any

# Sampling computes in float32: beyond these a number would become 0 or infinite there.
SMALLEST, LARGEST = 1e-30, 1e30

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """Return a value as error messages show it: on one line, and short however large it is."""
    try:
        return " ".join(_short.repr(value).split())
    except ValueError:  # Python prints no number of more than 4,300 digits
        return f"a very large {type(value).__name__}"


def whole_number(name: str, value: Any) -> int:
    """Return the value as a plain int, whatever kind of integer it is. Raises ValueError, naming it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, but is {shown(value)}") from None


def check_text(name: str, value: Any) -> None:
    """Raise ValueError, naming the value, unless it is a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, but is {shown(value)}")
    if not is_unicode(value):
        raise ValueError(f"{name} has a lone surrogate (bytes that were no UTF-8?) in {shown(value)}")


def is_unicode(value: str) -> bool:
    """Return whether the string has whole characters only; a lone surrogate is half of one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: Any, least: float = -LARGEST, most: float = LARGEST) -> bool:
    """Return whether the value is a number, no bool, from `least` to `most`."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and least <= float(value) <= most
    except OverflowError:
        return False


def is_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether the value is an integer of any kind, no bool, from `least` to `most`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def plain(value: Any) -> Any:
    """Return a value with numbers of Python's own, so that it can be hashed, compared and written as JSON."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    if is_whole(value):
        return int(value)
    return float(value) if is_number(value) else value


def as_token_ids(values: Iterable[Any], owner: str) -> list[int]:
    """Return the values as plain ints. Raises ValueError, naming the owner, for one that is no integer."""
    values = list(values)
    try:
        return [*map(index, values)][:]  # a prompt may be long; the copy has no room to grow
    except TypeError:
        return [_token_id(value, owner) for value in values]  # names the value


def _token_id(value: Any, owner: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{owner}: {shown(value)} is not a token id") from None
