"""lab-02's random_scripts: the three functions, asked by an engine with requests in every state.

A request computes what it was given a chunk for, gets a token when its chunk was the last, and may be
preempted at any time, so that its outputs are computed once more.
"""

from labs.kit import make_request
from labs.kit.toys.plays import Play as Base
from labs.kit.toys.plays import fields_changed, plain
from mini_engine.request import RequestStatus

SCRIPTS = 80
NUMBERS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 511, 2048, 2049)
EDGES = (4095, 4096, 4097, 65_535, 65_536, 65_537)


def draw(rng):
    """A few requests, and steps in which some of them advance, by themselves or all together."""
    config = {"calls": "add(id, prompt, outputs, computed), preempt(id, cached), step(budget, threshold)"}
    if rng.random() < 0.1:
        return {"config": config, "calls": draw_large(rng)}
    names, calls = [f"r{i}" for i in range(rng.randint(1, 5))], []
    for name in names:
        prompt, outputs = rng.choice((1, 2, 3, 5, 8, 16, 17)), rng.choice((0, 0, 1, 2, 5, 9))
        left = rng.choice((1, 1, 2, rng.randint(1, prompt + outputs)))
        calls.append(["add", name, prompt, outputs, max(0, prompt + outputs - left)])
    for _ in range(rng.randint(4, 12)):
        kind, name, size = rng.random(), rng.choice(names), rng.choice((1, 1, 2, 3, 5, 8, 16, 40))
        if kind < 0.25:
            near = rng.choice(NUMBERS)
            budget, threshold = (rng.choice((near, near + rng.randint(-2, 2), size, 100)) for _ in "bt")
            calls.append(["clamp", near, budget, max(0, rng.choice((0, threshold)))])
        elif kind < 0.6:
            calls.append(["next_chunk", name, size])
        elif kind < 0.75:
            calls.append(["prefill_budget", rng.choice((0, 1, 2, 3, 16, 2048))])
        elif kind < 0.85:
            calls.append(["preempt", name, rng.choice((0, 0, 0, 4))])
        else:
            calls.append(["step", rng.choice((1, 2, 4, 8, 16, 40)), rng.choice((0, 0, 1, 3, 7))])
    return {"config": config, "calls": calls}


def draw_large(rng):
    """Numbers, positions and token ids on the edge of a size, and hundreds of decodes."""
    computed, base = 4096 - rng.randint(1, 9), rng.choice((2**16, 2**31))
    calls = [["add", "r0", 4200, rng.choice((0, 3)), computed, base], ["add", "r1", 5000, 0, 10]]
    for _ in range(4):
        a, b, c = (rng.choice(EDGES) for _ in "abc")
        calls += [["clamp", a, b, rng.choice((0, 0, c))], ["next_chunk", "r0", rng.choice((1, 2, 8, 40))]]
    calls += [["next_chunk", "r1", 4097], ["clamp", 2**21, 2**20 + 1, rng.choice((0, 2**20 + 1))]]
    return [*calls, ["crowd", rng.choice((2, 2, 300))], ["prefill_budget", rng.choice(EDGES)]]


class Play(Base):
    """The running requests, and what an engine does with the answers of the three functions."""

    def __init__(self, part, config):
        super().__init__(part)
        self.running = []

    def watching(self, name, *arguments):
        """Ask one of the three functions, and see what it changes of that which it may only read."""
        before, order = {request: plain(request) for request in self.running}, list(self.running)
        try:
            return getattr(self.part, name)(*arguments)
        finally:
            self.changed += fields_changed(before, plain) + (["running"] if self.running != order else [])

    def add(self, name, prompt, outputs, computed, base=0):
        """A running request; one with outputs to compute once more was preempted before."""
        request = make_request(name, [base + 5 * i % 11 for i in range(prompt)], max_tokens=None)
        request.output_token_ids = [9000 + i % 3 for i in range(outputs)]
        request.num_computed_tokens, request.status = computed, RequestStatus.RUNNING
        request.num_preemptions = int(outputs > 0 and request.num_new_tokens > 1)
        self.requests[name] = request
        self.running.append(request)

    def crowd(self, count):
        for i in range(count):
            self.add(f"d{i}", 1, 1, 1)

    def clamp(self, num_new, budget, threshold):
        return self.watching("clamp", num_new, budget, threshold)

    def next_chunk(self, name, size):
        """The chunk, whose tokens are computed after that."""
        request = self.known(name)
        size = min(size, request.num_new_tokens)
        chunk = self.watching("next_chunk", request, size)
        tokens, positions = list(chunk.token_ids), list(chunk.positions)
        answer = {"token_ids": tokens, "positions": positions, "is_last": bool(chunk.is_last)}
        self.emptied(chunk)
        request.num_computed_tokens += size
        if request.num_new_tokens == 0:
            request.output_token_ids.append(9000 + len(request.output_token_ids) % 3)
        return answer

    def emptied(self, chunk):
        """The caller may do with a chunk's lists as it likes; the request is not to be changed by that."""
        before = [(request, plain(request)) for request in self.running]
        for part in (chunk.token_ids, chunk.positions):
            if isinstance(part, list):
                part.clear()
        self.changed += [f"{r.request_id}, with a chunk" for r, fields in before if fields != plain(r)]

    def prefill_budget(self, budget):
        return self.watching("prefill_budget", self.running, budget)

    def preempt(self, name, cached):
        request = self.known(name)
        request.num_computed_tokens = request.num_cached_tokens = min(cached, request.num_tokens - 1)
        request.num_preemptions += 1

    def step(self, budget, threshold):
        """Decodes get one token each, prompts share what is left; what each request was given."""
        left, given = self.prefill_budget(budget), {}
        for request in list(self.running):
            size = 1 if request.is_decode else self.clamp(request.num_new_tokens, left, threshold)
            left -= 0 if request.is_decode else size
            if size > 0:
                given[request.request_id] = size, self.next_chunk(request.request_id, size)
        return {
            "left of the budget": left,
            "tokens": {name: size for name, (size, _) in given.items()},
            "first position": {name: chunk["positions"][0] for name, (_, chunk) in given.items()},
            "is_last": {name: chunk["is_last"] for name, (_, chunk) in given.items()},
        }

    def seen(self):
        computed = {r.request_id: f"{r.num_computed_tokens} of {r.num_tokens}" for r in self.running}
        return {"num_computed_tokens": computed, "changed by asking": self.changed}
