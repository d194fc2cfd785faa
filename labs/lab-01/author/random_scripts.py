"""lab-01's random_scripts: steps in a row over one queue, one running list and one memory, in any mixture.

Between the steps requests come, leave and are preempted, as the engine around `schedule_step` does it.
"""

from labs.kit import FakeKV, RequestQueue, Skip, make_request
from mini_engine import request_queue
from mini_engine.block_manager import BlockManager
from mini_engine.request import RequestStatus

SCRIPTS = 60
KEPT = ("prompt_token_ids", "output_token_ids", "arrival", "priority", "max_tokens", "finish_reason")
CLAMPS = {  # other than the one that a step uses by itself
    "half": lambda num_new, budget, threshold: max(0, min((num_new + 1) // 2, budget)),
    "one": lambda num_new, budget, threshold: max(0, min(num_new, budget, 1)),
    "half of the budget": lambda num_new, budget, threshold: max(0, min(num_new, (budget + 1) // 2)),
    "threshold + 1": lambda num_new, budget, threshold: max(0, min(num_new, budget, threshold + 1)),
}


def draw(rng):
    """Two to eight requests, some with outputs, on memory that is now short and now plentiful."""
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
        if rng.random() < 0.25:
            calls.append([rng.choice(("abort", "preempt", "preempt")), rng.choice(list(lengths))])
        clamp = [rng.choice(list(CLAMPS))] if rng.random() < 0.15 else []
        calls.append(["step", *(settings if settings[2] or clamp else settings[:2]), *clamp])
        if rng.random() < 0.85:
            calls.append(["update"] + ([rng.choice(list(lengths)[:4])] if rng.random() < 0.3 else []))
    return {"config": config, "calls": calls}


class Play:
    """The engine around `schedule_step`: what a step scheduled is computed when `update` is called."""

    def __init__(self, part, config):
        self.part, self.requests, self.arrivals = part, {}, 0
        heap = request_queue.RequestQueue  # sorted by itself, as in lab-03
        self.waiting = RequestQueue() if config["queue"] == "deque" else heap(config["queue"])
        self.running = []
        blocks, watermark = config["num_blocks"], config["watermark"]
        if config["block_size"] == 1:
            self.kv = FakeKV(blocks, watermark=watermark, cached=config["cached"])
        else:
            self.kv = BlockManager(blocks, config["block_size"], watermark=watermark)
        self.scheduled, self.changed, self.refused = {}, [], None
        self.handed_out = []  # the last result, and a copy of it
        self.allocate, self.kv.allocate = self.kv.allocate, self.watched

    def watched(self, request, *args, **kwargs):
        """kv.allocate, and which request it was that found no room first."""
        answer = self.allocate(request, *args, **kwargs)
        if not answer:
            self.refused = self.refused or request.request_id
        return answer

    def find(self, name):
        if name not in self.requests:
            raise Skip
        return self.requests[name]

    def add(self, name, prompt, outputs=0):
        """A request joins the queue; one with outputs has been preempted before."""
        if name in self.requests:
            raise Skip
        request = make_request(name, list(range(prompt)), max_tokens=64, priority=prompt % 3)
        request.output_token_ids = [100 + i for i in range(outputs)]
        request.num_preemptions, request.arrival = int(outputs > 0), self.arrivals
        self.arrivals += 1
        self.requests[name] = request
        self.waiting.push(request)

    def step(self, budget, slots, threshold=0, clamp=""):
        """The rows of `schedule_step`, or whether its error names the request that found no room."""
        more = {"clamp": CLAMPS[clamp]} if clamp else {}
        if threshold:  # else the default, which is off
            more["long_prefill_token_threshold"] = threshold
        before = {request: kept(request) for request in self.requests.values()}
        self.scheduled, self.refused = {}, None
        try:
            scheduled = self.part.schedule_step(
                self.waiting,
                self.running,
                self.kv,
                max_num_batched_tokens=budget,
                max_num_seqs=slots,
                **more,
            )
        except RuntimeError as error:
            if self.refused is None or isinstance(error, NotImplementedError):
                raise
            return f"RuntimeError {'naming' if self.refused in str(error) else 'without'} {self.refused}"
        finally:
            self.changed = [
                f"{request.request_id}.{name}"
                for request, fields in before.items()
                for name, value in kept(request).items()
                if value != fields[name]
            ] + ["the result of the step before" for result, was in self.handed_out if result != was]
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

    def preempt(self, name):
        request = self.find(name)
        if request not in self.running:
            raise Skip
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.WAITING
        request.num_preemptions += 1
        self.scheduled.pop(name, None)
        self.waiting.push(request)

    def abort(self, name):
        request = self.find(name)
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
    return {name: repr(getattr(request, name)) for name in KEPT}
