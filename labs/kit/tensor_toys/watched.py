"""An engine on a toy model, for random scripts: the calls inside a step are written down, and can fail.

A token is some bytes: a letter, two of them, half a letter; the last one ends a text. It needs torch.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from labs.kit.toys.driver import ids
from labs.kit.toys.plays import Play, differences, plain
from labs.kit.toys.scripts import Skip
from mini_engine.engine import Engine
from mini_engine.model import ModelConfig
from mini_engine.outputs import Delta
from mini_engine.parts import NoWorkError, Parts
from mini_engine.request import Request, SamplingParams

VOCABULARY = (b"a", b"b", b"c", b"ab", b"ba", b"ca", b" ", b"\xc3", b"\xa9", b"")
SIZE, EOS = len(VOCABULARY), len(VOCABULARY) - 1
PATIENCE = 60  # steps of one call
FAULTY = ("schedule", "forward", "sample")  # nothing has been written when one of these fails
ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (NoWorkError, RuntimeError, KeyError, OSError)}
TOY = SimpleNamespace(config=ModelConfig("llama", SIZE, 4, 4, 1, 1, 1, 4, 64), dtype=torch.float32)


class ToyTokenizer:
    eos_token_ids, special_token_ids = (EOS,), frozenset({EOS})
    default_sampling_params: dict[str, Any] = {}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return b"".join(VOCABULARY[i] for i in ids).decode(errors="replace")


class ToyBackend:
    """Its logits are a hash of what the request's slots really hold: what is stale or missing shows."""

    name = "toy"

    def __init__(self, model: object, kv: Any, parts: object):
        self.kv, self.slots = kv, dict[int, tuple[int, int]]()

    def forward(self, rows: Sequence[Any]) -> torch.Tensor:
        for request, num_tokens, _ in rows:
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            held = enumerate(request.token_ids(start, end), start)
            self.slots.update(zip(self.kv.slot_mapping(request, start, end), held, strict=True))
        ends = [(request, request.num_computed_tokens + n) for request, n, is_last in rows if is_last]
        return torch.tensor([self.logits(request, end) for request, end in ends]).reshape(-1, SIZE)

    def logits(self, request: Request, end: int) -> list[float]:
        held = [self.slots.get(slot) for slot in self.kv.slot_mapping(request, 0, end)]
        digest = hashlib.blake2b(repr(held).encode(), digest_size=2 * SIZE).digest()
        values = [(digest[2 * i] * 256 + digest[2 * i + 1]) / 8192 for i in range(SIZE)]
        return [*values[:EOS], values[EOS] - 1]  # the end of a text comes seldom


class WatchedEngine(Play):
    """An engine between two steps, and what its parts are called with in a step.

    `parts` in the config name those of the lab; the others are the engine's.
    """

    def __init__(self, part: Any, config: dict[str, Any]):
        super().__init__(part)
        settings = dict(config)
        mine = {name: getattr(part, name) for name in settings.pop("parts")}
        self.step_of_part: Any = mine.get("step", Parts().step)
        parts = replace(Parts(), **mine | {"attend_backend": ToyBackend, "step": self.step_watched})
        toy: Any = TOY
        tokenizer: Any = ToyTokenizer()
        self.engine = Engine(toy, tokenizer, parts=parts, watermark=0, **settings)
        self.came: list[Request] = []  # all of them
        self.inside, self.served, self.state = False, list[Request](), dict[str, Any]()
        self.fault, self.num_steps = "", 0
        self.calls, self.deltas = list[str](), list[Any]()
        scheduler = self.engine.scheduler
        self.watch(scheduler, "schedule", lambda: [])
        self.watch(self.engine.backend, "forward", words_of_rows)
        self.watch(self.engine, "sample", lambda logits, requests: ids(requests))
        self.watch(scheduler, "update", words_of_update)
        self.watch(self.engine, "collect", lambda requests, stopped: ids(requests) + words(stopped))

    def add(
        self, name: str, prompt: list[int], max_tokens: int, more: dict[str, Any], by: str = "add_request"
    ) -> Any:
        if name in self.engine.requests:
            raise Skip
        options = {"request_id": name, "priority": more.get("priority", 0)}
        sampling = {"temperature": 0.0} | {key: value for key, value in more.items() if key != "priority"}
        added = getattr(self.engine, by)(prompt, SamplingParams(max_tokens=max_tokens, **sampling), **options)
        self.came.append(self.engine.requests[name])
        return added

    def step(self) -> None:
        self.engine.step()

    def abort(self, request_id: str) -> bool:
        return self.engine.abort(request_id)

    def fails(self, name: str, error: str) -> None:
        """From now on, until it has happened: this part of the engine raises when it is called next."""
        self.fault, self.error = name, ERRORS[error]

    def schedules_nothing(self) -> None:
        """From now on, until it has happened: the scheduler's next schedule is empty."""
        self.fault = "nothing"

    def seen(self) -> dict[str, Any]:
        scheduler, renamed = self.engine.scheduler, dict[int, int]()
        seen: dict[str, Any] = {
            "calls in a step": self.calls,
            "Deltas": self.deltas,
            "waiting": ids(scheduler.waiting),
            "running": ids(scheduler.running),
            "engine.requests": list(self.engine.requests),
            "inboxes": sorted(self.engine.inboxes),
            "free blocks": scheduler.kv.num_free_blocks,
            "cached blocks": scheduler.kv.num_cached_blocks,
        }
        for number, request in enumerate(self.came):
            table = scheduler.kv.block_table(request) if request.finish_reason is None else []
            state = plain(request) | {
                "status": request.status.value,
                "block_table": [renamed.setdefault(block, len(renamed)) for block in table],
            }
            name = f"request {number}, {request.request_id}: "
            seen |= {name + field: value for field, value in state.items() if value}
        self.calls, self.deltas, self.num_steps = [], [], 0
        return seen

    # ---- what is called in a step

    def step_watched(self, engine: Any) -> list[Delta]:
        self.inside, self.served = True, list(engine.requests.values())
        self.note()
        try:
            deltas: list[Delta] = self.step_of_part(engine)
            self.untouched("the end")
            self.lend(f"list of {len(self.lent)}", deltas)
            self.deltas += map(delta_as_json, deltas)
            return deltas
        finally:
            self.inside = False

    def watch(self, owner: Any, name: str, in_words: Callable[..., list[str]]) -> None:
        """Write down each call of owner.name in a step, and let it fail when its turn has come."""
        call = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.inside:
                return call(*args, **kwargs)
            said = in_words(*args, **kwargs)
            self.untouched(name)
            if said or name not in ("sample", "collect"):  # without a request they may be left out
                self.calls.append(" ".join([name, *said]))
                if self.fault == name:
                    self.fault = ""
                    raise self.error
            result = self.scheduled(call) if name == "schedule" else call(*args, **kwargs)
            self.note()
            if isinstance(result, dict):
                self.lend(name, result)
            return result

        setattr(owner, name, watched)

    def scheduled(self, call: Callable[[], Any]) -> Any:
        self.num_steps += 1
        if self.num_steps > PATIENCE:
            raise RuntimeError(f"no end after {PATIENCE} steps")
        if self.fault == "nothing":
            self.fault = ""
            return {}
        return call()

    def note(self) -> None:
        self.state = plain({request.request_id: request for request in self.served})

    def untouched(self, name: str) -> None:
        """Write down what the step itself has changed since the call before: there should be nothing."""
        before = self.state
        self.note()
        changed = [*differences("request", before, self.state), *self.all_changed()]
        self.calls += [f"before {name}, {what} has been changed" for what in changed]


def words(things: Any) -> list[str]:
    return [f"{name}:{value}" for name, value in sorted(dict(things).items())]


def words_of_rows(rows: Iterable[Any]) -> list[str]:
    return [f"{request.request_id}:{n}{'+' if is_last else ''}" for request, n, is_last in rows]


def words_of_update(scheduled: Any, sampled: Any, stopped: Iterable[str] = ()) -> list[str]:
    return [*words(scheduled), *words(sampled), *sorted(stopped)]


def delta_as_json(delta: Delta) -> list[Any]:
    return [delta.request_id, delta.token_ids, delta.text, delta.finish_reason, delta.stop_reason]
