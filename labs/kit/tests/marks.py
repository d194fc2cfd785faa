"""Marks for tests that need what a user's machine may lack, and for cases that only a soak plays."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

UNSHARE = """
import ctypes, sys
libc = ctypes.CDLL(None)
sys.exit(libc.unshare(0x10020000) or libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
"""


def _offered() -> bool:
    """Asked of the kernel itself: where it offers namespaces, a grader that finds none is broken."""
    return sys.platform == "linux" and subprocess.run([sys.executable, "-c", UNSHARE]).returncode == 0


namespaces = pytest.mark.skipif(
    not _offered(), reason="THE GRADER IS NOT TESTED: this kernel offers no user namespaces"
)


def some(every: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the arguments of a parametrised test: those that are `kept`, and for `make soak` the others."""
    return [one if one in kept else pytest.param(one, marks=pytest.mark.soak) for one in every]
