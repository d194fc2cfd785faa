"""Running a recorded run again in the simulator, to see whether simulated and real decisions agree."""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_engine.config import EngineConfig
from mini_engine.request import Request
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.cost_model import CostModel, backend_of
from mini_engine.sim.simulate import baseline_recorder, step
from mini_engine.sim.workloads import Arrival
from mini_engine.trace import Finished, Queued, Trace, VirtualClock, replay


@dataclass
class Replayed:
    """A request of a recorded run: when it was added, its outputs and its end."""

    step: int
    request: Request
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def replay_workload(trace: Trace) -> list[Replayed]:
    """Return the requests of a recorded run in order of arrival; `step` is the first step after each.

    Prompts have the recorded lengths and made-up tokens. Raise ValueError for a run in which requests shared
    a prefix, because a trace does not say with which request, and for one whose beginning is missing.
    """
    if trace.header.requests or (trace.steps and trace.steps[0].step):
        raise ValueError("the trace begins in the middle of a run; record it with keep=True")
    replayed: list[Replayed] = []
    latest: dict[str, Replayed] = {}
    for record, views in replay(trace):
        for event in record.events:
            if isinstance(event, Queued):
                arrival = Arrival(0, event.num_prompt_tokens, event.max_tokens, event.priority)
                request = arrival.request(len(replayed))
                request.request_id = event.id
                latest[event.id] = Replayed(record.step, request)
                replayed.append(latest[event.id])
            elif isinstance(event, Finished):
                latest[event.id].finish_reason = event.reason
            elif views[event.id].num_first_cached_tokens:
                raise ValueError(
                    f"request {event.id!r} began with a cached prefix; a trace does not say of which request"
                )
        for name, token_ids in record.new_tokens.items():
            latest[name].output_token_ids += token_ids
    return replayed


def resimulate(trace: Trace, cost: CostModel | None = None) -> Trace:
    """Simulate the recorded arrivals and aborts, step by step, and return the trace, in virtual time.

    `first_difference(resimulate(trace), trace)` is None if the simulator decides as the recorded engine did.
    """
    given = dict(trace.header.config)
    config = EngineConfig(enable_prefix_caching=given.pop("prefix_caching"), **given)
    name, backend = trace.header.parts.get("Scheduler", "mixed"), backend_of(trace)
    clock = VirtualClock((cost or CostModel()).clock(backend))
    recorder = baseline_recorder(name if name in BASELINES else "mixed", config, clock, backend)
    coming = iter(replay_workload(trace))
    live: dict[str, Request] = {}
    tokens: dict[str, list[int]] = {}
    stopping: set[str] = set()
    for record in trace.steps:
        for event in record.events:
            if isinstance(event, Queued):
                plan = next(coming)
                live[event.id], tokens[event.id] = plan.request, plan.output_token_ids
                (stopping.add if plan.finish_reason == "stop" else stopping.discard)(event.id)
                recorder.add(plan.request)
            elif isinstance(event, Finished) and event.reason == "abort":
                recorder.abort(event.id)
                live.pop(event.id, None)
        if not recorder.has_work:
            break
        step(recorder, live, tokens, stopping)
    return recorder.close("max_steps" if recorder.has_work else "drained")
