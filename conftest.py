"""pytest: the LAB_IMPL switch and what comes with it. All of it lives in labs/kit/judge/plugin.py."""

import gc
import sys
from pathlib import Path

# `pytest` from a fresh checkout, before anything is installed, finds labs and mini_engine too.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["labs.kit.judge.plugin"]


def pytest_collection_finish():
    """Leave what has been imported out of each garbage collection, which it would make take half a second."""
    gc.freeze()
