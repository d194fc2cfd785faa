"""Regular expressions as trees over bytes.

The alphabet is the 256 bytes of UTF-8, because a token may end in the middle of a character. `a + b` is a
sequence and `a | b` a choice. Both are simplified, so an expression that no text matches is always Nothing().
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast


class Node:
    """An expression; two that are built alike are equal."""

    def __init__(self, *parts: Any):
        self.parts = parts
        self._hash = hash(parts)  # once: a long tree is deep

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Node) and type(self) is type(other) and self._hash == other._hash
        return self is other or (same and self.parts == cast(Node, other).parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"

    def __iter__(self) -> Iterator[Node]:
        """Yield all nodes of the tree; one that stands in it twice comes twice."""
        todo: list[Any] = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += node.options if isinstance(node, Either) else node.parts * (not isinstance(node, OneOf))

    @property
    def size(self) -> int:
        """How many nodes there are in the tree."""
        return sum(1 for _ in self)

    @property
    def alphabet(self) -> frozenset[int]:
        """The bytes that occur in it."""
        return frozenset[int]().union(*{node.allowed for node in self if isinstance(node, OneOf)})

    def __add__(self, other: Node) -> Node:
        """Return the sequence of two."""
        if isinstance(self, Nothing) or isinstance(other, Empty):
            return self
        if isinstance(other, Nothing) or isinstance(self, Empty):
            return other
        return self.first + (self.second + other) if isinstance(self, Sequence) else Sequence(self, other)

    def __or__(self, other: Node) -> Node:
        """Return the choice of two."""
        if isinstance(self, Nothing) or self == other:
            return other
        if isinstance(other, Nothing):
            return self
        first, second = (one.unique if isinstance(one, Either) else {one: None} for one in (self, other))
        options = first | second
        single = [node.allowed for node in options if isinstance(node, OneOf)]
        if len(single) > 1:
            options = {node: None for node in options if not isinstance(node, OneOf)}
            options[OneOf(frozenset[int]().union(*single))] = None
        return Either(options) if len(options) > 1 else next(iter(options))


class Nothing(Node):
    """No text matches, not even the empty one."""


class Empty(Node):
    """The empty text matches, and no other."""


class OneOf(Node):
    """One byte, which is among the allowed ones."""

    __match_args__ = ("allowed",)

    def __init__(self, allowed: frozenset[int]):
        super().__init__(allowed)
        self.allowed = allowed


class Sequence(Node):
    """A text of the first expression, and behind it one of the second."""

    __match_args__ = ("first", "second")

    def __init__(self, first: Node, second: Node):
        super().__init__(first, second)
        self.first, self.second = first, second


class Either(Node):
    """A text of any of the options. Each stands once, in the order given; to == the order does not matter."""

    __match_args__ = ("options",)

    def __init__(self, options: Iterable[Node]):
        self.unique = dict.fromkeys(options)  # a set's order is another one on another machine
        super().__init__(frozenset(self.unique))
        self.options = (*self.unique,)


class Repeat(Node):
    """A text of the body, any number of times in a row, also never."""

    __match_args__ = ("body",)

    def __init__(self, body: Node):
        super().__init__(body)
        self.body = body
