"""From logits to tokens: greedy or random, with numbers of its own for every request.

The order is vLLM's. First allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors, penalties;
then greedy requests take the best token, and for the others come temperature, min_p, top_k, top_p and a draw.
`Sampler` does this for a batch.
"""

import random
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mini_engine.checks import shown
from mini_engine.outputs import Logprob
from mini_engine.request import Request, SamplingParams
from mini_engine.sampling_params import num_parameters
from mini_engine.speculative.rejection_sampler import accept

# A row of logits (vocab_size,) or a batch (S, vocab_size): a tensor, or what torch.as_tensor takes.
Logits = Tensor | Sequence[float] | Sequence[Sequence[float]]


# Numbers of the likeliest tokens among which those that top_p keeps are looked for, before all are sorted,
# which takes ten times as long.
NUCLEI = (1024, 8192)


class NotFiniteError(ValueError):
    """Logits from which no token can be chosen."""


def process_logits(logits: Logits, request: Request, output_token_ids: Sequence[int]) -> Tensor:
    """Return one row of logits (vocab_size,) after all that can change which token is the best.

    `output_token_ids` are those before the token to be chosen. Raises ValueError for a logits processor
    that returns anything but such a row.
    """
    row, params, outputs = _floats(logits).clone(), request.sampling_params, output_token_ids
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    for *before, last in request.bad_words_token_ids:
        if list(outputs[len(outputs) - len(before) :]) == before:
            row[last] = -torch.inf
    if len(outputs) < params.min_tokens:
        row[[*params.stop_token_ids, *request.eos_token_ids]] = -torch.inf
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        row[list(params.logit_bias)] += bias
    for processor in params.logits_processors:
        prompt = [] if num_parameters(processor) == 2 else [list(request.prompt_token_ids)]
        given = processor(*prompt, list(outputs), row)
        if not isinstance(given, Tensor) or given.shape != row.shape:
            what = f"a logits processor must return logits of the shape {tuple(row.shape)}"
            raise ValueError(f"{what}, but gave {shown(given)}")
        row = given
    return apply_penalties(row, request.prompt_token_ids, outputs, params)


def apply_penalties(
    logits: Logits,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    params: SamplingParams,
) -> Tensor:
    """Return one row of logits (vocab_size,) in which tokens that were seen are less likely.

    repetition_penalty divides the positive logits of all seen tokens and multiplies the negative ones (Keskar
    et al., CTRL, 2019). Of tokens of the output, frequency_penalty is then subtracted once for each time and
    presence_penalty once (OpenAI's definition).
    """
    row = _floats(logits).clone()
    penalty = params.repetition_penalty
    if penalty != 1 and (seen := sorted({*prompt_token_ids, *output_token_ids})):
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if output_token_ids and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(output_token_ids)
        ids = list(counts)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.frequency_penalty * times
        row[ids] -= params.presence_penalty
    return row


def apply_temperature(logits: Logits, temperature: float | Sequence[float]) -> Tensor:
    """Return the logits divided by the temperature: one for all rows, or one for each."""
    logits = _floats(logits)
    # Below 1e-6 the best token has all the probability already, and a quotient may overflow.
    return logits / _column(temperature, logits).clamp(min=1e-6)


def apply_min_p(logits: Logits, min_p: float | Sequence[float]) -> Tensor:
    """Return the logits with -inf for tokens below this share of the likeliest one's probability.

    One share for all rows, or one for each; 0 drops nothing.
    """
    logits = _floats(logits)
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < _column(min_p, logits) * probs.amax(-1, keepdim=True), -torch.inf)


def apply_top_k(logits: Logits, top_k: int | Sequence[int]) -> Tensor:
    """Return the logits with -inf for all below the k-th largest; its equals stay.

    One k for all rows, or one for each; 0 and -1 drop nothing.
    """
    logits = _floats(logits)
    ks = _column(top_k, logits, torch.int64)
    places = ks.clamp(1, logits.shape[-1])
    best = logits.topk(int(places.max())).values
    kth = best.gather(-1, (places - 1).expand(*logits.shape[:-1], 1))
    return logits.masked_fill((ks > 0) & (logits < kth), -torch.inf)


def apply_top_p(logits: Logits, top_p: float | Sequence[float]) -> Tensor:
    """Return the logits with -inf for tokens that the likeliest ones do not need to reach `top_p`.

    A token stays while the probabilities of those before it sum to less than `top_p`; of equals, the one
    with the smaller id is before. One limit for all rows, or one for each; 1 drops nothing.
    """
    logits = _floats(logits)
    limit, probs = _column(top_p, logits), logits.softmax(-1)
    size = logits.shape[-1]
    for num in (*(n for n in NUCLEI if n < size), size):
        best, order = logits.topk(num)
        likeliest = probs.gather(-1, order)
        running = likeliest.cumsum(-1)
        if bool(((limit >= 1) | (running[..., -1:] >= limit)).all()):
            break
    num_kept = (running - likeliest < limit).sum(-1, keepdim=True)
    last = best.gather(-1, (num_kept - 1).clamp(min=0))
    more, equal = logits > last, logits == last
    num_equal = num_kept - more.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > num_equal).any()):
        equal &= equal.cumsum(-1) <= num_equal
    return logits.masked_fill((limit < 1) & ~(more | equal), -torch.inf)


def probabilities(logits: Logits, params: SamplingParams | Sequence[SamplingParams]) -> Tensor:
    """Return probabilities in the shape of the logits: temperature, min_p, top_k and top_p, in that order.

    One SamplingParams for a row (vocab_size,), one for each row of a batch (S, vocab_size). Penalties have
    been applied before. Temperature 0 gives the largest logit, the first of equals, probability 1.
    """
    logits = _floats(logits)
    if isinstance(params, SamplingParams):
        return probabilities(logits[None], [params])[0]
    temperatures = [p.temperature for p in params]
    limited = apply_temperature(logits, temperatures)
    if any(p.min_p for p in params):
        limited = apply_min_p(limited, [p.min_p for p in params])
    if any(p.top_k for p in params):
        limited = apply_top_k(limited, [p.top_k for p in params])
    if any(p.top_p < 1 for p in params):
        limited = apply_top_p(limited, [p.top_p for p in params])
    probs = limited.softmax(-1)
    if greedy := [i for i, t in enumerate(temperatures) if t == 0]:
        best = logits[greedy].argmax(-1)
        probs[greedy] = 0.0
        probs[greedy, best] = 1.0
    return probs


def draw(probs: Logits, u: float | Sequence[float]) -> Any:
    """Return the first token whose cumulative probability exceeds u, a number in [0, 1).

    An int for one row (vocab_size,) and one u; a list of S for a batch (S, vocab_size) and S of them. The
    probabilities need not sum to 1 exactly: u is taken as a share of their sum. There is always such a token:
    u is at most 1 - 2**-53, and times the sum that rounds to less than the sum.
    """
    probs = _floats(probs)
    running = probs.cumsum(dim=-1, dtype=torch.float64)
    share = _column(u, running) * running[..., -1:]
    return torch.searchsorted(running, share, right=True).squeeze(-1).tolist()


class Sampler:
    """Chooses tokens: called with logits (S, vocab_size) and their S requests, it returns S token ids.

    The random number of a request's output i depends on its seed and i alone, so a request has the same
    tokens in any company, and a draw can be repeated. A request without a seed gets one from `seed`
    and its arrival number, so a whole run repeats. Where a draft was drawn (`spec_probs`) the row's token is
    that draft if it is accepted. Raises NotFiniteError if the largest logit of a row is NaN or infinite.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._numbers: dict[str, tuple[random.Random, list[float]]] = {}  # drawn so far, by request_id

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        params = [request.sampling_params for request in requests]
        raw = logits
        ahead = rows_before(requests)
        if changed := [i for i, p in enumerate(params) if p.changes_logits]:
            logits = _floats(logits).clone()
            for i in changed:
                outputs = requests[i].output_token_ids + requests[i].spec_token_ids[: ahead[i]]
                logits[i] = process_logits(raw[i], requests[i], outputs)
        token_ids = logits.argmax(dim=1)  # of a NaN, if there is one
        for i, best in enumerate(logits.gather(1, token_ids.unsqueeze(1)).flatten().tolist()):
            if not isfinite(best):
                if isfinite(raw[i].max()):
                    raise ValueError("its sampling_params leave no token to choose from")
                raise NotFiniteError(f"its largest logit is {best}")
        chosen: list[int] = token_ids.tolist()
        if drawn := [i for i, p in enumerate(params) if p.temperature > 0]:
            rows = logits if len(drawn) == len(logits) else logits[drawn]
            probs = probabilities(rows.float(), [params[i] for i in drawn])
            numbers = [self.uniform(requests[i], len(requests[i].output_token_ids) + ahead[i]) for i in drawn]
            for i, row, token_id in zip(drawn, probs, draw(probs, numbers), strict=True):
                chosen[i] = token_id
                if ahead[i] < len(drafts := requests[i].spec_token_ids) and requests[i].spec_probs:
                    p, q = row.tolist(), requests[i].spec_probs[ahead[i]]
                    index = len(requests[i].output_token_ids) + ahead[i]
                    chosen[i] = accept(drafts[ahead[i]], p, q, _Chance(self, requests[i], index))
        return chosen

    def uniform(self, request: Request, index: int) -> float:
        """Return the number in [0, 1) of a request's output `index`, the same whenever it is asked for."""
        if (kept := self._numbers.get(request.request_id)) is None:
            # Python's generator, not torch's, which uses 32 bits of a seed only.
            kept = random.Random(seed_of(self.seed, request)), []
            self._numbers[request.request_id] = kept
        generator, numbers = kept
        while len(numbers) <= index:
            numbers.append(generator.random())
        return numbers[index]

    def forget(self, request_id: str) -> None:
        """Drop a request's numbers; they are drawn anew if it goes on."""
        self._numbers.pop(request_id, None)


def seed_of(seed: int, request: Request) -> int | str:
    """Return the request's own seed; without one, that of the engine's `seed` and the request's arrival."""
    own = request.sampling_params.seed
    return f"{seed}/{request.arrival}" if own is None else own


def random_number(seed: int, request: Request, index: int, what: str) -> float:
    """Return a number in [0, 1) of a request's output `index`, beside that of `Sampler.uniform`."""
    return random.Random(f"{seed_of(seed, request)}/{index}/{what}").random()


class _Chance:
    """The random decisions on a draft that was drawn: numbers of the output in whose place it stands."""

    def __init__(self, sampler: Sampler, request: Request, index: int):
        self.sampler, self.request, self.index = sampler, request, index

    def flip(self, probability: float) -> bool:
        return random_number(self.sampler.seed, self.request, self.index, "accept") < probability

    def draw(self, row: Sequence[float]) -> int:
        return int(draw(row, self.sampler.uniform(self.request, self.index)))


def rows_before(requests: Sequence[Request]) -> list[int]:
    """Return, for each row, how many rows of the same request precede it: so many of its drafts are taken as
    given there."""
    before = [0] * len(requests)
    for i in range(1, len(requests)):
        if requests[i] is requests[i - 1]:
            before[i] = before[i - 1] + 1
    return before


def top_logprobs(logits: Tensor, token_id: int, num: int) -> dict[int, Logprob]:
    """Return log probabilities of the chosen token and of the `num` best (-1: all), from a row of raw logits.

    The chosen one is first. Where it is not among the best, its rank is that of the last of its equals.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs[token_id]
    found = {token_id: Logprob(chosen.item(), int((logprobs >= chosen).sum()))}
    best = logprobs.topk(len(logprobs) if num == -1 else min(num, len(logprobs)))
    for rank, (value, i) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True), 1):
        found[i] = Logprob(value, rank)
    return found


def _floats(values: Logits) -> Tensor:
    """Return a tensor of float32 or float64: Python's own numbers are float64, bfloat16 is too coarse."""
    if not isinstance(values, Tensor):
        return torch.as_tensor(values, dtype=torch.float64)
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _column(values: Any, logits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return one value, or one for each row, in a shape that fits the logits: (1,) or (S, 1)."""
    return torch.as_tensor(values, dtype=dtype or logits.dtype, device=logits.device).unsqueeze(-1)
