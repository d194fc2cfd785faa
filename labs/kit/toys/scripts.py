"""The types of a lab's random_scripts.py."""

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Script = dict[str, Any]  # {"config": {...}, "calls": [[name, *arguments], ...]}, all of it JSON


class Skip(Exception):
    """A call that has no place in the script as it went so far; raised by `Play`, it leaves the call out."""


BUILTINS: list[dict[str, Any]] = [vars(builtins)]  # a file that is graded has its own


@contextmanager
def builtin(**others: Callable[..., Any]) -> Iterator[None]:
    """Inside, these of Python's own functions are others, in all modules: `with builtin(len=counted):`."""
    own = [{name: names[name] for name in others} for names in BUILTINS]
    for names in BUILTINS:
        names.update(others)
    try:
        yield
    finally:
        for names, before in zip(BUILTINS, own, strict=True):
            names.update(before)


def in_two_runs_of_python(call: Callable[[], Any]) -> list[Any]:
    """Return what `call` returns in each: hash() of bytes and strings begins with another number there."""
    real = hash

    def differs(value: object) -> bool:
        return any(map(differs, value)) if isinstance(value, tuple) else isinstance(value, bytes | str)

    found = []
    for number in (1, 2):
        with builtin(hash=lambda value, more=number: real(value) + more * differs(value)):
            found.append(call())
    return found
