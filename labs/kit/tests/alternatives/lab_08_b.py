"""lab-08 in another shape: a row is a batch with one row, and a request's numbers are a stream."""

import bisect
import itertools
import math
import random

from mini_engine.request import SamplingParams


def one_row(limit, logits, **settings):
    import torch

    return limit(torch.tensor([logits], dtype=torch.float64), [SamplingParams(**settings)])[0].tolist()


def values(params, name, logits):
    import torch

    return torch.tensor([getattr(one, name) for one in params], dtype=torch.float64)[:, None].to(
        logits.device
    )


def apply_penalties(logits, prompt_token_ids, output_token_ids, params):
    import torch

    row, size = torch.tensor(logits, dtype=torch.float64), len(logits)
    said = torch.bincount(torch.tensor([*output_token_ids], dtype=torch.int64), minlength=size)
    seen = said + torch.bincount(torch.tensor([*prompt_token_ids], dtype=torch.int64), minlength=size)
    factor = torch.where(seen > 0, params.repetition_penalty, 1.0)
    row = torch.where(row > 0, row / factor, row * factor)
    return (row - said * params.frequency_penalty - (said > 0) * params.presence_penalty).tolist()


def apply_temperature(logits, temperature):
    return [logit / max(1e-6, temperature) for logit in logits]


def cut_min_p(logits, params):
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < values(params, "min_p", logits) * probs.max(-1, True).values, -math.inf)


def cut_top_k(logits, params):
    rows = []
    for row, one in zip(logits, params, strict=True):
        kth = row.topk(min(one.top_k, len(row))).values[-1] if one.top_k else -math.inf
        rows.append(row.masked_fill(row < kth, -math.inf))
    import torch

    return torch.stack(rows)


def cut_top_p(logits, params):
    """Row by row: how many of the best are needed, found among the ends of their stretches."""
    cut = logits.new_full(logits.shape, -math.inf)
    for row, probs, out, one in zip(logits, logits.softmax(-1), cut, params, strict=True):
        order = row.argsort(descending=True, stable=True)
        ends = [*itertools.accumulate(probs[order].tolist())]
        needed = order[: bisect.bisect_left(ends, one.top_p) + 1] if one.top_p < 1 else order
        out[needed] = row[needed]
    return cut


def apply_min_p(logits, min_p):
    return one_row(cut_min_p, logits, min_p=min_p)


def apply_top_k(logits, top_k):
    return one_row(cut_top_k, logits, top_k=top_k)


def apply_top_p(logits, top_p):
    return one_row(cut_top_p, logits, top_p=top_p)


def batch_probabilities(logits, params):
    scaled = logits.double() / values(params, "temperature", logits).clamp(min=1e-6)
    for cut in (cut_min_p, cut_top_k, cut_top_p):
        scaled = cut(scaled, params)
    return scaled.softmax(-1)


def probabilities(logits, params):
    import torch

    return batch_probabilities(torch.tensor([logits], dtype=torch.float64), [params])[0].tolist()


def draw(probs, u):
    ends = [*itertools.accumulate(probs)]
    return next(token_id for token_id, end in enumerate(ends) if end > u * ends[-1])


class Stream:
    def __init__(self, seed):
        generator = random.Random(seed)
        self.rest, self.drawn = iter(generator.random, None), []

    def __getitem__(self, index):
        self.drawn += itertools.islice(self.rest, max(0, index + 1 - len(self.drawn)))
        return self.drawn[index]


class Sampler:
    def __init__(self, seed=0):
        self.run, self.streams = seed, {}

    def uniform(self, request, index):
        if request.request_id not in self.streams:
            own = request.sampling_params.seed
            self.streams[request.request_id] = Stream(f"{self.run}/{request.arrival}" if own is None else own)
        return self.streams[request.request_id][index]

    def forget(self, request_id):
        if request_id in self.streams:
            del self.streams[request_id]

    def __call__(self, logits, requests):
        import torch

        rows = [
            apply_penalties(row, r.prompt_token_ids, r.output_token_ids, r.sampling_params)
            for row, r in zip(logits.tolist(), requests, strict=True)
        ]
        tokens, logits = [], torch.tensor(rows, dtype=torch.float64)
        for row, request in zip(logits, requests, strict=True):
            if request.sampling_params.temperature == 0:
                tokens.append(int(row.argmax()))
            else:
                (probs,) = batch_probabilities(row[None], [request.sampling_params]).tolist()
                tokens.append(draw(probs, self.uniform(request, len(request.output_token_ids))))
        return tokens
