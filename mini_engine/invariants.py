"""A monitor for any run: after each call of a scheduler, every rule that must always hold is checked.

    with watch(llm):                  # an LLM, an Engine, or a Scheduler of your own
        llm.generate(prompts)

It reads public state only and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mini_engine.interfaces import SchedulerLike, StepCachingKV
from mini_engine.request import Request, RequestStatus
from mini_engine.request_queue import policy_key

RULES = {
    "budget": "a step computes at most max_num_batched_tokens tokens",
    "threshold": "a request computes at most long_prefill_token_threshold tokens in a step, if that is set",
    "slots": "at most max_num_seqs requests run",
    "rows": "a schedule names running requests, in their order, with at least one token each",
    "computed": "a request never computes more tokens than it has",
    "turns": "each running request gets a token in every step",
    "progress": "a step with requests to serve computes something",
    "drafts": "drafts end before max_tokens, and after a step no block is held beyond a request's tokens",
    "order": "requests are admitted in policy order, and none in a step that preempted",
    "victim": "in policy order, a preempted request comes after all that keep running",
    "outputs": "tokens that were given are never changed or removed",
    "once": "each unfinished request is in waiting or in running, once",
    "blocks": "each block is free or held by running requests, whose tables have room for what they compute",
    "shared": "a block in two tables holds one text, under one cache salt; the first request computes it",
    "written": "no slot is written by two requests; others read only what an earlier row fills wholly",
    "finished": "a finished request is reported once, has its reason, and holds no block",
}


class InvariantError(RuntimeError):
    """A rule of RULES is broken. Has `rule`, `step` (from 0, while watched), `request_id` and `seed`."""

    def __init__(self, rule: str, what: str, step: int, request_id: str | None, seed: object):
        self.rule, self.step, self.request_id, self.seed = rule, step, request_id, seed
        whose = "" if request_id is None else f", request {request_id!r}"
        again = "" if seed is None else f"; replay it with seed {seed}"
        super().__init__(f"step {step}{whose}: {what} (rule {rule!r}: {RULES[rule]}){again}")


@contextmanager
def watch(run: Any, seed: object = None) -> Iterator[Monitor]:
    """Check each call of `run`'s scheduler inside the block; the first broken rule raises InvariantError.

    run   an LLM, an Engine, or an object with a scheduler's methods; it may have requests already
    seed  the seed of a random run; the error names it
    """
    engine = getattr(run, "engine", run)
    scheduler = engine if hasattr(engine, "schedule") else engine.scheduler
    monitor = Monitor(scheduler, seed)
    watched = {name: getattr(monitor, name) for name in ("add", "abort", "schedule", "update")}
    before = {name: vars(scheduler)[name] for name in watched if name in vars(scheduler)}
    vars(scheduler).update(watched)
    try:
        yield monitor
    finally:
        for name in watched:
            del vars(scheduler)[name]
        vars(scheduler).update(before)


class Monitor:
    """Replaces a scheduler's four methods by checked ones. `step` counts the completed steps."""

    def __init__(self, scheduler: SchedulerLike, seed: object = None):
        self.scheduler, self.kv, self.seed, self.step = scheduler, scheduler.kv, seed, 0
        # Bound now, because `watch` replaces them.
        self._add = scheduler.add
        self._abort: Any = scheduler.abort  # a Recorder's takes the reason, too
        self._schedule, self._update = scheduler.schedule, scheduler.update
        self.known = {r.request_id: r for r in (*scheduler.waiting, *scheduler.running)}
        # Whether a block may be shared that is computed in this step, and the tokens of the step.
        self.shares_in_step = isinstance(self.kv, StepCachingKV) and self.kv.caches_scheduled
        self.scheduled: dict[str, int] = {}

    # -------------------------------------------------------------------------------- the four calls

    def add(self, request: Request) -> None:
        self._add(request)
        self.known[request.request_id] = request
        self._check_state()

    def abort(self, request_id: str, *reason: str) -> bool:
        request = self.known.get(request_id)
        found: bool = self._abort(request_id, *reason)
        if found and request is not None:
            self._check_gone(request)
            self.known.pop(request_id, None)
        self._check_state()
        return found

    def schedule(self) -> dict[str, int]:
        scheduler = self.scheduler
        # An update that raised may have ended requests.
        self.known = {n: r for n, r in self.known.items() if r.status is not RequestStatus.FINISHED}
        queued, running = list(scheduler.waiting), list(scheduler.running)
        texts = {request: tuple(request.output_token_ids) for request in (*queued, *running)}
        self.scheduled = {}  # an update that raised has left it
        scheduled = self._schedule()
        self.scheduled = scheduled if self.shares_in_step else {}
        self._check_state()
        self._check_rows(scheduled)
        self._check_order(queued, running)
        self._check_written(scheduled)
        for request, text in texts.items():
            self._require("outputs", tuple(request.output_token_ids) == text, "its outputs differ", request)
        moves = bool(scheduled) or not scheduler.has_work
        left = f"{len(scheduler.waiting)} waiting and {len(scheduler.running)} running"
        self._require("progress", moves, f"nothing is scheduled with {left}")
        return scheduled

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        running = list(self.scheduler.running)
        texts = {request: tuple(request.output_token_ids) for request in running}
        finished = self._update(scheduled, sampled, stopped)
        self.scheduled = {}
        for request, text in texts.items():
            given = text + tuple(sampled.get(request.request_id, ()))
            now = tuple(request.output_token_ids)
            kept = now[: len(text)] == text and given[: len(now)] == now
            self._require("outputs", kept, f"its outputs were {text}, are {now}", request)
        twice = len({id(request) for request in finished}) < len(finished)
        self._require("finished", not twice, "a request is reported as finished twice")
        over = [request for request in running if request.finish_reason]
        for request in over:
            self._require("finished", request in finished, "it has ended and is not reported", request)
        for request in finished:
            self._require("finished", request in over, "it is reported and has not ended", request)
            self._check_gone(request)
            self.known.pop(request.request_id, None)
        self._check_state()
        for request in self.scheduler.running:
            self._require("computed", request.num_new_tokens > 0, "it has nothing left to compute", request)
            table, size = self.kv.block_table(request), self.kv.block_size
            needed = -(-request.num_tokens // size)
            self._require("drafts", len(table) <= needed, f"{len(table)} blocks, {needed} needed", request)
        self.step += 1
        return finished

    # ------------------------------------------------------------------------------------- the rules

    def _require(self, rule: str, holds: bool, what: str, request: Request | None = None) -> None:
        if not holds:
            name = None if request is None else request.request_id
            raise InvariantError(rule, what, self.step, name, self.seed)

    def _check_state(self) -> None:
        """Check the rules that hold between any two calls."""
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        limit = self.scheduler.max_num_seqs
        self._require("slots", len(running) <= limit, f"{len(running)} run on {limit} slots")
        found: dict[int, Request] = {}
        for request in (*waiting, *running):
            self._require("once", id(request) not in found, "it is there twice", request)
            found[id(request)] = request
            known = self.known.get(request.request_id) is request
            self._require("once", known, "it never came, or has gone", request)
            computed, most = request.num_computed_tokens, request.num_tokens
            self._require("computed", 0 <= computed <= most, f"{computed} of {most} tokens computed", request)
        for request in self.known.values():
            self._require("once", id(request) in found, "it is neither in waiting nor in running", request)
        for requests, status in ((waiting, RequestStatus.WAITING), (running, RequestStatus.RUNNING)):
            for request in requests:
                self._require("once", request.status is status, f"its status is {request.status}", request)
        self._check_blocks(waiting, running)

    def _check_blocks(self, waiting: list[Request], running: list[Request]) -> None:
        kv = self.kv
        try:
            kv.check()
        except RuntimeError as error:
            raise InvariantError("blocks", str(error), self.step, None, self.seed) from error
        for request in waiting:
            self._require("blocks", not kv.block_table(request), "it waits and holds blocks", request)
        holders: dict[int, tuple[int, Request]] = {}
        for request in running:
            table = kv.block_table(request)
            room = len(table) * kv.block_size
            self._require("blocks", room >= request.num_computed_tokens, f"it has room for {room}", request)
            self._require("blocks", len(set(table)) == len(table), f"a block twice in {table}", request)
            for index, block_id in enumerate(table):
                in_pool = 0 <= block_id < kv.num_blocks
                self._require("blocks", in_pool, f"block {block_id} is not in the pool", request)
                first_index, first = holders.setdefault(block_id, (index, request))
                if first is not request:
                    end = (index + 1) * kv.block_size
                    alike = index == first_index and request.cache_salt == first.cache_salt
                    alike = alike and request.token_ids(0, end) == first.token_ids(0, end)
                    # `running` is in order of admission: the first has computed it, found it computed, or
                    # computes it in this step.
                    num_new = self.scheduled.get(first.request_id, 0)
                    alike = alike and first.num_computed_tokens + num_new >= end
                    self._require("shared", alike, f"block {block_id} is {first.request_id!r}'s too", request)
        held, free = len(holders), kv.num_free_blocks
        self._require("blocks", held + free == kv.num_blocks, f"{held} held + {free} free of {kv.num_blocks}")

    def _check_rows(self, scheduled: dict[str, int]) -> None:
        most = self.scheduler.long_prefill_token_threshold
        running = {request.request_id: request for request in self.scheduler.running}
        for name, num_tokens in scheduled.items():
            self._require("rows", name in running, f"{name!r} is scheduled and does not run")
            request = running[name]
            self._require("rows", num_tokens >= 1, f"it is scheduled for {num_tokens} tokens", request)
            fits = not most or num_tokens <= most
            self._require("threshold", fits, f"{num_tokens} tokens, {most} at most", request)
            left = request.num_new_tokens + len(request.spec_token_ids)
            self._require("computed", num_tokens <= left, f"{num_tokens} tokens of {left} left", request)
            drafts, longest = len(request.spec_token_ids), request.max_tokens or 0
            ends = not drafts or len(request.output_token_ids) + drafts < longest
            self._require("drafts", ends, f"{drafts} drafts, {longest} tokens at most", request)
            room = len(self.kv.block_table(request)) * self.kv.block_size
            end = request.num_computed_tokens + num_tokens
            self._require("blocks", end <= room, f"it computes up to {end} with room for {room}", request)
        rows = [name for name in running if name in scheduled]
        self._require("rows", list(scheduled) == rows, f"rows {list(scheduled)} of running {rows}")
        total, budget = sum(scheduled.values()), self.scheduler.max_num_batched_tokens
        self._require("budget", total <= budget, f"{total} tokens of a budget of {budget}")
        for name, request in running.items():
            self._require("turns", name in scheduled, "it runs and is not scheduled", request)

    def _check_order(self, queued: list[Request], before: list[Request]) -> None:
        """Check the requests that were admitted and preempted since the step began."""
        scheduler = self.scheduler

        def key(request: Request) -> tuple[int, int]:
            return policy_key(request, scheduler.policy)

        after, waiting = list(scheduler.running), list(scheduler.waiting)
        were, are, fresh = set(before), set(after), set(queued)
        gone = [request for request in before if request not in are]
        admitted = [request for request in after if request not in were]
        stay = [request for request in before if request in are]
        self._require("order", after == stay + admitted, "running is not in order of admission")
        for request in admitted:
            self._require("order", not gone, "it is admitted in a step that preempted", request)
            self._require("order", request in fresh, "it runs and was not waiting", request)
        for earlier, request in zip(admitted, admitted[1:], strict=False):
            self._require("order", key(earlier) < key(request), "it should have come earlier", request)
        for request in waiting if admitted else ():
            self._require("order", key(admitted[-1]) < key(request), "another has passed it", request)
        for request in gone:
            worst = all(key(other) < key(request) for other in stay)
            self._require("victim", worst, "it is preempted, and one that comes later runs on", request)

    def _check_written(self, scheduled: dict[str, int]) -> None:
        readers: dict[int, list[Request]] = {}
        for request in self.scheduler.running:
            for block_id in self.kv.block_table(request):
                readers.setdefault(block_id, []).append(request)
        written: dict[int, Request] = {}
        for request in self.scheduler.running:
            start, size = request.num_computed_tokens, self.kv.block_size
            end = start + scheduled.get(request.request_id, 0)
            for position, slot in enumerate(self.kv.slot_mapping(request, start, end), start):
                first, *behind = readers[slot // size]
                edge = (position // size + 1) * size
                filled = end >= edge and all(reader.num_computed_tokens >= edge for reader in behind)
                alone = first is request and (not behind or self.shares_in_step and filled)
                self._require("written", alone, f"slot {slot} is in a block that is not its own", request)
                self._require("written", slot not in written, f"slot {slot} is written twice", request)
                written[slot] = request

    def _check_gone(self, request: Request) -> None:
        """Check a request that has finished or was aborted."""
        table = list(self.kv.block_table(request))
        self._require("finished", not table, f"it has ended and holds blocks {table}", request)
        over = request.status is RequestStatus.FINISHED and bool(request.finish_reason)
        self._require("finished", over, f"status {request.status}, reason {request.finish_reason}", request)
