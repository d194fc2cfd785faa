"""lab-08, sampling: the reference, written to be read."""

import math
import random
from bisect import bisect_right
from itertools import accumulate

# ------------------------------------------------------------------------------ one row, in plain lists


def softmax(logits):
    """Given: the probabilities of one row, as many floats as logits, whose sum is 1.

    The probability of a token is exp(logit) divided by the sum of all. A logit of -math.inf, a token
    that was dropped, gets 0. exp(710) is too large for a float, so the largest logit is subtracted from
    all first, which changes no probability.
    """
    best = max(logits)
    weights = [math.exp(logit - best) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def best_first(logits):
    """Given: the token ids of one row, the best first; of equal logits the lower id first."""
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def apply_penalties(logits, prompt_token_ids, output_token_ids, params):
    """Return a new list: the logits of one row, smaller for tokens that are in the text already.

    params.repetition_penalty    for each token in the prompt or the outputs, once: a logit above 0 is
                                 divided by it, any other multiplied, so that both get smaller
    params.frequency_penalty     for tokens in the outputs: subtracted as often as the token is there
    params.presence_penalty      for tokens in the outputs: subtracted once

    In this order. 1, 0 and 0 are off.
    """
    penalized = list(logits)
    for token_id in {*prompt_token_ids, *output_token_ids}:
        if penalized[token_id] > 0:
            penalized[token_id] /= params.repetition_penalty
        else:
            penalized[token_id] *= params.repetition_penalty
    for token_id in output_token_ids:
        penalized[token_id] -= params.frequency_penalty
    for token_id in {*output_token_ids}:
        penalized[token_id] -= params.presence_penalty
    return penalized


def apply_temperature(logits, temperature):
    """Return a new list: the logits of one row, divided by the temperature, which is above 0.

    A temperature below 1e-6 counts as 1e-6. The best token has all the probability by then, and a
    quotient could become too large for a float.
    """
    return [logit / max(temperature, 1e-6) for logit in logits]


def apply_min_p(logits, min_p):
    """Return a new list in which unlikely tokens are dropped: their logits are -math.inf.

    A token stays if its probability is at least min_p times that of the likeliest token. 0 is off.
    """
    probs = softmax(logits)
    least = min_p * max(probs)
    return [logit if prob >= least else -math.inf for logit, prob in zip(logits, probs, strict=True)]


def apply_top_k(logits, top_k):
    """Return a new list in which all tokens below the top_k best are dropped: their logits are -math.inf.

    Tokens with the same logit as the last of the top_k best stay, too: a limit cannot choose among
    equals. 0 is off, and so is a top_k of as many tokens as there are, or more.
    """
    if not 0 < top_k < len(logits):
        return list(logits)
    least = sorted(logits, reverse=True)[top_k - 1]
    return [logit if logit >= least else -math.inf for logit in logits]


def apply_top_p(logits, top_p):
    """Return a new list in which the tokens outside the nucleus are dropped: their logits are -math.inf.

    The nucleus is the smallest number of best tokens whose probabilities have a sum of at least top_p.
    Go through the tokens in the order of `best_first`: a token stays if the sum of those before it is
    below top_p. So the token that crosses top_p belongs to the nucleus, and the best one always does.
    1 is off: nothing is dropped, whatever a sum is rounded to.
    """
    if top_p >= 1:
        return list(logits)
    kept, before, probs = [-math.inf] * len(logits), 0.0, softmax(logits)
    for token_id in best_first(logits):
        if before < top_p:
            kept[token_id] = logits[token_id]
        before += probs[token_id]
    return kept


def probabilities(logits, params):
    """Return the probabilities by which the token of one row is drawn; penalties came before.

    In vLLM's order: params.temperature, min_p, top_k, top_p, each on what the one before has left. The
    probabilities of the tokens that are left sum to 1. (The temperature is above 0 here: a request
    with a temperature of 0 takes its best token, and draws nothing.)
    """
    logits = apply_temperature(logits, params.temperature)
    logits = apply_min_p(logits, params.min_p)
    logits = apply_top_k(logits, params.top_k)
    logits = apply_top_p(logits, params.top_p)
    return softmax(logits)


def draw(probs, u):
    """Return the token, an id, that the number u draws; u is from 0 up to but not including 1.

    Lay the probabilities end to end, in the order of the ids: token 0 has the stretch from 0 to
    probs[0], token 1 the next, and so on. The token whose stretch contains the point is drawn.

    - The point is u times the place where the last stretch ends. That is 1 but for rounding: with a
      bit less, a number just below 1 would lie after the last token.
    - A point on the border of two stretches belongs to the later one. So a token of probability 0
      is never drawn.

    itertools.accumulate gives the places where the stretches end.
    """
    ends = list(accumulate(probs))
    return bisect_right(ends, u * ends[-1])


# ------------------------------------------------------------------------------ a batch, with torch


def batch_probabilities(logits, params):
    """Return the `probabilities` of each row: a tensor (S, vocab_size) for logits (S, vocab_size).

    params: a list of S SamplingParams, each with a temperature above 0. Every row has settings of its
    own, and what is off in one row may be on in the next. Make a column of each setting,
    torch.tensor([[value of row 0], [value of row 1], ...]): (S, 1), which is used against (S, vocab_size)
    row by row. logits are only read, and the result has their dtype.

    `import torch` belongs inside the functions that need it: the first half of the file runs without.
    """
    import torch

    def column(name, dtype=logits.dtype):
        return torch.tensor([[getattr(p, name)] for p in params], dtype=dtype, device=logits.device)

    logits = logits / column("temperature").clamp(min=1e-6)
    probs = logits.softmax(dim=1)
    logits = logits.masked_fill(probs < column("min_p") * probs.amax(dim=1, keepdim=True), -math.inf)
    top_k, top_p = column("top_k", torch.int64), column("top_p")
    ordered, token_ids = logits.sort(dim=1, descending=True, stable=True)  # of equals the lower id first
    least = ordered.gather(1, top_k.clamp(1, logits.shape[1]) - 1)
    ordered = ordered.masked_fill((top_k > 0) & (ordered < least), -math.inf)
    probs = ordered.softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    ordered = ordered.masked_fill((top_p < 1) & (before >= top_p), -math.inf)
    return torch.empty_like(logits).scatter(1, token_ids, ordered.softmax(dim=1))


class Sampler:
    """Chooses a token for each row of a batch. Each request has random numbers of its own."""

    def __init__(self, seed=0):
        """Given. seed: the engine's, for requests without one."""
        self.seed = seed
        self.numbers = {}  # request_id: (its random.Random, the list of the numbers that it has given)

    def uniform(self, request, index):
        """Return the random number, from 0 up to but not including 1, for output `index` of a request.

        It is number `index`, counted from 0, of random.Random(request.sampling_params.seed). Without a
        seed (None) it is that of random.Random(f"{self.seed}/{request.arrival}"), so that a run of the
        engine repeats. The same index gives the same number, however often and in whatever order it
        is asked for: a token may be drawn again, because its step failed. Other requests have no part
        in it.

        self.numbers is there for what you want to keep of each request: a generator, and the numbers that
        it has given. Making a new generator for every token would work, and would take longer and longer.
        """
        if request.request_id not in self.numbers:
            seed = request.sampling_params.seed
            generator = random.Random(f"{self.seed}/{request.arrival}" if seed is None else seed)
            self.numbers[request.request_id] = generator, []
        generator, numbers = self.numbers[request.request_id]
        while len(numbers) <= index:
            numbers.append(generator.random())
        return numbers[index]

    def forget(self, request_id):
        """Drop what is kept of a request; nothing happens if there is nothing.

        The engine calls this when a request has ended, and its id may come again with another seed. It
        also does so in the middle of a request whose step has failed; the request then goes on with
        the numbers that it would have had anyway.
        """
        self.numbers.pop(request_id, None)

    def __call__(self, logits, requests):
        """Return a token id for each row, a list of S ints. Row i of logits (S, vocab_size) is requests[i]'s.

        1. Compute in float32 (logits.float()): a model may give bfloat16, which is too coarse to add up
           probabilities. The logits that are given are only read.
        2. Apply the penalties to the rows of requests that have any. (row.tolist() is a list.)
        3. A temperature of 0 is greedy: the best token of the row, and no random number.
        4. All other rows: their probabilities, a number from each request, and the token that it draws.
           The number is that of the output that comes next, len(request.output_token_ids).
           torch.cumsum says where the stretches end, in float64, because many small ones are added up;
           torch.searchsorted(ends, points, right=True) finds (S, 1) points, each in its row.
        """
        import torch

        logits = logits.float().clone()
        for row, request in zip(logits, requests, strict=True):
            p, seen = request.sampling_params, (request.prompt_token_ids, request.output_token_ids)
            if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1, 0, 0):
                row.copy_(torch.tensor(apply_penalties(row.tolist(), *seen, p)))
        token_ids = logits.argmax(dim=1)
        drawn = [i for i, request in enumerate(requests) if request.sampling_params.temperature > 0]
        if drawn:
            probs = batch_probabilities(logits[drawn], [requests[i].sampling_params for i in drawn])
            ends = probs.double().cumsum(dim=1)
            u = [[self.uniform(requests[i], len(requests[i].output_token_ids))] for i in drawn]
            points = torch.tensor(u, dtype=ends.dtype, device=ends.device) * ends[:, -1:]
            token_ids[drawn] = torch.searchsorted(ends, points, right=True).squeeze(1)
        return token_ids.tolist()
