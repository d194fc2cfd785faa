"""The contract of lab-08 as a slow oracle, for random_scripts.py: token by token, in float64, without torch.

Nothing is sorted: a token is compared with all others. CLOSE has how near two numbers were that were compared
and that another order of adding up may round to the other side; no script depends on such a pair.
"""

import math
import random

CLOSE = []


def reaches(value, limit):
    CLOSE.append(abs(value - limit))
    return value >= limit


def softmax(logits):
    """Return each token's probability: 1 in as many as all tokens together are likelier than it."""
    shares = []
    for own in logits:
        times = (math.exp(min(other - own, 700)) for other in logits)
        shares.append(0.0 if own == -math.inf else 1 / math.fsum(times))
    return shares


def apply_penalties(logits, prompt_token_ids, output_token_ids, params):
    found = []
    for token_id, logit in enumerate(logits):
        times = list(output_token_ids).count(token_id)
        if times or token_id in prompt_token_ids:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        if times:
            logit = logit - times * params.frequency_penalty - params.presence_penalty
        found.append(logit)
    return found


def apply_temperature(logits, temperature):
    return [logit / (temperature if temperature > 1e-6 else 1e-6) for logit in logits]


def apply_min_p(logits, min_p):
    best, found = max(logits), []
    for logit in logits:
        likely = logit == best or min_p == 0 or reaches(math.exp(logit - best), min_p)
        found.append(logit if likely else -math.inf)
    return found


def apply_top_k(logits, top_k):
    found = []
    for logit in logits:
        num_better = len([other for other in logits if other > logit])
        found.append(logit if top_k == 0 or num_better < top_k else -math.inf)
    return found


def apply_top_p(logits, top_p):
    probs, found = softmax(logits), []
    for token_id, logit in enumerate(logits):
        better = [i for i, other in enumerate(logits) if other > logit or (other == logit and i < token_id)]
        before = math.fsum(probs[i] for i in better)
        is_in = top_p == 1 or better == [] or not reaches(before, top_p)
        found.append(logit if is_in else -math.inf)
    return found


def probabilities(logits, params):
    limits = (apply_temperature, apply_min_p, apply_top_k, apply_top_p)
    settings = (params.temperature, params.min_p, params.top_k, params.top_p)
    for limit, setting in zip(limits, settings, strict=True):
        logits = limit(logits, setting)
    return softmax(logits)


def draw(probs, u):
    """Cut one stretch off after the other, until the point lies in the first."""
    point = u * math.fsum(probs)
    for token_id, prob in enumerate(probs):
        if prob > 0 and not reaches(point, prob):
            return token_id
        point -= prob
    raise AssertionError("the point lies behind all stretches")


def batch_probabilities(logits, params):
    return [probabilities(row, one) for row, one in zip(logits, params, strict=True)]


def token(row, request, penalize, uniform):
    params, outputs = request.sampling_params, request.output_token_ids
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0):
        row = penalize(row, request.prompt_token_ids, outputs, params)
    if params.temperature == 0:
        return row.index(max(row))
    return draw(probabilities(row, params), uniform(request, len(outputs)))


class Sampler:
    """Keeps nothing: each number is drawn from a new generator."""

    def __init__(self, seed=0):
        self.seed = seed

    def uniform(self, request, index):
        own = request.sampling_params.seed
        numbers = random.Random(f"{self.seed}/{request.arrival}" if own is None else own)
        return [numbers.random() for _ in range(index + 1)][-1]

    def forget(self, request_id):
        pass

    def __call__(self, logits, requests):
        pairs = zip(logits, requests, strict=True)
        return [token(row, request, apply_penalties, self.uniform) for row, request in pairs]
