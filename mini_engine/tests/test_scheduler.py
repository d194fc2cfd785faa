"""The scheduler's parts by themselves: clamp, next_chunk, the queue, victims, settings, life cycle.

How they behave together is in test_conformance.py.
"""

import gc
import random
import statistics
import tracemalloc
from time import process_time

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.request_queue import RequestQueue, pick_victim, policy_key
from mini_engine.scheduler import Scheduler, clamp, next_chunk, prefill_budget, schedule_step
from mini_engine.tests.helpers import SlotEngine, make_request


@pytest.mark.parametrize(
    ("num_new", "budget", "threshold", "expected"),
    [(10, 20, 0, 10), (10, 4, 0, 4), (10, 20, 3, 3), (10, 2, 3, 2), (3, 20, 3, 3), (2, 20, 3, 2),
     (10, 0, 0, 0), (10, -2, 0, 0), (0, 5, 2, 0), (1, 1, 1, 1), (5, 20, 1, 1)],
)  # fmt: skip
def test_clamp(num_new, budget, threshold, expected):
    """At most the threshold (0: none), at most the budget, never negative."""
    assert clamp(num_new, budget, threshold) == expected


def test_next_chunk():
    """The tokens that come next, at their absolute positions; last if nothing is left after them."""
    request = make_request("a", [10, 11, 12, 13])
    request.output_token_ids = [14, 15]
    request.num_computed_tokens = 3
    assert next_chunk(request, 2) == ([13, 14], [3, 4], False)
    assert next_chunk(request, 3) == ([13, 14, 15], [3, 4, 5], True)


def test_prefill_budget():
    """Every decode takes one token before prefills are thought of; prefills take none yet."""
    decode, prefill = make_request("d", 3), make_request("p", 9)
    decode.output_token_ids, decode.num_computed_tokens = [1], 3
    assert prefill_budget([decode, prefill, decode], 10) == 8


def stamped(*priorities):
    requests = [make_request(f"q{i}", priority=p) for i, p in enumerate(priorities)]
    for i, request in enumerate(requests):
        request.arrival = i
    return requests


def test_pick_victim():
    requests = stamped(0, 2, 1, 2, 0)
    assert pick_victim(requests, "fcfs") is requests[4]
    assert pick_victim(requests, "priority") is requests[3]
    assert pick_victim(requests[::-1], "priority") is requests[3], "the order of running plays no part"


def test_a_duplicate_id_is_refused_while_it_is_in_use():
    engine = SlotEngine().add(make_request("a", 4, 2))
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.add(make_request("a"))
        engine.step()
    while engine.scheduler.has_work:
        engine.step()
    engine.add(make_request("a"))
    assert engine.requests["a"].arrival == 1, "what was refused has not used up a number"


@pytest.mark.parametrize("max_tokens", [None, 0, 1])
def test_a_prompt_beyond_the_pool_is_refused_and_left_as_it_was(max_tokens):
    """Whatever max_tokens says, the prompt itself needs room; the next one gets the number."""
    scheduler = Scheduler(BlockManager(2, 4), max_num_batched_tokens=8, max_num_seqs=2)
    request = make_request("a", 9, None)
    request.max_tokens = max_tokens
    with pytest.raises(ValueError, match="'a' needs KV room for 9 tokens"):
        scheduler.add(request)
    assert (request.max_tokens, request.arrival, scheduler.has_work) == (max_tokens, -1, False)
    scheduler.add(fits := make_request("a", 8, None))
    assert (fits.max_tokens, fits.arrival) == (1, 0)


def test_a_short_running_request_means_that_room_was_not_made():
    """schedule_step never skips a running request in silence."""
    kv = BlockManager(1, 4)
    request = make_request("a", 4)
    assert kv.admit(request)
    request.num_computed_tokens, request.output_token_ids = 4, [1]
    with pytest.raises(RuntimeError, match="no KV room for running request 'a'"):
        schedule_step(RequestQueue(), [request], kv, max_num_batched_tokens=8, max_num_seqs=2)


@pytest.mark.parametrize("outputs", [0, 6])
def test_a_token_for_an_unfinished_chunk_is_refused(outputs):
    """update takes no token for a request that still has tokens to compute, its own outputs among them."""
    request = make_request("a", 12 - outputs)
    request.output_token_ids = [1] * outputs
    engine = SlotEngine(max_num_batched_tokens=8).add(request)
    scheduled = engine.scheduler.schedule()
    with pytest.raises(ValueError, match="'a' got a token with 4 tokens still to compute"):
        engine.scheduler.update(scheduled, {"a": [1]})


def test_the_head_of_the_queue_blocks():
    """A small request does not pass a large one that waits for memory."""
    engine = SlotEngine(num_blocks=6, block_size=4)
    engine.add(make_request("first", 12, 4), make_request("large", 16, 2), make_request("small", 1, 2))
    engine.step()
    assert list(engine.scheduler.waiting)[0].request_id == "large"
    assert "small" not in {i for _ in range(2) for i in engine.step()}
    engine.run()


# -------------------------------------------------------------------- several tokens, and their end


def prefilled(**sampling):
    """A scheduler whose one request, prompt 4, is scheduled whole and waits for its tokens."""
    scheduler = Scheduler(BlockManager(8, 4), max_num_batched_tokens=8, max_num_seqs=2)
    request = make_request("a", 4, **{"max_tokens": 8} | sampling)
    scheduler.add(request)
    return scheduler, request, scheduler.schedule()


def test_a_step_may_yield_several_tokens():
    """All are appended, in their order; what follows a stop is dropped with the stop's own reason."""
    scheduler, request, scheduled = prefilled()
    assert scheduler.update(scheduled, {"a": [3, 0, 2]}) == []
    assert (request.output_token_ids, request.num_new_tokens) == ([3, 0, 2], 3)
    for limit, reason in (({"stop_token_ids": [0]}, "stop"), ({"max_tokens": 2}, "length")):
        scheduler, request, scheduled = prefilled(**limit)
        assert scheduler.update(scheduled, {"a": [3, 0, 2]}) == [request]
        assert (request.output_token_ids, request.finish_reason) == ([3, 0], reason)
    scheduler, request, scheduled = prefilled(stop_token_ids=[0])
    assert scheduler.update(scheduled, {"a": [0, 2]}) == [request] and request.output_token_ids == [0]


def test_a_step_that_yields_no_token_ends_nothing():
    """Whatever ended the request before it."""
    engine = SlotEngine().add(make_request("a", 4, 1), make_request("b", 4))
    scheduled = engine.scheduler.schedule()
    assert engine.scheduler.update(scheduled, {"a": [1], "b": []}) == [engine.requests["a"]]
    assert engine.requests["b"].finish_reason is None


@pytest.mark.parametrize("max_tokens", [8, 1])
def test_a_stop_string_is_passed_not_left(max_tokens):
    """The ids in `stopped` end with "stop", at their last token too; nothing of it stays on the request."""
    scheduler, request, scheduled = prefilled(max_tokens=max_tokens)
    assert scheduler.update(scheduled, {"a": [3]}, {"a": "END"}) == [request]
    assert (request.finish_reason, request.output_token_ids) == ("stop", [3])
    assert not hasattr(request, "stop_string")


def test_a_stop_string_ends_no_other():
    engine = SlotEngine().add(make_request("a", 4, 8), make_request("b", 4, 8))
    scheduled = engine.scheduler.schedule()
    finished = engine.scheduler.update(scheduled, {"a": [1], "b": [1]}, {"a"})
    assert finished == [engine.requests["a"]] and engine.requests["b"].finish_reason is None


@pytest.mark.parametrize(
    ("num_requests", "num_given", "num_blocks", "block_size"),
    [(2, 2, 4, 2), (3, 3, 16, 1)],
    ids=["the tokens end beyond a block that has room", "blocks for one token each are left"],
)
def test_room_is_made_for_several_tokens_of_each(num_requests, num_given, num_blocks, block_size):
    """Prompts of three, which a step gives several tokens: the last is preempted, and the others fit."""
    kv = BlockManager(num_blocks, block_size, watermark=0)
    scheduler = Scheduler(kv, max_num_batched_tokens=64, max_num_seqs=8)
    names = "abc"[:num_requests]
    for i, name in enumerate(names):
        scheduler.add(make_request(name, [10 * i, 1, 2], 6))
    scheduler.update(scheduler.schedule(), {name: [7] * num_given for name in names})
    assert scheduler.schedule() == {name: num_given for name in names[:-1]}
    assert [request.request_id for request in scheduler.waiting] == [names[-1]]


# ----------------------------------------------------------------------------------- a part that raises


def raising(monkeypatch, part, name, times=1, after=False):
    """Let a method raise so many times, before or after its work."""
    method, left = getattr(part, name), [times]

    def call(*args):
        result = method(*args) if after or not left[0] else None
        if left[0]:
            left[0] -= 1
            raise OSError(name)
        return result

    monkeypatch.setattr(part, name, call)


@pytest.mark.parametrize("after", [False, True])
def test_a_request_that_cannot_be_queued_is_left_as_it_was(monkeypatch, after):
    scheduler = Scheduler(BlockManager(8, 4), max_num_batched_tokens=8, max_num_seqs=2)
    request = make_request("a", 4, None)
    raising(monkeypatch, scheduler.waiting, "push", after=after)
    with pytest.raises(OSError):
        scheduler.add(request)
    assert (request.max_tokens, request.arrival, len(scheduler.waiting)) == (None, -1, 0)
    scheduler.add(request)
    assert request.arrival == 0 and [*scheduler.waiting] == [request]


def test_a_request_that_is_pushed_twice_is_in_the_queue_once():
    queue, (a, b) = RequestQueue(), stamped(0, 0)
    for request in (b, a, b, a):
        queue.push(request)
    assert (len(queue), [*queue], queue.pop(), queue.pop(), len(queue)) == (2, [a, b], a, b, 0)


def test_a_preempted_request_is_queued_once(monkeypatch):
    scheduler, request, scheduled = prefilled()
    scheduler.update(scheduled, {"a": [1]})
    raising(monkeypatch, scheduler.waiting, "push", after=True)
    with pytest.raises(OSError):
        scheduler.preempt(request)
    assert [*scheduler.waiting] == [request] and scheduler.kv.num_free_blocks == 8


def test_a_step_that_cannot_be_decided_admits_nothing(monkeypatch):
    scheduler = Scheduler(BlockManager(8, 4), max_num_batched_tokens=8, max_num_seqs=2)
    requests = [make_request(name, 4) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    raising(monkeypatch, scheduler, "clamp", after=True)
    with pytest.raises(OSError):
        scheduler.schedule()
    assert scheduler.running == [] and [*scheduler.waiting] == requests
    assert scheduler.kv.num_free_blocks == 8 and scheduler.schedule() == {"a": 4, "b": 4}


def test_what_could_not_be_freed_is_freed_before_the_next_step(monkeypatch):
    scheduler, request, scheduled = prefilled(max_tokens=1)
    raising(monkeypatch, scheduler.kv, "free", times=2)
    with pytest.raises(OSError):
        scheduler.update(scheduled, {"a": [1]})
    assert request.finish_reason == "length" and scheduler.kv.num_free_blocks == 7
    assert scheduler.schedule() == {} and scheduler.kv.num_free_blocks == 8


def test_a_step_that_is_done_is_not_taken_back():
    scheduler, request, scheduled = prefilled()
    scheduler.update(scheduled, {"a": [1]})
    scheduler.take_back([])
    assert scheduler.running == [request] and not scheduler.waiting


def test_a_step_is_taken_back_once():
    scheduler, request, scheduled = prefilled()
    scheduler.update(scheduled, {"a": [1]})
    assert scheduler.schedule() == {"a": 1}
    for before in ([request], []):
        scheduler.take_back(before)
        assert scheduler.running == [request] and not scheduler.waiting


def test_a_decode_asks_for_a_block_where_one_begins(monkeypatch):
    """A decode within its last block is decided without a call of the block manager."""
    scheduler, _, scheduled = prefilled(max_tokens=20)
    asked, allocate = [], scheduler.kv.allocate
    monkeypatch.setattr(
        scheduler.kv, "allocate", lambda *args: asked.append(args[0].num_tokens) or allocate(*args)
    )
    for _ in range(9):
        scheduler.update(scheduled, {"a": [1]})
        scheduled = scheduler.schedule()
    assert asked == [5, 9, 13]


# ----------------------------------------------------------------------------------- at scale


def test_removal_anywhere_keeps_the_order():
    """Pushes, pops and removals at random: the queue is that of a sorted list, at every moment."""
    rng = random.Random(0)
    for policy in ("fcfs", "priority"):
        queue, model, number = RequestQueue(policy), [], 0
        for _ in range(600):
            if not model or rng.random() < 0.5:
                request = make_request(str(number), 1, priority=rng.randrange(3))
                request.arrival, number = number, number + 1
                queue.push(request)
                model.append(request)
            else:
                model.sort(key=lambda request: policy_key(request, policy))
                goes = model.pop(rng.choice([0, 0, rng.randrange(len(model))]))
                first = min([goes, *model], key=lambda r: policy_key(r, policy))
                if goes is not first or rng.random() < 0.3:
                    queue.remove(goes)
                    if rng.random() < 0.3:  # it comes back with its old key
                        queue.push(goes)
                        model.append(goes)
                else:
                    assert queue.pop() is goes
            model.sort(key=lambda request: policy_key(request, policy))
            assert len(queue) == len(model) and bool(queue) == bool(model)
            assert not model or queue.peek() is model[0]
        assert list(queue) == model
        with pytest.raises(ValueError, match="'gone' is not in the queue"):
            queue.remove(make_request("gone", 1))


def test_settings_that_cannot_work_are_refused():
    """Also without an engine, whose EngineConfig judges them too."""
    with pytest.raises(ValueError, match="policy must be one of fcfs, priority, but is 'lifo'"):
        RequestQueue("lifo")
    with pytest.raises(ValueError, match="max_num_seqs must be .*, but is 0"):
        Scheduler(BlockManager(8, 4), max_num_batched_tokens=8, max_num_seqs=0)


def test_removed_requests_are_dropped_when_they_are_more_than_half_of_the_heap():
    queue, requests = RequestQueue(), stamped(*[0] * 6)
    for request in requests:
        queue.push(request)
    sizes = []
    for request in reversed(requests):
        queue.remove(request)
        sizes.append(len(queue._heap))
    assert sizes == [6, 6, 6, 2, 2, 0]


def test_add_and_abort_cost_little_however_many_wait():
    """A request is added, and aborted, among 8,000 that wait in hardly more time than among 500."""

    def seconds(num_waiting: int) -> float:
        """The least of three times for 300 requests that come and go, aborted in random order, beside."""
        scheduler, times = Scheduler(BlockManager(8, 4), max_num_batched_tokens=8, max_num_seqs=2), []
        for i in range(num_waiting):
            scheduler.add(make_request(str(i), [0]))
        for _ in range(3):
            requests = [make_request(f"more {i}", [0]) for i in range(300)]
            start = process_time()
            for request in requests:
                scheduler.add(request)
            for i in random.Random(1).sample(range(300), 300):
                assert scheduler.abort(f"more {i}")
            times.append(process_time() - start)
        return min(times)

    assert seconds(8000) < 4 * seconds(500)


def crowded(num_waiting: int) -> Scheduler:
    """64 requests that decode, and so many that wait for a place."""
    scheduler = Scheduler(BlockManager(4000, 16), max_num_batched_tokens=2048, max_num_seqs=64)
    for i in range(64 + num_waiting):
        scheduler.add(make_request(str(i), [i], 400))
    scheduler.update(scheduler.schedule(), {str(i): [0] for i in range(64)})
    assert (len(scheduler.running), len(scheduler.waiting)) == (64, num_waiting)
    return scheduler


def test_a_step_costs_the_same_however_many_wait():
    """With a queue of 10,000 instead of some hundred it costs a fifth more at most."""

    def seconds(scheduler: Scheduler) -> float:
        """For twenty steps, in each of which a request finishes and another comes in."""
        start = process_time()
        for _ in range(20):
            scheduled = scheduler.schedule()
            sampled = {request_id: [0] for request_id in scheduled}
            scheduler.update(scheduled, sampled, {scheduler.running[0].request_id})
        return process_time() - start

    few, many = crowded(400), crowded(10_000)
    gc.collect()  # what was made above is not for the steps to pay
    ratios = [seconds(many) / seconds(few) for _ in range(11)]
    assert statistics.median(ratios) < 1.2


def test_a_waiting_request_takes_a_kibibyte_beyond_its_tokens():
    scheduler = Scheduler(BlockManager(8, 4), max_num_batched_tokens=8, max_num_seqs=2)
    tokens = [0] * 30
    tracemalloc.start()
    try:
        for i in range(500):
            scheduler.add(make_request(f"request-{i}", tokens, 2))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / 500 - 8 * len(tokens) < 1024


def test_schedule_step_by_itself():
    """Without a threshold a prompt comes whole; and more decodes than the budget pays for wait for a step."""
    kv, queue, running = BlockManager(8, 4), RequestQueue(), []
    for name in "ab":
        queue.push(make_request(name, 5))
    assert schedule_step(queue, running, kv, max_num_batched_tokens=64, max_num_seqs=2) == {"a": 5, "b": 5}
    for request in running:
        request.num_computed_tokens = 5
        request.output_token_ids.append(1)
    assert schedule_step(queue, running, kv, max_num_batched_tokens=1, max_num_seqs=2) == {"a": 1}


def running(kv, *requests):
    """Requests of (id, tokens, computed tokens) that have been admitted."""
    admitted = []
    for name, tokens, computed in requests:
        request = make_request(name, tokens)
        assert kv.admit(request)
        request.num_computed_tokens = computed
        admitted.append(request)
    return admitted


def test_a_clamp_may_leave_one_out():
    """A clamp of one's own that gives a request nothing says nothing of those behind it."""
    kv = BlockManager(8, 4)
    both = running(kv, ("a", 5, 0), ("b", 3, 0))
    scheduled = schedule_step(
        RequestQueue(),
        both,
        kv,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        clamp=lambda num_new, budget, threshold: 0 if num_new == 5 else num_new,
    )
    assert scheduled == {"b": 3}


def test_several_new_tokens_get_room_for_all():
    """After a step that gave two tokens the block has room for one of them."""
    kv = BlockManager(4, 4)
    (request,) = running(kv, ("a", 3, 3))
    request.output_token_ids = [1, 2]
    step = schedule_step(RequestQueue(), [request], kv, max_num_batched_tokens=8, max_num_seqs=2)
    assert step == {"a": 2} and len(kv.block_table(request)) == 2
