"""A recorded run once more, through the simulator: whether simulated and real agree."""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_engine.config import EngineConfig
from mini_engine.request import Request
from mini_engine.sim.cost_model import CostModel, backend_of
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.simulate import baseline_recorder, step
from mini_engine.sim.workloads import Arrival
from mini_engine.trace import Finished, Queued, Trace, VirtualClock, replay


@dataclass
class Replayed:
    """A request of a recorded run: when it was added, and what became of it."""

    step: int
    request: Request
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def replay_workload(trace: Trace) -> list[Replayed]:
    """The requests of a recorded run, in order of arrival; `step` is the one that first saw each.

    Prompts have the recorded lengths and made-up tokens. Raises ValueError for a run in which
    requests shared a prefix, as a trace does not say whose, and for one whose beginning is missing.
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
                    f"request {event.id!r} began with a cached prefix; a trace does not say whose"
                )
        for name, token_ids in record.new_tokens.items():
            latest[name].output_token_ids += token_ids
    return replayed


def resimulate(trace: Trace, cost: CostModel | None = None) -> Trace:
    """The same arrivals and aborts, step by step, through the simulator: its trace, in virtual time.

    `first_difference(resimulate(trace), trace)` is None if the simulator decides as the recorded
    engine did.
    """
    given = dict(trace.header.config)
    config = EngineConfig(enable_prefix_caching=given.pop("prefix_caching"), **given)
    policy = trace.header.parts.get("Scheduler", "mixed")
    policy, backend = policy if policy in BASELINES else "mixed", backend_of(trace)
    clock = VirtualClock((cost or CostModel()).clock(backend))
    recorder = baseline_recorder(policy, config, clock, backend)
    coming = iter(replay_workload(trace))
    plans: dict[str, Replayed] = {}
    live: dict[str, Request] = {}

    def next_token(request: Request) -> int:
        planned, n = plans[request.request_id].output_token_ids, len(request.output_token_ids)
        return planned[n] if n < len(planned) else 0

    def stops(request: Request) -> bool:
        plan = plans[request.request_id]
        is_last = len(request.output_token_ids) == len(plan.output_token_ids) - 1
        return is_last and plan.finish_reason == "stop"

    for record in trace.steps:
        for event in record.events:
            if isinstance(event, Queued):
                plans[event.id] = next(coming)
                live[event.id] = plans[event.id].request
                recorder.add(live[event.id])
            elif isinstance(event, Finished) and event.reason == "abort":
                recorder.abort(event.id)
                live.pop(event.id, None)
        if not recorder.has_work:
            break
        step(recorder, live, next_token, stops)
    return recorder.close("max_steps" if recorder.has_work else "drained")
