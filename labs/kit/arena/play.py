"""Plays a policy on a workload and writes down its decisions. Runs beside the policy, so it is not believed.

A policy is a module with any of `schedule_step`, `policy_key` and `pick_victim`, as in lab-01 and lab-03;
what it lacks is the engine's. referee.py judges the decisions, without the policy.
"""

import json
import sys
from collections.abc import Callable, Iterator
from traceback import extract_tb
from types import ModuleType
from typing import Any

from labs.kit.arena.games import BLOCK_SIZE, BUDGET, GAMES, SLOTS, Game
from mini_engine import request_queue, schedule_step
from mini_engine.block_manager import BlockManager
from mini_engine.interfaces import KVManager
from mini_engine.request import Request
from mini_engine.scheduler import Scheduler
from mini_engine.sim.cost_model import CostModel
from mini_engine.sim.simulate import serve
from mini_engine.trace import Recorder, VirtualClock
from mini_engine.trace.metrics import Metrics

FUNCTIONS = ("schedule_step", "policy_key", "pick_victim")
NONE = f"it has none of {', '.join(FUNCTIONS)}"
MOST_STEPS = 5_000  # a game takes about 1,000; after 5,000 somebody has waited beyond the bound
Decision = dict[str, Any]  # {"ops": calls that moved a request or took memory, "rows": the schedule}


class Waiting:
    """The waiting requests in the order of their keys, which may change with time: each look asks anew."""

    def __init__(self, key: Callable[[Request], Any]):
        self.key, self.requests = key, list[Request]()
        self.push, self.remove = self.requests.append, self.requests.remove

    def peek(self) -> Request:
        return min(self.requests, key=self.key)

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        return request

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self.requests, key=self.key))


class Memory:
    """The KV manager as a policy sees it. It can claim room, and gives none back: preemption does."""

    def __init__(self, kv: KVManager, ops: list[list[Any]]):
        self._kv, self._ops = kv, ops
        self.num_blocks, self.block_size, self.watermark = kv.num_blocks, kv.block_size, kv.watermark
        self.num_new_blocks, self.block_table = kv.num_new_blocks, kv.block_table

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks

    def admit(self, request: Request) -> bool:
        done = self._kv.admit(request)
        if done:
            self._ops.append(["admit", request.request_id])
        return done

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        if self._kv.num_new_blocks(request, num_new_tokens):
            self._ops.append(["allocate", request.request_id, num_new_tokens])
        return self._kv.allocate(request, num_new_tokens)


class PolicyScheduler(Scheduler):
    """The engine's scheduler with a policy's functions in place of its own."""

    def __init__(self, policy: Any, decisions: list[Decision], num_blocks: int):
        kv = BlockManager(num_blocks, BLOCK_SIZE)
        super().__init__(kv, max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS)
        self.decisions, self.ops = decisions, list[list[Any]]()
        self.key = getattr(policy, "policy_key", request_queue.policy_key)
        self.pick_victim = getattr(policy, "pick_victim", None) or self.last
        self.schedule_step = getattr(policy, "schedule_step", schedule_step.schedule_step)
        self.waiting = self.queue()

    def queue(self) -> Waiting:
        return Waiting(lambda request: self.key(request, self.policy))

    def last(self, running: list[Request], policy: str) -> Request:
        return max(running, key=lambda request: self.key(request, policy))

    def schedule(self) -> dict[str, int]:
        if len(self.decisions) == MOST_STEPS:
            raise RuntimeError(f"no end after {MOST_STEPS:,} steps")
        self.ops.clear()
        victims = 0
        while self._is_short():
            victim = self.pick_victim(list(self.running), self.policy)
            if not any(victim is request for request in self.running):
                raise ValueError(f"pick_victim returned {victim!r}, which does not run")
            self.ops.append(["preempt", victim.request_id])
            self.preempt(victim)
            victims += 1
        computed = [(request, request.num_computed_tokens) for request in self.running]
        rows = self.schedule_step(
            self.queue() if victims else self.waiting,
            self.running,
            Memory(self.kv, self.ops),
            max_num_batched_tokens=BUDGET,
            max_num_seqs=SLOTS,
            long_prefill_token_threshold=0,
            clamp=self.clamp,
        )
        if not isinstance(rows, dict):
            raise TypeError(f"schedule_step returned {rows!r}, which is not a dict")
        for request, before in computed:
            if (after := request.num_computed_tokens) != before:
                name = request.request_id
                raise ValueError(f"{name!r} had {before} computed tokens, and {after} after schedule_step")
        self.decisions.append({"ops": list(self.ops), "rows": dict(rows)})
        return rows


def run(
    scheduler: Scheduler, game: Game, seed: int, watch: Callable[[Recorder], object] = lambda recorder: None
) -> Metrics:
    """Serve a game's requests in virtual time; `watch` may replace methods of the recorder."""
    clock = VirtualClock(unit="ms")
    recorder = Recorder(scheduler, clock=clock, keep=False, backend="paged")
    metrics = Metrics(recorder.header)
    clock.cost = CostModel().clock("paged", metrics.fold)
    recorder.consumers.append(metrics)
    watch(recorder)
    serve(recorder, clock, game.arrivals(seed))
    metrics.close(recorder.close("drained").end)
    return metrics


def decide(policy: Any, game: Game, seed: int) -> tuple[list[Decision], str]:
    """Return the policy's decisions, and why they ended before the work did, or ""."""
    decisions: list[Decision] = []
    try:
        run(PolicyScheduler(policy, decisions, game.num_blocks), game, seed)
    except (Exception, SystemExit) as error:
        own = ("policy.py", "starter.py")  # here, and in a sandbox
        places = [one.lineno for one in extract_tb(error.__traceback__) if one.filename in own]
        where = f" (line {places[-1]})" if places else ""
        return decisions, " ".join(f"{type(error).__name__}: {error}".split()) + where
    return decisions, ""


def loaded(source: str) -> ModuleType:
    """Return a policy's file as a new module. Raise ValueError for a file that does not load, or has none of
    the functions."""
    module = sys.modules["policy"] = ModuleType("policy")  # a dataclass looks its module up there
    try:
        exec(compile(source, "policy.py", "exec"), module.__dict__)
    except SyntaxError as error:
        raise ValueError(f"it does not parse, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"it does not load: {type(error).__name__}: {error}") from None
    if not has_functions(module):
        raise ValueError(NONE)
    return module


def has_functions(module: ModuleType) -> bool:
    return any(name in vars(module) for name in FUNCTIONS)


def lines(policy: ModuleType, script: dict[str, Any]) -> list[str]:
    """Return the decisions in one game as the lines that a sandbox answers."""
    game = next(game for game in GAMES if game.name == script["game"])
    decisions, ended = decide(policy, game, script["seed"]) if has_functions(policy) else ([], NONE)
    if ended:
        decisions.append({"ended": ended[:300]})
    return [json.dumps({"call": ["step"], "seen": decision}) for decision in decisions]
