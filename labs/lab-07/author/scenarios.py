"""lab-07's scenarios, and how one is run: a whole Engine around `step`, on a tiny or the embedded model.

All parts but `step` are the engine's own, so that a verdict is about `step` alone; `run` takes other
parts (LearnerParts.from_labs) where they are to be tried together.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace

import torch

from labs.kit import make_request
from labs.kit.tensor_toys.models import random_model, run_alone
from labs.kit.toys.driver import PATIENCE, RUNS, ids
from labs.kit.toys.workloads import workload
from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.outputs import Delta
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
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


def prompt_of(entry: dict, name: str = "tiny") -> list[int]:
    """A request's prompt as token ids: given as text, as ids, or as how many to make up."""
    if isinstance(entry["prompt"], str):
        return tokenizer(name).encode(entry["prompt"])
    made = make_request(entry["id"], entry["prompt"]).prompt_token_ids
    return [token % TINY.vocab_size for token in made]


def sampling_of(entry: dict) -> SamplingParams:
    return SamplingParams(**{"temperature": 0} | {key: entry[key] for key in SAMPLING if key in entry})


def alone(entry: dict, name: str = "tiny") -> list[int]:
    """The tokens of a request with no engine at all: one sequence, one dense cache, one loop."""
    return list(_alone(tuple(prompt_of(entry, name)), sampling_of(entry), name))


@cache
def _alone(prompt: tuple[int, ...], sampling: SamplingParams, name: str) -> list[int]:
    return run_alone(model(name), list(prompt), sampling)


# ------------------------------------------------------------------------------------- scenarios

_IMPORTANT = [("A", 12, 10, 0, 2), ("B", 10, 10, 0, 2), ("C", 9, 6, 4, 0)]
_SEEDED = [(f"r{i}", 9 + i, 8, i, {"temperature": 1.0, "seed": i}) for i in range(4)]
_ALIKE = [("A", list(range(24)), 5, 0), ("B", [*range(20), 7, 7, 7], 5, 2)]
_PLAYS = [
    ("romeo", "O Romeo, ", 10, 0),
    ("king", "KING HENRY:\nMy lord of ", 6, 0),
    ("late", "O Romeo, Romeo, wherefore ", 9, 3),
    ("sampled", "HAMLET:\n", 9, 3, {"temperature": 0.8, "seed": 7}),
]


def _scenario(name, requests, size=4, **config):
    return workload(name, requests, block_size=size, **{"policy": "fcfs", "watermark": 0} | config)


SCENARIOS = [
    _scenario("one alone", [("A", 5, 6, 0)]),
    _scenario("three at once", [("A", 5, 4, 0), ("B", 3, 6, 0), ("C", 4, 2, 0)]),
    _scenario("one token is all they want", [("A", 5, 1, 0), ("B", 20, 1, 0), ("C", 4, 1, 1)]),
    _scenario("a long prompt beside a chat", [("chat", 4, 9, 0), ("essay", 40, 3, 2)], budget=8),
    _scenario("nothing but chunks", [("A", 30, 2, 0)], budget=7, slots=2),
    _scenario("no room for B until A is done", [("A", 10, 4, 0), ("B", 9, 3, 0)], blocks=4),
    _scenario("preempted, twice over", [("A", 6, 12, 0), ("B", 7, 12, 0), ("C", 5, 9, 1)], 3, blocks=9),
    _scenario(
        "the important one comes late, and the rows change places", _IMPORTANT, blocks=9, policy="priority"
    ),
    _scenario("the same beginning", _ALIKE, budget=32, prefix_caching=True),
    _scenario("drawn at random, each from its own seed", _SEEDED, blocks=9),
    _scenario("a pause", [("A", 5, 3, 0), ("B", 5, 3, 9)]),
    _scenario(
        "some leave",
        [("A", 30, 5, 0), ("B", 6, 9, 0), ("C", 12, 9, 0)],
        budget=8,
        aborts=[(1, "A"), (6, "B")],
    ),
    _scenario("the plays", _PLAYS, blocks=12, model="shakespeare", prefix_caching=True),
]


# ------------------------------------------------------------------------------------------- runs


@dataclass
class Silent:
    """A stand-in for an engine, as a Stream needs it: it forgets no inbox by itself.

    After so many steps there is a Delta.
    """

    num_steps: int
    requests: dict = field(default_factory=dict)
    inboxes: dict = field(default_factory=dict)

    def step(self):
        self.num_steps -= 1
        if self.num_steps == 0:
            for inbox in self.inboxes.values():
                inbox.append(SimpleNamespace(finish_reason=None))

    def abort(self, request_id):
        return True


@dataclass
class Play:
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


def make_engine(step=None, *, learner=None, **config) -> Engine:
    """An Engine for a scenario's config, with `step` in it, and `learner`'s parts where there are any."""
    parts = learner.parts if learner else Parts()
    names = dict(learner.names) if learner else {}
    if step is not None:
        parts, names = replace(parts, step=step), names | {"step": "lab-07"}
    settings = {"num_blocks": 64, "block_size": 4, "watermark": 0, "max_num_batched_tokens": 16} | config
    name = settings.pop("model", "tiny")
    caching = settings.pop("prefix_caching", False)
    if names.get("attend_backend") == "lab-04":
        caching = False  # dense caches share nothing
    settings = {"max_num_seqs": min(8, settings["max_num_batched_tokens"])} | settings
    return Engine(
        model(name),
        tokenizer(name),
        enable_prefix_caching=caching,
        record=True,
        clock=VirtualClock(),
        parts=parts,
        part_names=names,
        **settings,
    )


def add(engine: Engine, entry: dict, name: str = "tiny"):
    """Add a scenario's request to an engine; returns the Request."""
    request_id = engine.add_request(
        prompt_of(entry, name), sampling_of(entry), request_id=entry["id"], priority=entry.get("priority", 0)
    )
    return engine.requests[request_id]


def play(lab, scenario: dict, *, raise_errors: bool = True, learner=None) -> Play:
    """Run a scenario under `lab.step`: arrivals, aborts, step, turn by turn, until all is done."""
    engine = make_engine(lab.step, learner=learner, **scenario["config"])
    turns: list[list[Delta]] = []
    try:
        end, details = _turns(engine, scenario, turns)
    except BaseException as error:  # sys.exit() too ends a run
        played = _played(engine, scenario, turns, "error", error=f"{type(error).__name__}: {error}")
        if raise_errors or not isinstance(error, Exception):
            raise
        return played
    return _played(engine, scenario, turns, end, **details)


def _played(engine: Engine, scenario: dict, turns: list[list[Delta]], end: str, **details) -> Play:
    trace = engine.scheduler.close(end, **details)
    RUNS.append((scenario, trace))
    return Play(trace, turns, engine)


def _turns(engine: Engine, scenario: dict, turns: list[list[Delta]]) -> tuple[str, dict]:
    name = scenario["config"].get("model", "tiny")
    arrivals = sorted(scenario["requests"], key=lambda entry: entry.get("at", 0))
    idle, before = 0, None
    for turn in range(scenario.get("max_steps", 500)):
        while arrivals and arrivals[0].get("at", 0) <= turn:
            add(engine, arrivals.pop(0), name)
        for abort in [a for a in scenario.get("aborts", ()) if a["step"] == turn]:
            engine.abort(abort["id"])
        if not engine.has_work and not arrivals:
            return "drained", {}
        turns.append(engine.step() if engine.has_work else [])
        engine.scheduler.kv.check()
        progress = [(r.num_computed_tokens, r.num_tokens) for r in engine.requests.values()]
        idle = idle + 1 if progress == before and engine.has_work else 0
        before = progress
        if idle == PATIENCE:
            return "stuck", _left(engine)
    return "max_steps", _left(engine)


def _left(engine: Engine) -> dict:
    return {"waiting": ids(engine.scheduler.waiting), "running": ids(engine.scheduler.running)}


def run(lab, scenario: dict, *, raise_errors: bool = True, learner=None) -> Trace:
    """The trace of one scenario under `lab.step`.

    `learner` (labs.kit.learner.parts.LearnerParts) brings the parts of other labs; without it they are the
    engine's own.
    """
    return play(lab, scenario, raise_errors=raise_errors, learner=learner).trace
