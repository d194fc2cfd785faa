"""Random scripts: rows of logits through each function, and batches whose requests come, fail and go.

A script avoids numbers that another order of adding up would round to another token. Without torch, as in a
web page, the oracle answers the two calls that need it, a step with the part's penalties and random numbers.
"""

from functools import cache, partial
from importlib.util import find_spec

from labs.kit import Skip, load, make_request
from labs.kit.toys import logits as toys
from labs.kit.toys.plays import Play as Base
from mini_engine.request import SamplingParams

SCRIPTS = 60
NAMES = ["r0", "r1", "r2", "r3"]


def draw(rng):
    return draw_batch(rng) if rng.random() < 0.5 else draw_rows(rng)


OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
APPLY = [f"apply_{name}" for name in toys.LIMITS]
KINDS = ["apply_penalties", *APPLY, "probabilities", "probabilities", "draw"]


def draw_rows(rng):
    oracle = load("lab-08", "oracle")

    def call(kind):
        row = toys.row_of(rng)
        if kind == "draw":
            made = ["draw", *toys.stretches_of(rng)]
        elif kind == "apply_penalties":
            some = [[rng.randrange(len(row)) for _ in range(rng.randint(0, 5))] for _ in "po"]
            made = [kind, row, *some, toys.settings_of(rng, toys.PENALTIES, 0.6)]
        elif kind == "probabilities":
            made = [kind, row, toys.settings_of(rng, toys.LIMITS, 0.65)]
        else:
            name = kind.removeprefix("apply_")
            made = [kind, row, rng.choice((OFF[name], *toys.VALUES[name]))]
        getattr(Play(oracle, {}), kind)(*made[1:])
        return made

    kinds = [rng.choice(KINDS) for _ in range(16)]
    calls = [toys.settled(oracle.CLOSE, partial(call, kind), exact=kind == "draw") for kind in kinds]
    return {"config": {}, "calls": calls}


def draw_batch(rng):
    size, seeds = rng.randint(3, 8), (0, 1, 7, 2**32 + 7, None, None)
    config = {"seed": rng.choice((0, 0, 1, 5)), "dtype": rng.choice(("float32", "float32", "bfloat16"))}
    oracle = load("lab-08", "oracle")
    play, calls, close = Play(oracle, config), [], oracle.CLOSE
    play.is_oracle = True

    def add(name):
        settings = {"seed": rng.choice(seeds)} | toys.settings_of(rng, toys.LIMITS, 0.5)
        if rng.random() < 0.25:
            settings["temperature"] = 0
        if rng.random() < 0.4:
            settings |= toys.settings_of(rng, toys.PENALTIES, 0.6)
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
        made = [kind, {name: toys.row_of(rng, size) for name in names}]
        getattr(play, kind)(made[1], is_trial=True)
        return made

    for name in NAMES[: rng.randint(1, 4)]:
        goes_on(add(name))
    for _ in range(16):
        known, kind = sorted(play.requests), rng.random()
        new = [name for name in NAMES if name not in known]
        if not known or (new and kind < 0.12):
            goes_on(add(rng.choice(new)))
        elif kind < 0.78:
            which = "step" if kind < 0.5 else "failed_step" if kind < 0.58 else "batch_probabilities"
            goes_on(toys.settled(close, partial(rows, which)))
        elif kind < 0.88:
            goes_on(["uniform", rng.choice(known), rng.choice((0, 1, 2, 3, 9))])
        else:
            goes_on([rng.choice(("finish", "forget", "forget")), rng.choice(known)])
    if rng.random() < 0.2:
        calls.insert(0, ["names_that_need_torch"])
    return {"config": config, "calls": calls}


def limit(name):
    return lambda self, row, setting: self.limited(name, row, setting)


class Play(Base):
    """The functions for a row, and a Sampler with the requests of a batch."""

    def __init__(self, part, config):
        super().__init__(part)
        self.config, self.num_arrivals = config, 0
        if "seed" in config:
            self.sampler = part.Sampler(config["seed"])

    apply_temperature, apply_min_p, apply_top_k, apply_top_p, draw = map(limit, (*APPLY, "draw"))

    def apply_penalties(self, row, prompt, outputs, settings):
        return self.limited("apply_penalties", row, prompt, outputs, params_of(**settings))

    def probabilities(self, row, settings):
        return self.limited("probabilities", row, params_of(**settings))

    def limited(self, name, row, *others):
        logits = toys.logits_of(row)
        with self.only_reading(logits=logits, others=[one for one in others if isinstance(one, list)]):
            return toys.by_token(getattr(self.part, name)(logits, *others))

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
        logits = [toys.logits_of(row) for row in rows.values()]
        if self.is_oracle:
            return self.sampler(logits, requests)
        if not find_spec("torch"):
            own = self.part.apply_penalties, self.sampler.uniform
            return [load("lab-08", "oracle").token(*one, *own) for one in zip(logits, requests, strict=True)]
        import torch

        logits = torch.tensor(logits, dtype=getattr(torch, self.config["dtype"]))
        with self.only_reading(logits=logits, **{r.request_id: r for r in requests}):
            return [int(token_id) for token_id in self.sampler(logits, requests)]

    def batch_probabilities(self, rows, is_trial=False):
        requests = [self.known(name) for name in rows]
        logits, params = [toys.logits_of(row) for row in rows.values()], [r.sampling_params for r in requests]
        if self.is_oracle or not find_spec("torch"):
            found = load("lab-08", "oracle").batch_probabilities(logits, params)
        else:
            import torch

            logits = torch.tensor(logits, dtype=torch.float64)
            with self.only_reading(logits=logits):
                found = self.part.batch_probabilities(logits, params) if rows else []
        return {name: toys.by_token(row) for name, row in zip(rows, found, strict=True)}

    def seen(self):
        settings = {name: in_words(request) for name, request in self.requests.items()}
        return {"requests": settings, "changed, and only to be read": self.all_changed()}


@cache  # they are frozen
def params_of(**settings):
    return SamplingParams(**settings)


def in_words(request):
    settings = vars(request.sampling_params)
    default = vars(params_of())
    said = [f"{name} {settings[name]}" for name in (*toys.VALUES, "seed") if settings[name] != default[name]]
    return f"{', '.join(said) or 'nothing set'}; outputs {request.output_token_ids}"
