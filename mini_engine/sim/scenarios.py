"""Scenarios: small workloads with their settings, for any engine, from scenarios.json or another file.

They are the classic cases of the labs, with blocks of 32, and the demo. vLLM serves them in
trace/serve_vllm.py; `ours` serves them here without a model, with the tokens that the other run sampled.
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

from mini_engine.checks import shown
from mini_engine.config import EngineConfig
from mini_engine.request import Request, SamplingParams
from mini_engine.sim.simulate import baseline_recorder, step
from mini_engine.trace import Trace, VirtualClock


@dataclass(frozen=True)
class Wanted:
    """A request of a scenario. It arrives before step `at`; `prompt` is token ids, or text for an engine with
    a tokenizer. `stop` and `stop_token_ids` end it; its reader leaves after `leaves_after` tokens (0: never).
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
    """A workload with its settings; `about` is one sentence on what it shows."""

    name: str
    about: str
    config: EngineConfig | None  # None: the engine's own defaults
    requests: list[Wanted]


@cache
def named() -> dict[str, Scenario]:
    """Return the scenarios of the package, by name."""
    found = json.loads((files("mini_engine.sim") / "scenarios.json").read_text("utf-8"))
    return {entry["name"]: _scenario(entry) for entry in found}


def find(name: str | os.PathLike[str]) -> Scenario:
    """Return a named scenario, or that of a .json file of the same form. Raise ValueError for any other name,
    and, naming the file, for one that holds no scenario."""
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
    """Return a scenario of texts that arrive before the first step, with the engine's default settings."""
    if not all(prompts):
        raise ValueError("a prompt must have at least one character, but is ''")
    requests = [Wanted(f"r{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)]
    return Scenario("prompts", "", None, requests)


def _scenario(entry: dict[str, Any]) -> Scenario:
    """Return the scenario of a JSON entry, where a prompt may be a number of tokens: those of the request
    `like`, then its own."""
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
        raise ValueError(f"a scenario needs requests with different ids, but the ids are {shown(ids)}")
    return Scenario(entry["name"], entry.get("about", ""), EngineConfig(**entry["config"]), requests)


def ours(scenario: Scenario, sampled: Trace | None = None) -> Trace:
    """Return the trace of the same requests and settings under our own Scheduler and BlockManager.

    A request gets the tokens that it got in the run `sampled` (None: token 0), so that two runs differ only
    in their decisions. Raise ValueError for settings that cannot work, and for a prompt that is text:
    there is no tokenizer here.
    """
    tokens: dict[str, list[int]] = {wanted.id: [] for wanted in scenario.requests}
    for record in sampled.steps if sampled else ():
        for name, token_ids in record.new_tokens.items():
            tokens[name] += token_ids
    stopping = {wanted.id for wanted in scenario.requests if wanted.stop}
    if scenario.config is None:
        raise ValueError(f"scenario {scenario.name!r} has no settings")
    recorder = baseline_recorder("mixed", scenario.config, VirtualClock(), "paged")
    recorder.header.parts["Scheduler"] = "mini-engine"  # its name in a comparison
    coming = sorted(scenario.requests, key=lambda wanted: wanted.at)
    live: dict[str, Request] = {}
    now = 0
    while coming or recorder.has_work:
        while coming and (coming[0].at <= now or not recorder.has_work):
            wanted = coming.pop(0)
            live[wanted.id] = _request(wanted)
            recorder.add(live[wanted.id])
        step(recorder, live, tokens, stopping)
        for wanted in scenario.requests:
            request = live.get(wanted.id)
            if request and 0 < wanted.leaves_after <= len(request.output_token_ids):
                recorder.abort(wanted.id)
                del live[wanted.id]
        now += 1
    return recorder.close("drained")


def _request(wanted: Wanted) -> Request:
    if isinstance(wanted.prompt, str):
        raise ValueError(f"request {wanted.id!r}: its prompt is text; give token ids, or a number of tokens")
    params = SamplingParams(temperature=0, max_tokens=wanted.max_tokens, stop_token_ids=wanted.stop_token_ids)
    return Request(wanted.id, wanted.prompt, params, wanted.priority)
