"""The monitor: of each rule a scheduler or block manager that breaks it and no other; and runs without."""

import re
from functools import partial

import pytest

from labs.kit import FakeKV
from labs.kit.judge import loading
from mini_engine.block_manager import BlockManager
from mini_engine.invariants import RULES, InvariantError, watch
from mini_engine.request_queue import RequestQueue
from mini_engine.scheduler import Scheduler, schedule_step
from mini_engine.tests.helpers import make_request
from mini_engine.tests.test_conformance import SharesToo
from mini_engine.trace import Recorder


def run(scheduler, requests, seed=None, max_steps=300):
    """Requests through a scheduler that is watched, to the end; those named late come after a step."""
    with watch(scheduler, seed) as monitor:
        for step in range(max_steps):
            for request in requests:
                if request.request_id.startswith("late") == step and step < 2:
                    scheduler.add(request)
            if not scheduler.has_work:
                break
            scheduled = scheduler.schedule()
            ending = [r for r in scheduler.running if scheduled[r.request_id] == r.num_new_tokens]
            scheduler.update(scheduled, {r.request_id: [(r.num_tokens * 7 + step) % 5] for r in ending})
    return monitor


def six():
    """Some begin alike, share, grow, run short and finish apart."""
    head = [1, 2, 3, 4]
    specs = [
        ("a", [*head, *head, 1], 9),
        ("b", [5, 6, 7], 6),
        ("c", [*head, *head, 2], 8),
        ("d", [8] * 5, 2),
        ("e", [*head, *head], 3),
        ("f", [5, 6, 7, 8, *head, 1], 3),
    ]
    return [make_request(*spec) for spec in specs]


SETTINGS = {"max_num_batched_tokens": 16, "max_num_seqs": 3}


def make(scheduler=Scheduler, manager=BlockManager, num_blocks=8, **settings):
    kv = manager(num_blocks, 4, watermark=0)
    kv.copy_block = lambda source, target, num_tokens: None
    return scheduler(kv, **SETTINGS | settings)


# ------------------------------------------------------------------------- each breaks one rule


def more_budget(*args, max_num_batched_tokens, **kwargs):
    return schedule_step(*args, max_num_batched_tokens=max_num_batched_tokens + 1, **kwargs)


def no_threshold(*args, long_prefill_token_threshold, **kwargs):
    return schedule_step(*args, **kwargs)


def more_slots(*args, max_num_seqs, **kwargs):
    return schedule_step(*args, max_num_seqs=max_num_seqs + 1, **kwargs)


def reversed_rows(*args, **kwargs):
    return dict(reversed(schedule_step(*args, **kwargs).items()))


def too_much(waiting, running, kv, **kwargs):
    scheduled = schedule_step(waiting, running, kv, **kwargs)
    return {name: n + (n == 1) for name, n in scheduled.items()}


def skips_the_last(waiting, running, kv, **kwargs):
    scheduled = schedule_step(waiting, running, kv, **kwargs)
    if len(scheduled) > 1:
        scheduled.popitem()
    return scheduled


def stays_in_the_queue(waiting, running, kv, **kwargs):
    before = list(running)
    scheduled = schedule_step(waiting, running, kv, **kwargs)
    for request in running:
        if request not in before:
            waiting.push(request)
    return scheduled


def admits_nobody(waiting, running, kv, **kwargs):
    return schedule_step(RequestQueue(), running, kv, **kwargs)


class Newest(RequestQueue):
    """Serves the newest first."""

    def _newest(self):
        return max(self, key=lambda request: request.arrival)

    def peek(self):
        return self._newest()

    def pop(self):
        request = self._newest()
        self.remove(request)
        return request


class LastComeFirst(Scheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waiting = Newest()


class AdmitsAfterPreempting(Scheduler):
    def make_room(self):
        super().make_room()
        return False


class ThrowsOutTheFirst(Scheduler):
    def preempt(self, request):
        super().preempt(self.running[0])


class ForgetsOutputs(Scheduler):
    def preempt(self, request):
        super().preempt(request)
        request.output_token_ids.clear()


class LosesTheVictim(Scheduler):
    def preempt(self, request):
        super().preempt(request)
        self.waiting.remove(request)


class CountsTheSampled(Scheduler):
    """Takes a token that was sampled for one that was computed."""

    def update(self, *args):
        finished = super().update(*args)
        for request in self.running:
            request.num_computed_tokens = request.num_tokens
        return finished


class ReportsTwice(Scheduler):
    def update(self, *args):
        return 2 * super().update(*args)


class KeepsFinished(Scheduler):
    """Takes a finished request off the lists and forgets its blocks."""

    def _end(self, request, reason):
        super()._end(request, reason)
        call, _ = self._pending.pop()
        assert call == self.kv.free


class TakesMore(BlockManager):
    """A decode takes a block too many, as if for a token that was rejected, and keeps it."""

    def allocate(self, request, num_new_tokens):
        return super().allocate(request, num_new_tokens + self.block_size)


class Loses(BlockManager):
    """A block is lost whenever a request gives its blocks back."""

    def free(self, request):
        super().free(request)
        self._free = self._free[1:]


class SharesTooEarly(BlockManager):
    """Publishes at admission, before anything is computed (nano-vLLM's issue 208 feared it)."""

    def admit(self, request):
        if not super().admit(request):
            return False
        computed, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens
        self.cache_blocks(request)
        request.num_computed_tokens = computed
        return True


class ComputesAgain(BlockManager):
    """Finds all of a prompt and then computes its last token again, into the shared block."""

    def get_computed_blocks(self, request):
        return self._cache.find_longest_cache_hit(request, request.num_tokens // self.block_size)

    def admit(self, request):
        admitted = super().admit(request)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return admitted


class OneSlotForAll(BlockManager):
    def slot_mapping(self, request, start, end):
        return [
            slot // self.block_size * self.block_size for slot in super().slot_mapping(request, start, end)
        ]


class SharesThePartialBlock(BlockManager):
    """Forks without a copy: two answers write into one block."""

    def fork(self, parent, child):
        num_tokens = min(child.num_prompt_tokens, child.num_tokens - 1)
        return self._claim(
            child, self.block_table(parent)[: num_tokens // self.block_size + 1], 0, num_tokens
        )


def answers(num_prompt_tokens=7):
    """Two answers to one prompt; the second comes when it is computed."""
    requests = [make_request(name, [1] * num_prompt_tokens, 6) for name in ("a", "late")]
    for request in requests:
        request.siblings = requests
    return requests


def latecomer():
    """When c is preempted, the late one could have its place."""
    return [
        make_request("a", 4, 9),
        make_request("c", 9, 4, priority=5),
        make_request("late", 1, 1, priority=1),
    ]


def second_half():
    return [make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 6), make_request("b", [5, 6, 7, 8, 9], 6)]


BROKEN = [
    ("budget", dict(schedule_step=more_budget)),
    ("threshold", dict(schedule_step=no_threshold, long_prefill_token_threshold=4)),
    ("slots", dict(schedule_step=more_slots, num_blocks=16)),
    ("rows", dict(schedule_step=reversed_rows)),
    ("computed", dict(schedule_step=too_much, num_blocks=30)),
    ("computed", dict(scheduler=CountsTheSampled)),
    ("turns", dict(schedule_step=skips_the_last)),
    ("progress", dict(schedule_step=admits_nobody)),
    ("order", dict(scheduler=LastComeFirst)),
    (
        "order",
        dict(
            scheduler=AdmitsAfterPreempting,
            policy="priority",
            max_num_seqs=2,
            num_blocks=4,
            requests=latecomer,
        ),
    ),
    ("victim", dict(scheduler=ThrowsOutTheFirst)),
    ("outputs", dict(scheduler=ForgetsOutputs)),
    ("once", dict(scheduler=LosesTheVictim)),
    ("once", dict(schedule_step=stays_in_the_queue)),
    ("blocks", dict(manager=Loses)),
    ("shared", dict(manager=SharesToo, max_num_batched_tokens=9, requests=second_half)),
    ("shared", dict(manager=SharesTooEarly)),
    ("shared", dict(manager=SharesThePartialBlock, requests=answers)),
    ("written", dict(manager=SharesThePartialBlock, requests=partial(answers, 8))),
    ("written", dict(manager=ComputesAgain)),
    ("written", dict(manager=OneSlotForAll)),
    ("drafts", dict(manager=TakesMore, num_blocks=30)),
    ("finished", dict(scheduler=ReportsTwice)),
    ("finished", dict(scheduler=KeepsFinished)),
]


@pytest.mark.parametrize(("rule", "parts"), BROKEN, ids=[
    f"{rule}-{next(getattr(part, '__name__', '') for part in parts.values())}" for rule, parts in BROKEN
])  # fmt: skip
def test_a_broken_rule_is_named(rule, parts):
    """The error has the rule, the step and the seed; without the break the same run passes."""
    parts = dict(parts)
    requests = parts.pop("requests", six)
    right = {
        name: value
        for name, value in parts.items()
        if name in ("policy", "num_blocks", "long_prefill_token_threshold", *SETTINGS)
    }
    run(make(**right), requests())
    with pytest.raises(InvariantError) as caught:
        run(make(**parts), requests(), seed=("draw", 42))
    error = caught.value
    assert error.rule == rule, str(error)
    assert re.match(rf"step {error.step}\b", str(error)) and RULES[rule] in str(error)
    assert str(error).endswith("replay it with seed ('draw', 42)")
    if error.request_id is not None:
        assert f"request {error.request_id!r}" in str(error)


def test_each_rule_has_a_run_that_breaks_it():
    assert {rule for rule, _ in BROKEN} == set(RULES)


@pytest.mark.parametrize("num_blocks", [8, 16, 30])
def test_a_right_run_passes(num_blocks):
    requests = six()
    scheduler = make(num_blocks=num_blocks)
    monitor = run(scheduler, requests)
    assert not scheduler.has_work and monitor.known == {}
    assert scheduler.kv.stats.hits > 0
    assert bool(sum(request.num_preemptions for request in requests)) == (num_blocks == 8)


# ----------------------------------------------------------------------------- how it is put on


def test_what_is_not_watched_is_as_it_was():
    """The methods are a class's again, though the run inside ended in an error; and one may watch twice."""
    scheduler = make()
    with pytest.raises(ZeroDivisionError), watch(scheduler):
        assert "schedule" in vars(scheduler)
        with watch(scheduler):
            scheduler.add(six()[0])
        assert vars(scheduler)["schedule"]
        raise ZeroDivisionError
    assert not {"add", "abort", "schedule", "update"} & set(vars(scheduler))


def test_a_run_can_be_watched_from_the_middle_on():
    scheduler = make()
    for request in six()[:3]:
        scheduler.add(request)
    scheduled = scheduler.schedule()
    ending = [r for r in scheduler.running if scheduled[r.request_id] == r.num_new_tokens]
    scheduler.update(scheduled, {r.request_id: [1] for r in ending})
    assert run(scheduler, six()[3:]).step > 5
    assert not scheduler.has_work


def test_an_abort_is_watched_too():
    scheduler = make(scheduler=KeepsFinished)
    with watch(scheduler) as monitor:
        for request in six():
            scheduler.add(request)
        scheduler.schedule()
        assert not scheduler.abort("unknown")
        assert scheduler.abort("f"), "it waits and holds nothing"
        with pytest.raises(InvariantError, match="request 'a': it has ended and holds blocks"):
            scheduler.abort("a")
    assert monitor.step == 0


@pytest.mark.parametrize("lab_id", ["lab-01", "lab-03"])
def test_a_labs_scheduler_can_be_watched(lab_id):
    """The reference on the lab's own memory, recorded as the lab's driver does; and a wrong one."""
    lab = loading.load(lab_id, "solution")

    def right(schedule_step=lab.schedule_step if lab_id == "lab-01" else schedule_step):
        kind = Scheduler if lab_id == "lab-01" else lab.Scheduler
        return kind(FakeKV(30), **SETTINGS, schedule_step=schedule_step)

    requests = six()
    run(Recorder(right()), requests)
    assert sum(request.num_preemptions for request in requests) > 0
    with pytest.raises(InvariantError, match="'budget'"):
        run(Recorder(right(more_budget)), six())


def test_an_engine_and_an_llm_can_be_watched(model):
    """In the middle of a step, too; the error names the engine's request."""
    from mini_engine.engine import Engine
    from mini_engine.llm import LLM
    from mini_engine.request import SamplingParams

    engine = Engine(model, num_blocks=6, block_size=4, **SETTINGS)
    prompts, params = [[1, 2, 3, 4, 5, n] for n in range(4)], SamplingParams(max_tokens=9, seed=1)
    plain = LLM.from_engine(engine).generate(prompts, params, use_tqdm=False)
    engine = Engine(model, num_blocks=6, block_size=4, record=True, **SETTINGS)
    with watch(LLM.from_engine(engine)) as monitor:
        watched = LLM.from_engine(engine).generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in watched] == [o.outputs[0].token_ids for o in plain]
    assert monitor.step == len(engine.trace.steps)
    engine = Engine(model, num_blocks=6, block_size=4, **SETTINGS)
    engine.scheduler.kv.slot_mapping = lambda request, start, end: [0] * (end - start)
    engine.add_request(prompts[0], params)
    with watch(engine), pytest.raises(InvariantError, match="request 'r0'.*slot 0 is written twice"):
        engine.step()
