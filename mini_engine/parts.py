"""What an engine is built from, each part under the name by which the labs replace it; and `step`.

No part is put into an engine in any other way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mini_engine import scheduler as _scheduler
from mini_engine.attention import PagedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.interfaces import Backend, KVManager, Row, SchedulerLike
from mini_engine.outputs import Delta, Stream
from mini_engine.request import Request
from mini_engine.text.output_text import OutputText

if TYPE_CHECKING:
    from mini_engine.engine import Engine


class NoWorkError(RuntimeError):
    """`step` was called with no request to serve."""


def step(engine: Engine) -> list[Delta]:
    """One turn of the engine: decide, compute, sample, take back.

    Raises NoWorkError when there is nothing to do.
    """
    if not engine.has_work:
        raise NoWorkError("step() was called, but no request is waiting or running; add one first")
    scheduled = engine.scheduler.schedule()
    requests = ((engine.requests[request_id], num_tokens) for request_id, num_tokens in scheduled.items())
    rows = [Row(request, n, n == request.num_new_tokens) for request, n in requests]
    if not rows:
        raise RuntimeError(
            f"the scheduler scheduled nothing with {len(engine.scheduler.waiting)} requests waiting "
            f"and {len(engine.scheduler.running)} running"
        )
    ending = [row.request for row in rows if row.is_last]
    with engine.computing:
        logits = engine.backend.forward(rows)
    sampled, stopped = engine.sample(logits, ending)
    engine.scheduler.update(scheduled, sampled, stopped)
    return engine.collect(ending, stopped)


@dataclass(frozen=True)
class Parts:
    """What an engine is built from. The labs replace these one by one."""

    clamp: Callable[[int, int, int], int] = _scheduler.clamp
    next_chunk: Callable[[Request, int], _scheduler.Chunk] = _scheduler.next_chunk
    schedule_step: Callable[..., dict[str, int]] = _scheduler.schedule_step
    Scheduler: Callable[..., SchedulerLike] = _scheduler.Scheduler
    BlockManager: Callable[..., KVManager] = BlockManager
    attend_backend: Callable[..., Backend] = PagedBackend
    OutputText: Callable[..., OutputText] = OutputText
    Stream: Callable[..., Stream] = Stream
    step: Callable[[Engine], list[Delta]] = step

    def origins(self) -> dict[str, str]:
        """The parts that are not the engine's own, and the module each comes from."""
        replaced = (f.name for f in fields(self) if getattr(self, f.name) is not f.default)
        return {name: getattr(getattr(self, name), "__module__", "?") for name in replaced}
