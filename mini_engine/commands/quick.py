"""Importing torch for a command, in three quarters of the time."""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

COMPILER = "torch._meta_registrations"  # shapes of results for torch's compiler: a quarter of the import


class _Later(ModuleType):
    """A module that is imported when one of its names is first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks of any module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def import_torch() -> None:
    """Import torch without what only its compiler needs, and without looking for garbage meanwhile.

    For commands that serve: nothing in their process compiles. Does nothing where torch is there already.
    """
    if "torch" in sys.modules:
        return
    sys.modules[COMPILER] = _Later(COMPILER)
    gc.disable()
    try:
        import_module("torch")
    finally:
        gc.enable()
    gc.freeze()  # modules stay: the collector need not visit them again and again
