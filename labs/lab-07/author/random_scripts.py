"""lab-07's scripts: an Engine with parts of the lab, a toy for a model, and its calls written down.

`parts` in a script's config are the lab's own; all others are the engine's. A script whose config has
`stop` is about texts alone.
"""

from types import SimpleNamespace

from labs.kit import Skip
from labs.kit.tensor_toys.engines import Silent
from labs.kit.tensor_toys.watched import EOS, ERRORS, FAULTY, SIZE, WatchedEngine, delta_as_json

SCRIPTS = 150
STOPS = [*"ab ba aab aba bab cab abab ca bc é bb aa cc".split(), "a b", " c", "ac "]
ALPHABETS = ("ab", "ab", "abc", "ab.", "a*", "xX\n", "aé")


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
            fails = ["fails", rng.choice(FAULTY), rng.choice([*ERRORS])]
            calls.append(rng.choice((["schedules_nothing"], fails)))
    if read and rng.random() < 0.2:
        calls.append(["waits", rng.choice((50, 1500, 5000))])
        calls.append(["close_unread"])
    calls += [["step"]] * rng.choice((0, 5))
    for reader in range(len(lengths)) if read else ():
        read_it, close_it = ["read", reader], ["close", reader]
        calls += rng.choice(([read_it] * 2, [close_it, read_it], [close_it]))
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


def graded(script):
    """The same with every part the lab's: where submissions are graded there is none of the engine's."""
    parts = ["step", "Stream", "OutputText"]
    return script | {"config": script["config"] | {"parts": parts}}


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


class EnginePlay(WatchedEngine):
    """An engine, and readers of some of its requests."""

    def __init__(self, part, config):
        super().__init__(part, config)
        self.streams = {}

    def stream(self, reader, *request):
        self.streams[reader] = self.add(*request, by="stream")

    def read(self, reader):
        return delta_as_json(next(self.reader(reader)))

    def close(self, reader):
        self.reader(reader).close()

    def reader(self, reader):
        if reader not in self.streams:
            raise Skip
        return self.streams[reader]

    def waits(self, num_steps):
        """A reader whose engine has nothing for it in so many steps; returns those left then."""
        engine = Silent(num_steps)
        next(self.part.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None)))
        return engine.num_steps

    def close_unread(self):
        """Return the inboxes that are left in an engine that forgets none by itself."""
        engine = Silent(2)
        self.part.Stream(engine, SimpleNamespace(request_id="A", finish_reason=None)).close()
        return sorted(engine.inboxes)
