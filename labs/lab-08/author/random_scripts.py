"""Random scripts: rows of logits through each function, and batches whose requests come, fail and go.

A script avoids numbers that another order of adding up would round to another token. Without torch, as in a
web page, the two calls that need it are answered by the oracle: what needs torch is not judged there.
"""

import math
from functools import cache, partial
from importlib.util import find_spec

from labs.kit import Skip, load, make_request
from labs.kit.toys.plays import Play as Base
from mini_engine.request import SamplingParams

SCRIPTS = 60
NAMES = ["r0", "r1", "r2", "r3"]
OUT = "out"  # a token that was dropped; JSON has no infinity
NEAR = 1e-4


def draw(rng):
    return draw_batch(rng) if rng.random() < 0.5 else draw_rows(rng)


def settled(make, exact=False):
    """Call `make` until its result compares no two numbers that are nearly equal, and return that result.

    If sums are exact in every order of adding up (`exact`), equal numbers may be compared.
    """
    close, made = load("lab-08", "oracle").CLOSE, []
    while not made or any(near < NEAR and not (exact and near == 0) for near in close):
        close.clear()
        made = make()
    return made


def row_of(rng, size=0):
    """Logits on a grid, so that some are equal; now and then all alike, with one far above, or large."""
    shift = 0 if size else rng.choice((0, 0, 0, 0, 800, -800))  # float32 is too coarse for large ones
    size = size or rng.randint(2, 8)
    row = [shift + rng.randint(-8, 8) / 4 for _ in range(size)]
    if rng.random() < 0.1:
        row = [row[0]] * size
    elif rng.random() < 0.1:
        row[rng.randrange(size)] += 40
    if size > 2 and rng.random() < 0.15:
        row[rng.randrange(size)] = OUT
    return row


VALUES = {
    "temperature": (0.25, 0.5, 0.7, 1.5, 2.0, 4.0, 1e-6, 1e-300),
    "min_p": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0),
    "top_k": (1, 2, 3, 3, 4, 5, 8, 100),
    "top_p": (1e-9, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.99),
    "repetition_penalty": (0.5, 1.25, 2.0, 4.0),
    "frequency_penalty": (-0.5, 0.25, 0.5, 2.0),
    "presence_penalty": (-1.0, 0.25, 0.75, 2.0),
}
LIMITS, PENALTIES = tuple(VALUES)[:4], tuple(VALUES)[4:]
OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
KINDS = ("apply_penalties", *(f"apply_{name}" for name in LIMITS), "probabilities", "probabilities", "draw")


def settings_of(rng, names, share):
    return {name: rng.choice(VALUES[name]) for name in names if rng.random() < share}


def draw_rows(rng):
    oracle = load("lab-08", "oracle")

    def call(kind):
        row = row_of(rng)
        if kind == "draw":
            made = ["draw", *stretches_of(rng)]
        elif kind == "apply_penalties":
            some = [[rng.randrange(len(row)) for _ in range(rng.randint(0, 5))] for _ in "po"]
            made = [kind, row, *some, settings_of(rng, PENALTIES, 0.6)]
        elif kind == "probabilities":
            made = [kind, row, settings_of(rng, LIMITS, 0.65)]
        else:
            name = kind.removeprefix("apply_")
            made = [kind, row, rng.choice((OFF[name], *VALUES[name]))]
        getattr(Play(oracle, {}), kind)(*made[1:])
        return made

    kinds = [rng.choice(KINDS) for _ in range(16)]
    return {"config": {}, "calls": [settled(partial(call, kind), exact=kind == "draw") for kind in kinds]}


def stretches_of(rng):
    """Stretches in 64ths, whose ends are exact in every order of adding up, and a number to draw."""
    size = rng.randint(1, 7)
    cuts = [0, *sorted(rng.choice(range(65)) for _ in range(size - 1)), 64]
    probs = [(b - a) / 64 for a, b in zip(cuts, cuts[1:], strict=False)]
    if rng.random() < 0.3:  # they do not sum to 1
        scale = rng.choice((0.75, 1.5))
        return [prob * scale for prob in probs], (2 * rng.randrange(64) + 1) / 128
    return probs, rng.choice((rng.choice(cuts[:-1]) / 64 % 1, (2 * rng.randrange(64) + 1) / 128, 1 - 2**-53))


def draw_batch(rng):
    size, seeds = rng.randint(3, 8), (0, 1, 7, 2**32 + 7, None, None)
    config = {"seed": rng.choice((0, 0, 1, 5)), "dtype": rng.choice(("float32", "float32", "bfloat16"))}
    play, calls = Play(load("lab-08", "oracle"), config), []
    play.is_model = True

    def add(name):
        settings = {"seed": rng.choice(seeds)} | settings_of(rng, LIMITS, 0.5)
        if rng.random() < 0.25:
            settings["temperature"] = 0
        if rng.random() < 0.4:
            settings |= settings_of(rng, PENALTIES, 0.6)
        prompt = [rng.randrange(size) for _ in range(rng.randint(1, 4))]
        return ["add", name, prompt, {key: value for key, value in settings.items() if value is not None}]

    def goes_on(call):
        calls.append(call)
        getattr(play, call[0])(*call[1:])

    def rows(kind):
        """A step of some of the requests, in any order, whose outputs the play does not take for true yet."""
        able = [name for name in sorted(play.requests) if kind != "batch_probabilities" or play.draws(name)]
        fewest = len(able) if kind == "batch_probabilities" else 1
        names = rng.sample(able, rng.randint(fewest, len(able))) if able else []
        made = [kind, {name: row_of(rng, size) for name in names}]
        getattr(play, kind)(made[1], is_trial=True)
        return made

    for name in NAMES[: rng.randint(1, 4)]:
        goes_on(add(name))
    for _ in range(16):
        known, kind = sorted(play.requests), rng.random()
        new = [name for name in NAMES if name not in known]
        if not known or (new and kind < 0.12):
            goes_on(add(rng.choice(new)))
        elif kind < 0.5:
            goes_on(settled(lambda: rows("step")))
        elif kind < 0.58:
            goes_on(settled(lambda: rows("failed_step")))
        elif kind < 0.78:
            goes_on(settled(lambda: rows("batch_probabilities")))
        elif kind < 0.88:
            goes_on(["uniform", rng.choice(known), rng.choice((0, 1, 2, 3, 9))])
        else:
            goes_on([rng.choice(("finish", "forget", "forget")), rng.choice(known)])
    if rng.random() < 0.2:
        calls.insert(0, ["names_that_need_torch"])
    return {"config": config, "calls": calls}


class Play(Base):
    """The functions for a row, and a Sampler with the requests of a batch."""

    def __init__(self, part, config):
        super().__init__(part)
        self.config, self.num_arrivals = config, 0
        if "seed" in config:
            self.sampler = part.Sampler(config["seed"])

    # one row: a dict from its tokens to what they get

    def apply_penalties(self, row, prompt, outputs, settings):
        return self.limited("apply_penalties", row, prompt, outputs, params_of(**settings))

    def apply_temperature(self, row, temperature):
        return self.limited("apply_temperature", row, temperature)

    def apply_min_p(self, row, min_p):
        return self.limited("apply_min_p", row, min_p)

    def apply_top_k(self, row, top_k):
        return self.limited("apply_top_k", row, top_k)

    def apply_top_p(self, row, top_p):
        return self.limited("apply_top_p", row, top_p)

    def probabilities(self, row, settings):
        return self.limited("probabilities", row, params_of(**settings))

    def draw(self, probs, u):
        return self.limited("draw", probs, u)

    def limited(self, name, row, *others):
        logits = logits_of(row)
        with self.only_reading(logits=logits, others=[one for one in others if isinstance(one, list)]):
            return by_token(getattr(self.part, name)(logits, *others))

    # a batch

    def add(self, name, prompt, settings):
        request = make_request(name, prompt, max_tokens=None)
        request.sampling_params = params_of(**settings)
        request.arrival, self.num_arrivals = self.num_arrivals, self.num_arrivals + 1
        if name in self.requests:
            raise Skip
        self.requests[name] = request

    def draws(self, name):
        return self.requests[name].sampling_params.temperature > 0

    def uniform(self, name, index):
        request = self.known(name)
        with self.only_reading(request=request):
            return self.sampler.uniform(request, index)

    def forget(self, name):
        self.sampler.forget(name)

    def finish(self, name):
        del self.requests[self.known(name).request_id]
        self.sampler.forget(name)

    def step(self, rows, is_trial=False):
        """Each request gets its token."""
        requests = [self.known(name) for name in rows]
        sampled = dict(zip(rows, self.sampled(rows, requests), strict=True))
        for request in [] if is_trial else requests:
            request.output_token_ids.append(sampled[request.request_id])
        return sampled

    def failed_step(self, rows, is_trial=False):
        """Draw tokens that no request gets; the engine then forgets their numbers."""
        sampled = self.step(rows, is_trial=True)
        for name in rows:
            self.sampler.forget(name)
        return sampled

    def sampled(self, rows, requests):
        logits = [logits_of(row) for row in rows.values()]
        if self.is_model or not find_spec("torch"):
            sampler = self.sampler if self.is_model else load("lab-08", "oracle").Sampler(self.config["seed"])
            return sampler(logits, requests)
        import torch

        logits = torch.tensor(logits, dtype=getattr(torch, self.config["dtype"]))
        with self.only_reading(logits=logits, **{r.request_id: r for r in requests}):
            return [int(token_id) for token_id in self.sampler(logits, requests)]

    def batch_probabilities(self, rows, is_trial=False):
        requests = [self.known(name) for name in rows]
        logits, params = [logits_of(row) for row in rows.values()], [r.sampling_params for r in requests]
        if self.is_model or not find_spec("torch"):
            found = load("lab-08", "oracle").batch_probabilities(logits, params)
        elif not rows:
            found = []
        else:
            import torch

            logits = torch.tensor(logits, dtype=torch.float64)
            with self.only_reading(logits=logits):
                found = self.part.batch_probabilities(logits, params)
        return {name: by_token(row) for name, row in zip(rows, found, strict=True)}

    def seen(self):
        settings = {name: in_words(request) for name, request in self.requests.items()}
        return {"requests": settings, "changed, and only to be read": self.all_changed()}


@cache  # they are frozen
def params_of(**settings):
    return SamplingParams(**settings)


def logits_of(row):
    return [-math.inf if logit == OUT else logit for logit in row]


def by_token(values):
    """A dict from tokens to their numbers, rounded, of lists and tensors alike; an id is an id."""
    if not hasattr(values, "__len__") or getattr(values, "shape", 1) == ():
        return int(values)
    numbers = [float(f"{round(float(value), 9):.9g}") for value in values]
    return {f"token {i}": OUT if number == -math.inf else number for i, number in enumerate(numbers)}


def in_words(request):
    settings = vars(request.sampling_params)
    default = vars(params_of())
    said = [f"{name} {settings[name]}" for name in (*VALUES, "seed") if settings[name] != default[name]]
    return f"{', '.join(said) or 'nothing set'}; outputs {request.output_token_ids}"
