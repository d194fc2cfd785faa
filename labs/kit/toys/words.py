"""An error, a value or how far a tensor is off, in one line, whatever the methods of learners' code do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 300  # characters of a message that are shown


def describe(error: BaseException) -> str:
    """An error in one line: its kind and what it says first, whatever its __str__ does."""
    return f"{type(error).__name__}: {said(error)}".removesuffix(": ")


def said(error: BaseException) -> str:
    """What an error says first."""
    return _shown(str, error)


def brief(value: Any) -> str:
    """A value's repr, short, whatever its __repr__ does."""
    return _shown(repr, value, 100)


def _shown(show: Callable[[Any], str], value: Any, longest: int = LONGEST) -> str:
    try:
        text = (show(value).splitlines() or [""])[0]
    except Exception:
        return f"({type(value).__name__}, whose text cannot be had)"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def assert_close(actual: Tensor, expected: Tensor, what: str, atol: float = 1e-9) -> None:
    """`actual` equals `expected` to `atol` in every element; shapes must agree.

    The AssertionError names `what`, the largest difference and where it is.
    """
    __tracebackhide__ = True
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if actual.numel() == 0:
        return
    if actual.isnan().any():
        where = actual.isnan().nonzero()[0].tolist()
        raise AssertionError(f"{what}: NaN, first at {where}")
    difference = (actual.double() - expected.double()).abs()
    worst = difference.max().item()
    if worst > atol:
        where = (difference == worst).nonzero()[0].tolist()
        raise AssertionError(f"{what}: off by {worst:.3g} at {where} (allowed: {atol:g})")
