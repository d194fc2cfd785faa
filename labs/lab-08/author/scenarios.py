"""lab-08's scenarios: a row of logits through the limits, and runs of requests with settings of their own.

In a run a toy model makes logits of all that a request's memory holds. Tokens are chosen row by row, with the
functions of the first half, or by the Sampler, which needs torch.
"""

from importlib.util import find_spec

from labs.kit import FakeKV, load
from labs.kit.toys.driver import serve
from labs.kit.toys.logits import VOCAB, LogitsModel
from labs.kit.toys.workloads import workload

ROW = [2.0, 1.0, 0.5, 0.0, 0.0, -1.0]
OPS = [
    ["apply_temperature", ROW, 0.5],
    ["apply_min_p", ROW, 0.2],
    ["apply_top_k", ROW, 4],
    ["apply_top_p", ROW, 0.7],
    ["probabilities", ROW, {"temperature": 0.5, "top_k": 4, "top_p": 0.9}],
    ["apply_penalties", ROW, [0, 5], [1, 1], {"repetition_penalty": 2.0, "frequency_penalty": 0.5}],
    ["draw", [0.5, 0.25, 0.125, 0.125], 0.7],
]
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"top_k": 3, "seed": 2},
    {"temperature": 1.5, "top_p": 0.8, "seed": 3},
    {"min_p": 0.2, "seed": 0, "repetition_penalty": 1.5},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 5},
]


def requests_of(settings, prompt, max_tokens, spacing=0, **more):
    """Requests r0, r1, ... with these settings, whose prompts are of different lengths."""
    prompts = [[(7 * i + 3 * j) % VOCAB for j in range(prompt + i)] for i in range(len(settings))]
    sampling = [more | {"sampling": one} for one in settings]
    return [(f"r{i}", prompts[i], max_tokens, i * spacing, one) for i, one in enumerate(sampling)]


TWINS = [("a", [7, 7, 7], 8, 0), ("b", [7, 7, 7], 8, 3), ("c", [1, 2], 8, 1), ("d", [7, 7, 7], 8, 4)]
SEEDED = {"sampling": {"temperature": 1.2, "seed": 11}}
RUNS = [
    workload("six settings in one batch", requests_of(SETTINGS, 3, 8), budget=24, slots=6),
    workload("prompts in chunks", requests_of(SETTINGS, 9, 5, spacing=1), budget=8, slots=6),
    workload("preempted, and on with their own numbers", requests_of(SETTINGS[:4], 4, 9), blocks=30),
    workload("one seed, three times", [(*one, SEEDED) for one in TWINS], budget=8),
]
BY_THE_SAMPLER = [run | {"name": f"{run['name']}, by the Sampler", "by": "Sampler"} for run in RUNS]
SCENARIOS = [{"name": "one row of logits", "config": {}, "ops": OPS}, *RUNS]
SCENARIOS += BY_THE_SAMPLER if find_spec("torch") else []


def row_by_row(lab, sampler):
    def token(logits, request):
        params, outputs = request.sampling_params, request.output_token_ids
        logits = lab.apply_penalties(logits, request.prompt_token_ids, outputs, params)
        if params.temperature == 0:
            return max(range(VOCAB), key=lambda token_id: float(logits[token_id]))
        return lab.draw(lab.probabilities(logits, params), sampler.uniform(request, len(outputs)))

    return lambda logits, requests: [token(*row) for row in zip(logits, requests, strict=True)]


def as_a_batch(sampler):
    import torch

    return lambda logits, requests: sampler(torch.tensor(logits, dtype=torch.float64), requests)


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The log of the calls, or the trace of a run under the engine's own Scheduler."""
    if "ops" in scenario:
        return load("lab-08", "random_scripts").Play(lab, scenario["config"]).log(scenario, raise_errors)
    sampler, config = lab.Sampler(0), scenario["config"]
    choose = as_a_batch(sampler) if scenario.get("by") == "Sampler" else row_by_row(lab, sampler)
    kv = FakeKV(config["num_blocks"], watermark=config.get("watermark", 0))
    model, parts = LogitsModel(kv, choose), {"Sampler": "lab-08"}
    return serve(kv, scenario, model=model, raise_errors=raise_errors, parts=parts)
