"""Random scripts of an engine's loop around a scheduler: how one is drawn, the memory, and the calls.

Between the steps requests come, are refused, are aborted and preempted, and ids are used again.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from labs.kit.toys.plays import Play, plain
from labs.kit.toys.requests import make_request
from labs.kit.toys.scripts import Script, Skip
from mini_engine.request import Request, RequestStatus

NAMES = ("a", "b", "aa", "c", "d", "e")  # one begins like another
PRIORITIES = (0, 0, 1, 1, 2, 2, 10, 30)


class LoopScript:
    """Draws the calls of an engine's loop; `busy` is how often something comes in between.

    `slots` is the size of the memory in tokens, `prompts` are lengths to choose from; with `is_long` most
    requests run to their max_tokens.
    """

    def __init__(
        self, rng: Random, slots: int, *, prompts: Sequence[int], busy: float, is_long: bool = False
    ):
        self.rng, self.slots, self.prompts, self.busy, self.is_long = rng, slots, prompts, busy, is_long
        self.names = NAMES[: rng.randint(2, len(NAMES))]
        self.has_family = rng.random() < 0.4

    def drawn(self, config: Any, steps: int, calls: Iterable[Any] = (), early: float = 0.0) -> Script:
        """Return a script of some steps; `early` is how often a token comes for a partial chunk."""
        calls = list(calls) or [self.add(name) for name in self.names[: self.rng.randint(1, 4)]]
        for _ in range(steps):
            calls += [*self.between(1.0), ["schedule"], *self.between(0.5)]
            if self.rng.random() < early:
                calls.append(["update", [[5]], [], "too early"])
            calls.append(update := self.update())
            if update[2]:  # of those that were stopped, an id comes again
                calls.append(self.add(self.names[0]))
        return {"config": config, "calls": [*calls, ["pop_all"]]}

    def between(self, chance: float) -> Any:
        """Return what may happen between two calls of the loop."""
        name = self.rng.choice(self.names)
        add, abort, preempt = self.add(name), ["abort", name], ["preempt", name]
        kinds: list[Any] = [[add]] * 4 + [[abort], [preempt], [preempt]]
        kinds += [[abort, add], [preempt, abort], [["pick_victim"]]]
        return self.rng.choice(kinds) if self.rng.random() < chance * self.busy else []

    def add(self, name: str, prompt: int = 0) -> list[Any]:
        rng, slots = self.rng, self.slots
        prompt = prompt or rng.choice(self.prompts)
        most = max(min(slots + 1 - prompt, 12), 1)
        limits: list[int | None] = [*range((most + 1) // 2 if self.is_long else 1, most + 1)]
        if not self.is_long:
            limits = [1, 1, 2, *limits]
        kind = rng.random()
        if kind < 0.1:  # on the edge of what is refused
            prompt = rng.randint(slots - 1, slots + 2)
            limits = [None, None, 0, 1, 2]
        elif kind < 0.3:
            limits = [None, None, slots + 1 - prompt, slots + 2 - prompt]
        more: dict[str, Any] = {}
        if rng.random() < (0.05 if self.is_long else 0.2):
            more[rng.choice(["stop_token_ids", "eos_token_ids"])] = [rng.randint(0, 4)]
        if rng.random() < 0.15:
            more["cached"] = rng.randint(1, 4)
        if self.has_family and rng.random() < 0.8:
            more["family"] = "x"
        return ["add", name, prompt, rng.choice(limits), rng.choice(PRIORITIES), *([more] if more else [])]

    def update(self) -> list[Any]:
        tokens = [[self.rng.randint(0, 9) for _ in range(self.rng.choice([1, 1, 1, 3]))] for _ in range(3)]
        is_stopped = self.rng.random() < (0.05 if self.is_long else 0.2)
        return ["update", tokens, self.rng.choice([[0], [0], [1], [0, 2]]) if is_stopped else []]


class CountingKV:
    """KV memory that only counts. Requests of a family (`cache_salt`) share their prompts' full blocks."""

    def __init__(self, num_blocks: int, block_size: int, watermark: int):
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        # By id: (family, blocks that it shares with the family, all of its blocks)
        self.held: dict[str, tuple[str, int, int]] = {}
        self.cached: dict[str, int] = {}  # by id: tokens that are found when it is admitted
        self.published: list[list[Any]] = []

    def shared(self, family: str) -> int:
        return max((shared for other, shared, _ in self.held.values() if other == family), default=0)

    @property
    def num_free_blocks(self) -> int:
        alone = sum(blocks - shared for _, shared, blocks in self.held.values())
        together = sum(map(self.shared, {family for family, _, _ in self.held.values()}))
        return self.num_blocks - alone - together

    def admit(self, request: Request) -> bool:
        name, family = request.request_id, request.cache_salt
        if name in self.held:
            raise ValueError(f"request {name!r} was admitted already; it holds its blocks")
        blocks = -(-request.num_tokens // self.block_size)
        shared = (request.num_prompt_tokens - 1) // self.block_size if family else 0
        new = blocks - min(shared, self.shared(family))
        if new + (self.watermark if self.held else 0) > self.num_free_blocks:
            return False
        self.held[name] = (family, shared, blocks)
        found = min(self.cached.get(name, 0), request.num_tokens - 1)
        request.num_computed_tokens = request.num_cached_tokens = found
        return True

    def num_new_blocks(self, request: Request, num_new_tokens: int) -> int:
        needed = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, needed - self.num_held(request))

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        new = self.num_new_blocks(request, num_new_tokens)
        if new > self.num_free_blocks:
            return False
        family, shared, blocks = self.held.get(request.request_id, ("", 0, 0))
        self.held[request.request_id] = (family, shared, blocks + new)
        return True

    def cache_blocks(self, request: Request) -> None:
        self.published.append([request.request_id, request.num_computed_tokens, self.num_held(request)])

    def free(self, request: Request) -> None:
        self.held.pop(request.request_id, None)

    def num_held(self, request: Request) -> int:
        return self.held.get(request.request_id, ("", 0, 0))[2]


class LoopPlay(Play):
    """A scheduler on a CountingKV. Requests go by their ids; the next of an id is shown with a stroke: a'."""

    def __init__(self, part: Any, kv: CountingKV, scheduler: Any, several_tokens: bool):
        super().__init__(part)
        self.kv, self.scheduler, self.several_tokens = kv, scheduler, several_tokens
        self.over = False
        self.refused: dict[str, Any] = {}  # outputs of a request whose tokens came too early
        self.scheduled: dict[str, int] | None = None  # of the step that is being computed
        self.rows: dict[str, Request] = {}
        self.ends: list[str] = []  # of the rows, those that get a token
        self.num_steps = 0

    def labels(self, requests: Iterable[Request]) -> list[str]:
        known = {id(request): label for label, request in self.requests.items()}
        return [known.get(id(request), f"<{type(request).__name__}>") for request in requests]

    def add(
        self,
        name: str,
        prompt: int,
        max_tokens: int | None,
        priority: int = 0,
        more: dict[str, Any] | None = None,
    ) -> None:
        self.goes_on()
        more = dict(more or {})
        cached, family = more.pop("cached", 0), more.pop("family", "")
        request = make_request(name, prompt, None, priority=priority, cache_salt=family, **more)
        request.max_tokens = max_tokens  # where the engine has put the model's limit
        label = name
        while label in self.requests:
            label += "'"
        self.requests[label] = request
        self.scheduler.add(request)
        self.kv.cached[name] = cached

    def schedule(self) -> list[Any]:
        self.goes_on()
        if self.scheduled is not None:
            raise Skip  # the last step has not been taken back
        self.scheduled = scheduled = self.scheduler.schedule()
        self.num_steps += 1
        self.lend(f"schedule of step {self.num_steps}", scheduled)
        running = {request.request_id: request for request in self.scheduler.running}
        self.rows = {name: running[name] for name in scheduled if name in running}
        self.ends = [name for name, request in self.rows.items() if request.num_new_tokens == scheduled[name]]
        return [[name, num_tokens] for name, num_tokens in scheduled.items()]

    def update(self, tokens: list[list[int]], stopped: Any = (), too_early: str = "") -> dict[str, Any]:
        self.goes_on()
        ends, rows, scheduled = self.ends, self.rows, self.scheduled or {}
        # Not in row order: that is not promised.
        ending = reversed([*enumerate(ends)])
        sampled = {name: self.fitting(rows[name], tokens[i % len(tokens)]) for i, name in ending}
        stopped = [name for i, name in enumerate(ends) if i in stopped]
        running = list(self.scheduler.running)
        early = [name for name, r in rows.items() if name not in ends and r in running]
        if too_early:
            if not early:
                raise Skip
            sampled |= {early[0]: [*tokens[0]]}
        self.scheduled, self.rows, self.ends = None, {}, []
        self.lend(f"sampled in step {self.num_steps}", sampled)
        self.lend(f"stopped in step {self.num_steps}", stopped)
        try:
            finished = self.scheduler.update(scheduled, sampled, *([stopped] if stopped else []))
        except ValueError:
            if too_early:  # a caller can only abort all then: nothing may be left behind
                self.over = True
                self.refused = {f"the list of {early[0]}'s outputs": [*rows[early[0]].output_token_ids]}
                for request in running:
                    self.scheduler.abort(request.request_id)
            raise
        self.lend(f"finished in step {self.num_steps}", finished)
        return {"sampled": plain(sampled), "stopped": stopped, "finished": self.labels(finished)}

    def fitting(self, request: Request, tokens: list[int]) -> list[int]:
        """Return the tokens, or the first alone where several might lack room and do not end the request."""
        ends = {*request.sampling_params.stop_token_ids, *request.eos_token_ids}
        is_end = len(request.output_token_ids) + len(tokens) >= (request.max_tokens or 0)
        return [*tokens] if self.several_tokens or is_end or ends & {*tokens} else tokens[:1]

    def abort(self, name: str) -> Any:
        self.goes_on()
        return self.scheduler.abort(name)

    def preempt(self, name: str) -> None:
        self.goes_on()
        request = next((r for r in self.scheduler.running if r.request_id == name), None)
        if request is None:
            raise Skip
        self.scheduler.preempt(request)

    def pop_all(self) -> list[str]:
        """Return the queue as it is popped, which shows whether it is a heap."""
        self.goes_on()
        self.over = True
        queue = self.scheduler.waiting
        return self.labels([queue.pop() for _ in range(len(queue))])

    def goes_on(self) -> None:
        if self.over:
            raise Skip

    def seen(self) -> dict[str, Any]:
        if self.over:
            refused, self.refused = self.refused, {}
            return refused
        kv, running = self.kv, list(self.scheduler.running)
        published, kv.published = sorted(kv.published), []
        seen = queue_seen(self.scheduler.waiting, self.labels, "waiting") | {
            "running": self.labels(running),
            "num_free_blocks": kv.num_free_blocks,
            "has_work": self.scheduler.has_work,
            "published (id, num_computed_tokens, blocks)": published,
            "changed, though the caller holds it": self.all_changed(),
        }
        for label, request in self.requests.items():
            values = plain(request) | {"blocks": kv.num_held(request)}
            values["status"] = getattr(request.status, "value", request.status)
            if request.status is not RequestStatus.RUNNING:
                del values["num_cached_tokens"], values["blocks"]
            if request.status is RequestStatus.FINISHED:
                del values["num_computed_tokens"]
            seen |= {f"{label}.{name}": value for name, value in values.items()}
        return seen


def queue_seen(queue: Any, labels: Any, name: str) -> dict[str, Any]:
    """Return all that a queue shows without giving a request away."""
    requests = list(queue)
    front = labels([queue.peek()]) if len(queue) else []
    return {name: labels(requests), f"front of {name}": front, f"len of {name}": len(queue)}
