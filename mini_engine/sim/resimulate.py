"""Running a recorded run again in the simulator, to see whether simulated and real decisions agree."""

from __future__ import annotations

from mini_engine.config import EngineConfig
from mini_engine.request import Request
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.cost_model import CostModel, backend_of
from mini_engine.sim.simulate import baseline_recorder, step
from mini_engine.sim.workloads import Arrival
from mini_engine.trace import Finished, Queued, Trace, VirtualClock, replay


def resimulate(trace: Trace, cost: CostModel | None = None) -> Trace:
    """Simulate the recorded arrivals and aborts, step by step, and return the trace, in virtual time.

    `first_difference(resimulate(trace), trace)` is None if the simulator decides as the recorded engine did.
    Outputs are the recorded tokens, prompts have the recorded lengths and made-up tokens. Raise ValueError
    for a run in which requests shared a prefix, because a trace does not say with which request, and for one
    whose beginning is missing.
    """
    if trace.header.requests or (trace.steps and trace.steps[0].step):
        raise ValueError("the trace begins in the middle of a run; record it with keep=True")
    given = dict(trace.header.config)
    config = EngineConfig(enable_prefix_caching=given.pop("prefix_caching"), **given)
    name, backend = trace.header.parts.get("Scheduler", "mixed"), backend_of(trace)
    clock = VirtualClock((cost or CostModel()).clock(backend))
    recorder = baseline_recorder(name if name in BASELINES else "mixed", config, clock, backend)
    live: dict[str, Request] = {}
    tokens: dict[str, list[int]] = {}
    num_requests = 0
    for record, views in replay(trace):
        stopping = set()
        for event in record.events:
            if isinstance(event, Queued):
                arrival = Arrival(0, event.num_prompt_tokens, event.max_tokens, event.priority)
                request = arrival.request(num_requests)
                request.request_id = event.id
                live[event.id], tokens[event.id], num_requests = request, [], num_requests + 1
                recorder.add(request)
            elif isinstance(event, Finished):
                if event.reason == "abort":
                    recorder.abort(event.id)
                    live.pop(event.id, None)
                elif event.reason == "stop":
                    stopping.add(event.id)
            elif views[event.id].num_first_cached_tokens:
                raise ValueError(
                    f"request {event.id!r} began with a cached prefix; a trace does not say of which request"
                )
        for request_id, token_ids in record.new_tokens.items():
            tokens[request_id] += token_ids
        if not recorder.has_work:
            break
        step(recorder, live, tokens, stopping)
    return recorder.close("max_steps" if recorder.has_work else "drained")
