"""Recording vLLM: `record(llm)` writes the decisions of vLLM's own scheduler as a trace of this project.

It wraps four methods of the scheduler inside an LLM (v1; read at vLLM 0.32.0) and changes no decision.
It needs only vLLM and the standard library, so that it runs in vLLM's own environment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mini_engine.trace.causes import blocked, changes, preemptions
from mini_engine.trace.clock import VirtualClock, WallClock
from mini_engine.trace.records import (
    Blocked,
    End,
    Event,
    Finished,
    Header,
    Queued,
    Scheduled,
    StepTrace,
    Trace,
)
from mini_engine.trace.retention import Retention, TraceStore

NULL_BLOCKS = 1  # vLLM reserves block 0: its block n is our n - 1, and its pool has one fewer to allocate
SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # which vLLM appends to each request id


@contextmanager
def record(llm: Any, path: Retention = True, *, wall: bool = False) -> Iterator[VLLMRecorder]:
    """Record the decisions of the vLLM `llm` inside the `with`, into the file `path` or in memory.

        with record(llm, "trace.jsonl"):
            llm.generate(prompts)

    The file appears at the end of the `with`; a trace in memory is `recorder.trace()`. Times are steps, or
    seconds with `wall`. Raise ValueError for an LLM that cannot be recorded: its scheduler runs in another
    process or a step ahead, or a request has more than one table of blocks.
    """
    recorder = VLLMRecorder(scheduler_of(llm), path, wall=wall)
    with recorder.recording():
        yield recorder


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler inside a vLLM LLM or LLMEngine. Raise ValueError if it cannot be recorded."""
    engine = getattr(llm, "llm_engine", llm)
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    if core is None:
        raise ValueError(
            "the scheduler of this LLM runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 in the "
            "environment before vllm is imported"
        )
    scheduler = core.scheduler
    if scheduler.scheduler_config.async_scheduling or getattr(core, "batch_queue", None) is not None:
        raise ValueError(
            "this LLM schedules a step before it knows the tokens of the last one; create it with "
            "LLM(..., async_scheduling=False), without pipeline parallelism, to record it"
        )
    groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    windows = [group for group in groups if getattr(group.kv_cache_spec, "sliding_window", None)]
    if len(groups) != 1 or windows:
        raise ValueError(
            f"this model keeps its keys and values in {len(groups)} groups, {len(windows)} with a sliding "
            "window; a trace has one table of blocks per request"
        )
    if scheduler.get_num_unfinished_requests():
        raise ValueError("there are unfinished requests; start recording before requests are added")
    return scheduler


def settings(scheduler: Any) -> dict[str, Any]:
    """Return the scheduler's settings as a header's `config`."""
    kv = scheduler.kv_cache_manager
    return {
        "policy": scheduler.policy.value,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_seqs": scheduler.max_num_running_reqs,
        "long_prefill_token_threshold": scheduler.scheduler_config.long_prefill_token_threshold,
        "num_blocks": kv.block_pool.num_gpu_blocks - NULL_BLOCKS,
        "block_size": scheduler.block_size,
        "prefix_caching": bool(kv.enable_caching),
        "watermark": kv.watermark_blocks,
    }


class VLLMRecorder:
    """Wraps a scheduler of vLLM and records each of its steps."""

    def __init__(self, scheduler: Any, keep: Retention = True, *, wall: bool = False):
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.clock = WallClock() if wall else VirtualClock()
        module = sys.modules.get("vllm")
        name = f"vLLM {getattr(module, '__version__', '')}".strip()
        cached = [block.block_id - NULL_BLOCKS for block in self.pool.blocks if block.block_hash is not None]
        clock = self.clock
        self.header = Header(
            clock.kind, clock.unit, "paged", {"Scheduler": name}, settings(scheduler), [], sorted(cached)
        )
        self.store = TraceStore(self.header, keep)
        self.step = 0
        self.end: End | None = None
        self._names: dict[str, str] = {}  # our ids by vLLM's
        self._taken: set[str] = set()
        self._num_blocks_seen: dict[str, int] = {}
        self._events: list[Event] = []  # since the latest step was decided
        self._record: StepTrace | None = None

    def trace(self) -> Trace:
        """Return the part of the run so far that is kept."""
        return self.store.trace(self.end or self._end())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the scheduler's methods inside the `with`; its end closes the trace."""
        wrappers: dict[str, Callable[..., Any]] = {
            "add_request": self._add,
            "schedule": self._schedule,
            "update_from_output": self._update,
            "finish_requests": self._finish,
        }
        self._original = {name: getattr(self.scheduler, name) for name in wrappers}
        vars(self.scheduler).update(wrappers)  # on this object; the class is not changed
        try:
            yield
        except BaseException as error:
            self.end = self._end("error", error=f"{type(error).__name__}: {error}")
            raise
        else:
            self.end = self._end()
        finally:
            for name in wrappers:
                delattr(self.scheduler, name)
            self.store.finish(self.end or self._end())

    def _end(self, end: str = "", **details: Any) -> End:
        end = end or ("max_steps" if self.scheduler.get_num_unfinished_requests() else "drained")
        return End(end, self.step, self.pool.get_num_free_blocks(), events=list(self._events), **details)

    # ------------------------------------------------------------------------------ the four methods

    def _add(self, request: Any) -> None:
        is_new = request.request_id not in self.scheduler.requests
        self._original["add_request"](request)
        if is_new:  # else more input of a known request
            short = SUFFIX.sub("", request.request_id)
            name = request.request_id if short in self._taken else short
            size, longest, arrival = request.num_prompt_tokens, request.max_tokens, len(self._names)
            self._names[request.request_id] = name
            self._taken.add(name)
            self._events.append(Queued(name, self.clock.now(), size, longest, request.priority, arrival))

    def _finish(self, request_ids: Any, finished_status: Any) -> list[Any]:
        gone: list[Any] = self._original["finish_requests"](request_ids, finished_status)
        self._events += [self._finished(request) for request in gone]
        return gone

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduler, t = self.scheduler, self.clock.now()
        before, free = list(scheduler.running), self.pool.get_num_free_blocks()
        lacking = {request.request_id: self._lacking(request) for request in before}
        output = self._original["schedule"](*args, **kwargs)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        running, num_waiting = list(scheduler.running), scheduler.get_request_counts()[1]
        if not (scheduled or running or num_waiting):  # a step that only releases finished requests
            return output
        events, self._events = self._events, []
        # A request that was preempted between two steps, to empty the prefix cache, is no longer in running.
        preempted = sorted(output.preempted_req_ids, key=[*lacking, *output.preempted_req_ids].index)
        events += preemptions(preempted, lacking, free, self._names.__getitem__)
        _, admitted = changes(before, running)
        events += [self._admission(request, scheduled) for request in admitted]
        self._record = StepTrace(
            step=self.step,
            t=t,
            t_end=t,
            scheduled={self._names[name]: num_tokens for name, num_tokens in scheduled.items()},
            num_batched_tokens=sum(scheduled.values()),
            num_running=len(running),
            num_waiting=num_waiting,
            blocked=self._blocked(scheduled, bool(preempted)),
            blocks=self._new_blocks(scheduled),
            new_tokens={},
            num_free_blocks=self.pool.get_num_free_blocks(),
            num_cached_blocks=len(self.pool.cached_block_hash_to_block),
            events=events,
            draft_token_ids={
                self._names[name]: list(ids) for name, ids in output.scheduled_spec_decode_tokens.items()
            },
        )
        return output

    def _update(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [self.scheduler.requests.get(name) for name in scheduler_output.num_scheduled_tokens]
        known = {request: len(request.output_token_ids) for request in rows if request}
        result = self._original["update_from_output"](scheduler_output, *args, **kwargs)
        record, self._record = self._record, None
        if record is None:
            return result
        self.clock.advance(record)
        record.t_end = self.clock.now()
        for request, num_known in known.items():
            name, token_ids = self._names[request.request_id], list(request.output_token_ids[num_known:])
            if token_ids:
                record.new_tokens[name] = token_ids
            if name in record.draft_token_ids:
                record.num_accepted_tokens[name] = max(0, len(token_ids) - 1)
            if request.is_finished():
                record.events.append(self._finished(request))
        self.step += 1
        self.store.add(record)
        return result

    # ------------------------------------------------------------------------- what a step is made of

    def _table(self, request_id: str) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return [block - NULL_BLOCKS for block in blocks]

    def _lacking(self, request: Any) -> int:
        """Return the blocks that a running request needs in the next step, without regard to the budget."""
        left = request.num_tokens - request.num_computed_tokens
        config = self.header.config
        tokens = request.num_computed_tokens + min(left, config["long_prefill_token_threshold"] or left)
        needed: int = -(-tokens // config["block_size"])
        return max(0, needed - len(self._table(request.request_id)))

    def _admission(self, request: Any, scheduled: dict[str, int]) -> Event:
        # vLLM has counted what it scheduled as computed already.
        cached = request.num_computed_tokens - scheduled[request.request_id]
        blocks = self._table(request.request_id)[: cached // self.header.config["block_size"]]
        self._num_blocks_seen[request.request_id] = len(blocks)
        return Scheduled(self._names[request.request_id], cached, blocks)

    def _new_blocks(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        new_blocks = {}
        for request_id in scheduled:
            table, seen = self._table(request_id), self._num_blocks_seen.get(request_id, 0)
            if len(table) > seen:
                new_blocks[self._names[request_id]] = table[seen:]
                self._num_blocks_seen[request_id] = len(table)
        return new_blocks

    def _blocked(self, scheduled: dict[str, int], preempted: bool) -> Blocked:
        """Return the reason why the front of the queue was not admitted, as far as it is visible."""
        config, waiting = self.header.config, self.scheduler.waiting
        if not waiting:
            return Blocked("empty")
        request = waiting.peek_request()
        needs = -(-request.num_tokens // config["block_size"])  # an upper bound: some may be cached
        needs += config["watermark"] if self.scheduler.running else 0
        name, room = self._names[request.request_id], (needs, self.pool.get_num_free_blocks())
        return blocked(name, self.header, scheduled, len(self.scheduler.running), preempted, *room)

    def _finished(self, request: Any) -> Event:
        self._num_blocks_seen.pop(request.request_id, None)
        return Finished(self._names[request.request_id], str(request.get_finished_reason()))
