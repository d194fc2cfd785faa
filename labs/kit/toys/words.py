"""An error or a value, in one line, whatever the methods of learners' code do."""

import re
from collections.abc import Callable
from typing import Any

LONGEST = 300  # characters of a message that are shown


def kind(error: BaseException) -> str:
    """The name of its type, alike in every Python: 3.13 calls re.error PatternError."""
    return "error" if isinstance(error, re.error) else type(error).__name__


def describe(error: BaseException) -> str:
    """An error in one line: its kind and what it says first, whatever its __str__ does."""
    return f"{kind(error)}: {said(error)}".removesuffix(": ")


def said(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return _shown(str, error)


def brief(value: Any, longest: int = 100) -> str:
    """A value's repr, short, whatever its __repr__ does."""
    return _shown(repr, value, longest)


def _shown(show: Callable[[Any], str], value: Any, longest: int = LONGEST) -> str:
    try:
        text = (show(value).splitlines() or [""])[0]
    except Exception:
        return f"({type(value).__name__}, which cannot be shown)"
    return text if len(text) <= longest else text[: longest - 3] + "..."
