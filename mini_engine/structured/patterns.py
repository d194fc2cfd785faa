"""The parser of patterns: a small part of the regular expressions of `re`, as a tree over bytes of UTF-8."""

from __future__ import annotations

import re
from functools import reduce
from operator import or_
from typing import NoReturn

from mini_engine.structured.nodes import Empty, Node, Nothing, OneOf, Repeat

MAX_SIZE, MAX_COUNT, MAX_DEPTH = 4000, 200, 20  # nodes of a tree; numbers in {m,n}; groups in groups
LAST = 0x10FFFF  # code point
CLASSES = {  # ASCII, as with re.ASCII
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32)],
}
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}
Ranges = list[tuple[int, int]]  # of code points, both ends included


def parse(pattern: str) -> Node:
    """Return the tree of a pattern, which is matched against whole texts, as re.fullmatch does.

    It knows literals, ., [classes], \\d \\w \\s (ASCII) and their opposites, *, +, ?, {m}, {m,}, {m,n}, | and
    groups. Raise ValueError for anything else, and for a pattern that is too large.
    """
    return _Parser(pattern).whole()


class _Parser:
    """Reads a pattern from left to right, one rule of the grammar a method."""

    def __init__(self, pattern: str):
        self.pattern, self.at, self.depth = pattern, 0, 0

    def fail(self, why: str) -> NoReturn:
        raise ValueError(f"pattern {self.pattern!r}, at character {self.at + 1}: {why}")

    def next(self, expected: str = "") -> str:
        """Return the next character, which must be there, and go on behind it."""
        if self.at >= len(self.pattern):
            self.fail(f"{expected or 'a character'} is missing")
        self.at += 1
        return self.pattern[self.at - 1]

    def follows(self, text: str) -> bool:
        """Whether this text is next; if so, go on behind it."""
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def whole(self) -> Node:
        node = self.choice()
        if self.at < len(self.pattern):
            self.fail("this ) closes no group")
        return node

    def choice(self) -> Node:
        options = [self.sequence()]
        while self.follows("|"):
            options.append(self.sequence())
        return reduce(or_, options)

    def sequence(self) -> Node:
        items: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            items.append(self.repeated())
        node: Node = Empty()
        for item in reversed(items):
            node = item + node
        if node.size > MAX_SIZE:
            self.fail(f"the expression has more than {MAX_SIZE} nodes; write a shorter one")
        return node

    def repeated(self) -> Node:
        node = self.item()
        start = self.at
        if self.follows("*"):
            node = Repeat(node)
        elif self.follows("+"):
            node = node + Repeat(node)
        elif self.follows("?"):
            node = node | Empty()
        elif self.follows("{"):
            node = self.counted(node)
        if self.at > start and self.at < len(self.pattern) and self.pattern[self.at] in "*+?{":
            self.fail("one repetition directly after another; put the first into a group")
        return node

    def counted(self, node: Node) -> Node:
        between, brace, _ = self.pattern[self.at :].partition("}")
        low, comma, high = between.partition(",")
        if not brace or not re.fullmatch("[0-9]+(,[0-9]*)?", between):
            self.fail("a repetition is {m}, {m,} or {m,n}")
        self.at += len(between) + 1
        least, most = int(low), int(high or low)
        if least > most or most > MAX_COUNT or node.size * max(most, 1) > MAX_SIZE:
            self.fail(f"m must be at most n, n at most {MAX_COUNT}, and the result at most {MAX_SIZE} nodes")
        rest: Node = Repeat(node) if comma and not high else Empty()
        for _ in range(most - least):
            rest = (node + rest) | Empty()
        for _ in range(least):
            rest = node + rest
        return rest

    def item(self) -> Node:
        character = self.next()
        if character == "(":
            return self.group()
        if character == "[":
            return bytes_of(self.members())
        if character == ".":
            return bytes_of(without([(10, 10)]))
        if character == "\\":
            return bytes_of(self.escape())
        if character in "*+?{^$":
            self.at -= 1
            self.fail(f"put a backslash before {character} if the text should contain it")
        return bytes_of([(ord(character), ord(character))])

    def group(self) -> Node:
        if not self.follows("?:") and self.follows("?"):
            self.fail("of the groups with ? there is only (?: )")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"more than {MAX_DEPTH} groups inside each other")
        node = self.choice()
        if not self.follows(")"):
            self.fail("a group is not closed")
        self.depth -= 1
        return node

    def escape(self) -> Ranges:
        character = self.next()
        if character.lower() in CLASSES:
            found = CLASSES[character.lower()]
            return found if character.islower() else without(found)
        if character in CONTROLS:
            return [(CONTROLS[character],) * 2]
        if character.isalnum():
            self.fail(f"\\{character} is not known here")
        return [(ord(character),) * 2]

    def members(self) -> Ranges:
        """Return the code points of a class, from behind its [ to behind its ]."""
        negated, found = self.follows("^"), Ranges()
        while not found or self.pattern[self.at : self.at + 1] != "]":
            low = self.member()
            if self.pattern[self.at : self.at + 1] == "-" and self.pattern[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                # A character is one number, and a class of characters is more.
                ends = [code for pair in (*low, *self.member()) for code in {*pair}]
                if len(ends) != 2 or ends[0] > ends[1]:
                    self.fail("the ends of a range are two characters in their order")
                low = [(ends[0], ends[1])]
            found = found + low
        self.at += 1
        return without(found) if negated else found

    def member(self) -> Ranges:
        character = self.next("]")
        return self.escape() if character == "\\" else [(ord(character),) * 2]


def without(ranges: Ranges) -> Ranges:
    """Return all other code points; a range may be empty."""
    found, start = Ranges(), 0
    for low, high in sorted(ranges):
        found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST)]


def bytes_of(ranges: Ranges) -> Node:
    """Return the characters of these ranges as bytes of UTF-8; surrogates are no characters."""
    node: Node = Nothing()
    for low, high in ranges:
        for start, end in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST)):
            first, last = max(low, start), min(high, end)
            if first <= last:
                node = node | _between(chr(first).encode(), chr(last).encode())
    return node


def _between(low: bytes, high: bytes) -> Node:
    """Return the encodings from one to another; both have the same length."""
    if len(low) == 1:
        return OneOf(frozenset(range(low[0], high[0] + 1)))
    first, last, least, most = low[0], high[0], b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    if first == last:
        return OneOf(frozenset([first])) + _between(low[1:], high[1:])
    node: Node = Nothing()
    if low[1:] != least:
        node, first = OneOf(frozenset([first])) + _between(low[1:], most), first + 1
    if high[1:] != most:
        node, last = node | (OneOf(frozenset([last])) + _between(least, high[1:])), last - 1
    middle = OneOf(frozenset(range(first, last + 1)))
    return node | (middle + _between(least, most)) if first <= last else node
