"""lab-08 in another shape: the Sampler keeps nothing, and tokens are compared with all others."""

import math
import random
from collections import Counter


def softmax(logits):
    best = max(logits)
    weights = [math.exp(logit - best) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def keep(logits, stays):
    return [logit if stays(token_id) else -math.inf for token_id, logit in enumerate(logits)]


def apply_penalties(logits, prompt_token_ids, output_token_ids, params):
    said, row = Counter(output_token_ids), []
    for token_id, logit in enumerate(logits):
        if token_id in said or token_id in prompt_token_ids:
            logit *= params.repetition_penalty ** (-1 if logit > 0 else 1)
        times = said[token_id]
        row.append(logit - times * params.frequency_penalty - (times > 0) * params.presence_penalty)
    return row


def apply_temperature(logits, temperature):
    divisor = temperature if temperature > 1e-6 else 1e-6
    return list(map(lambda logit: logit / divisor, logits))


def apply_min_p(logits, min_p):
    best = max(logits)
    least = best + math.log(min_p) if min_p else -math.inf  # in logits a share is a distance
    return keep(logits, lambda token_id: logits[token_id] >= least)


def apply_top_k(logits, top_k):
    def num_better(token_id):
        return sum(other > logits[token_id] for other in logits)

    return keep(logits, lambda token_id: top_k == 0 or num_better(token_id) < top_k)


def apply_top_p(logits, top_p):
    probs = softmax(logits)

    def before(token_id):
        own = (-logits[token_id], token_id)
        return math.fsum(p for i, p in enumerate(probs) if (-logits[i], i) < own)

    return keep(logits, lambda token_id: top_p == 1 or before(token_id) < top_p)


def probabilities(logits, params):
    logits = apply_min_p(apply_temperature(logits, params.temperature), params.min_p)
    return softmax(apply_top_p(apply_top_k(logits, params.top_k), params.top_p))


def draw(probs, u):
    left = u * sum(probs)
    for token_id, prob in enumerate(probs):
        if left < prob:
            return token_id
        left -= prob
    return max(token_id for token_id, prob in enumerate(probs) if prob)  # rounded away


def batch_probabilities(logits, params):
    import torch

    rows = [probabilities(row, one) for row, one in zip(logits.tolist(), params, strict=True)]
    return torch.tensor(rows, dtype=logits.dtype)


class Sampler:
    def __init__(self, seed=0):
        self.seed = seed

    def uniform(self, request, index):
        seed = request.sampling_params.seed
        generator = random.Random(f"{self.seed}/{request.arrival}" if seed is None else seed)
        for _ in range(index):
            generator.random()
        return generator.random()

    def forget(self, request_id):
        pass

    def __call__(self, logits, requests):
        return [self.token(row, request) for row, request in zip(logits.tolist(), requests, strict=True)]

    def token(self, row, request):
        params, outputs = request.sampling_params, request.output_token_ids
        row = apply_penalties(row, request.prompt_token_ids, outputs, params)
        if params.temperature == 0:
            return row.index(max(row))
        return draw(probabilities(row, params), self.uniform(request, len(outputs)))
