"""Comparing tensors in words: a failed test says how far off and where, and never dumps a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
