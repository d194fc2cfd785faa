"""Marks for tests that need what a user's machine may lack."""

import subprocess
import sys

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
