"""Frames between the grader and a sandbox: bytes with their length in front, most of them JSON.

Everything that comes out of a sandbox is a claim of the submission. Its size and form are checked here, and
none of it is ever executed or unpickled.
"""

import json
import os
import select
import struct
from math import isfinite
from time import monotonic
from typing import Any

HEADER = struct.Struct(">I")
DEEPEST, LONGEST_INT = 32, 2**63


class BadFrame(Exception):
    """The bytes are not a frame, or not one that was asked for."""


def send(descriptor: int, value: Any) -> None:
    send_bytes(descriptor, json.dumps(value, allow_nan=False).encode())


def send_bytes(descriptor: int, data: bytes) -> None:
    view = memoryview(HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, limit: int, seconds: float) -> Any:
    """Return the next frame's value. Raise BadFrame if it is malformed, TimeoutError if none comes."""
    return parsed(receive_bytes(descriptor, limit, seconds))


def receive_bytes(descriptor: int, limit: int, seconds: float) -> bytes:
    end = monotonic() + seconds
    (length,) = HEADER.unpack(_read(descriptor, HEADER.size, end))
    if length > limit:
        raise BadFrame(f"a reply of {length:,} bytes, where {limit:,} are allowed")
    return _read(descriptor, length, end)


def parsed(data: bytes) -> Any:
    """Return the value of JSON. Raise BadFrame if it is malformed, or not such as a lab gives."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a reply that is not JSON: {type(error).__name__}") from None
    check(value)
    return value


def check(value: Any, depth: int = 1) -> None:
    """Raise BadFrame if a value is nested too deeply, or a number is too large or not finite."""
    for one in value.values() if type(value) is dict else value if type(value) is list else (value,):
        kind = type(one)  # JSON gives no subclasses; a call for each number would take most of the time
        if kind is list or kind is dict:
            if depth >= DEEPEST:
                raise BadFrame(f"a reply nested more than {DEEPEST} deep")
            check(one, depth + 1)
        elif kind is int and not -LONGEST_INT <= one < LONGEST_INT:
            raise BadFrame("a number of more than 64 bits")
        elif kind is float and not isfinite(one):
            raise BadFrame("a number that is not finite")


def _read(descriptor: int, count: int, end: float) -> bytes:
    parts: list[bytes] = []
    while count:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise BadFrame("it ended without a reply")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
