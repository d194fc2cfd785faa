"""What happened, a record a step: the one format that labs, engine, figures and grader share.

A `Recorder` stands in front of any scheduler and looks at its public state before and after each
call; the code under observation writes nothing. JSON Lines: a header, a line a step, an end.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mini_engine.request import Request

VERSION = 1
STEP_KEYS = (
    "step", "t", "t_end", "scheduled", "num_batched_tokens", "num_running", "num_waiting", "blocked",
    "blocks", "new_tokens", "num_free_blocks", "num_cached_blocks", "events",
)  # fmt: skip


@dataclass
class Trace:
    """A recorded run: `header`, `steps` and `end` are the parsed lines of the file."""

    header: dict
    steps: list[dict] = field(default_factory=list)
    end: dict | None = None


class VirtualClock:
    """Time that does not depend on the machine: a step takes 1, or what `cost(record)` says."""

    kind = "virtual"

    def __init__(self, cost: Callable[[dict], float] | None = None, unit: str | None = None):
        self.cost = cost
        self.unit = unit or ("step" if cost is None else "ms")
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, record: dict) -> None:
        self.time += 1.0 if self.cost is None else self.cost(record)


class WallClock:
    """Seconds since the first look at the clock."""

    kind, unit = "wall", "s"

    def __init__(self):
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def advance(self, record: dict) -> None:
        pass


class Recorder:
    """A scheduler that remembers: the same interface as the Scheduler it wraps, plus `trace`.

    `sink` takes each step's record as it is finished; the default keeps them in `trace.steps`.
    Anything else that is asked of it (waiting, running, has_work, kv ...) goes to the scheduler.
    """

    def __init__(
        self,
        scheduler,
        *,
        clock: VirtualClock | WallClock | None = None,
        config: dict | None = None,
        parts: dict[str, str] | None = None,
        sink: Callable[[dict], None] | None = None,
    ):
        self.scheduler = scheduler
        self.clock = clock or VirtualClock()
        self.trace = Trace(
            {
                "trace": "mini-engine",
                "version": VERSION,
                "clock": self.clock.kind,
                "unit": self.clock.unit,
                "parts": parts or {},
                "config": config if config is not None else describe(scheduler),
            }
        )
        self.sink = sink or self.trace.steps.append
        self.step = 0
        self._events: list[dict] = []
        self._record: dict | None = None
        self._num_blocks_seen: dict[str, int] = {}

    def __getattr__(self, name):
        return getattr(self.scheduler, name)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self._events.append(
            {
                "type": "QUEUED",
                "id": request.request_id,
                "t": self.clock.now(),
                "num_prompt_tokens": request.num_prompt_tokens,
                "max_tokens": request.max_tokens,
                "priority": request.priority,
                "arrival": request.arrival,
            }
        )

    def abort(self, request_id: str) -> bool:
        found = self.scheduler.abort(request_id)
        if found:
            self._num_blocks_seen.pop(request_id, None)
            self._events.append({"type": "FINISHED", "id": request_id, "reason": "abort"})
        return found

    def schedule(self) -> dict[str, int]:
        scheduler, kv = self.scheduler, self.scheduler.kv
        start = self.clock.now()
        before = list(scheduler.running)
        free = kv.num_free_blocks
        needs = [(request.request_id, kv.num_new_blocks(request, 1)) for request in before]

        scheduled = scheduler.schedule()

        ids_before = {request.request_id for request in before}
        ids_after = {request.request_id for request in scheduler.running}
        gone = [request for request in before if request.request_id not in ids_after]
        events, self._events = self._events, []
        if gone:
            short = _first_short(needs, ids_after, free)
            total = sum(n for _, n in needs)
            for request in gone:
                self._num_blocks_seen.pop(request.request_id, None)
                events.append(
                    {
                        "type": "PREEMPTED",
                        "id": request.request_id,
                        "for": short or request.request_id,
                        "needs": total,
                        "free": free,
                    }
                )
        for request in scheduler.running:
            if request.request_id not in ids_before:
                cached = request.num_computed_tokens // kv.block_size
                events.append(
                    {
                        "type": "SCHEDULED",
                        "id": request.request_id,
                        "num_cached_tokens": request.num_computed_tokens,
                        "cached_blocks": kv.block_table(request)[:cached],
                    }
                )
                self._num_blocks_seen[request.request_id] = cached
        self._record = {
            "step": self.step,
            "t": start,
            "t_end": None,
            "scheduled": dict(scheduled),
            "num_batched_tokens": sum(scheduled.values()),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "blocked": self._blocked(scheduled, bool(gone)),
            "blocks": self._new_blocks(),
            "new_tokens": {},
            "num_free_blocks": kv.num_free_blocks,
            "num_cached_blocks": getattr(kv, "num_cached_blocks", 0),
            "events": events,
        }
        return scheduled

    def update(self, scheduled: dict[str, int], sampled: dict[str, int]) -> list[Request]:
        if self._record is None:
            raise RuntimeError("update() was called without schedule(); a step is one of each, in this order")
        finished = self.scheduler.update(scheduled, sampled)
        record, self._record = self._record, None
        self.clock.advance(record)
        record["t_end"] = self.clock.now()
        record["new_tokens"] = dict(sampled)
        for request in finished:
            self._num_blocks_seen.pop(request.request_id, None)
            record["events"].append(
                {"type": "FINISHED", "id": request.request_id, "reason": request.finish_reason}
            )
        self.sink(record)
        self.step += 1
        return finished

    def close(self, end: str, **details) -> Trace:
        """Say how the run ended (drained, stuck, max_steps or error) and hand over the trace."""
        self.trace.end = {
            "end": end,
            "step": self.step,
            "num_free_blocks": self.scheduler.kv.num_free_blocks,
            **details,
        }
        if self._events:  # what came after the last step, an abort for one
            self.trace.end["events"] = self._events
        return self.trace

    def _blocked(self, scheduled: dict[str, int], preempted: bool) -> dict:
        """Why the front of the queue was not admitted in this step."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        config = self.trace.header["config"]
        if not len(scheduler.waiting):
            return {"reason": "empty"}
        request = scheduler.waiting.peek()
        why = {"id": request.request_id}
        needs = kv.num_new_blocks(request, request.num_new_tokens)
        if preempted:
            return {"reason": "preempted", **why}
        if len(scheduler.running) >= config["max_num_seqs"]:
            return {"reason": "slots", **why}
        if sum(scheduled.values()) >= config["max_num_batched_tokens"]:
            return {"reason": "budget", **why}
        reserve = getattr(kv, "watermark", 0) if scheduler.running else 0
        if needs + reserve > kv.num_free_blocks:
            return {"reason": "memory", **why, "needs": needs + reserve, "free": kv.num_free_blocks}
        return {"reason": "none", **why}  # it could have been admitted: a bug of the scheduler

    def _new_blocks(self) -> dict[str, list[int]]:
        new_blocks = {}
        for request in self.scheduler.running:
            table = self.scheduler.kv.block_table(request)
            seen = self._num_blocks_seen.get(request.request_id, 0)
            if len(table) > seen:
                new_blocks[request.request_id] = table[seen:]
                self._num_blocks_seen[request.request_id] = len(table)
        return new_blocks


def describe(scheduler) -> dict:
    """The settings of a scheduler and its KV manager, as a header's `config`."""
    kv = scheduler.kv
    return {
        "policy": scheduler.policy,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "num_blocks": kv.num_blocks,
        "block_size": kv.block_size,
        "prefix_caching": getattr(kv, "enable_prefix_caching", False),
        "watermark": getattr(kv, "watermark", 0),
    }


def _first_short(needs: list[tuple[str, int]], survivors: set[str], free: int) -> str | None:
    """The first surviving request that could not have grown with the blocks that were free."""
    for request_id, num_blocks in needs:
        free -= num_blocks
        if free < 0 and num_blocks and request_id in survivors:
            return request_id
    return next((i for i, n in needs if n and i in survivors), None)


# ------------------------------------------------------------------------------------------ files


@contextmanager
def line_writer(path: str | os.PathLike) -> Iterator[Callable[[dict], None]]:
    """Takes a trace's lines one by one; the file is there once the block has ended well, or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")  # of this run: another may write the same
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield lambda line: file.write(json.dumps(line, separators=(",", ":")) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_trace(path: str | os.PathLike, trace: Trace) -> None:
    """Write the file whole or not at all."""
    with line_writer(path) as write:
        for line in (trace.header, *trace.steps, *([trace.end] if trace.end else [])):
            write(line)


def read_trace(path: str | os.PathLike) -> Trace:
    """Raises ValueError naming file and line if this is not a trace that we can read."""
    trace = None
    # So that a binary file, too, is "not JSON" on a line that can be named.
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
            if trace is None:
                if not isinstance(line, dict) or line.get("trace") != "mini-engine":
                    raise ValueError(f"{path}, line 1: not the header of a mini-engine trace")
                if line.get("version") != VERSION:
                    raise ValueError(
                        f"{path}: trace version {line.get('version')!r}; this reads version {VERSION}"
                    )
                trace = Trace(line)
            elif not isinstance(line, dict) or not ("end" in line or "step" in line):
                raise ValueError(f"{path}, line {number}: neither a step nor the end")
            elif "end" in line:
                trace.end = line
            elif missing := [key for key in STEP_KEYS if key not in line]:
                raise ValueError(f"{path}, line {number}: the step has no {missing[0]!r}")
            else:
                trace.steps.append(line)
    if trace is None:
        raise ValueError(f"{path}: empty file, not a trace")
    return trace


# ----------------------------------------------------------------------------------------- replay


@dataclass
class RequestView:
    """One request in one step, as folded from the events. `state` is what the step did with it:
    waiting, prefill, decode, preempted (in this step) or finished (in an earlier one)."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival: int
    state: str = "waiting"
    num_scheduled: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the latest admission
    blocks: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens known and not computed before this step: prompt and outputs less what is cached."""
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens


def replay(trace: Trace) -> Iterator[tuple[dict, dict[str, RequestView]]]:
    """Fold a trace: yields (step record, {request_id: view}) for each step, as things stood while
    it ran. The views are reused from step to step: copy what you keep."""
    views: dict[str, RequestView] = {}
    for record in trace.steps:
        for view in views.values():
            view.num_scheduled = 0
            if view.state == "preempted":
                view.state = "waiting"
            elif view.finish_reason:
                view.state = "finished"
                view.blocks = []
        finished = {}
        for event in record["events"]:
            view = views.get(event["id"])
            if event["type"] == "QUEUED":
                fields = ("num_prompt_tokens", "max_tokens", "priority", "arrival")
                views[event["id"]] = RequestView(event["id"], *(event[name] for name in fields))
                finished.pop(event["id"], None)  # an aborted request's id, used again
            elif event["type"] == "PREEMPTED":
                view.state, view.blocks, view.num_computed_tokens = "preempted", [], 0
                view.num_preemptions += 1
            elif event["type"] == "SCHEDULED":
                view.num_computed_tokens = view.num_cached_tokens = event["num_cached_tokens"]
                view.blocks = list(event.get("cached_blocks", ()))
            elif event["type"] == "FINISHED":
                finished[event["id"]] = event["reason"]
        for request_id, blocks in record["blocks"].items():
            views[request_id].blocks.extend(blocks)
        for request_id, num_tokens in record["scheduled"].items():
            view = views[request_id]
            view.state = "decode" if view.num_output_tokens and view.num_new_tokens == 1 else "prefill"
            view.num_scheduled = num_tokens
        for request_id, reason in finished.items():
            view = views[request_id]
            view.finish_reason = reason
            if not view.num_scheduled:  # aborted between two steps
                view.state, view.blocks = "finished", []
        yield record, views
        for request_id, num_tokens in record["scheduled"].items():
            views[request_id].num_computed_tokens += num_tokens
        for request_id in record["new_tokens"]:
            views[request_id].num_output_tokens += 1


# -------------------------------------------------------------------------------------- comparing

# Decisions and their results. Times differ from run to run, block ids between correct managers,
# and `blocked` is commentary.
_COMPARED = ("scheduled", "num_batched_tokens", "num_running", "num_waiting", "num_free_blocks", "new_tokens")


def decisions(record: dict) -> dict:
    """The part of a step's record in which two correct implementations must agree."""
    told = {key: record[key] for key in _COMPARED}
    told["scheduled"] = list(record["scheduled"].items())  # with its order
    told["events"] = [
        {k: v for k, v in event.items() if k not in ("t", "cached_blocks")} for event in record["events"]
    ]
    return told


def first_difference(trace: Trace, reference: Trace) -> int | None:
    """The index of the first step whose decisions depart from the reference; None if none does."""
    for index, (ours, theirs) in enumerate(zip(trace.steps, reference.steps, strict=False)):
        if decisions(ours) != decisions(theirs):
            return index
    if len(trace.steps) != len(reference.steps):
        return min(len(trace.steps), len(reference.steps))
    return None
