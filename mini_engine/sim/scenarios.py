"""Small workloads with their settings, step by step, for any engine: those of scenarios.json, or a file.

They are the labs' classic cases, redrawn for blocks of 32, and the demo's. vLLM serves them in
trace/vllm.py; `ours` serves them here, with the tokens that the other run has sampled and no model.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mini_engine.config import EngineConfig
from mini_engine.request import Request, SamplingParams, shown
from mini_engine.sim.simulate import baseline_recorder, step
from mini_engine.trace import Trace, VirtualClock


@dataclass(frozen=True)
class Wanted:
    """A request: the step from which it is there, its tokens (or text, for an engine with a tokenizer).

    `stop` and `stop_token_ids` end it; its reader leaves after `leaves_after` tokens (0: never).
    """

    id: str
    prompt: list[int] | str
    max_tokens: int
    priority: int = 0
    at: int = 0
    stop: str | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    leaves_after: int = 0


@dataclass(frozen=True)
class Scenario:
    """`config` are fields of an EngineConfig; `about` says in a sentence what is to be seen."""

    name: str
    about: str
    config: EngineConfig | None  # None: the engine's own defaults
    requests: list[Wanted]


@cache
def named() -> dict[str, Scenario]:
    """Those that come with the package, by name."""
    found = json.loads((files("mini_engine.sim") / "scenarios.json").read_text("utf-8"))
    return {entry["name"]: _scenario(entry) for entry in found}


def find(name: str | os.PathLike[str]) -> Scenario:
    """A named scenario, or that of a .json file of the same form. Raises ValueError for any other name,
    and for a file that is none, naming it."""
    if str(name) in named():
        return named()[str(name)]
    if not str(name).endswith(".json"):
        known = ", ".join(named())
        raise ValueError(f"there is no scenario {str(name)!r}; there are {known}, and .json files")
    try:
        return _scenario(json.loads(Path(name).read_text("utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name}: not a scenario ({type(error).__name__}: {error})") from None


def of_prompts(prompts: list[str], max_tokens: int) -> Scenario:
    """Texts that are there from the first step, under whatever settings the engine has by itself."""
    requests = [Wanted(f"r{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)]
    return Scenario("prompts", "", None, requests)


def _scenario(entry: dict[str, Any]) -> Scenario:
    """Where it is a number, a prompt is that many tokens: those of the request `like`, then its own."""
    prompts: dict[str, Any] = {}
    requests = []
    for given in entry["requests"]:
        wanted = dict(given)
        like, prompt = prompts.get(wanted.pop("like", ""), []), wanted["prompt"]
        if isinstance(prompt, int):
            draw = random.Random(wanted["id"])  # small ids, which every model has
            prompt = (like + [draw.randrange(100, 1000) for _ in range(prompt)])[:prompt]
        prompts[wanted["id"]] = wanted["prompt"] = prompt
        requests.append(Wanted(**wanted))
    if len(prompts) < len(requests) or not requests:
        ids = [wanted.id for wanted in requests]
        raise ValueError(f"there must be requests, each with an id of its own, but the ids are {shown(ids)}")
    return Scenario(entry["name"], entry.get("about", ""), EngineConfig(**entry["config"]), requests)


def ours(scenario: Scenario, sampled: Trace | None = None) -> Trace:
    """The same requests and settings under our own Scheduler and BlockManager.

    A request gets the tokens that it got in the run `sampled` (None: token 0), so that two runs differ in
    what was decided and in nothing else. Raises ValueError for settings that cannot work, and for a prompt
    that is text: there is no tokenizer here.
    """
    tokens: dict[str, list[int]] = {wanted.id: [] for wanted in scenario.requests}
    for record in sampled.steps if sampled else ():
        for name, token_ids in record.new_tokens.items():
            tokens[name] += token_ids
    texts_end = {wanted.id: len(tokens[wanted.id]) for wanted in scenario.requests if wanted.stop}

    def next_token(request: Request) -> int:
        said, n = tokens[request.request_id], len(request.output_token_ids)
        return said[n] if n < len(said) else 0

    def stops(request: Request) -> bool:
        """At its limit, too, which is looked at first."""
        return len(request.output_token_ids) + 1 == texts_end.get(request.request_id)

    if scenario.config is None:
        raise ValueError(f"scenario {scenario.name!r} has no settings of its own")
    recorder = baseline_recorder("mixed", scenario.config, VirtualClock(), "paged")
    recorder.header.parts["Scheduler"] = "mini-engine"  # its name beside the other's
    coming = sorted(scenario.requests, key=lambda wanted: wanted.at)
    live: dict[str, Request] = {}
    turn = 0
    while coming or recorder.has_work:
        while coming and (coming[0].at <= turn or not recorder.has_work):
            wanted = coming.pop(0)
            live[wanted.id] = _request(wanted)
            recorder.add(live[wanted.id])
        step(recorder, live, next_token, stops)
        for wanted in scenario.requests:
            request = live.get(wanted.id)
            if request and 0 < wanted.leaves_after <= len(request.output_token_ids):
                recorder.abort(wanted.id)
                del live[wanted.id]
        turn += 1
    return recorder.close("drained")


def _request(wanted: Wanted) -> Request:
    if isinstance(wanted.prompt, str):
        raise ValueError(f"request {wanted.id!r}: its prompt is text; give token ids, or a number of tokens")
    params = SamplingParams(temperature=0, max_tokens=wanted.max_tokens, stop_token_ids=wanted.stop_token_ids)
    return Request(wanted.id, wanted.prompt, params, wanted.priority)
