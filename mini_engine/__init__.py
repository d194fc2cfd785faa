"""mini_engine: a small, complete LLM inference engine, written to be read.

    from mini_engine import LLM, SamplingParams
    LLM("shakespeare").generate(["O Romeo, "], SamplingParams(temperature=0))

Importing this package is cheap: torch is loaded with the first name that needs it.
"""

from importlib import import_module

from mini_engine.request import Request, RequestStatus, SamplingParams

_LAZY = {"LLM": "llm", "RequestOutput": "llm", "Engine": "engine", "Parts": "parts"}

__all__ = ["Request", "RequestStatus", "SamplingParams", *_LAZY]
__version__ = "0.1.0"


def __getattr__(name):
    if name in _LAZY:
        return getattr(import_module(f"mini_engine.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mini_engine' has no attribute {name!r}")
