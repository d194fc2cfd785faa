"""lab-04's scenarios, its tiny model, and how one is run: the engine's Scheduler around `fused_step`."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import torch
from torch.nn.utils.rnn import pad_sequence

from labs.kit import FakeKV, drive, make_request
from labs.kit.tensor_toys.models import SMALL as CONFIG
from labs.kit.tensor_toys.models import random_model as model
from labs.kit.tensor_toys.models import run_alone
from labs.kit.toys.workloads import workload
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.interfaces import Row
from mini_engine.model import sdpa
from mini_engine.scheduler import Scheduler

SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")

# What one step may look like: (tokens in the cache, new tokens) of each row.
SHAPES = {
    "the worked example": [(21, 1), (14, 1), (8, 1), (0, 8)],
    "decodes only": [(21, 1), (14, 1), (8, 1)],
    "one prefill only": [(0, 8)],
    "several first chunks": [(0, 8), (0, 3), (0, 1)],
    "later chunks and decodes, in any order": [(5, 6), (21, 1), (0, 9), (14, 1), (30, 2)],
    "no past beside a long one": [(40, 1), (0, 1)],
    "a long chunk, a long past and many decodes": [(260, 1), (3, 60), *((past, 1) for past in range(5, 45))],
}


class Failing:
    """A model that raises OSError behind the attention of one layer."""

    def __init__(self, net, layer: int):
        self.net, self.layer = net, layer

    def __getattr__(self, name):
        return getattr(self.net, name)

    def __call__(self, token_ids, positions, attend):
        def up_to_here(layer, *qkv):
            out = attend(layer, *qkv)
            if layer == self.layer:
                raise OSError("the model fails")
            return out

        return self.net(token_ids, positions, up_to_here)


def empty_cache() -> DenseCache:
    return DenseCache(CONFIG, torch.float64)


def compute(token_ids: Sequence[int], store: DenseCache) -> torch.Tensor:
    """Compute tokens one request alone, behind what `store` holds; the last hidden row."""
    positions = torch.arange(len(store), len(store) + len(token_ids))
    return model()(torch.tensor(token_ids), positions, dense_attend(store))[-1]


def alone(token_ids: list[int]) -> tuple[torch.Tensor, DenseCache]:
    """The logits behind the last token, and the cache, of a run alone in which nothing is cut."""
    logits, store = _alone(tuple(token_ids))
    return logits, deepcopy(store)


@cache
def _alone(token_ids: tuple[int, ...]) -> tuple[torch.Tensor, DenseCache]:
    store = empty_cache()
    return model().logits(compute(token_ids, store)), store


@cache
def text_alone(request_id: str, prompt: int, max_tokens: int) -> list[int]:
    """The greedy text of one request alone."""
    request = make_request(request_id, prompt, max_tokens)
    return run_alone(model(), request.prompt_token_ids, request.sampling_params)


def mid_flight(name: str, past: int, new: int, *, outputs: int = 0):
    """A request with `past` computed tokens and `new` left, and its cache; the last ones are outputs."""
    tokens = make_request(name, past + new).prompt_token_ids
    request = make_request(name, tokens[: len(tokens) - outputs])
    request.output_token_ids = tokens[len(tokens) - outputs :]
    request.num_computed_tokens = past
    return request, alone(tokens[:past])[1] if past else empty_cache()


def row(request, num_tokens: int) -> Row:
    """The row of a request that computes so many tokens."""
    return Row(request, num_tokens, num_tokens == request.num_new_tokens)


def fleet(shapes: list[tuple[int, int]]):
    """Rows and caches of a step: each request brings all that it has left; single tokens are decodes.

    The caches are found by name: their order is not that of the rows.
    """
    rows, caches = [], {}
    for number, (past, new) in enumerate(shapes):
        outputs = 1 if past and new == 1 else 0
        request, caches[f"r{number}"] = mid_flight(f"r{number}", past, new, outputs=outputs)
        rows.append(row(request, new))
    return rows, dict(reversed(caches.items()))


def long_rows(past_lens, num_new, edges):
    """Rows and caches of long sequences: the ids of the tokens are `edges`, in turn; keys are zeros."""
    rows, caches = [], {}
    for number, (past, new) in enumerate(zip(past_lens, num_new, strict=True)):
        tokens = [edges[(number + place) % len(edges)] for place in range(past + new)]
        request = make_request(f"r{number}", tokens)
        request.num_computed_tokens = past
        rows.append(row(request, new))
        caches[request.request_id] = empty_cache()
        for layer in range(CONFIG.num_hidden_layers):
            caches[request.request_id].append(layer, *torch.zeros(2, past, 2, 8, dtype=torch.float64))
    return rows, caches


def worked_example():
    """Rows and caches of the README's step: three decodes, and the first 8 tokens of a prompt of 13."""
    rows, caches = fleet([*SHAPES["the worked example"][:3], (0, 13)])
    return [*rows[:3], row(rows[3].request, 8)], caches


def logits_under(mask, batch, caches) -> torch.Tensor:
    """The last column's logits (B, vocab_size) under a mask, whatever it says; stores nothing."""
    pasts = [caches[request_id] for request_id in batch.request_ids]

    def attend(layer, q, k, v):
        past = (pad_sequence(x, True, 0.0, "left") for x in zip(*(c.get(layer) for c in pasts), strict=True))
        k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v), strict=True))
        return sdpa(q, k, v, mask)

    return model().logits(model()(batch.tokens, batch.positions, attend)[:, -1])


class FusedModel:
    """The driver's model: `fused_step` once a step, the caches it needs, and the largest logit."""

    def __init__(self, lab):
        self.lab = lab
        self.caches = {}

    def forward(self, rows) -> dict[str, list[int]]:
        """Rows of (request, token_ids, positions, sample); {request_id: [token]} of the sampled."""
        if not rows:
            return {}
        # A request that is not in the step has finished or was preempted; one that starts again starts empty.
        self.caches = {
            request.request_id: self.caches[request.request_id]
            if request.num_computed_tokens
            else empty_cache()
            for request, *_ in rows
        }
        step = [row(request, len(token_ids)) for request, token_ids, *_ in rows]
        logits = self.lab.fused_step(model(), step, self.caches)
        if strangers := [name for name in logits if name not in self.caches]:
            raise AssertionError(f"fused_step returned logits under {strangers[0]!r}, which is no request_id")
        return {request_id: [int(scores.argmax())] for request_id, scores in logits.items()}


_MIXED = [("A", 5, 6, 0), ("B", 4, 6, 0), ("C", 3, 6, 0), ("D", 30, 3, 1)]
_PROMPTS = [("A", 5, 3, 0), ("B", 9, 3, 0), ("C", 2, 3, 0)]
SCENARIOS = [
    workload("one alone", [("A", 5, 6, 0)]),
    workload("a prompt beside three decodes", _MIXED),
    workload("several prompts at once", _PROMPTS, budget=12),
    workload("two long prompts in chunks", [("A", 25, 3, 0), ("B", 18, 3, 0)], budget=10, threshold=6),
    workload("preempted and computed again", [("A", 6, 9, 0), ("B", 6, 9, 0)], blocks=20),
]


def run(lab, scenario: dict, *, raise_errors: bool = True):
    """The trace of one scenario: mixed steps, each computed by one `lab.fused_step`."""
    config = scenario["config"]
    scheduler = Scheduler(FakeKV(config["num_blocks"]), **{name: config[name] for name in SETTINGS})
    parts = {"attend_backend": "lab-04"}
    return drive(scheduler, scenario, model=FusedModel(lab), raise_errors=raise_errors, parts=parts)
