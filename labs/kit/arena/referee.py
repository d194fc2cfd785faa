"""Judges a policy by its decisions alone: they are played on memory and requests that it never touches.

A decision that breaks a rule of mini_engine.invariants, or lets a request wait beyond BOUND, is a Foul.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from labs.kit.arena.games import BLOCK_SIZE, BOUND, BUDGET, ITL, SLOTS, Game
from labs.kit.arena.play import Decision, run
from mini_engine.block_manager import BlockManager
from mini_engine.invariants import InvariantError, Monitor
from mini_engine.request import Request, RequestStatus
from mini_engine.scheduler import Scheduler
from mini_engine.sim.cost_model import CostModel, StepLoad
from mini_engine.trace import Recorder
from mini_engine.trace.metrics import Metrics, RequestMetrics

# Steps between two looks at all requests and blocks. A policy cannot touch them, so a look finds nothing but
# mistakes of this program.
LOOK = 50


class Foul(Exception):
    """A rule is broken; its text is the sentence."""


@dataclass(frozen=True)
class Score:
    """A policy's outcome in a game.

    goodput    the share of the requests that met both limits
    fairness   Jain's index (1984) of the speeds, a request's time alone by its time here: 1 if all are
               slowed down alike, 1/n if one of n has all
    ttft, itl  the 99th percentiles, in ms
    """

    goodput: float
    fairness: float
    ttft: float
    itl: float


class Replay(Scheduler):
    """Carries out decisions that were made elsewhere. Raises Foul for one that cannot be carried out."""

    def __init__(self, decisions: Iterable[Decision], ended: str, num_blocks: int):
        kv = BlockManager(num_blocks, BLOCK_SIZE)
        super().__init__(kv, max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS)
        self.decisions, self.ended, self.num_steps = iter(decisions), ended, 0
        self.carried: dict[str, Any] = {
            "preempt": self.preempt,
            "admit": self._admit,
            "allocate": self._allocate,
        }

    def schedule(self) -> dict[str, int]:
        try:
            decision = next(self.decisions, None)
            if decision is None:
                raise Foul(f"the policy ended: {self.ended or 'it decided nothing more'}")
            rows = self.carried_out(decision)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise Foul(f"step {self.num_steps}: the decision cannot be read ({error})") from None
        except Foul as foul:
            raise Foul(f"step {self.num_steps}: {foul}") from None
        self.num_steps += 1
        return rows

    def carried_out(self, decision: Decision) -> dict[str, int]:
        for name, request_id, *amount in decision["ops"]:
            if request_id not in self._requests:
                raise Foul(f"{name} of {request_id!r}, which is not there")
            request = self._requests[request_id]
            if (name == "admit") == (request in self.running):
                raise Foul(f"{name} of {request_id!r}, which is {request.status.value}")
            self.carried[name](request, *amount)
        rows = decision["rows"]
        for request_id, amount in rows.items():
            if type(amount) is not int:
                raise Foul(f"{request_id!r} is scheduled for {amount!r} tokens")
        order = {request.request_id: number for number, request in enumerate(self.running)}
        return dict(sorted(rows.items(), key=lambda row: order.get(row[0], -1)))

    def _admit(self, request: Request) -> None:
        if not self.kv.admit(request):
            raise Foul(f"{request.request_id!r} is admitted, and memory has no room for it")
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING

    def _allocate(self, request: Request, num_tokens: int) -> None:
        if not self.kv.allocate(request, num_tokens):
            computes = f"{request.request_id!r} is to compute {num_tokens} tokens"
            raise Foul(f"{computes}, and memory has no room for them")


class Watch(Monitor):
    """The engine's monitor with a bound on waiting, and without the rules that a policy makes itself: the
    order, the victim, the turns."""

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        self.clock = recorder.clock
        self.since: dict[str, float] = {}  # the time at which a token was last computed, or it came
        vars(recorder).update({name: getattr(self, name) for name in ("add", "schedule", "update")})

    def _require(self, rule: str, holds: bool, what: str, request: Request | None = None) -> None:
        if not holds and rule not in ("order", "victim", "turns"):
            super()._require(rule, holds, what, request)

    def add(self, request: Request) -> None:
        self._add(request)
        self.known[request.request_id] = request
        self.since[request.request_id] = self.clock.now()

    def schedule(self) -> dict[str, int]:
        now = self.clock.now()
        scheduled = super().schedule() if self.step % LOOK == 0 else self._scheduled()
        for request_id in self.known:
            if (waited := now - self.since[request_id]) > BOUND:
                has_waited = f"step {self.step}: {request_id!r} has waited {waited / 1000:.1f} s"
                raise Foul(f"{has_waited}; the bound is {BOUND / 1000:g} s")
            if request_id in scheduled:
                self.since[request_id] = now
        return scheduled

    def _scheduled(self) -> dict[str, int]:
        """Return the step, after the checks of what a policy decides."""
        scheduled, limit = self._schedule(), self.scheduler.max_num_seqs
        running = len(self.scheduler.running)
        self._require("slots", running <= limit, f"{running} run on {limit} slots")
        self._check_rows(scheduled)
        self._require("progress", bool(scheduled), f"nothing is scheduled, and {len(self.known)} are served")
        return scheduled

    def update(self, *step: Any) -> list[Request]:
        if self.step % LOOK == 0:
            return super().update(*step)
        finished = self._update(*step)
        for request in finished:
            del self.known[request.request_id]
        self.step += 1
        return finished


def judged(game: Game, seed: int, decisions: Sequence[Decision], ended: str = "") -> Score:
    """Return the score of a policy's decisions. Raise Foul, with the sentence, for one that breaks a rule."""
    try:
        return score(game, run(Replay(decisions, ended, game.num_blocks), game, seed, Watch))
    except InvariantError as error:
        raise Foul(str(error)) from None


def score(game: Game, metrics: Metrics) -> Score:
    ttfts, gaps, speeds, num_good = list[float](), list[float](), list[float](), 0
    requests = metrics.requests().values()
    for request in requests:
        assert request.ttft is not None and request.e2e is not None  # all have finished
        own = list(request.itl or ())
        num_good += request.ttft <= game.ttft_limit(request.priority) and max(own, default=0) <= ITL
        ttfts.append(request.ttft)
        gaps += own
        speeds.append(alone(request) / request.e2e)
    fairness = sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds))
    p99s = (quantiles(times, n=100, method="inclusive")[-1] for times in (ttfts, gaps))
    return Score(num_good / len(requests), fairness, *p99s)


def alone(request: RequestMetrics) -> float:
    """Return the milliseconds that a request takes with the engine to itself and nothing cached."""
    cost, prompt = CostModel(), request.num_prompt_tokens
    chunks = [(start, min(BUDGET, prompt - start)) for start in range(0, prompt, BUDGET)]
    loads = [StepLoad(1, size, start + size) for start, size in chunks]
    loads += [StepLoad(1, 1, prompt + number) for number in range(1, request.num_output_tokens)]
    return sum(map(cost.step_time, loads))
