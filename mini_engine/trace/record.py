"""Records: dataclasses that can be written as JSON objects and read back.

The JSON follows from the fields. A field with its default value is left out. A field whose name is a
Python keyword ends in `_` in the class, and not in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from mini_engine.checks import is_unicode, shown


class Record:
    """A dataclass that can be written as a JSON object and read back."""

    __slots__ = ()
    what: ClassVar[str]  # in error messages
    tags: ClassVar[tuple[str, ...]] = ()  # class variables that are written too, before the fields

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict for `json.dumps`. Lists and dicts are shared with it, not copied."""
        line = {tag: getattr(self, tag) for tag in self.tags}
        kind: Any = type(self)
        for name, key, default, _ in _plan(kind):
            value = getattr(self, name)
            if default is MISSING or value != default:
                line[key] = _plain(value)
        return line

    @classmethod
    def from_json(cls, line: Any) -> Self:
        """Return the record in a JSON object. Raise ValueError naming a missing or mistyped field."""
        if type(line) is not dict:
            raise ValueError(f"{cls.what} must be an object, but is {shown(line)}")
        values = {}
        this: Any = cls
        for name, key, default, read in _plan(this):
            if key in line:
                try:
                    values[name] = read(line[key])
                except TypeError as error:
                    kind = get_type_hints(cls)[name]
                    kind = str(error) or (kind.__name__ if isinstance(kind, type) else kind)
                    value = shown(line[key])
                    raise ValueError(f"{cls.what}'s {key!r} must be {kind}, but is {value}") from None
            elif default is MISSING:
                raise ValueError(f"{cls.what} has no {key!r}")
        return cls(**values)


@cache
def _plan(cls: Any) -> list[tuple[str, str, Any, Callable[[Any], Any]]]:
    """Return (name, JSON key, default or MISSING, reader) for each field."""
    hints = get_type_hints(cls)
    plan = []
    for f in fields(cls):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        plan.append((f.name, f.name.removesuffix("_"), default, _reader(hints[f.name])))
    return plan


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, list) and value and isinstance(value[0], Record):
        return [record.to_json() for record in value]
    return value


LARGEST = 2**53  # whole numbers beyond it are not exact in JavaScript, where the player reads them


def _is(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # not isinstance: True is an int for isinstance
            raise TypeError
        return value

    return read


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    if abs(value) > LARGEST:
        raise TypeError("whole numbers of at most 2**53")
    return value


def _finite(value: Any) -> float:
    """Python's json reads NaN, Infinity and 1e999 as numbers."""
    if type(value) is not float:
        return _whole(value)
    if not isfinite(value):
        raise TypeError("a finite number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    if not is_unicode(value):
        raise TypeError("text without lone surrogates")
    return value


_PLAIN: dict[Any, Callable[[Any], Any]] = {int: _whole, float: _finite, str: _text}


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return the function that reads a field's value from JSON; it raises TypeError for another type."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if kind is list:
        a_list, item = _is(list), _reader(inner[0])
        return lambda value: [item(v) for v in a_list(value)]
    if kind is dict:
        a_dict, item = _is(dict), _reader(inner[1])
        return lambda value: {_text(key): item(v) for key, v in a_dict(value).items()}
    if kind is UnionType and NoneType in inner:
        some = _reader(inner[0])
        return lambda value: None if value is None else some(value)
    if kind is UnionType:
        return _one_of({one.type: one.from_json for one in inner})
    if issubclass(hint, Record):
        read: Callable[[Any], Any] = hint.from_json
        return read
    return _PLAIN.get(hint) or _is(hint)


def _one_of(readers: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(line: Any) -> Any:
        kind = line.get("type") if type(line) is dict else line
        if type(kind) is not str or kind not in readers:
            raise ValueError(f"the event's 'type' must be one of {', '.join(readers)}, but is {shown(kind)}")
        return readers[kind](line)

    return read
