"""What goes between the grader and a sandbox: frames, each with its length before it; most are JSON.

Whatever comes out of a sandbox is a claim of the submission's: its size, its form and the id that it
echoes are checked here, and nothing of it is ever executed, unpickled or read as text.
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
    """What came is no frame, or none that was asked for."""


def send(descriptor: int, value: Any) -> None:
    send_bytes(descriptor, json.dumps(value, allow_nan=False).encode())


def send_bytes(descriptor: int, data: bytes) -> None:
    view = memoryview(HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, limit: int, seconds: float) -> Any:
    """The next frame's value. Raises BadFrame if it is too big or malformed, TimeoutError if none comes."""
    return parsed(receive_bytes(descriptor, limit, seconds))


def receive_bytes(descriptor: int, limit: int, seconds: float) -> bytes:
    end = monotonic() + seconds
    (length,) = HEADER.unpack(_read(descriptor, HEADER.size, end))
    if length > limit:
        raise BadFrame(f"a reply of {length:,} bytes, where {limit:,} are allowed")
    return _read(descriptor, length, end)


def parsed(data: bytes) -> Any:
    """The value that JSON stands for. Raises BadFrame for what is no JSON, or not as a lab gives it."""
    try:
        value = json.loads(data, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a reply that is no JSON: {type(error).__name__}") from None
    check(value)
    return value


def check(value: Any, depth: int = 0) -> None:
    """Raise BadFrame for what is nested too deeply, or a number that no lab gives."""
    if depth > DEEPEST:
        raise BadFrame(f"a reply nested more than {DEEPEST} deep")
    if isinstance(value, list):
        for one in value:
            check(one, depth + 1)
    elif isinstance(value, dict):
        for one in value.values():
            check(one, depth + 1)
    elif isinstance(value, int) and not -LONGEST_INT <= value < LONGEST_INT:
        raise BadFrame("a number of more than 64 bits")
    elif isinstance(value, float) and not isfinite(value):
        raise BadFrame("a number that is not finite")


def _refused(name: str) -> None:
    raise ValueError(name)


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
