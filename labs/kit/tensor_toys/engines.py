"""Whole engines for scenarios, on a tiny random model or an embedded one. This module needs torch.

An engine runs on a virtual clock and records its trace; `play` serves a scenario to its end.
"""

from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from labs.kit.tensor_toys.models import random_model, run_alone
from labs.kit.toys.driver import Scenario, play_out
from labs.kit.toys.requests import make_request
from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.outputs import Delta
from mini_engine.parts import Parts
from mini_engine.request import Request, SamplingParams
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Trace, VirtualClock

torch.set_num_threads(1)  # small tensors: a second thread costs more than it gives

# One layer, four heads that share two pairs of keys and values: a wrong key changes the text.
TINY = ModelConfig("llama", 61, 24, 32, 1, 4, 2, 6, 256)
SAMPLING = ("max_tokens", "stop", "stop_token_ids", "ignore_eos", "temperature", "seed")


@cache
def model(name: str = "tiny") -> CausalLM:
    """In float64, where no near tie can hide or make a difference: a random model, or one by its name."""
    return random_model(TINY, 0.4) if name == "tiny" else load_model(resolve(name), dtype="float64")


@cache
def tokenizer(name: str) -> Tokenizer | None:
    """The tiny model has none: its requests are made of token ids."""
    return None if name == "tiny" else load_tokenizer(resolve(name))


def prompt_of(entry: dict[str, Any], name: str = "tiny") -> list[int]:
    """A request's prompt as token ids: given as text, as ids, or as how many to make up."""
    if isinstance(entry["prompt"], str):
        encoder = tokenizer(name)
        assert encoder is not None, "the tiny model takes token ids"
        return encoder.encode(entry["prompt"])
    made = make_request(entry["id"], entry["prompt"]).prompt_token_ids
    return [token % TINY.vocab_size for token in made]


def sampling_of(entry: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0} | {key: entry[key] for key in SAMPLING if key in entry})


def alone(entry: dict[str, Any], name: str = "tiny") -> list[int]:
    """The tokens of a request with no engine at all: one sequence, one dense cache, one loop."""
    return list(run_alone(model(name), tuple(prompt_of(entry, name)), sampling_of(entry)))


def make_engine(parts: Parts | None = None, names: dict[str, str] | None = None, **config: Any) -> Engine:
    """An Engine for a scenario's config with these parts; `names` say whose they are."""
    settings = {"num_blocks": 64, "block_size": 4, "watermark": 0, "max_num_batched_tokens": 16} | config
    name = settings.pop("model", "tiny")
    settings["enable_prefix_caching"] = settings.pop("prefix_caching", False)
    if names and names.get("attend_backend") == "lab-04":
        settings["enable_prefix_caching"] = False  # dense caches share nothing
    settings = {"max_num_seqs": min(8, settings["max_num_batched_tokens"])} | settings
    settings |= {"record": True, "clock": VirtualClock(), "parts": parts, "part_names": names or {}}
    return Engine(model(name), tokenizer(name), **settings)


def add(engine: Engine, entry: dict[str, Any], name: str = "tiny") -> Request:
    """Add a scenario's request to an engine."""
    options = {"request_id": entry["id"], "priority": entry.get("priority", 0)}
    return engine.requests[engine.add_request(prompt_of(entry, name), sampling_of(entry), **options)]


@dataclass
class Played:
    """A scenario that was run: its trace, and for each turn the Deltas that `step` returned."""

    trace: Trace
    turns: list[list[Delta]]
    engine: Engine

    def deltas(self, request_id: str) -> list[Delta]:
        return [delta for turn in self.turns for delta in turn if delta.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas(request_id) for token in delta.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(delta.text for delta in self.deltas(request_id))


def play(engine: Engine, scenario: Scenario, *, raise_errors: bool = True) -> Played:
    """Run a scenario on an engine of its config: arrivals, aborts, step, turn by turn, until all is done."""
    turns: list[list[Delta]] = []
    counters: list[tuple[int, int]] = []

    def step() -> bool:
        nonlocal counters
        turns.append(engine.step() if engine.has_work else [])
        before, counters = counters, [(r.num_computed_tokens, r.num_tokens) for r in engine.requests.values()]
        return counters != before or not engine.has_work

    recorder: Any = engine.scheduler
    arrives = partial(add, engine, name=scenario["config"].get("model", "tiny"))
    trace = play_out(recorder, scenario, arrives, step, engine, raise_errors=raise_errors)
    return Played(trace, turns, engine)


@dataclass
class Silent:
    """A stand-in for an engine, as a reader of one needs it: it forgets no inbox by itself.

    After so many steps there is a Delta.
    """

    num_steps: int
    requests: dict[str, Request] = field(default_factory=dict)
    inboxes: dict[str, list[Any]] = field(default_factory=dict)

    def step(self) -> None:
        self.num_steps -= 1
        if self.num_steps == 0:
            for inbox in self.inboxes.values():
                inbox.append(SimpleNamespace(finish_reason=None))

    def abort(self, request_id: str) -> bool:
        return True
