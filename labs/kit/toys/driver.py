"""The driver of labs 01 to 03, from a scenario to a trace, and one for logs of operations.

Tests, grader and notebooks all run a lab through here, so that they judge the same thing. Every run
is kept in `RUNS` until the next test: what a failed test shows is taken from there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from labs.kit.toys.memory import ToyModel
from labs.kit.toys.requests import make_request
from labs.kit.toys.words import brief, describe
from mini_engine.request import Request
from mini_engine.scheduler import Scheduler, next_chunk
from mini_engine.trace import End, Recorder, Trace
from mini_engine.trace.record import Record

PATIENCE = 50  # steps without any work done, until a run counts as stuck
DEFAULTS = {  # of a scenario's config
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "block_size": 1,
    "prefix_caching": False,
    "watermark": 0,
}
LIMITS = ("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
Scenario = dict[str, Any]
NextChunk = Callable[[Request, int], Any]
Add = Callable[[dict[str, Any]], object]


@dataclass(slots=True)
class OpStep(Record):
    """One operation: what it returned, and the public state that it left behind."""

    what: ClassVar[str] = "the operation"
    step: int
    op: list[Any]
    returned: Any
    observed: dict[str, Any]


@dataclass(slots=True)
class OpHeader(Record):
    what: ClassVar[str] = "the header"
    tags: ClassVar[tuple[str, ...]] = ("trace", "version")
    trace: ClassVar[str] = "mini-engine-ops"
    version: ClassVar[int] = 1
    config: dict[str, Any]


@dataclass
class OpLog:
    """The operations of labs 05 and 06, as a Trace has the steps of a run."""

    header: OpHeader
    steps: list[OpStep] = field(default_factory=list)
    end: End | None = None


RUNS: list[tuple[Scenario, Trace | OpLog]] = []  # (scenario, trace) of the test that is running
EXPECTED: list[tuple[Scenario, Trace | OpLog]] = []  # beside them, where random scripts know it
PULSE = [0]  # steps and operations so far: what code may print is counted from one to the next


class ScheduleError(Exception):
    """A schedule that no engine could run."""


class Referee:
    """A proxy of a scheduler that refuses impossible schedules, with the reason."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = self.scheduler.schedule()
        if not isinstance(scheduled, dict):
            kind = "a dict {request_id: num_tokens}"
            raise ScheduleError(f"the schedule must be {kind}, not {brief(scheduled)}")
        running = {request.request_id: request for request in self.scheduler.running}
        if len(running) != len(self.scheduler.running):
            raise ScheduleError(f"a request is in running twice: {ids(self.scheduler.running)}")
        if both := [name for name in ids(self.scheduler.waiting) if name in running]:
            raise ScheduleError(f"{', '.join(both)} is in waiting and in running at once")
        for request_id, num_tokens in scheduled.items():
            if not isinstance(request_id, str):
                raise ScheduleError(f"{brief(request_id)} is a key of the schedule: it needs a request_id")
            if (request := running.get(request_id)) is None:
                raise ScheduleError(f"{brief(request_id)} is scheduled but not in running")
            if not isinstance(num_tokens, int) or not 1 <= num_tokens <= request.num_new_tokens:
                left = f"and has {request.num_new_tokens} left to compute"
                raise ScheduleError(f"{request_id} is scheduled for {brief(num_tokens)} tokens, {left}")
        return scheduled


def drive(
    scheduler: Any,
    scenario: Scenario,
    *,
    next_chunk: NextChunk = next_chunk,
    model: ToyModel | None = None,
    raise_errors: bool = True,
    parts: dict[str, str] | None = None,
) -> Trace:
    """Run a scenario: arrivals, aborts, schedule, one forward, update, until all is done.

    The trace's end says drained, stuck (50 steps in which nothing was computed), max_steps or error.
    With `raise_errors` an error of the code under test is raised (a test shows its line); without, it
    only ends the trace, as the grader wants it.
    """
    referee: Any = Referee(scheduler)
    recorder = Recorder(referee, config=DEFAULTS | scenario["config"], parts=parts)
    computes = model or ToyModel(scheduler.kv)

    def step() -> bool:
        scheduled = recorder.schedule()
        running = {request.request_id: request for request in recorder.running}
        rows = [(running[name], *next_chunk(running[name], n)) for name, n in scheduled.items()]
        recorder.update(scheduled, computes.forward(rows))
        return bool(scheduled) or not recorder.has_work

    return play_out(
        recorder, scenario, lambda entry: recorder.add(request_of(entry)), step, raise_errors=raise_errors
    )


def serve(kv: Any, scenario: Scenario, **options: Any) -> Trace:
    """Run a scenario under the engine's own Scheduler on a block manager; `options` are those of `drive`."""
    limits = {name: value for name, value in scenario["config"].items() if name in LIMITS}
    return drive(Scheduler(kv, **limits), scenario, **options)


def play_out(
    recorder: Recorder,
    scenario: Scenario,
    add: Add,
    step: Callable[[], bool],
    engine: Any = None,
    raise_errors: bool = True,
) -> Trace:
    """Run a scenario turn by turn until all is done, and return its trace.

    `add` takes an entry of the scenario, `step` returns whether there was progress, and `engine` is asked for
    work and aborts, if it is not the recorder. How a run ends, and `raise_errors`, are as in `drive`.
    """
    try:
        end = _turns(engine or recorder, recorder.kv, scenario, add, step)
        queues = {"waiting": ids(recorder.waiting), "running": ids(recorder.running)}
    except BaseException as error:  # sys.exit() too ends a run
        trace = _ran(scenario, recorder, "error", error=describe(error))
        if raise_errors or not isinstance(error, Exception):
            raise
        return trace
    return _ran(scenario, recorder, end, **({} if end == "drained" else queues))


def _ran(scenario: Scenario, recorder: Recorder, end: str, **details: Any) -> Trace:
    trace = recorder.close(end, **details)
    RUNS.append((scenario, trace))
    return trace


def _turns(engine: Any, kv: Any, scenario: Scenario, add: Add, step: Callable[[], bool]) -> str:
    arrivals = sorted(scenario["requests"], key=lambda request: request.get("at", 0))
    idle = 0
    for turn in range(scenario.get("max_steps", 500)):
        PULSE[0] += 1
        while arrivals and arrivals[0].get("at", 0) <= turn:
            add(arrivals.pop(0))
        for entry in scenario.get("aborts", ()):
            if entry["step"] == turn:
                engine.abort(entry["id"])
        if not engine.has_work and not arrivals:
            return "drained"
        idle = 0 if step() else idle + 1
        kv.check()
        if idle == PATIENCE:
            return "stuck"
    return "max_steps"


def request_of(entry: dict[str, Any]) -> Request:
    """Return the request of a scenario's entry; `sampling` holds settings that have no key of their own."""
    fields = {k: v for k, v in entry.items() if k in ("priority", "max_tokens", "stop_token_ids")}
    request = make_request(entry["id"], entry["prompt"], **fields)
    own = {k: v for k, v in entry.items() if k in ("temperature", "seed")}
    request.sampling_params = replace(request.sampling_params, **own, **entry.get("sampling", {}))
    return request


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def assert_drained(trace: Trace) -> None:
    """Every request of the run finished; the AssertionError names those that did not, and how it ended."""
    __tracebackhide__ = True
    end = trace.end or End("unfinished", len(trace.steps))
    if end.end == "stuck":
        left = f"waiting was {end.waiting}, running was {end.running}"
        raise AssertionError(f"no progress for {PATIENCE} steps; {left}")
    if end.end != "drained":
        said = {key: getattr(end, key) for key in ("waiting", "running", "error") if getattr(end, key)}
        raise AssertionError(f"the run ended as {end.end!r} in step {end.step}, with {said}")


def tokens_of(trace: Trace, request_id: str) -> list[int]:
    """Return all tokens that a request sampled in a run."""
    return [token for record in trace.steps for token in record.new_tokens.get(request_id, ())]


def assert_texts_alone(scenario: Scenario, run: Callable[[Scenario], Trace]) -> Trace:
    """Return the trace of a run in which each request that is not aborted has the text of a run alone."""
    __tracebackhide__ = True
    trace = run(scenario)
    assert_drained(trace)
    aborted = {abort["id"] for abort in scenario.get("aborts", ())}
    for request in scenario["requests"]:
        name = request["id"]
        if name not in aborted:
            ours = tokens_of(trace, name)
            alone = tokens_of(run(scenario | {"requests": [request | {"at": 0}], "aborts": []}), name)
            if ours != alone or len(ours) != request["max_tokens"]:
                wanted = f"alone it is {alone}, and max_tokens is {request['max_tokens']}"
                raise AssertionError(f"the text of {name} is {ours}; {wanted}")
    return trace


def one_step(
    schedule_step: Callable[..., dict[str, int]],
    waiting: Any,
    running: list[Request],
    kv: Any,
    **settings: Any,
) -> dict[str, int]:
    """Call `schedule_step` once, on a state made by hand, and record that as a run of one step.

    `clamp` may be among the settings; the others become the config.
    """
    config = DEFAULTS | {k: v for k, v in settings.items() if k != "clamp"} | {"num_blocks": kv.num_blocks}

    def update(scheduled: dict[str, int], sampled: object, stopped: object) -> list[Request]:
        for request in running:  # by this the recorder knows that the step was computed
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
        return []

    scheduler = SimpleNamespace(
        kv=kv,
        waiting=waiting,
        running=running,
        schedule=lambda: schedule_step(waiting, running, kv, **settings),
        update=update,
    )
    referee: Any = Referee(scheduler)
    recorder = Recorder(referee, config=config, requests=[*running, *waiting])
    scenario = {"name": "", "config": config}
    try:
        scheduled = recorder.schedule()
    except BaseException as error:
        _ran(scenario, recorder, "error", error=describe(error))
        raise
    recorder.update(scheduled, {})
    for request in running:  # the tests count by themselves
        request.num_computed_tokens -= scheduled.get(request.request_id, 0)
    _ran(scenario, recorder, "drained")
    return scheduled


def log_ops(
    scenario: Scenario,
    perform: Callable[[str, list[Any]], Any],
    observe: Callable[[], dict[str, Any]],
    *,
    raise_errors: bool = True,
) -> OpLog:
    """Run a scenario of operations (labs 05 and 06) and log what each returned and left behind.

    `perform(name, arguments)` carries out one of `scenario["ops"]`; what it returns must be JSON.
    `observe()` gives the public state after it, for example {"num_free_blocks": 3, "lengths": {"a": 2}}.
    """
    log = OpLog(OpHeader(scenario["config"]))
    RUNS.append((scenario, log))
    for number, (name, *arguments) in enumerate(scenario["ops"]):
        PULSE[0] += 1
        try:
            returned = perform(name, arguments)
        except Exception as error:
            log.end = End("error", number, error=describe(error))
            if raise_errors:
                raise
            return log
        log.steps.append(OpStep(number, [name, *arguments], returned, observe()))
    log.end = End("drained", len(log.steps))
    return log
