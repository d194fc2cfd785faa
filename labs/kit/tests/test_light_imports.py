"""No module of these packages imports torch: they run in a browser, or answer within a second."""

import subprocess
import sys

WITHOUT_TORCH = """
    mini_engine mini_engine.request mini_engine.config mini_engine.interfaces mini_engine.scheduler
    mini_engine.request_queue mini_engine.block_manager mini_engine.prefix_cache mini_engine.trace
    mini_engine.sim mini_engine.text mini_engine.loading.registry mini_engine.loading.tokenizer
    mini_engine.loading.files mini_engine.show.player labs.kit labs.kit.toys labs.kit.judge
""".split()
CODE = """
import importlib, pkgutil, sys
for room in sys.argv[1:]:
    path = getattr(importlib.import_module(room), "__path__", ()) if "." in room else ()
    for name in [room, *(module.name for module in pkgutil.iter_modules(path, room + "."))]:
        importlib.import_module(name)
        if "torch" in sys.modules:
            sys.exit(f"{name} imports torch")
"""


def test_these_rooms_import_without_torch():
    """In the order of the layers, so that the message names the module at fault and no other above it."""
    command = [sys.executable, "-c", CODE, *WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
