"""lab-03's random_scripts: a scheduler on small memories, and a queue by itself, in random calls.

A script draws the calls of an engine's loop, and some that come in between: aborts and preemptions
after a schedule, ids used again, requests that are refused, tokens that come too early.
"""

from copy import deepcopy

from labs.kit import Skip, make_request
from mini_engine.request import RequestStatus
from mini_engine.scheduler import schedule_step

SCRIPTS = 80
NAMES = ("a", "b", "aa", "c", "d", "e")  # one begins like another
PRIORITIES = (0, 0, 1, 1, 2, 2, 10, 30)


# ------------------------------------------------------------------------------------------ the scripts


def draw(rng):
    often = [draw_queue, draw_tight, draw_tight, draw_rows]
    return rng.choice([*often, *often, draw_lopsided, draw_slow, draw_again, draw_mixed])(rng)


def draw_queue(rng):
    """Pushes, then removals and pops in between; a request that was taken out may be pushed again."""
    arrivals = rng.sample(range(40), rng.randint(6, 24))
    pushes = [["push", f"r{arrival}", arrival, rng.choice(PRIORITIES)] for arrival in arrivals]
    calls = [*pushes]
    for _ in range(rng.randint(4, 16)):
        one = rng.choice(pushes)
        calls += rng.choice(
            [[["pop"]], [["remove", one[1]]], [["remove", one[1]]], [["remove", one[1]], one]]
        )
    for _ in range(2):
        for arrival in arrivals[: rng.randint(1, 5)]:
            calls.append(["run", f"r{arrival}", {"arrival": arrival, **drawn_runner(rng)}])
        calls.append(["pick_victim"])
    if rng.random() < 0.5:
        calls.append(["RequestQueue", rng.choice(["shortest", "lifo", "FCFS", ""])])
    config = {"queue": "alone", "policy": rng.choice(["fcfs", "priority"])}
    if rng.random() < 0.3:
        calls.insert(0, ["long_queue", 200])
    return {"config": config, "calls": [*calls, ["pop_all"]]}


def draw_lopsided(rng):
    """A heap whose left branch comes late: what fills a hole there belongs further up."""
    a = sorted(rng.sample(range(40), 15))
    pushed = [a[0], a[8], a[1], *a[9:11], *a[2:4], *a[11:], *a[4:8]]
    pushes = [["push", f"r{arrival}", arrival, 1] for arrival in pushed]
    config = {"queue": "alone", "policy": rng.choice(["fcfs", "priority"])}
    return {"config": config, "calls": [*pushes, ["remove", f"r{rng.choice(a[9:11])}"], ["pop_all"]]}


def draw_tight(rng):
    """Requests that are all admitted at once, and then grow: preemptions, several in a step."""
    block_size, first = rng.choice([1, 1, 1, 2, 3]), rng.randint(2, 4)
    sizes = rng.choice([[1], [1, 2, 4], [2, 3, 4, 5]])
    prompts = [rng.choice(sizes) for _ in range(first)]
    spare = rng.choice([0, rng.randint(0, first)])
    blocks = sum(-(-prompt // block_size) for prompt in prompts) + spare
    config = drawn_config(rng, blocks * block_size, block_size, first + rng.choice([0, 0, 1]))
    config |= {
        "max_num_batched_tokens": rng.randint(6, 20),
        "policy": rng.choice(["fcfs", *["priority"] * 2]),
    }
    script = Script(rng, blocks * block_size, prompts=sizes, busy=0.25, is_long=True)
    calls = [script.add(name, prompt) for name, prompt in zip(NAMES, prompts, strict=False)]
    calls += [["schedule"], script.update(), *map(script.add, NAMES[first:])]
    return script.drawn(config, rng.randint(4, 10), calls)


def draw_rows(rng):
    """Rows that do not stand in the order of arrival; one of them leaves."""
    config = drawn_config(rng, 40, 1, 4) | {
        "policy": "priority",
        "max_num_batched_tokens": 12,
        "parts": "its own",
    }
    names, priorities = NAMES[:4], rng.sample([0, 1, 2, 10], 4)
    limits = rng.choices([1, 2, 4], k=4)
    calls = [["add", *row] for row in zip(names, [1, 2, 1, 2], limits, priorities, strict=True)]
    end = rng.randrange(4)
    leaves = [["abort", names[end]], ["preempt", names[end]], ["update", [[9]], [end]]]
    calls += [["schedule"], rng.choice(leaves), ["update", [[9], [8]], []], ["schedule"]]
    return {"config": config, "calls": calls}


def draw_slow(rng):
    """Prompts in many chunks, and a token that comes too early."""
    config = drawn_config(rng, 40, 1, rng.randint(1, 3))
    config |= {"long_prefill_token_threshold": 2, "max_num_batched_tokens": 6}
    script = Script(rng, 40, prompts=range(3, 9), busy=0.5)
    return script.drawn(config, rng.randint(5, 10), early=0.3)


def draw_again(rng):
    """Outputs that are recomputed in many chunks, and a token that comes too early."""
    config = drawn_config(rng, 40, 1, rng.randint(1, 3))
    config |= {"long_prefill_token_threshold": rng.choice([1, 2]), "max_num_batched_tokens": 4}
    script = Script(rng, 40, prompts=[1, 2], busy=0.1, is_long=True)
    calls = [script.add(name) for name in "ab"]
    for _ in range(rng.randint(3, 7)):
        calls += [["schedule"], script.update()]
    calls += rng.sample([["preempt", "a"], ["preempt", "b"]], rng.randint(1, 2))
    return script.drawn(config, rng.randint(3, 7), calls, early=0.9)


def draw_mixed(rng):
    """Everything, in any order; in a large pool a step may yield several tokens."""
    is_roomy = rng.random() < 0.5
    config = drawn_config(rng, 200 if is_roomy else rng.randint(8, 24), 1, rng.randint(1, 4))
    script = Script(rng, 24 if is_roomy else config["num_blocks"], prompts=range(1, 9), busy=0.6)
    drawn = script.drawn(config, rng.randint(5, 10))
    if rng.random() < 0.3:
        rng.shuffle(drawn["calls"])
    return drawn


def drawn_runner(rng):
    more = {name: rng.randint(0, 3) for name in ("prompt", "outputs", "num_preemptions")}
    return {"priority": rng.choice(PRIORITIES), **more}


def drawn_config(rng, slots, block_size, max_num_seqs):
    return {
        "policy": rng.choice(["fcfs", "priority"]),
        "max_num_batched_tokens": rng.randint(max_num_seqs, 12),
        "max_num_seqs": max_num_seqs,
        "long_prefill_token_threshold": rng.choice([0, 0, 2, 4]),
        "num_blocks": slots // block_size,
        "block_size": block_size,
        "watermark": rng.choice([0, 0, 0, 1]),
        "parts": rng.choice([*["its own"] * 5, "given"]),
    }


class Script:
    """Draws the calls of an engine's loop; `busy` is how often something comes in between."""

    def __init__(self, rng, slots, *, prompts, busy, is_long=False):
        self.rng, self.slots, self.prompts, self.busy, self.is_long = rng, slots, prompts, busy, is_long
        self.names = NAMES[: rng.randint(2, len(NAMES))]
        self.has_family = rng.random() < 0.4

    def drawn(self, config, steps, calls=(), early=0.0):
        calls = list(calls) or [self.add(name) for name in self.names[: self.rng.randint(1, 4)]]
        for _ in range(steps):
            calls += [*self.between(1.0), ["schedule"], *self.between(0.5)]
            if self.rng.random() < early:
                calls.append(["update", [[5]], [], "too early"])
            calls.append(update := self.update())
            if update[2]:  # of those that were stopped, an id comes again
                calls.append(self.add(self.names[0]))
        return {"config": config, "calls": [*calls, ["pop_all"]]}

    def between(self, chance):
        """What may happen between two calls of the loop."""
        name = self.rng.choice(self.names)
        add, abort, preempt = self.add(name), ["abort", name], ["preempt", name]
        kinds = [[add]] * 4 + [[abort], [preempt], [preempt]]
        kinds += [[abort, add], [preempt, abort], [["pick_victim"]], [["policy_key"]]]
        return self.rng.choice(kinds) if self.rng.random() < chance * self.busy else []

    def add(self, name, prompt=None):
        rng, slots = self.rng, self.slots
        prompt = prompt or rng.choice(self.prompts)
        most = max(min(slots + 1 - prompt, 12), 1)
        limits = range((most + 1) // 2 if self.is_long else 1, most + 1)
        if not self.is_long:
            limits = [1, 1, 2, *limits]
        kind = rng.random()
        if kind < 0.1:  # on the edge of what is refused
            prompt = rng.randint(slots - 1, slots + 2)
            limits = [None, None, 0, 1, 2]
        elif kind < 0.3:
            limits = [None, None, slots + 1 - prompt, slots + 2 - prompt]
        more = {}
        if rng.random() < (0.05 if self.is_long else 0.2):
            more[rng.choice(["stop_token_ids", "eos_token_ids"])] = [rng.randint(0, 4)]
        if rng.random() < 0.15:
            more["cached"] = rng.randint(1, 4)
        if self.has_family and rng.random() < 0.8:
            more["family"] = "x"
        return ["add", name, prompt, rng.choice(limits), rng.choice(PRIORITIES), *([more] if more else [])]

    def update(self):
        tokens = [[self.rng.randint(0, 9) for _ in range(self.rng.choice([1, 1, 1, 3]))] for _ in range(3)]
        is_stopped = self.rng.random() < (0.05 if self.is_long else 0.2)
        return ["update", tokens, self.rng.choice([[0], [0], [1], [0, 2]]) if is_stopped else []]


# ------------------------------------------------------------------------------------------ playing one


class Memory:
    """KV memory that only counts. Requests of a family hold the full blocks of their prompts together."""

    def __init__(self, num_blocks, block_size, watermark):
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        self.held = {}  # by id: (family, blocks that it shares with the family, all of its blocks)
        self.cached = {}  # by id: tokens that are found when it is admitted
        self.published = []

    def shared(self, family):
        return max((shared for other, shared, _ in self.held.values() if other == family), default=0)

    @property
    def num_free_blocks(self):
        alone = sum(blocks - shared for _, shared, blocks in self.held.values())
        together = sum(map(self.shared, {family for family, _, _ in self.held.values()}))
        return self.num_blocks - alone - together

    def admit(self, request):
        name, family = request.request_id, request.cache_salt
        if name in self.held:
            raise ValueError(f"request {name!r} was admitted already; it holds its blocks")
        blocks = -(-request.num_tokens // self.block_size)
        shared = (request.num_prompt_tokens - 1) // self.block_size if family else 0
        new = blocks - min(shared, self.shared(family))
        if new + (self.watermark if self.held else 0) > self.num_free_blocks:
            return False
        self.held[name] = (family, shared, blocks)
        found = min(self.cached.get(name, 0), request.num_tokens - 1)
        request.num_computed_tokens = request.num_cached_tokens = found
        return True

    def num_new_blocks(self, request, num_new_tokens):
        needed = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, needed - self.num_held(request))

    def allocate(self, request, num_new_tokens):
        new = self.num_new_blocks(request, num_new_tokens)
        if new > self.num_free_blocks:
            return False
        family, shared, blocks = self.held.get(request.request_id, ("", 0, 0))
        self.held[request.request_id] = (family, shared, blocks + new)
        return True

    def cache_blocks(self, request):
        self.published.append([request.request_id, request.num_computed_tokens, self.num_held(request)])

    def free(self, request):
        self.held.pop(request.request_id, None)

    def num_held(self, request):
        return self.held.get(request.request_id, ("", 0, 0))[2]


def one_newcomer(waiting, running, kv, *, max_num_seqs, **settings):
    """A schedule_step that admits one request a step, so that its use can be seen."""
    return schedule_step(waiting, running, kv, max_num_seqs=min(max_num_seqs, len(running) + 1), **settings)


def three_at_most(num_new, budget, threshold):
    return max(0, min(num_new, budget, 3))


class Looks(int):
    """An arrival that counts how often arrivals are compared."""

    def __new__(cls, value, looks):
        self = super().__new__(cls, value)
        self.looks = looks
        return self

    def _counted(compare):
        return lambda self, other: self.looks.append(1) or compare(self, other)

    __lt__, __le__, __gt__, __ge__ = map(_counted, (int.__lt__, int.__le__, int.__gt__, int.__ge__))


class Play:
    """One script on one part. Requests go by their ids; the next of an id is shown with a stroke: a'."""

    def __init__(self, part, config):
        self.part, self.policy = part, config["policy"]
        self.requests, self.came = {}, {}  # all that came, and what they came with, by label
        self.is_over, self.early, self.queue = False, None, None
        if "queue" in config:
            self.queue, self.scheduler, self.inside = part.RequestQueue(self.policy), None, set()
            self.runners = {}  # for pick_victim, by name
            return
        self.kv = Memory(config["num_blocks"], config["block_size"], config["watermark"])
        names = ("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
        settings = {name: config[name] for name in names}
        if config["parts"] == "given":
            settings |= {"schedule_step": one_newcomer, "clamp": three_at_most}
        self.scheduler = part.Scheduler(self.kv, **settings)
        self.is_roomy = config["num_blocks"] == 200
        self.scheduled, self.rows, self.ends = None, {}, []  # of the step that is being computed
        self.num_steps = 0
        self.changed = []  # what was not left as it was
        self.lent = []  # what the caller holds of the latest steps: its name, itself and a copy

    def label(self, request):
        return self.labels([request])[0]

    def labels(self, requests):
        known = {id(request): label for label, request in self.requests.items()}
        return [known.get(id(request), f"<{type(request).__name__}>") for request in requests]

    # ------------------------------------------------------------------- calls of a script: the queue

    def push(self, name, arrival, priority):
        self.goes_on()
        if name in self.inside:
            raise Skip
        if name not in self.requests:
            self.requests[name] = make_request(name, 1, priority=priority)
            self.requests[name].arrival = arrival
        self.inside.add(name)
        self.queue.push(self.requests[name])

    def pop(self):
        self.goes_on()
        if not self.inside:
            raise Skip
        name = self.label(self.queue.pop())
        self.inside.discard(name)
        return name

    def remove(self, name):
        self.goes_on()
        if name not in self.inside:
            raise Skip
        self.inside.discard(name)
        self.queue.remove(self.requests[name])

    def RequestQueue(self, policy):  # noqa: N802, named like what it calls
        self.part.RequestQueue(policy)

    def long_queue(self, count):
        """Another queue: `count` requests go in and come out, with some 15 comparisons each in a heap."""
        queue, looks = self.part.RequestQueue(self.policy), []
        for i in range(count):
            request = make_request(f"r{i}", 1)
            request.arrival = Looks(i * 7919 % count, looks)
            queue.push(request)
        popped = [int(queue.pop().arrival) for _ in range(count)]
        is_slow = len(looks) > 40 * count and not self.is_model
        return {"popped": popped, "comparisons": f"{'more than' if is_slow else 'at most'} 40 a request"}

    # --------------------------------------------------------------- calls of a script: the scheduler

    def add(self, name, prompt, max_tokens=4, priority=0, more=None):
        self.goes_on()
        more = dict(more or {})
        cached, family = more.pop("cached", 0), more.pop("family", "")
        request = make_request(name, prompt, None, priority=priority, cache_salt=family, **more)
        request.max_tokens = max_tokens  # where the engine has put the model's limit
        label = name
        while label in self.requests:
            label += "'"
        self.requests[label], self.came[label] = request, given(request)
        self.scheduler.add(request)
        self.kv.cached[name] = cached

    def schedule(self):
        self.goes_on()
        if self.scheduled is not None:
            raise Skip  # the last step has not been taken back
        self.scheduled = scheduled = self.scheduler.schedule()
        self.lend("schedule", scheduled)
        self.num_steps += 1
        running = {request.request_id: request for request in self.scheduler.running}
        self.rows = {name: running[name] for name in scheduled if name in running}
        self.ends = [name for name, request in self.rows.items() if request.num_new_tokens == scheduled[name]]
        return [[name, num_tokens] for name, num_tokens in scheduled.items()]

    def update(self, tokens, stopped=(), too_early=""):
        self.goes_on()
        sampled = {name: tokens[i % len(tokens)] for i, name in enumerate(self.ends)}
        sampled = {name: [*self.fitting(self.rows[name], some)] for name, some in sampled.items()}
        stopped = [name for i, name in enumerate(self.ends) if i in stopped]
        early = [
            name for name, r in self.rows.items() if name not in self.ends and r in self.scheduler.running
        ]
        if too_early:
            if not early:
                raise Skip
            sampled |= {early[0]: [*tokens[0]]}
        arguments = [self.scheduled or {}, sampled, *([stopped] if stopped else [])]
        before = deepcopy(arguments)
        rows, self.scheduled, self.rows, self.ends = self.rows, None, {}, []
        try:
            finished = self.scheduler.update(*arguments)
        except ValueError:
            if too_early:
                self.give_up(rows[early[0]])
            raise
        self.lend("sampled", arguments[1], before[1])
        self.lend("stopped", stopped, before[2:] and before[2])
        self.lend("finished", finished)
        said = {"stopped": before[2]} if stopped else {}
        return {"sampled": before[1], **said, "finished": self.labels(finished)}

    def lend(self, name, held, copy=None):
        """The caller goes on reading it: nothing that comes later may change it."""
        copy = type(held)(held) if copy is None else copy
        step = self.num_steps - (name != "schedule")
        self.lent = [(f"{name} of step {step}", held, copy), *self.lent[:7]]

    def fitting(self, request, tokens):
        """Several tokens of one step need room for each, unless they are the request's last."""
        ends = {*request.sampling_params.stop_token_ids, *request.eos_token_ids}
        is_end = len(request.output_token_ids) + len(tokens) >= (request.max_tokens or 0)
        return tokens if self.is_roomy or is_end or ends & {*tokens} else tokens[:1]

    def give_up(self, request):
        """After a token that came too early a caller can only abort all: nothing may be left behind."""
        self.is_over, self.early = True, request
        for name in NAMES:
            self.scheduler.abort(name)

    def abort(self, name):
        self.goes_on()
        return self.scheduler.abort(name)

    def preempt(self, name):
        self.goes_on()
        request = next((r for r in self.scheduler.running if r.request_id == name), None)
        if request is None:
            raise Skip
        self.scheduler.preempt(request)

    def run(self, name, fields):
        """A request for pick_victim, in a script of a queue, which has no scheduler."""
        self.goes_on()
        self.runners[name] = made(name, **fields)

    def pick_victim(self):
        """Of those that run."""
        self.goes_on()
        if self.queue is not None:
            if not self.runners:
                raise Skip
            return self.part.pick_victim([*self.runners.values()], self.policy).request_id
        running = list(self.scheduler.running)
        if not running:
            raise Skip
        victim = self.label(self.part.pick_victim(running, self.policy))
        if running != list(self.scheduler.running):
            self.changed.append("running")
        return victim

    def policy_key(self):
        """All that came in, in the order of their keys."""
        self.goes_on()
        here = [request for request in self.requests.values() if request.arrival >= 0]
        return self.labels(sorted(here, key=lambda request: self.part.policy_key(request, self.policy)))

    def pop_all(self):
        """The queue as it comes out; a heap shows only then whether it is one."""
        self.goes_on()
        self.is_over = True
        queue = self.scheduler.waiting if self.scheduler else self.queue
        return self.labels([queue.pop() for _ in range(len(queue))])

    def goes_on(self):
        if self.is_over:
            raise Skip

    # ------------------------------------------------------------------------------- what can be seen

    def seen(self):
        if self.scheduler is None:
            seen = look(self.queue, self.labels, "queue")
            return seen | {"priorities": [r.priority for r in self.requests.values()]}
        running, kv = self.scheduler.running, self.kv
        seen = look(self.scheduler.waiting, self.labels, "waiting") | {
            "running": self.labels(running),
            "num_free_blocks": kv.num_free_blocks,
        }
        if self.early is not None:
            return seen | {"its output_token_ids": self.early.output_token_ids}
        if self.is_over:
            return {}  # all of the queue has been popped, and seen
        seen |= {
            "has_work": self.scheduler.has_work,
            "published (id, num_computed_tokens, blocks)": sorted(kv.published),
            "changed, though the caller holds it": self.changed
            + [name for name, held, copy in self.lent if held != copy]
            + [label for label, request in self.requests.items() if given(request) != self.came[label]],
        }
        kv.published, self.changed = [], []
        for label, request in self.requests.items():
            seen |= {f"{label}.{name}": value for name, value in fields(request, kv).items()}
        return seen


def made(name, arrival, priority, prompt, outputs, num_preemptions):
    request = make_request(name, prompt + 1, priority=priority)
    request.arrival, request.num_preemptions = arrival, num_preemptions
    request.output_token_ids, request.num_computed_tokens = [0] * outputs, prompt + outputs
    return request


def look(queue, labels, name):
    """A queue by all that it shows without giving anything away."""
    requests = list(queue)
    front = labels([queue.peek()]) if len(queue) else []
    return {name: labels(requests), f"front of {name}": front, f"len of {name}": len(queue)}


def fields(request, kv):
    """Of a request, all that a scheduler answers for."""
    seen = {
        "status": getattr(request.status, "value", request.status),
        "finish_reason": request.finish_reason,
        "output_token_ids": request.output_token_ids,
        "arrival": request.arrival,
        "max_tokens": request.max_tokens,
        "num_preemptions": request.num_preemptions,
    }
    if request.status is RequestStatus.FINISHED:
        return seen
    seen |= {"num_computed_tokens": request.num_computed_tokens}
    if request.status is RequestStatus.RUNNING:
        seen |= {"num_cached_tokens": request.num_cached_tokens, "blocks": kv.num_held(request)}
    return seen


def given(request):
    """What a request comes with; a scheduler only reads it."""
    return (request.request_id, tuple(request.prompt_token_ids), request.priority, request.sampling_params)
