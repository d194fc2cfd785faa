"""lab-10's scenarios, and how one is run: proposals, one pass over rows and drafts, verify, rewind."""

from functools import partial
from types import SimpleNamespace

from labs.kit.toys.driver import DEFAULTS, play_out
from labs.kit.toys.speculation import request_of, spec_loop
from labs.kit.toys.workloads import draw_workloads, workload
from mini_engine.trace import Recorder

QUOTES = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]  # its end stands in it before

scenario = partial(workload, block_size=4, proposer="ngram", k=4)
_TWO = [("a", QUOTES, 16, 0), ("b", [7, 7, 8, 7, 7], 12, 0, {"temperature": 1.0, "seed": 5})]
_LONG = [("a", QUOTES, 18, 0), ("long", [*range(9)] * 4, 6, 2)]
_TIGHT = [(name, [i, 2, i, 2, i], 14, 0) for i, name in enumerate("abc")]
_FAMILY = [("a", QUOTES, 14, 0), ("again", [*QUOTES, 2], 14, 4), ("b", QUOTES, 14, 16)]

SCENARIOS = [
    scenario("one that quotes", [("a", QUOTES, 20, 0)]),
    scenario("a draft model", [("a", QUOTES, 20, 0)], proposer="draft"),
    scenario("two, one of them drawn", _TWO),
    scenario("a long prompt beside drafts", _LONG, budget=8),
    scenario("a pool that is too small", _TIGHT, block_size=2, blocks=15, proposer="draft"),
    scenario("one prefix", _FAMILY, block_size=2, prefix_caching=True),
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
            more = [{}, {"temperature": 1.0, "seed": seed + number}, {"stop_token_ids": [number]}]
            entry |= more[number % 3]
    return drawn


def play(lab, scenario: dict, *, raise_errors: bool = True) -> SimpleNamespace:
    """Run a scenario. Return its trace, its requests by id, and the loop, which counts the drafts."""
    loop, requests = spec_loop(lab, scenario["config"]), {}
    recorder = Recorder(loop, config=DEFAULTS | scenario["config"], parts={"drafts": "lab-10"})

    def add(entry):
        requests[entry["id"]] = request = request_of(entry)
        recorder.add(request)

    def step():
        scheduled = recorder.schedule()
        recorder.update(scheduled, loop.compute(scheduled))
        return scheduled or not recorder.has_work

    trace = play_out(recorder, {"max_steps": 300} | scenario, add, step, raise_errors=raise_errors)
    return SimpleNamespace(trace=trace, requests=requests, loop=loop)


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario under the lab's functions."""
    return play(lab, scenario, raise_errors=raise_errors).trace
