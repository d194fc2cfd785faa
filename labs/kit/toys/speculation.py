"""Toys for drafts: a model whose text repeats itself, a loop that verifies, and exact probabilities.

The model's next token depends on the (position, token) pairs that its KV really holds: a wrong rewind
changes the text.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from labs.kit.toys import driver
from labs.kit.toys.loop import StepLoop
from mini_engine.block_manager import BlockManager
from mini_engine.request import Request
from mini_engine.scheduler import schedule_step

TOKENS = 12  # of the vocabulary
Row = list[int]  # a weight for each token
Chances = dict[tuple[Any, ...], Fraction]


def row_after(held: Sequence[Any]) -> Row:
    """Return what the model says after these (position, token) pairs, None where nothing was written.

    Mostly it goes on as it did after the same two tokens before.
    """
    digest = hashlib.blake2b(repr(list(held)).encode(), digest_size=TOKENS + 2).digest()
    weights = [1 + byte % 3 for byte in digest[2:]]
    weights[digest[1] % TOKENS] += 20
    tokens = [pair and pair[1] for pair in held]
    if digest[0] % 5:
        for place in range(len(tokens) - 2, 1, -1):
            if tokens[place - 2 : place] == tokens[-2:]:
                weights[tokens[place] or 0] += 40
                break
    return weights


def choose(row: Row, request: Request, index: int) -> int:
    """Return the token that a request says from a row, as its output `index`."""
    params = request.sampling_params
    if not params.temperature:
        return row.index(max(row))
    left = random.Random(f"{params.seed or 0}/{index}").random() * sum(row)
    for token_id, weight in enumerate(row):
        left -= weight
        if left < 0:
            return token_id
    raise AssertionError("a number below 1 ends within the row")


def text_alone(request: Request) -> list[int]:
    """Return a request's outputs as it has them alone, token by token, with a memory that is right."""
    held = list(enumerate(request.prompt_token_ids))
    twin = Request("twin", request.prompt_token_ids, request.sampling_params)
    while not twin.output_token_ids or twin.check_stop() is None:
        token_id = choose(row_after(held), twin, len(twin.output_token_ids))
        twin.output_token_ids.append(token_id)
        held.append((len(held), token_id))
    return twin.output_token_ids


class QuotingModel:
    """The target model, whose KV is a pool of slots."""

    def __init__(self, kv: Any):
        self.kv = kv
        self.slots: dict[int, tuple[int, int]] = {}

    def forward(self, rows: list[tuple[Request, int]]) -> dict[str, list[Row]]:
        """Compute rows of (request, number of tokens), drafts included. Return, by id, a row behind the last
        known token and behind each draft, for those that reach them."""
        found = {}
        for request, num_tokens in rows:
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            text = [*request.token_ids(), *request.spec_token_ids]
            new = zip(self.kv.slot_mapping(request, start, end), range(start, end), strict=True)
            self.slots.update({slot: (position, text[position]) for slot, position in new})
        for request, num_tokens in rows:
            end = request.num_computed_tokens + num_tokens
            held = [self.slots.get(slot) for slot in self.kv.slot_mapping(request, 0, end)]
            if end >= request.num_tokens:
                places = range(request.num_tokens, end + 1)
                found[request.request_id] = [row_after(held[:place]) for place in places]
        return found


class DraftCache:
    """The tokens of one text that a draft model has computed, in order."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`."""
        del self.token_ids[num_tokens:]


class ToyDraft:
    """A draft model that often says what the target says. `passes` are the tokens that it has computed."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def new_cache(self) -> DraftCache:
        return DraftCache()

    def forward(self, cache: DraftCache, token_ids: Sequence[int]) -> int:
        """Compute these tokens after the cache's. Return the token that comes next."""
        if not token_ids:
            raise ValueError("forward() got no tokens; at least one must be computed, or there is no row")
        self.passes.append(list(token_ids))
        cache.token_ids += token_ids
        row = row_after(list(enumerate(cache.token_ids)))
        return row.index(max(row)) if sum(cache.token_ids) % 4 else cache.token_ids[0]


class SpecLoop(StepLoop):
    """A loop whose steps verify drafts: `lab` gives them room, verifies and rewinds. It preempts the last.

    `proposer` None proposes nothing. `accepted` counts the accepted drafts by request.
    """

    def __init__(self, lab: Any, kv: Any, proposer: Any, **settings: Any):
        super().__init__(kv, schedule_step, **settings)
        self.lab, self.proposer, self.model = lab, proposer, QuotingModel(kv)
        self.accepted: dict[str, int] = {}

    def schedule(self) -> dict[str, int]:
        while sum(self.kv.num_new_blocks(r, 1) for r in self.running) > self.kv.num_free_blocks:
            self.preempt(self.running[-1])
        drafts = {}
        for request in self.running:
            proposes = self.proposer and request.is_decode
            drafts[request] = self.proposer.propose(request) if proposes else request.spec_token_ids
            request.spec_token_ids = []  # the engine's schedule_step would give them room by its own rule
        scheduled = super().schedule()
        for request, proposed in drafts.items():
            request.spec_token_ids = proposed
        self.lab.schedule_drafts(self.running, scheduled, self.kv, self.max_num_batched_tokens)
        return scheduled

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens, request.spec_token_ids = 0, []
        request.num_preemptions += 1
        queue: Any = self.waiting
        queue._requests.appendleft(request)

    def compute(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Run the model and verify. Return what each request says."""
        rows = [(r, scheduled[r.request_id]) for r in self.running if r.request_id in scheduled]
        said = self.model.forward(rows)
        sampled = {}
        for request, _ in rows:
            if request.request_id in said:
                ask = chooser(request)
                sampled[request.request_id] = self.lab.verify(request, said[request.request_id], ask)
        return sampled

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Any = ()
    ) -> list[Request]:
        finished = []
        for request in list(self.running):
            name = request.request_id
            if name in sampled:
                accepted = self.lab.rewind(request, sampled[name], self.kv)
                self.accepted[name] = self.accepted.get(name, 0) + accepted
                if request.finish_reason:
                    self._leave(request)
                    finished.append(request)
            elif name in scheduled:
                request.num_computed_tokens += scheduled[name]
                self.kv.cache_blocks(request)
        return finished


def spec_loop(lab: Any, config: dict[str, Any]) -> SpecLoop:
    """Return the loop of a scenario's config, before its requests come; the lab makes the proposer."""
    caching, k = config.get("prefix_caching", False), config.get("k", 0)
    kv = BlockManager(config["num_blocks"], config["block_size"], enable_prefix_caching=caching, watermark=0)
    proposer: Any = None
    if config.get("proposer"):
        is_ngram = config["proposer"] == "ngram"
        proposer = lab.NgramProposer(1, 3, k) if is_ngram else lab.DraftModelProposer(ToyDraft(), k)
    limits = {name: config[name] for name in driver.LIMITS if name in config and name != "policy"}
    return SpecLoop(lab, kv, proposer, **limits)


def request_of(entry: dict[str, Any]) -> Request:
    """Return a scenario's request, of the tokens that the model knows."""
    return driver.request_of(entry | {"prompt": [token % TOKENS for token in entry["prompt"]]})


def chooser(request: Request) -> Callable[[Row, int], int]:
    return lambda row, index: choose(row, request, index)


# ---------------------------------------------------------------------- chance, counted out


class Chance:
    """One sequence of random outcomes; `weight` is its probability."""

    def __init__(self, way: Sequence[int]):
        self.way, self.taken, self.weight = way, list[tuple[int, int]](), Fraction(1)

    def flip(self, probability: Any) -> bool:
        """Return True with this probability, which may not be negative; 1 or more is always True."""
        sure = exact(probability)
        if sure < 0:
            raise ValueError(f"flip(): a probability is not negative, but this one is {sure}")
        return bool(self._next([1 - min(sure, Fraction(1)), min(sure, Fraction(1))]))

    def draw(self, row: Sequence[Any]) -> int:
        """Return a token, drawn from a row of probabilities that add up to 1."""
        weights = [exact(one) for one in row]
        if sum(weights) != 1 or min(weights) < 0:
            raise ValueError(f"draw(): a row's probabilities add up to 1, but these to {sum(weights)}")
        return self._next(weights)

    def _next(self, weights: list[Fraction]) -> int:
        open_ways = [i for i, weight in enumerate(weights) if weight]
        place = self.way[len(self.taken)] if len(self.taken) < len(self.way) else 0
        self.taken.append((place, len(open_ways)))
        self.weight *= weights[open_ways[place]]
        return open_ways[place]


def exact(number: Any) -> Fraction:
    """Return a fraction: of a float the simple one that it stands for."""
    return Fraction(number).limit_denominator(10**6)


def exact_row(weights: Sequence[int]) -> list[Fraction]:
    """Return the probabilities that are in the proportion of these weights."""
    return [Fraction(weight, sum(weights)) for weight in weights]


def ways(play: Callable[[Chance], Any]) -> Iterator[tuple[Any, Fraction]]:
    """Yield what `play` returns on every way that chance can take, and the way's probability."""
    way: list[int] | None = []
    while way is not None:
        chance = Chance(way)
        yield play(chance), chance.weight
        taken = chance.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        way = [*(place for place, _ in taken[:-1]), taken[-1][0] + 1] if taken else None


def distribution(play: Callable[[Chance], Sequence[Any]]) -> Chances:
    """Return {what `play` returns, as a tuple: its probability}, exactly."""
    found: Chances = {}
    for outcome, weight in ways(play):
        found[tuple(outcome)] = found.get(tuple(outcome), Fraction(0)) + weight
    return found
