"""lab-10's scenarios, and how one is run: proposals, one pass over rows and drafts, verify, rewind."""

from types import SimpleNamespace

from labs.kit import make_request
from labs.kit.toys.driver import DEFAULTS, PATIENCE, PULSE, RUNS, ids
from labs.kit.toys.speculation import TOKENS, SpecLoop, ToyDraft
from labs.kit.toys.words import describe
from labs.kit.toys.workloads import draw_workloads, workload
from mini_engine.block_manager import BlockManager
from mini_engine.request import Request, SamplingParams
from mini_engine.trace import Recorder

SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
QUOTES = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]  # its end stands in it before


def scenario(name, requests, *, size=4, proposer="ngram", k=4, **config):
    return workload(name, requests, block_size=size, proposer=proposer, k=k, **config)


_TWO = [("a", QUOTES, 16, 0), ("b", [7, 7, 8, 7, 7], 12, 0, {"temperature": 1.0, "seed": 5})]
_TIGHT = [(name, [i, 2, i, 2, i], 14, 0) for i, name in enumerate("abc")]
_FAMILY = [("a", QUOTES, 14, 0), ("again", [*QUOTES, 2], 14, 4), ("b", QUOTES, 14, 16)]

SCENARIOS = [
    scenario("one that quotes", [("a", QUOTES, 20, 0)]),
    scenario("a draft model", [("a", QUOTES, 20, 0)], proposer="draft"),
    scenario("two, one of them drawn", _TWO),
    scenario(
        "a long prompt beside drafts", [("a", QUOTES, 18, 0), ("long", [*range(9)] * 4, 6, 2)], budget=8
    ),
    scenario("a pool that is too small", _TIGHT, size=2, blocks=15, proposer="draft"),
    scenario("one prefix", _FAMILY, size=2, prefix_caching=True),
    scenario("stopped among the drafts", [("a", QUOTES, 20, 0, {"stop_token_ids": [8]})], proposer="draft"),
]


def draw(seed, count):
    """Scenarios with small pools, seeds, stops and both proposers."""
    choices = {"block_size": (1, 2, 3, 4), "proposer": ("ngram", "draft"), "k": (1, 2, 4, 7)}
    drawn = draw_workloads(
        seed, count, requests=(1, 4), prompt=(2, 10), max_tokens=(1, 14), slots=(2, 4), **choices,
        threshold=(0, 0, 3), prefix_caching=(False, True),
    )  # fmt: skip
    for one in drawn:
        config = one["config"]
        config["num_blocks"] = -(-config["num_blocks"] // config["block_size"]) + 1
        for number, entry in enumerate(one["requests"]):
            entry["prompt"] = [(number % 2 * 5 + i * i) % 3 for i in range(entry["prompt"])]
            entry |= [{}, {"temperature": 1.0, "seed": seed + number}, {"stop_token_ids": [number]}][
                number % 3
            ]
    return drawn


def request_of(entry) -> Request:
    """A scenario's request; it has no drafts yet."""
    names = ("temperature", "seed", "stop_token_ids", "max_tokens")
    sampling = {name: entry[name] for name in names if name in entry}
    request = make_request(entry["id"], [token % TOKENS for token in entry["prompt"]])
    request.sampling_params = SamplingParams(**{"temperature": 0.0} | sampling)
    request.max_tokens, request.spec_token_ids = entry["max_tokens"], []
    return request


def proposer_of(lab, config):
    """The scenario's proposer, made by the lab."""
    if config["proposer"] == "ngram":
        return lab.NgramProposer(1, 3, config["k"])
    return lab.DraftModelProposer(ToyDraft(), config["k"]) if config["proposer"] == "draft" else None


def make(lab, config) -> SpecLoop:
    """The loop of a scenario, before its requests come."""
    kv = BlockManager(
        config["num_blocks"],
        config["block_size"],
        enable_prefix_caching=config.get("prefix_caching", False),
        watermark=0,
    )
    settings = {name: config[name] for name in SETTINGS}
    return SpecLoop(lab, kv, proposer_of(lab, config), **settings)


def play(lab, scenario: dict, *, raise_errors: bool = True) -> SimpleNamespace:
    """Run a scenario. Return its trace, its requests by id, and the loop, which counts the drafts."""
    loop = make(lab, scenario["config"])
    recorder = Recorder(loop, config=DEFAULTS | scenario["config"], parts={"drafts": "lab-10"})
    requests, end, details = {}, "error", {}
    try:
        end = _steps(recorder, loop, scenario, requests)
        details = {} if end == "drained" else {"waiting": ids(loop.waiting), "running": ids(loop.running)}
    except BaseException as error:  # sys.exit() too ends a run
        details = {"error": describe(error)}
        if raise_errors or not isinstance(error, Exception):
            raise
    finally:
        trace = recorder.close(end, **details)
        RUNS.append((scenario, trace))
    return SimpleNamespace(trace=trace, requests=requests, loop=loop)


def _steps(recorder, loop, scenario, requests) -> str:
    arrivals = sorted(scenario["requests"], key=lambda entry: entry.get("at", 0))
    idle = 0
    for step in range(scenario.get("max_steps", 300)):
        PULSE[0] += 1
        while arrivals and arrivals[0].get("at", 0) <= step:
            entry = arrivals.pop(0)
            requests[entry["id"]] = request = request_of(entry)
            recorder.add(request)
        if not recorder.has_work and not arrivals:
            return "drained"
        scheduled = recorder.schedule()
        recorder.update(scheduled, loop.compute(scheduled))
        loop.kv.check()
        idle = idle + 1 if not scheduled and recorder.has_work else 0
        if idle == PATIENCE:
            return "stuck"
    return "max_steps"


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario under the lab's functions."""
    return play(lab, scenario, raise_errors=raise_errors).trace
