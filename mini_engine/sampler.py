"""From logits to tokens: greedy or random, with a generator of its own for every request.

A request draws exactly one number a token, so its stream depends on its seed alone, never on what
it is batched with or on how its prompt was cut.
"""

import random
from math import isfinite

import torch
from torch import Tensor

from mini_engine.request import Request, SamplingParams


class NotFiniteError(ValueError):
    """Logits from which no token can be chosen."""


class Sampler:
    """Chooses tokens: called with logits (S, vocab_size) and their S requests, it returns S token ids.

    A request without a seed gets one from `seed` and its arrival number, so a whole run repeats. Raises
    NotFiniteError before anything is drawn if the largest logit of a row is NaN or infinite.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._generators: dict[str, random.Random] = {}

    def __call__(self, logits: Tensor, requests: list[Request]) -> list[int]:
        params = [request.sampling_params for request in requests]
        penalized = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
        if penalized:
            logits = logits.clone()
            for i in penalized:
                _penalize(logits[i], requests[i])
        token_ids = logits.argmax(dim=1)  # of a NaN, if there is one
        for best in logits.gather(1, token_ids.unsqueeze(1)).flatten().tolist():
            if not isfinite(best):
                raise NotFiniteError(f"its largest logit is {best}")
        drawn = [i for i, p in enumerate(params) if p.temperature > 0]
        if drawn:
            probs = _probabilities(logits[drawn], [params[i] for i in drawn])
            token_ids[drawn] = _draw(probs, self._uniform([requests[i] for i in drawn]))
        return token_ids.tolist()

    def forget(self, request_id: str) -> None:
        """Drop a request's generator; if the request goes on, a new one continues where it was."""
        self._generators.pop(request_id, None)

    def _uniform(self, requests: list[Request]) -> Tensor:
        """Return one number in [0, 1) from each request's generator, (S,) float64."""
        draws = []
        for request in requests:
            generator = self._generators.get(request.request_id)
            if generator is None:
                # Python's generator, not torch's, which uses 32 bits of a seed only.
                seed = request.sampling_params.seed
                generator = random.Random(f"{self.seed}/{request.arrival}" if seed is None else int(seed))
                for _ in request.output_token_ids:  # where one was forgotten in the middle of a request
                    generator.random()
                self._generators[request.request_id] = generator
            draws.append(generator.random())
        return torch.tensor(draws, dtype=torch.float64)


def top_logprobs(logits: Tensor, token_id: int, num: int) -> dict[int, float]:
    """Return log probabilities of the chosen token and of the `num` best, from one row of raw logits."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(num, len(logprobs))).indices.tolist()
    return {i: logprobs[i].item() for i in dict.fromkeys([token_id, *best])}


def _penalize(row: Tensor, request: Request) -> None:
    """Make tokens that the request has seen less likely, in its row (Keskar et al., CTRL, 2019)."""
    penalty = request.sampling_params.repetition_penalty
    seen = torch.tensor(sorted(set(request.token_ids())), device=row.device)
    row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)


def _probabilities(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return probabilities (S, vocab_size) float32: temperature, min_p, top_k and top_p, in that order."""

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], device=logits.device).unsqueeze(1)

    # Below 1e-6 the best token has all the probability already, and a quotient may overflow.
    logits = logits.float() / column("temperature").clamp(min=1e-6)
    if any(p.min_p for p in params):
        probs = logits.softmax(dim=1)
        logits = logits.masked_fill(probs < column("min_p") * probs.amax(1, keepdim=True), -torch.inf)
    if any(p.top_k or p.top_p < 1 for p in params):
        ordered, order = logits.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        top_k = column("top_k")
        ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
        probs = ordered.softmax(dim=1)
        # A token stays while those before it have not reached top_p; the first always does.
        top_p = column("top_p")
        cut = (top_p < 1) & (probs.cumsum(1) - probs >= top_p)
        ordered = ordered.masked_fill(cut, -torch.inf)
        logits = logits.scatter(1, order, ordered)
    return logits.softmax(dim=1)


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the draw.

    There is one: a draw is at most 1 - 2**-53, and times the whole sum that rounds to less than the sum.
    """
    running = probs.double().cumsum(dim=1)
    draw = uniform.to(probs.device).unsqueeze(1) * running[:, -1:]
    return torch.searchsorted(running, draw, right=True).squeeze(1)
