"""mini_engine: a small, complete LLM inference engine, written to be read.

    from mini_engine import LLM, SamplingParams
    LLM("shakespeare").generate(["O Romeo, "], SamplingParams(temperature=0))

Importing this package is cheap: torch is loaded with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mini_engine.config import EngineConfig, SpeculativeConfig
from mini_engine.request import Request, RequestStatus, SamplingParams
from mini_engine.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:  # the types of the names in _LAZY, whose modules import torch
    from mini_engine.engine import Engine
    from mini_engine.llm import LLM
    from mini_engine.outputs import RequestOutput
    from mini_engine.parts import Parts

_LAZY = {"LLM": "llm", "RequestOutput": "outputs", "Engine": "engine", "Parts": "parts"}

__all__ = [
    "LLM", "Engine", "EngineConfig", "Parts", "Request", "RequestOutput", "RequestStatus", "SamplingParams",
    "SpeculativeConfig", "StructuredOutputsParams",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"mini_engine.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mini_engine' has no attribute {name!r}")
