"""The parts that an engine is built from, each under the name by which the labs replace it.

No part is put into an engine in any other way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from mini_engine import scheduler as _scheduler
from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.fast.attention import paged_backend
from mini_engine.interfaces import Backend, EngineLike, KVManager, SamplerLike, SchedulerLike
from mini_engine.model import CausalLM
from mini_engine.outputs import Delta, Stream
from mini_engine.renamed import adopt
from mini_engine.request import Request
from mini_engine.sampler import Sampler
from mini_engine.text.output_text import OutputText


class NoWorkError(RuntimeError):
    """`step` was called with no request to serve."""


@dataclass(frozen=True)
class Parts:
    """The parts of an engine; the labs replace them one by one. `step` None means engine.step."""

    clamp: Callable[[int, int, int], int] = _scheduler.clamp
    next_chunk: Callable[[Request, int], _scheduler.Chunk] = _scheduler.next_chunk
    schedule_step: Callable[..., dict[str, int]] = _scheduler.schedule_step
    Scheduler: Callable[..., SchedulerLike] = _scheduler.Scheduler
    BlockManager: Callable[..., KVManager] = BlockManager
    attend_backend: Callable[..., Backend] = paged_backend
    Sampler: Callable[[int], SamplerLike] = Sampler
    OutputText: Callable[..., OutputText] = OutputText
    Stream: Callable[..., Stream] = Stream
    step: Callable[[EngineLike], list[Delta]] | None = None

    def build(self, model: CausalLM, config: EngineConfig) -> tuple[SchedulerLike, Backend]:
        """Return the scheduler, with its KV manager, and the backend, for a config fitted to the model."""
        kv = adopt(self.BlockManager(config.num_blocks, config.block_size, **config.kv_args()))
        functions = {"schedule_step": self.schedule_step, "clamp": self.clamp}
        scheduler = self.Scheduler(kv, **config.scheduler_args(), **functions)
        return scheduler, self.attend_backend(model, kv, self.next_chunk)

    def origins(self) -> dict[str, str]:
        """Return {name: module} of the parts that are not the engine's own."""
        replaced = (f.name for f in fields(self) if getattr(self, f.name) is not f.default)
        return {name: getattr(getattr(self, name), "__module__", "?") for name in replaced}
