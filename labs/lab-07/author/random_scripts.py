"""lab-07's scripts: an Engine with parts of the lab, a toy for a model, and its calls written down.

`parts` in a script's config are the lab's own; all others are the engine's. A script whose config has
`stop` is about texts alone.
"""

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import torch

from labs.kit import Skip, load
from labs.kit.toys.plays import Play as Base
from labs.kit.toys.plays import differences, plain
from mini_engine.engine import Engine
from mini_engine.model import ModelConfig
from mini_engine.parts import NoWorkError, Parts
from mini_engine.request import SamplingParams

scenarios = load("lab-07", "scenarios")
SCRIPTS = 150
PATIENCE = 60  # steps of one call
FAULTY = ("schedule", "forward", "sample")  # nothing has been written when one of these fails
ERRORS = {error.__name__: error for error in (NoWorkError, RuntimeError, KeyError, OSError)}

# A token is some bytes: a letter, two of them, half a letter. The last one ends a text.
VOCABULARY = (b"a", b"b", b"c", b"ab", b"ba", b"ca", b" ", b"\xc3", b"\xa9", b"")
SIZE, EOS = len(VOCABULARY), len(VOCABULARY) - 1
STOPS = [*"ab ba aab aba bab cab abab ca bc é bb aa cc".split(), "a b", " c", "ac "]
NO_FAULT = ("", None)
ALPHABETS = ("ab", "ab", "abc", "ab.", "a*", "xX\n", "aé")


# --------------------------------------------------------------------------------------- the scripts


def draw(rng):
    kind = rng.choices(("texts", "step", "Stream", "OutputText", "all"), (32, 10, 10, 5, 15))[0]
    if kind == "texts":
        return draw_texts(rng)
    return draw_engine(rng, ["step", "Stream", "OutputText"] if kind == "all" else [kind])


def draw_texts(rng):
    """One text or two, in pieces of any size; stop strings that overlap, nearly match, begin alike."""
    letters = rng.choice(ALPHABETS)
    stops, calls = [], []
    for number in range(rng.choice((1, 1, 2))):
        text = word(rng, letters, 4, rng.choice((24, 24, 40)))
        stop = [word(rng, letters, 2, 5) for _ in range(rng.choice((0, 1, 2, 3, 12)))]
        for _ in range(rng.choice((0, 1, 2, 2))):  # from the text itself, or with another last letter
            at = rng.randrange(len(text))
            stop.append(text[at : at + rng.randint(1, 6)] + rng.choice(("", "", letters[0])))
        if rng.random() < 0.1:  # a long one alone: most of the text is in doubt
            text += word(rng, letters, 20, 40)
            stop = [text[rng.randint(0, 4) :]]
        stops.append(rng.sample(stop, len(stop)))
        time = 0.0
        while text:
            size, time = rng.choice((0, 1, 1, 2, 3, 4, 6)), time + rng.random()
            calls.append((time, ["append", number, text[:size]]))
            if rng.random() < 0.8:
                calls.append((time, ["take", number, False]))
            text = text[size:]
    calls.sort(key=lambda call: call[0])  # two texts grow side by side
    ends = [["take", number, True] for number in range(len(stops)) for _ in range(2)]
    return {"config": {"parts": ["OutputText"], "stop": stops}, "calls": [call for _, call in calls] + ends}


def word(rng, letters, shortest, longest):
    return "".join(rng.choices(letters, k=rng.randint(shortest, longest)))


def draw_engine(rng, parts):
    """A pool in which the largest request fits and little more; anything may happen between two steps."""
    size, budget = rng.randint(1, 4), rng.choice((2, 3, 4, 6, 10, 14))
    crowded = rng.random() < 0.6  # requests that grow side by side, so that many are preempted
    prompts, outputs = ((1, 4), (7, 11)) if crowded else ((1, 12), (1, 6))
    lengths = [(rng.randint(*prompts), rng.randint(*outputs)) for _ in range(rng.randint(3, 7))]
    largest = max(-(-(prompt + most - 1) // size) for prompt, most in lengths)
    engine = {
        "policy": rng.choice(("fcfs", "priority")),
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(rng.choice((3, 4) if crowded else (1, 2, 3)), budget),
        "long_prefill_token_threshold": rng.choice((0, 0, 0, 2, 3)),
        "num_blocks": largest + rng.choice((0, 0, 1) if crowded else (0, 2, 8)),
        "block_size": size,
        "enable_prefix_caching": rng.random() < 0.4,
    }
    read = "Stream" in parts
    rest = [arrival(rng, number, *length, read) for number, length in enumerate(lengths)]
    if rng.random() < 0.2:  # all alike, so that they end side by side
        stop = {"stop": rng.sample(STOPS, 3)}
        rest = [[*call[:-3], *rest[0][-3:-1], rest[0][-1] | stop] for call in rest]
    calls = [rest.pop(0) for _ in range(rng.randint(2, 3))]
    for _ in range(rng.randint(8, 26)):
        kind = rng.choices(("turn", "arrive", "close", "abort", "fault"), (24, 5, read, 1, 2))[0]
        reader = rng.randrange(len(lengths))
        if kind == "turn":
            calls.append(["read", reader] if read and rng.random() < 0.7 else ["step"])
        elif kind == "arrive" and rest:
            calls.append(rest.pop(0))
        elif kind == "close":
            calls += [["close", reader], *(rest[:1]), *([["close", reader]] * (rng.random() < 0.5))]
            del rest[:1]
        elif kind == "abort":
            calls.append(["abort", rng.choice("ABC")])
        elif kind == "fault":
            calls.append(
                rng.choice((["schedules_nothing"], ["fails", rng.choice(FAULTY), rng.choice([*ERRORS])]))
            )
    if read and rng.random() < 0.2:
        calls.append(["waits", rng.choice((50, 1500, 5000))])
        calls.append(["close_unread"])
    calls += [["step"]] * rng.choice((0, 5))
    for reader in range(len(lengths)) if read else ():
        calls += rng.choice(
            ([["read", reader]] * 2, [["close", reader], ["read", reader]], [["close", reader]])
        )
    return {"config": {"parts": parts, **engine}, "calls": calls}


def arrival(rng, number, prompt, max_tokens, read):
    """`add` or `stream`. The ids are few, so that they are used again; prompts often begin alike."""
    more = {}
    if rng.random() < 0.3:
        more["stop"] = rng.sample(STOPS, rng.randint(1, 3))
    if rng.random() < 0.3:
        more |= {"temperature": 1.0, "seed": rng.randint(0, 3)}
    if rng.random() < 0.1:
        more["stop_token_ids"] = [rng.randrange(SIZE)]
    if rng.random() < 0.1:
        more["ignore_eos"] = True
    if rng.random() < 0.4:
        more["priority"] = rng.randint(0, 2)
    start = rng.choice((0, 0, rng.randrange(SIZE)))
    prompt = [(start + i * i) % EOS for i in range(prompt)]
    request = ["ABC"[number] if number < 3 else rng.choice("ABC"), prompt, max_tokens, more]
    return ["stream", number, *request] if read and rng.random() < 0.8 else ["add", *request]


# ------------------------------------------------------------------------------------------- the toys


def graded(script):
    """The same with every part the lab's: where submissions are graded there is none of the engine's."""
    parts = ["step", "Stream", "OutputText"]
    return script | {"config": script["config"] | {"parts": parts}}


class ToyTokenizer:
    eos_token_ids, special_token_ids = (EOS,), frozenset({EOS})
    default_sampling_params = {}

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(VOCABULARY[i] for i in ids).decode(errors="replace")


class ToyBackend:
    """Its logits are a hash of what the request's slots really hold: what is stale or missing shows."""

    name = "toy"

    def __init__(self, model, kv, parts):
        self.kv, self.slots = kv, {}

    def forward(self, rows):
        for request, num_tokens, _ in rows:
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            held = enumerate(request.token_ids(start, end), start)
            self.slots.update(zip(self.kv.slot_mapping(request, start, end), held, strict=True))
        ends = [(request, request.num_computed_tokens + n) for request, n, is_last in rows if is_last]
        return torch.tensor([self.logits(request, end) for request, end in ends]).reshape(-1, SIZE)

    def logits(self, request, end):
        held = [self.slots.get(slot) for slot in self.kv.slot_mapping(request, 0, end)]
        digest = hashlib.blake2b(repr(held).encode(), digest_size=2 * SIZE).digest()
        values = [(digest[2 * i] * 256 + digest[2 * i + 1]) / 8192 for i in range(SIZE)]
        return [*values[:EOS], values[EOS] - 1]  # the end of a text comes seldom


TOY = SimpleNamespace(config=ModelConfig("llama", SIZE, 4, 4, 1, 1, 1, 4, 64), dtype=torch.float32)


# -------------------------------------------------------------------------------------------- the play


def Play(part, config):  # noqa: N802  a script's config says which of the two it is
    return (TextPlay if "stop" in config else EnginePlay)(part, config)


class TextPlay:
    """Texts that grow side by side."""

    def __init__(self, part, config):
        self.texts = [part.OutputText(None, tuple(stop)) for stop in config["stop"]]
        self.over, self.whole = [False] * len(self.texts), [""] * len(self.texts)

    def append(self, number, piece):
        if self.over[number]:
            raise Skip
        stop = self.texts[number].append(piece)
        self.over[number] = stop is not None
        self.whole[number] += piece
        if stop:
            self.whole[number] = self.whole[number].partition(stop)[0]
        return stop

    def take(self, number, finished):
        if self.over[number] and not finished:
            raise Skip
        self.over[number] |= finished
        return self.texts[number].take(finished)

    def seen(self):
        """Return the texts whose `text` is not all that was decoded, if they keep one."""
        both = enumerate(zip(self.texts, self.whole, strict=True))
        return {"not all that was decoded": [n for n, (one, all) in both if getattr(one, "text", all) != all]}


class EnginePlay(Base):
    """An engine between two steps, and what its parts are called with in a step."""

    def __init__(self, part, config):
        super().__init__(part)
        settings = dict(config)
        mine = {name: getattr(part, name) for name in settings.pop("parts")}
        self.step_of_part = mine.get("step", Parts().step)
        parts = replace(Parts(), **mine | {"attend_backend": ToyBackend, "step": self.step_watched})
        self.engine = Engine(TOY, ToyTokenizer(), parts=parts, watermark=0, **settings)
        self.came, self.streams = [], {}  # all requests, and the readers of some
        self.inside, self.served, self.state = False, [], []
        self.fault, self.num_steps, self.calls, self.deltas = NO_FAULT, 0, [], []
        scheduler = self.engine.scheduler
        self.watch(scheduler, "schedule", lambda: [])
        self.watch(self.engine.backend, "forward", words_of_rows)
        self.watch(self.engine, "sample", lambda logits, requests: names(requests))
        self.watch(scheduler, "update", words_of_update)
        self.watch(self.engine, "collect", lambda requests, stopped: names(requests) + words(stopped))

    def add(self, request_id, prompt, max_tokens, more, takes="add_request"):
        if request_id in self.engine.requests:
            raise Skip
        sampling = {name: value for name, value in more.items() if name != "priority"}
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0} | sampling)
        keywords = {"request_id": request_id, "priority": more.get("priority", 0)}
        added = getattr(self.engine, takes)(prompt, params, **keywords)
        self.came.append(self.engine.requests[request_id])
        return added

    def stream(self, reader, *request):
        self.streams[reader] = self.add(*request, takes="stream")

    def step(self):
        self.engine.step()

    def abort(self, request_id):
        return self.engine.abort(request_id)

    def read(self, reader):
        return delta_as_json(next(self.reader(reader)))

    def waits(self, num_steps):
        """A reader whose engine has nothing for it in so many steps; returns those left then."""
        engine = scenarios.Silent(num_steps)
        next(self.part.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None)))
        return engine.num_steps

    def close_unread(self):
        """Return the inboxes that are left in an engine that forgets none by itself."""
        engine = scenarios.Silent(2)
        self.part.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None)).close()
        return sorted(engine.inboxes)

    def close(self, reader):
        self.reader(reader).close()

    def reader(self, reader):
        if reader not in self.streams:
            raise Skip
        return self.streams[reader]

    def fails(self, name, error):
        """From now on, until it has happened: this part of the engine raises when it is called next."""
        self.fault = name, ERRORS[error]

    def schedules_nothing(self):
        """From now on, until it has happened: the scheduler's next schedule is empty."""
        self.fault = "nothing", None

    def seen(self):
        scheduler, renamed = self.engine.scheduler, {}
        seen = {
            "calls in a step": self.calls,
            "Deltas": self.deltas,
            "waiting": names(scheduler.waiting),
            "running": names(scheduler.running),
            "engine.requests": list(self.engine.requests),
            "inboxes": sorted(self.engine.inboxes),
            "free blocks": scheduler.kv.num_free_blocks,
            "cached blocks": scheduler.kv.num_cached_blocks,
        }
        for number, request in enumerate(self.came):
            table = scheduler.kv.block_table(request) if request.finish_reason is None else []
            state = plain(request) | {
                "status": request.status.value,
                "block_table": [renamed.setdefault(block, len(renamed)) for block in table],
            }
            name = f"request {number}, {request.request_id}: "
            seen |= {name + field: value for field, value in state.items() if value}
        self.calls, self.deltas, self.num_steps = [], [], 0
        return seen

    # ---- what is called in a step

    def step_watched(self, engine):
        self.inside, self.served = True, list(engine.requests.values())
        self.state = plain({request.request_id: request for request in self.served})
        try:
            deltas = self.step_of_part(engine)
            self.untouched("the end")
            self.lend(f"list of {len(self.lent)}", deltas)
            self.deltas += map(delta_as_json, deltas)
            return deltas
        finally:
            self.inside = False

    def watch(self, owner, name, in_words):
        """Write down each call of owner.name in a step, and let it fail when its turn has come."""
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            if not self.inside:
                return call(*args, **kwargs)
            said = in_words(*args, **kwargs)
            self.untouched(name)
            if said or name not in ("sample", "collect"):  # without a request they may be left out
                self.calls.append(" ".join([name, *said]))
                if self.fault[0] == name:
                    error, self.fault = self.fault[1], NO_FAULT
                    raise error
            result = self.scheduled(call) if name == "schedule" else call(*args, **kwargs)
            self.state = plain({request.request_id: request for request in self.served})
            if isinstance(result, dict):
                self.lend(name, result)
            return result

        setattr(owner, name, watched)

    def scheduled(self, call):
        self.num_steps += 1
        if self.num_steps > PATIENCE:
            raise RuntimeError(f"no end after {PATIENCE} steps")
        if self.fault == ("nothing", None):
            self.fault = NO_FAULT
            return {}
        return call()

    def untouched(self, name):
        """Write down what the step itself has changed since the call before: there should be nothing."""
        now = plain({request.request_id: request for request in self.served})
        changed = [*differences("request", self.state, now), *self.all_changed()]
        self.calls += [f"before {name}, {what} has been changed" for what in changed]


def names(requests):
    return [request.request_id for request in requests]


def words(things):
    return [f"{name}:{value}" for name, value in sorted(dict(things).items())]


def words_of_rows(rows):
    return [f"{request.request_id}:{n}{'+' if is_last else ''}" for request, n, is_last in rows]


def words_of_update(scheduled, sampled, stopped=()):
    return [*words(scheduled), *words(sampled), *sorted(stopped)]


def delta_as_json(delta):
    return [delta.request_id, delta.token_ids, delta.text, delta.finish_reason, delta.stop_reason]
