"""lab-01's random_scripts: steps in a row over one queue, one running list and one memory, in any mixture.

Between the steps requests come, leave and are preempted, as the engine around `schedule_step` does it.
"""

from labs.kit import FakeKV, RequestQueue, Skip, make_request
from labs.kit.toys.plays import Play as Base
from labs.kit.toys.plays import fields_changed, plain
from mini_engine import request_queue
from mini_engine.block_manager import BlockManager
from mini_engine.request import RequestStatus

SCRIPTS = 60
SET = {"status", "num_computed_tokens", "num_cached_tokens", "block_hashes"}  # by a step or by admit
CLAMPS = {  # other than the one that a step uses by itself
    "half": lambda num_new, budget, threshold: max(0, min((num_new + 1) // 2, budget)),
    "one": lambda num_new, budget, threshold: max(0, min(num_new, budget, 1)),
    "half of the budget": lambda num_new, budget, threshold: max(0, min(num_new, (budget + 1) // 2)),
    "threshold + 1": lambda num_new, budget, threshold: max(0, min(num_new, budget, threshold + 1)),
}


def draw(rng):
    """Two to eight requests, some with outputs, on memory that is now short and now plentiful."""
    kind = rng.random()
    if kind < 0.2:
        return (draw_large if kind < 0.08 else draw_without_room)(rng)
    lengths = {f"r{i}": rng.choice((1, 2, 3, 5, 8, 12, 20)) for i in range(rng.randint(2, 8))}
    config = {"calls": "add(id, prompt, outputs), step(budget, slots, threshold, clamp), update(late)"}
    config |= {"queue": rng.choice(("deque", "fcfs", "priority")), "block_size": rng.choice((1, 1, 2, 4))}
    config["num_blocks"] = rng.randint(max(lengths.values()), sum(lengths.values()) + rng.choice((1, 12)))
    config["num_blocks"] = -(-config["num_blocks"] // config["block_size"])
    config["watermark"] = rng.choice((0, 0, 0, 1, 2)) if config["num_blocks"] > 2 else 0
    if config["block_size"] == 1:
        config["cached"] = {name: rng.randint(1, n) for name, n in lengths.items() if rng.random() < 0.3}
    later, calls = list(lengths), []
    settings = [rng.choice((2, 4, 6, 10, 16, 40)), rng.randint(1, 6), rng.choice((0, 0, 1, 3, 5))]

    def comes():
        if later:
            name = later.pop(0)
            outputs = rng.choice((0, 0, 0, 1, 4, 9))
            calls.append(["add", name, lengths[name]] + ([outputs] if outputs else []))

    for _ in range(rng.randint(1, 5)):
        comes()
    for _ in range(rng.randint(2, 8)):
        if rng.random() < 0.4:
            settings = [rng.choice((1, 2, 3, 5, 9, 14, 24)), rng.randint(1, 6), rng.choice((0, 0, 2, 4, 7))]
        if rng.random() < 0.5:
            comes()
        if rng.random() < 0.3:
            kind = rng.choice(("abort", "preempt", "preempt", "lose_room", "lose_room"))
            calls.append([kind, rng.choice(list(lengths))])
        clamp = [rng.choice(list(CLAMPS))] if rng.random() < 0.15 else []
        calls.append(["step", *(settings if settings[2] or clamp else settings[:2]), *clamp])
        if rng.random() < 0.85:
            calls.append(["update"] + ([rng.choice(list(lengths)[:4])] if rng.random() < 0.3 else []))
    return {"config": config, "calls": calls}


def draw_without_room(rng):
    """Running prompts that hold nothing; what they ask for, chunk by chunk, others have taken. Few slots."""
    lengths, calls = [rng.randint(3, 9) for _ in range(3)], []
    config = {"calls": "add(id, prompt), step(budget, slots, threshold), lose_room(id), update(late)"}
    config |= {"queue": "deque", "block_size": 1, "watermark": 0, "cached": {}}
    config["num_blocks"], slots = sum(lengths) + rng.randint(0, 8), rng.choice((3, 6))
    calls += [["add", f"r{i}", length] for i, length in enumerate(lengths)]
    calls += [["step", 30, slots], ["update"]]
    calls += [["lose_room", name] for name in rng.sample(("r0", "r1", "r2"), rng.randint(0, 2))]
    calls += [["add", "r3", rng.randint(1, 6)]] * rng.randint(0, 1)
    for _ in range(4):
        calls += [["step", rng.choice((4, 6, 30)), slots, rng.choice((0, 2, 3))]]
        calls += [["update", *rng.choice(([], ["r0"]))]]
    return {"config": config, "calls": calls}


def draw_large(rng):
    """Prompts, budgets and thresholds on the edge of a number of tokens, more requests than slots."""
    size, slots, calls = rng.choice((4096, 2**16, 2**20, 2**20)), rng.choice((2, 2, 2, 300)), []
    config = {"calls": "add(id, prompt), crowd(count), step(budget, slots, threshold), update()"}
    config |= {"queue": rng.choice(("deque", "fcfs")), "block_size": 2**22, "num_blocks": 310, "watermark": 0}
    for name in rng.sample(("r0", "r1", "r2"), 3):
        calls.append(["add", name, rng.choice((1, 2)) * size + rng.randint(-1, 1)])
    calls.insert(rng.randint(0, 3), ["crowd", slots])
    for _ in range(3):
        threshold = rng.choice((0, 0, size - 1, size, size + 1))
        calls += [["step", 2 * size + rng.choice((-1, 0, 1, size)), slots, threshold], ["update"]]
    return {"config": config, "calls": calls}


class Play(Base):
    """The engine around `schedule_step`: what a step scheduled is computed when `update` is called."""

    def __init__(self, part, config):
        super().__init__(part)
        self.arrivals = 0
        heap = request_queue.RequestQueue  # sorted by itself, as in lab-03
        self.waiting = RequestQueue() if config["queue"] == "deque" else heap(config["queue"])
        self.running = []
        blocks, watermark = config["num_blocks"], config["watermark"]
        if config["block_size"] == 1:
            self.kv = FakeKV(blocks, watermark=watermark, cached=config["cached"])
        else:
            self.kv = BlockManager(blocks, config["block_size"], watermark=watermark)
        self.scheduled, self.refused = {}, None
        self.handed_out = []  # the last result, and a copy of it
        self.allocate, self.kv.allocate = self.kv.allocate, self.watched

    def watched(self, request, *args, **kwargs):
        """kv.allocate, and which request it was that found no room first."""
        answer = self.allocate(request, *args, **kwargs)
        if not answer:
            self.refused = self.refused or request.request_id
        return answer

    def add(self, name, prompt, outputs=0):
        """A request joins the queue; one with outputs has been preempted before."""
        if name in self.requests:
            raise Skip
        request = make_request(name, 1, max_tokens=64, priority=prompt % 3)
        request.prompt_token_ids = range(prompt)  # as long as one likes, at no cost
        request.output_token_ids = [100 + i for i in range(outputs)]
        request.num_preemptions, request.arrival = int(outputs > 0), self.arrivals
        self.arrivals += 1
        self.requests[name] = request
        self.waiting.push(request)

    def crowd(self, count):
        for i in range(count):
            self.add(f"c{self.arrivals + i}", 1)

    def step(self, budget, slots, threshold=0, clamp=""):
        """The rows of `schedule_step`, or whether its error names the request that found no room."""
        limits = {"max_num_batched_tokens": budget, "max_num_seqs": slots}
        if clamp:
            limits["clamp"] = CLAMPS[clamp]
        if threshold:  # else the default, which is off
            limits["long_prefill_token_threshold"] = threshold
        before = {request: kept(request) for request in self.requests.values()}
        self.scheduled, self.refused = {}, None
        try:
            scheduled = self.part.schedule_step(self.waiting, self.running, self.kv, **limits)
        except RuntimeError as error:
            if self.refused is None or isinstance(error, NotImplementedError):
                raise
            return f"RuntimeError {'naming' if self.refused in str(error) else 'without'} {self.refused}"
        finally:
            self.changed = fields_changed(before, kept)
            self.changed += ["the result of the step before" for now, was in self.handed_out if now != was]
        if not isinstance(scheduled, dict):
            return f"a {type(scheduled).__name__}, where a dict should be"
        self.scheduled, self.handed_out = dict(scheduled), [(scheduled, dict(scheduled))]
        return [[name, tokens] for name, tokens in scheduled.items()]

    def update(self, late=""):
        """Compute what the last step scheduled; a sequence that is computed grows by a token.

        The token of the request that is `late` comes with a later update: until then nothing is left of it.
        """
        if not self.scheduled and all(request.num_new_tokens for request in self.running):
            raise Skip
        for request in self.running:
            request.num_computed_tokens += self.scheduled.get(request.request_id, 0)
            self.kv.cache_blocks(request)
            if request.num_new_tokens == 0 and request.request_id != late:
                request.output_token_ids.append(100 + len(request.output_token_ids))
        self.scheduled = {}

    def runs(self, name):
        if (request := self.known(name)) not in self.running:
            raise Skip
        return request

    def preempt(self, name):
        request = self.runs(name)
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.WAITING
        request.num_preemptions += 1
        self.scheduled.pop(name, None)
        self.waiting.push(request)

    def lose_room(self, name):
        """The memory has lost what a running request held: it asks for room again, chunk by chunk."""
        request = self.runs(name)
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.scheduled.pop(name, None)

    def abort(self, name):
        request = self.known(name)
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv.free(request)
        self.scheduled.pop(name, None)
        del self.requests[name]

    def seen(self):
        known = self.requests
        numbers = ("num_computed_tokens", "num_cached_tokens", "num_preemptions")
        return {
            "running": [self.name(request) for request in self.running],
            "waiting": [self.name(request) for request in self.waiting],
            "status": {name: request.status.value for name, request in known.items()},
            "blocks held": {name: len(self.kv.block_table(request)) for name, request in known.items()},
            "num_free_blocks": self.kv.num_free_blocks,
            **{key: {name: getattr(request, key) for name, request in known.items()} for key in numbers},
            "changed by schedule_step": self.changed,
        }

    def name(self, request):
        """Its id, if it is the request that was added and no copy of it."""
        name = request.request_id
        return name if self.requests.get(name) is request else f"another {name}"


def kept(request):
    """Return the fields that a step may only read, as they are now."""
    return {name: value for name, value in plain(request).items() if name not in SET}
