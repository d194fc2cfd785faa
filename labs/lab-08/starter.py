"""lab-08, sampling: your file.

Replace each NotImplementedError by code; the docstrings say what to do, README.md says why.
Check with: LAB_IMPL=starter pytest labs/lab-08     Stuck? python -m labs hint lab-08
"""

import math

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
    raise NotImplementedError("lab-08: apply_penalties is not written yet")


def apply_temperature(logits, temperature):
    """Return a new list: the logits of one row, divided by the temperature, which is above 0.

    A temperature below 1e-6 counts as 1e-6. The best token has all the probability by then, and a
    quotient could become too large for a float.
    """
    raise NotImplementedError("lab-08: apply_temperature is not written yet")


def apply_min_p(logits, min_p):
    """Return a new list in which unlikely tokens are dropped: their logits are -math.inf.

    A token stays if its probability is at least min_p times that of the likeliest token. 0 is off.
    """
    raise NotImplementedError("lab-08: apply_min_p is not written yet")


def apply_top_k(logits, top_k):
    """Return a new list in which all tokens below the top_k best are dropped: their logits are -math.inf.

    Tokens with the same logit as the last of the top_k best stay, too: a limit cannot choose among
    equals. 0 is off, and so is a top_k of as many tokens as there are, or more.
    """
    raise NotImplementedError("lab-08: apply_top_k is not written yet")


def apply_top_p(logits, top_p):
    """Return a new list in which the tokens outside the nucleus are dropped: their logits are -math.inf.

    The nucleus is the smallest number of best tokens whose probabilities have a sum of at least top_p.
    Go through the tokens in the order of `best_first`: a token stays if the sum of those before it is
    below top_p. So the token that crosses top_p belongs to the nucleus, and the best one always does.
    1 is off: nothing is dropped, whatever a sum is rounded to.
    """
    raise NotImplementedError("lab-08: apply_top_p is not written yet")


def probabilities(logits, params):
    """Return the probabilities by which the token of one row is drawn; penalties came before.

    In vLLM's order: params.temperature, min_p, top_k, top_p, each on what the one before has left. The
    probabilities of the tokens that are left sum to 1. (The temperature is above 0 here: a request
    with a temperature of 0 takes its best token, and draws nothing.)
    """
    raise NotImplementedError("lab-08: probabilities is not written yet")


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
    raise NotImplementedError("lab-08: draw is not written yet")


# ------------------------------------------------------------------------------ a batch, with torch


def batch_probabilities(logits, params):
    """Return the `probabilities` of each row: a tensor (S, vocab_size) for logits (S, vocab_size).

    params: a list of S SamplingParams, each with a temperature above 0. Every row has settings of its
    own, and what is off in one row may be on in the next. Make a column of each setting,
    torch.tensor([[value of row 0], [value of row 1], ...]): (S, 1), which is used against (S, vocab_size)
    row by row. logits are only read, and the result has their dtype.

    `import torch` belongs inside the functions that need it: the first half of the file runs without.
    """
    raise NotImplementedError("lab-08: batch_probabilities is not written yet")


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
        raise NotImplementedError("lab-08: Sampler.uniform is not written yet")

    def forget(self, request_id):
        """Drop what is kept of a request; nothing happens if there is nothing.

        The engine calls this when a request has ended, and its id may come again with another seed. It
        also does so in the middle of a request whose step has failed; the request then goes on with
        the numbers that it would have had anyway.
        """
        raise NotImplementedError("lab-08: Sampler.forget is not written yet")

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
        raise NotImplementedError("lab-08: Sampler.__call__ is not written yet")
