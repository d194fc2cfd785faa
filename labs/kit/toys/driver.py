"""The one driver of labs 01 to 03: a scenario in, a trace out. And its sibling for operation logs.

Tests, grader and notebooks all run a lab through here, so that they judge the same thing. Every run
is kept in `RUNS` until the next test: what a failed test shows is taken from there.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from labs.kit.toys.model import ToyModel
from labs.kit.toys.requests import make_request
from labs.kit.toys.words import brief, describe
from mini_engine.request import Request
from mini_engine.trace import Recorder, Trace

PATIENCE = 50  # steps without any work done, until a run counts as stuck
DEFAULTS = {  # of a scenario's config
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "block_size": 1,
    "prefix_caching": False,
    "watermark": 0,
}
RUNS: list[tuple[dict, Trace]] = []  # (scenario, trace) of the test that is running


class ScheduleError(Exception):
    """A schedule that no engine could run."""


class Referee:
    """Stands in front of a scheduler and refuses schedules that make no sense, in words."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def __getattr__(self, name):
        return getattr(self.scheduler, name)

    def schedule(self) -> dict[str, int]:
        scheduled = self.scheduler.schedule()
        if not isinstance(scheduled, dict):
            raise ScheduleError(
                f"the schedule must be a dict {{request_id: num_tokens}}, not {brief(scheduled)}"
            )
        running = {request.request_id: request for request in self.scheduler.running}
        if len(running) != len(self.scheduler.running):
            raise ScheduleError(f"a request is in running twice: {ids(self.scheduler.running)}")
        both = [request.request_id for request in self.scheduler.waiting if request.request_id in running]
        if both:
            raise ScheduleError(f"{', '.join(both)} is in waiting and in running at once")
        for request_id, num_tokens in scheduled.items():
            request = running.get(request_id)
            if request is None:
                raise ScheduleError(f"{brief(request_id)} is scheduled but not in running")
            if not isinstance(num_tokens, int) or not 1 <= num_tokens <= request.num_new_tokens:
                raise ScheduleError(
                    f"{request_id} is scheduled for {brief(num_tokens)} tokens; "
                    f"it has {request.num_new_tokens} left to compute, and who computes none is left out"
                )
        return scheduled


def drive(
    scheduler,
    scenario: dict,
    *,
    next_chunk: Callable | None = None,
    model: ToyModel | None = None,
    raise_errors: bool = True,
    parts: dict[str, str] | None = None,
) -> Trace:
    """Run a scenario: arrivals, aborts, schedule, one forward, update, until all is done.

    The trace's end says drained, stuck (50 steps in which nobody computed anything), max_steps or
    error. With `raise_errors` an error of the code under test is raised (a test shows its line);
    without, it only ends the trace, as the grader wants it.
    """
    recorder = Recorder(Referee(scheduler), config=DEFAULTS | scenario["config"], parts=parts)
    RUNS.append((scenario, recorder.trace))
    model = model or ToyModel(scheduler.kv)
    try:
        end, details = _steps(recorder, scenario, model, next_chunk)
    except BaseException as error:  # sys.exit() too ends a run
        recorder.close("error", error=describe(error))
        if raise_errors or not isinstance(error, Exception):
            raise
        return recorder.trace
    return recorder.close(end, **details)


def _steps(recorder: Recorder, scenario: dict, model: ToyModel, next_chunk) -> tuple[str, dict]:
    arrivals = sorted(scenario["requests"], key=lambda request: request.get("at", 0))
    aborts = list(scenario.get("aborts", ()))
    idle = 0
    for step in range(scenario.get("max_steps", 500)):
        while arrivals and arrivals[0].get("at", 0) <= step:
            recorder.add(_request(arrivals.pop(0)))
        for abort in [a for a in aborts if a["step"] == step]:
            recorder.abort(abort["id"])
        if not recorder.has_work and not arrivals:
            return "drained", {}
        scheduled = recorder.schedule()
        recorder.update(scheduled, model.forward(_rows(recorder.running, scheduled, next_chunk)))
        recorder.kv.check()
        idle = idle + 1 if not scheduled and recorder.has_work else 0
        if idle == PATIENCE:
            return "stuck", {"waiting": ids(recorder.waiting), "running": ids(recorder.running)}
    return "max_steps", {"waiting": ids(recorder.waiting), "running": ids(recorder.running)}


def _request(entry: dict) -> Request:
    fields = {k: v for k, v in entry.items() if k in ("priority", "max_tokens", "stop_token_ids")}
    return make_request(entry["id"], entry["prompt"], **fields)


def _rows(running: Sequence[Request], scheduled: dict[str, int], next_chunk) -> list[tuple]:
    """The rows of one forward, cut by the lab's `next_chunk` where it has one."""
    rows = []
    by_id = {request.request_id: request for request in running}
    for request_id, num_tokens in scheduled.items():
        request = by_id[request_id]
        if next_chunk is not None:
            rows.append((request, *next_chunk(request, num_tokens)))
        else:
            start = request.num_computed_tokens
            end = start + num_tokens
            positions = list(range(start, end))
            rows.append((request, request.token_ids(start, end), positions, end == request.num_tokens))
    return rows


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def assert_drained(trace: Trace) -> None:
    """Every request of the run finished; the AssertionError says who did not, and how it ended."""
    __tracebackhide__ = True
    end = trace.end or {"end": "unfinished"}
    if end["end"] == "stuck":
        raise AssertionError(
            f"no progress for {PATIENCE} steps; waiting was {end['waiting']}, running was {end['running']}"
        )
    if end["end"] != "drained":
        left = {key: end[key] for key in ("waiting", "running", "error") if end.get(key)}
        raise AssertionError(f"the run ended as {end['end']!r} in step {end.get('step')}, with {left}")


def one_step(schedule_step: Callable, waiting, running, kv, **settings) -> dict[str, int]:
    """Call `schedule_step` once, on a state made by hand, and record that as a run of one step.

    `clamp` may be among the settings; the others become the config.
    """
    config = DEFAULTS | {k: v for k, v in settings.items() if k != "clamp"} | {"num_blocks": kv.num_blocks}
    scheduler = SimpleNamespace(
        kv=kv,
        waiting=waiting,
        running=running,
        schedule=lambda: schedule_step(waiting, running, kv, **settings),
        update=lambda scheduled, sampled: [],
    )
    recorder = Recorder(Referee(scheduler), config=config)
    RUNS.append(({"name": "", "config": config}, recorder.trace))
    try:
        scheduled = recorder.schedule()
    except BaseException as error:
        recorder.close("error", error=describe(error))
        raise
    recorder.update(scheduled, {})
    recorder.trace.steps[0]["queues"] = {"running": ids(running), "waiting": ids(waiting)}
    recorder.close("drained")
    return scheduled


def log_ops(
    scenario: dict, perform: Callable[[str, list], object], observe: Callable[[], dict], *, raise_errors=True
) -> Trace:
    """Run a scenario of operations (labs 05 and 06) and log what each returned and left behind.

    `perform(name, arguments)` carries out one of `scenario["ops"]`; what it returns must be JSON.
    `observe()` tells the public state after it, for example {"num_free_blocks": 3, "lengths": {"a": 2}}.
    """
    trace = Trace({"trace": "mini-engine-ops", "version": 1, "config": scenario["config"]})
    RUNS.append((scenario, trace))
    for number, (name, *arguments) in enumerate(scenario["ops"]):
        try:
            returned = perform(name, arguments)
        except Exception as error:
            trace.end = {"end": "error", "step": number, "error": describe(error)}
            if raise_errors:
                raise
            return trace
        trace.steps.append({"step": number, "op": [name, *arguments], "returned": returned, **observe()})
    trace.end = {"end": "drained", "step": len(trace.steps)}
    return trace
