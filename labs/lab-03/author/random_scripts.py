"""Random scripts: a scheduler on small memories, and a queue by itself, in random calls."""

from labs.kit import Skip, make_request
from labs.kit.toys.driver import ids
from labs.kit.toys.engine_loop import NAMES, PRIORITIES, CountingKV, LoopPlay, LoopScript, queue_seen
from labs.kit.toys.plays import Play as Base
from mini_engine.scheduler import schedule_step

SCRIPTS = 80
POLICIES = ["fcfs", "priority"]


def draw(rng):
    often = [draw_queue, draw_tight, draw_tight]
    return rng.choice([*often, *often, draw_again, draw_again, draw_mixed])(rng)


def draw_queue(rng):
    """Pushes, then removals and pops in between; a request that was taken out may be pushed again."""
    arrivals = rng.sample(range(40), rng.randint(6, 24))
    some = rng.choice((PRIORITIES, (-3, -1, 0, 255, 256, 2**31)))
    pushes = [["push", f"r{arrival}", arrival, rng.choice(some)] for arrival in arrivals]
    calls = [*pushes]
    for _ in range(rng.randint(4, 16)):
        one = rng.choice(pushes)
        removal = ["remove", one[1]]
        calls += rng.choice([[["pop"]], [removal, ["pick_victim"]], [removal], [removal, one]])
    return {"config": {"queue": "alone", "policy": rng.choice(POLICIES)}, "calls": [*calls, ["pop_all"]]}


def draw_tight(rng):
    """Requests that are all admitted at once, and then grow: preemptions, several in a step."""
    size, first = rng.choice([1, 1, 1, 2, 3]), rng.randint(2, 4)
    sizes = rng.choice([[1], [1, 2, 4], [2, 3, 4, 5]])
    prompts = [rng.choice(sizes) for _ in range(first)]
    slots = size * (sum(-(-prompt // size) for prompt in prompts) + rng.choice([0, rng.randint(0, first)]))
    most, policy = first + rng.choice([0, 0, 1]), rng.choice([*POLICIES, "priority"])
    config = config_of(rng, slots, most, size, policy=policy)
    config["max_num_batched_tokens"] = rng.randint(6, 20)
    script = LoopScript(rng, slots, prompts=sizes, busy=0.25, is_long=True)
    calls = [script.add(name, prompt) for name, prompt in zip(NAMES, prompts, strict=False)]
    calls += [["schedule"], script.update(), *map(script.add, NAMES[first:])]
    return script.drawn(config, rng.randint(4, 10), calls)


def draw_again(rng):
    """Outputs that are recomputed in many chunks, and a token that comes too early."""
    limits = {"long_prefill_token_threshold": rng.choice([1, 2, 4]), "max_num_batched_tokens": 4}
    prompts = rng.choice([[1, 2], [8]])  # of the budget's size, and preempted in between
    script = LoopScript(rng, 40, prompts=prompts, busy=0.1, is_long=True)
    calls = [script.add(name) for name in "ab"]
    for _ in range(rng.choice([1, 1, 2, 3, 5, 7])):
        calls += [["schedule"], script.update()]
    calls += rng.sample([["preempt", "a"], ["preempt", "b"]], rng.randint(1, 2))
    return script.drawn(config_of(rng, 40, rng.randint(1, 3), **limits), rng.randint(3, 7), calls, early=0.9)


def draw_mixed(rng):
    """Everything, in any order; in a large pool a step may yield several tokens."""
    is_roomy = rng.random() < 0.5
    config = config_of(rng, 200 if is_roomy else rng.randint(8, 24), rng.randint(1, 4))
    script = LoopScript(rng, 24 if is_roomy else config["num_blocks"], prompts=range(1, 9), busy=0.6)
    drawn = script.drawn(config, rng.randint(5, 10))
    if rng.random() < 0.3:
        rng.shuffle(drawn["calls"])
    return drawn


def config_of(rng, slots, max_num_seqs, block_size=1, **settings):
    return {
        "policy": rng.choice(POLICIES),
        "max_num_batched_tokens": rng.randint(max_num_seqs, 12),
        "max_num_seqs": max_num_seqs,
        "long_prefill_token_threshold": rng.choice([0, 0, 2, 4]),
        "num_blocks": slots // block_size,
        "block_size": block_size,
        "watermark": rng.choice([0, 0, 0, 1]),
        "parts": rng.choice([*["its own"] * 5, "given"]),
    } | settings


def one_newcomer(waiting, running, kv, *, max_num_seqs, **settings):
    """A schedule_step that admits one request a step, so that its use can be seen."""
    return schedule_step(waiting, running, kv, max_num_seqs=min(max_num_seqs, len(running) + 1), **settings)


def three_at_most(num_new, budget, threshold):
    return max(0, min(num_new, budget, 3))


def Play(part, config):  # noqa: N802  a script's config says which of the two it is
    return (QueuePlay if "queue" in config else SchedulerPlay)(part, config)


class SchedulerPlay(LoopPlay):
    def __init__(self, part, config):
        settings = dict(config)
        kv = CountingKV(*(settings.pop(name) for name in ("num_blocks", "block_size", "watermark")))
        if settings.pop("parts") == "given":
            settings |= {"schedule_step": one_newcomer, "clamp": three_at_most}
        super().__init__(part, kv, part.Scheduler(kv, **settings), several_tokens=kv.num_blocks == 200)

    def fitting(self, request, tokens):
        """Token 9 stands for one whose id does not fit into 16 bits."""
        return [token if token < 9 else 2**17 for token in super().fitting(request, tokens)]

    def pick_victim(self):
        """Pick one of the running requests."""
        self.goes_on()
        running = list(self.scheduler.running)
        if not running:
            raise Skip
        with self.only_reading(running=running):
            return self.labels([self.part.pick_victim(running, self.scheduler.policy)])


class QueuePlay(Base):
    def __init__(self, part, config):
        super().__init__(part)
        self.policy, self.queue, self.inside = config["policy"], part.RequestQueue(config["policy"]), set()

    def push(self, name, arrival, priority):
        if name in self.inside:
            raise Skip
        request = self.requests.setdefault(name, make_request(name, 1, priority=priority))
        request.arrival, request.num_preemptions = arrival, arrival * 7 % 4
        request.output_token_ids = [0] * (arrival % 5)
        self.inside.add(name)
        self.queue.push(request)

    def pop(self):
        if not self.inside:
            raise Skip
        name = self.queue.pop().request_id
        self.inside.discard(name)
        return name

    def remove(self, name):
        if name not in self.inside:
            raise Skip
        self.inside.discard(name)
        self.queue.remove(self.requests[name])

    def pop_all(self):
        return [self.pop() for _ in range(len(self.queue))]

    def pick_victim(self):
        """Pick one of the queue; the function takes any requests."""
        if not self.inside:
            raise Skip
        requests = [self.requests[name] for name in sorted(self.inside)]
        return self.part.pick_victim(requests, self.policy).request_id

    def seen(self):
        seen = queue_seen(self.queue, ids, "queue")
        return seen | {"priorities": [request.priority for request in self.requests.values()]}
