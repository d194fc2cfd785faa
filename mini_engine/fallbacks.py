"""Stand-ins for the optional abilities that a replaced part lacks.

Each does the plain thing: it frees blocks, aborts a request, or does nothing.
"""

from __future__ import annotations

from typing import cast

from mini_engine.interfaces import (
    Backend,
    CopyingBackend,
    ForkingKV,
    KVManager,
    RecoverableBackend,
    RecoverableKV,
    RecoverableScheduler,
    SchedulerLike,
    StepCachingKV,
    StepSharingBackend,
)
from mini_engine.request import Request


class _PlainKV:
    caches_scheduled = False

    def __init__(self, kv: KVManager):
        self.kv = kv

    def unadmit(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = request.num_cached_tokens = 0

    def shrink(self, request: Request) -> None:
        pass

    def uncache_blocks(self, request: Request) -> None:
        pass

    def evict_blocks(self, request: Request) -> list[int]:
        return []

    def cache_scheduled_blocks(self, request: Request, num_new_tokens: int) -> None:
        pass


class _PlainScheduler:
    def __init__(self, scheduler: SchedulerLike):
        self.scheduler = scheduler

    def take_back(self, before: list[Request]) -> None:
        pass

    def fail(self, request: Request) -> None:
        self.scheduler.abort(request.request_id)
        request.finish_reason = "error"


class _PlainBackend:
    def compute_alone(self, request: Request) -> None:
        pass

    def clear(self, slots: list[int]) -> None:
        pass


def let_fork(kv: KVManager, backend: Backend) -> None:
    """Let the KV manager fork requests, if both parts can: without it, each computes its own prompt."""
    if isinstance(kv, ForkingKV) and isinstance(backend, CopyingBackend):
        kv.copy_block = backend.copy_block


def let_share_within_step(kv: KVManager, scheduler: SchedulerLike, backend: Backend) -> None:
    """Let blocks be found in the step that computes them, if all three parts can: the scheduler must take
    back what it decided, because blocks of a step that is not computed must not be found."""
    if (
        isinstance(kv, StepCachingKV)
        and isinstance(scheduler, RecoverableScheduler)
        and isinstance(backend, StepSharingBackend)
    ):
        kv.caches_scheduled = backend.writes_before_reading


def step_caching_kv(kv: KVManager) -> StepCachingKV:
    """Return the KV manager itself, or a stand-in for what it lacks. It is asked in every step, and
    isinstance would take 20 µs."""
    return cast(StepCachingKV, kv if hasattr(kv, "cache_scheduled_blocks") else _PlainKV(kv))


def recoverable_kv(kv: KVManager) -> RecoverableKV:
    """Return the KV manager itself, or a stand-in for what it lacks."""
    return kv if isinstance(kv, RecoverableKV) else _PlainKV(kv)


def recoverable_scheduler(scheduler: SchedulerLike) -> RecoverableScheduler:
    """Return the scheduler itself, or a stand-in for what it lacks."""
    return scheduler if isinstance(scheduler, RecoverableScheduler) else _PlainScheduler(scheduler)


def recoverable_backend(backend: Backend) -> RecoverableBackend:
    """Return the backend itself, or a stand-in for what it lacks."""
    return backend if isinstance(backend, RecoverableBackend) else _PlainBackend()
