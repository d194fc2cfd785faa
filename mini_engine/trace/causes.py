"""The causes in a step's record: for which request another was preempted, and why the queue waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mini_engine.request import Request
from mini_engine.trace.records import Blocked, Event, Header, Preempted

Key = TypeVar("Key")


def preemptions(gone: list[Key], needs: dict[Key, int], free: int, name: Callable[[Key], str]) -> list[Event]:
    """Return an event for each request that is gone; the cause is the first other that was short."""
    if not gone:
        return []
    short, total = first_short(needs, set(gone), free), sum(needs.values())
    return [Preempted(name(one), name(short or one), total, free) for one in gone]


def changes(before: list[Request], after: list[Request]) -> tuple[list[Request], list[Request]]:
    """Return the running requests that are gone, and those that are new."""
    if after[: len(before)] == before:  # nearly always
        return [], after[len(before) :]
    were, are = set(before), set(after)
    return [r for r in before if r not in are], [r for r in after if r not in were]


def blocked(
    name: str, header: Header, scheduled: dict[str, int], running: int, preempted: bool, needs: int, free: int
) -> Blocked:
    """Return why the front of the queue, which needs so many blocks, was not admitted in a step."""
    if preempted:
        return Blocked("preempted", name)
    if running >= header.config["max_num_seqs"]:
        return Blocked("slots", name)
    if sum(scheduled.values()) >= header.config["max_num_batched_tokens"]:
        return Blocked("budget", name)
    if needs > free:
        return Blocked("memory", name, needs, free)
    return Blocked("none", name)  # it could have been admitted: a bug in the scheduler


def first_short(needs: dict[Key, int], gone: set[Key], free: int) -> Key | None:
    """Return the first surviving request that could not have grown with the blocks that were free."""
    for request, num_blocks in needs.items():
        free -= num_blocks
        if free < 0 and num_blocks and request not in gone:
            return request
    return next((r for r, num_blocks in needs.items() if num_blocks and r not in gone), None)
