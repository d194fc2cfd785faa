"""Tests of a scheduler that preempts: the queue, the single steps, then whole runs."""

from functools import partial

import pytest

from labs.kit import (
    FakeKV,
    assert_drained,
    assert_texts_alone,
    judge_random_scripts,
    load,
    make_request,
    one_step,
    tokens_of,
)
from mini_engine.block_manager import BlockManager
from mini_engine.request import RequestStatus
from mini_engine.trace import describe

scenarios = load("lab-03", "scenarios")
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios.SCENARIOS}
SETTINGS = ("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")


def waiter(name, arrival, priority=0, prompt=4):
    """A request with its number, for a queue of its own."""
    request = make_request(name, prompt, priority=priority)
    request.arrival = arrival
    return request


def runner(scheduler, name, prompt, *, priority=0, outputs=1, computed=None):
    """A request that came in by add and runs already, moved to running as schedule_step would do it.

    `computed` says how far it is with what it claimed; by default it is a decode that needs a slot more.
    """
    kv = scheduler.kv
    request = make_request(name, prompt, priority=priority)
    request.max_tokens = kv.num_blocks * kv.block_size + 1 - request.num_prompt_tokens
    scheduler.add(request)
    scheduler.waiting.remove(request)
    said = list(range(outputs))
    request.output_token_ids = said[:-1] if computed is None else said
    assert kv.admit(request), f"the pool is too small for {name}"
    request.num_computed_tokens = request.num_tokens if computed is None else computed
    request.output_token_ids = said
    request.status = RequestStatus.RUNNING
    kv.cache_blocks(request)
    scheduler.running.append(request)
    return request


class Now:
    """`waiting` or `running` as it is now: a scheduler may put a new one in place of the old."""

    def __init__(self, scheduler, name):
        self.now = lambda: getattr(scheduler, name)

    def __len__(self):
        return len(self.now())

    def __iter__(self):
        return iter(self.now())

    def peek(self):
        return self.now().peek()


def decide(scheduler):
    """One call of schedule(), recorded."""
    settings = {name: value for name, value in describe(scheduler).items() if name in SETTINGS}
    waiting, running = Now(scheduler, "waiting"), Now(scheduler, "running")
    return one_step(lambda *_, **__: scheduler.schedule(), waiting, running, scheduler.kv, **settings)


def names(requests):
    return [request.request_id for request in requests]


def events(trace, kind):
    """(step, id) of every event of this kind, in order."""
    return [(r.step, event.id) for r in trace.steps for event in r.events if event.type == kind]


# ---------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("policy, order", [("fcfs", "abcdef"), ("priority", "ebdacf")])
def test_key_is_the_order_of_the_policy(lab, policy, order):
    """Sorted by key, fcfs goes by arrival alone, priority by priority first: -1, 0, 3, 20, 2**31."""
    requests = [waiter("a", 0, 20), waiter("b", 1, 0), waiter("c", 2, 20), waiter("d", 10**9, 3)]
    requests += [waiter("e", 10**9 + 1, -1), waiter("f", 10**9 + 2, 2**31)]
    assert names(sorted(requests, key=lambda r: lab.policy_key(r, policy))) == list(order)


@pytest.mark.parametrize("policy, order", [("fcfs", "abcd"), ("priority", "bdac")])
def test_queue_pops_in_policy_order(lab, policy, order):
    """Pushed in any order, requests come out in policy order, whatever the policy of another queue."""
    queue, _ = lab.RequestQueue(policy), lab.RequestQueue({"fcfs": "priority"}.get(policy, "fcfs"))
    for request in (waiter("c", 2, 2), waiter("d", 3, 1), waiter("a", 0, 2), waiter("b", 1, 0)):
        queue.push(request)
    assert [queue.pop().request_id for _ in range(4)] == list(order)
    assert not queue


# ----------------------------------------------------------------------------------------------- add


def test_arrivals_are_numbered(lab):
    """add numbers requests in the order in which they come; one that leaves gives no number back."""
    scheduler = scenarios.make(lab, FakeKV(64), policy="priority")
    requests = [make_request(name, 4, priority=p) for name, p in (("a", 2), ("b", 0), ("c", 1))]
    for request in requests:
        scheduler.add(request)
    a, b, c = (request.arrival for request in requests)
    assert a < b < c
    assert names(scheduler.waiting) == ["b", "c", "a"]
    scheduler.waiting.pop(), scheduler.waiting.pop()
    scheduler.add(late := make_request("late", 4))
    assert late.arrival > c


def test_what_could_never_finish_is_refused(lab):
    """A prompt of 12 with 12 tokens to come needs 23 slots: with a pool of 22, add refuses it by name."""
    scheduler = scenarios.make(lab, FakeKV(22))
    with pytest.raises(ValueError, match="greedy"):
        scheduler.add(make_request("greedy", 12, max_tokens=12))
    assert not scheduler.has_work


def test_what_just_fits_is_taken(lab):
    """12 and 11 need 22 slots, since the last token needs none: a pool of 22 is enough."""
    scheduler = scenarios.make(lab, FakeKV(22))
    scheduler.add(make_request("modest", 12, max_tokens=11))
    assert names(scheduler.waiting) == ["modest"]


def test_the_pool_is_counted_in_tokens(lab):
    """Six blocks of 4 hold 24 tokens: 12 and 13 just fit, 12 and 14 do not."""
    scheduler = scenarios.make(lab, BlockManager(6, 4))
    scheduler.add(make_request("modest", 12, max_tokens=13))
    with pytest.raises(ValueError, match="greedy"):
        scheduler.add(make_request("greedy", 12, max_tokens=14))


def test_no_limit_means_the_pools_limit(lab):
    """max_tokens None becomes what the whole pool has room for, also if some of it is held now: 11 in 22."""
    scheduler = scenarios.make(lab, FakeKV(22))
    runner(scheduler, "other", 4)
    scheduler.add(request := make_request("endless", 12, max_tokens=None))
    assert request.max_tokens == 11


@pytest.mark.parametrize("max_tokens", [None, 0, 1])
def test_a_prompt_beyond_the_pool_is_refused(lab, max_tokens):
    """A prompt of 23 in a pool of 22 is refused with any max_tokens, None and 0 too; one of 22 is taken."""
    scheduler = scenarios.make(lab, FakeKV(22))
    novel, story = make_request("novel", 23, None), make_request("story", 22, None)
    novel.max_tokens = story.max_tokens = max_tokens
    with pytest.raises(ValueError, match="novel"):
        scheduler.add(novel)
    assert not scheduler.has_work
    scheduler.add(story)
    assert story.max_tokens == (1 if max_tokens is None else max_tokens)


@pytest.mark.parametrize("why", ["too long", "too long without a limit", "its id is in use"])
def test_a_refused_request_leaves_no_trace(lab, why):
    """After a refusal the request is as it was, and the next one gets the number and may have the id."""
    scheduler = scenarios.make(lab, FakeKV(22))
    scheduler.add(first := make_request("first", 4))
    name = "first" if why == "its id is in use" else "refused"
    limit = 64 if why == "too long" else None
    request = make_request(name, 23 if why == "too long without a limit" else 4, limit)
    before = dict(vars(request))
    with pytest.raises(ValueError, match=name):
        scheduler.add(request)
    changed = {key: value for key, value in vars(request).items() if value != before[key]}
    assert changed == {}, "add changed a request that it refused"
    assert names(scheduler.waiting) == ["first"]
    scheduler.add(late := make_request("refused", 4))
    assert late.arrival == first.arrival + 1, "the refused request has used up a number"


def test_a_limit_that_is_set_stays(lab):
    """request.max_tokens counts, not sampling.max_tokens: the engine has put the model's limit there."""
    scheduler = scenarios.make(lab, FakeKV(22))
    request = make_request("limited", 12, max_tokens=None)
    request.max_tokens = 5
    scheduler.add(request)
    assert request.max_tokens == 5


def test_one_id_one_request(lab):
    """An id that waits or runs already is refused by name: two of one name could not be told apart."""
    scheduler = scenarios.make(lab, FakeKV(64))
    runner(scheduler, "runs", 4)
    scheduler.add(make_request("waits", 4))
    scheduler.add(make_request("behind", 4))
    for name in ("runs", "waits", "behind"):
        with pytest.raises(ValueError, match=name):
            scheduler.add(make_request(name, 4))
    assert names(scheduler.waiting) == ["waits", "behind"]


def test_an_id_is_free_again(lab):
    """A request that has finished or was aborted no longer needs its id: another may come under it."""
    scheduler = scenarios.make(lab, FakeKV(22))
    runner(scheduler, "done", 4).max_tokens = 2
    scheduler.update({"done": 1}, {"done": [42]})
    scheduler.add(make_request("left", 4))
    scheduler.add(make_request("other", 4))
    scheduler.abort("left")
    for name in ("done", "left"):
        scheduler.add(make_request(name, 3))
    assert decide(scheduler) == {"other": 4, "done": 3, "left": 3}


# ---------------------------------------------------------------------------------------- the victim


def test_victim_is_the_newest(lab):
    """Under fcfs the latest arrival goes, whatever the priorities say: it has the least to lose."""
    running = [waiter("a", 0, 2), waiter("b", 1, 0), waiter("c", 2, 1)]
    assert lab.pick_victim(running, "fcfs").request_id == "c"


def test_victim_is_the_least_important(lab):
    """Under priority the largest number goes, wherever it stands in running."""
    for order in ("abc", "bca", "cab"):
        by_name = {"a": waiter("a", 0, 1), "b": waiter("b", 1, 2), "c": waiter("c", 2, 0)}
        assert lab.pick_victim([by_name[name] for name in order], "priority").request_id == "b"


def test_victim_among_equals_is_the_latest(lab):
    """Among the least important the latest arrival goes; length, work done, past victims do not matter."""
    running = []
    rows = (("a", 3, 1, 9), ("long", 5, 2, 9), ("latest", 7, 2, 5), ("short", 4, 2, 1), ("vip", 8, 0, 5))
    for name, arrival, priority, size in rows:
        request = waiter(name, arrival, priority, prompt=size)
        request.output_token_ids = list(range(size))
        request.num_computed_tokens, request.num_preemptions = 2 * size - 1, size
        running.append(request)
    assert lab.pick_victim(running, "priority").request_id == "latest"


# ------------------------------------------------------------------------------------------- preempt


@pytest.mark.parametrize(
    "prompt, outputs, computed",
    [(9, 3, None), (9, 0, 5), (16, 0, 8), (17, 0, 16)],
    ids=["decoding", "in mid-prompt", "with a prompt of a budget", "with a budget computed"],
)
def test_preempted_gives_back_room_and_progress(lab, prompt, outputs, computed):
    """The victim leaves running, its slots are free, nothing of it counts as computed; it is WAITING."""
    scheduler = scenarios.make(lab, FakeKV(22, cached={"goes": 4}))
    runner(scheduler, "stays", 5)
    goes = runner(scheduler, "goes", prompt, outputs=outputs, computed=computed)
    goes.num_preemptions = 1  # it has been through this before
    scheduler.running.reverse()  # and it is not the last row
    scheduler.preempt(goes)
    assert (names(scheduler.running), names(scheduler.waiting)) == (["stays"], ["goes"])
    assert scheduler.kv.num_free_blocks == 22 - 5
    assert (goes.num_computed_tokens, goes.num_preemptions) == (0, 2)
    assert goes.status is RequestStatus.WAITING


def test_preempted_keeps_outputs_and_arrival(lab):
    """Prompt, outputs, limit and arrival stay as they were: a reader has seen what it said."""
    scheduler = scenarios.make(lab, FakeKV(22))
    runner(scheduler, "stays", 5)
    request = runner(scheduler, "goes", 9, outputs=3)
    prompt, outputs = list(request.prompt_token_ids), list(request.output_token_ids)
    arrival, limit = request.arrival, request.max_tokens
    scheduler.preempt(request)
    assert (request.prompt_token_ids, request.output_token_ids) == (prompt, outputs)
    assert (request.arrival, request.max_tokens, request.num_new_tokens) == (arrival, limit, 12)


@pytest.mark.parametrize(
    "policy, order", [("fcfs", "older goes later vip"), ("priority", "vip older goes later")]
)
def test_preempted_waits_where_its_arrival_puts_it(lab, policy, order):
    """Neither front nor back: it waits behind those that the policy puts first, and before the others."""
    scheduler = scenarios.make(lab, FakeKV(22), policy=policy)
    scheduler.add(make_request("older", 4, priority=1))
    goes = runner(scheduler, "goes", 4, priority=1)
    scheduler.add(make_request("later", 4, priority=1))
    scheduler.add(make_request("vip", 4, priority=0))
    scheduler.preempt(goes)
    queue = scheduler.waiting
    assert (names(queue), queue.peek().request_id) == (order.split(), order.split()[0])
    assert [queue.pop().request_id for _ in range(4)] == order.split(), "popped in another order than shown"


# ----------------------------------------------------------------------------- make room, then schedule


@pytest.mark.parametrize("slots, goes", [(10, []), (9, ["b"])])
def test_make_room_says_whether_one_had_to_go(lab, slots, goes):
    """With room for two decodes make_room says no, with room for one it says yes: schedule goes by that."""
    said = []

    class Watched(lab.Scheduler):
        def make_room(self, *args, **kwargs):  # yours may hand itself something when it calls itself
            said.append(super().make_room(*args, **kwargs))
            return said[-1]

    scheduler = Watched(FakeKV(slots), max_num_batched_tokens=16, max_num_seqs=4)
    runner(scheduler, "a", 4), runner(scheduler, "b", 4)
    scheduler.schedule()
    assert names(scheduler.waiting) == goes
    for answer in said[-1:]:  # none, if schedule preempts on its way; several, if make_room calls itself
        assert bool(answer) is bool(goes), f"make_room returned {answer!r}"


@pytest.mark.parametrize("slots, goes, decided", [(10, [], {"a": 1, "b": 1}), (9, ["b"], {"a": 1})])
def test_room_is_counted_for_all_together(lab, slots, goes, decided):
    """Two decodes need two slots: with both free they compute; with one free there is no room, so b goes."""
    scheduler = scenarios.make(lab, FakeKV(slots))
    runner(scheduler, "a", 4), runner(scheduler, "b", 4)
    assert decide(scheduler) == decided
    assert (names(scheduler.waiting), scheduler.kv.num_free_blocks) == (goes, 4 if goes else 0)


def test_only_as_many_go_as_must(lab):
    """Four decodes, no free slot: the newest, a victim before, gives back 4, which is room for the others."""
    scheduler = scenarios.make(lab, FakeKV(16))
    for name in "abcd":
        newest = runner(scheduler, name, 4)
    newest.num_preemptions = 2
    assert decide(scheduler) == {"a": 1, "b": 1, "c": 1}
    assert names(scheduler.waiting) == ["d"]


def test_one_may_not_be_enough(lab):
    """Four decodes with one slot each, no free slot: one victim makes room for one only, so two go."""
    scheduler = scenarios.make(lab, FakeKV(4))
    for name in "abcd":
        runner(scheduler, name, 1)
    assert decide(scheduler) == {"a": 1, "b": 1}
    assert names(scheduler.waiting) == ["c", "d"]


def test_a_prefill_needs_no_more_room(lab):
    """A prompt's slots were claimed at admission: it goes on in a full pool, and none has to go."""
    scheduler = scenarios.make(lab, FakeKV(13))
    runner(scheduler, "long", 8, outputs=0, computed=3)
    runner(scheduler, "decode", 4)
    assert decide(scheduler) == {"long": 5, "decode": 1}
    assert (len(scheduler.waiting), scheduler.kv.num_free_blocks) == (0, 0)


def test_not_the_short_one_but_the_last(lab):
    """a finds no room, those behind it need none: still d, the last in order, goes, and no other."""
    scheduler = scenarios.make(lab, FakeKV(28))
    runner(scheduler, "a", 4)
    for name in "bcd":
        runner(scheduler, name, 8, outputs=0, computed=2)
    assert decide(scheduler) == {"a": 1, "b": 6, "c": 6}
    assert names(scheduler.waiting) == ["d"]


def test_a_block_with_room_is_room(lab):
    """Blocks of 4, none of them free: two decodes in the middle of a block need no other, so neither goes."""
    scheduler = scenarios.make(lab, BlockManager(4, 4))
    runner(scheduler, "a", 5), runner(scheduler, "b", 6)
    assert decide(scheduler) == {"a": 1, "b": 1}


def test_shared_blocks_are_no_room(lab):
    """c shares one of its two blocks with b (lab-06): its going frees one, a and b need two, so b goes."""
    scheduler = scenarios.make(lab, BlockManager(5, 4))
    runner(scheduler, "a", 8)
    for name in "bc":
        runner(scheduler, name, [7] * 8)
    assert decide(scheduler) == {"a": 1}
    assert names(scheduler.waiting) == ["b", "c"]


def test_victim_computes_nothing(lab):
    """The least important stands first in running: it is preempted before it computes, and is in no row."""
    scheduler = scenarios.make(lab, FakeKV(9), policy="priority")
    runner(scheduler, "batch", 4, priority=2)
    runner(scheduler, "chat", 5, priority=0)
    assert decide(scheduler) == {"chat": 1}
    assert (names(scheduler.running), names(scheduler.waiting)) == (["chat"], ["batch"])


def test_victim_leaves_its_budget_to_the_others(lab):
    """The victim's chunk of 4 does not count in a budget of 8: the last prompt gets 4 tokens, not 3."""
    scheduler = scenarios.make(
        lab, FakeKV(36), policy="priority", max_num_batched_tokens=8, long_prefill_token_threshold=4
    )
    runner(scheduler, "victim", 12, priority=2, outputs=0, computed=4)
    runner(scheduler, "decode", 4, priority=0)
    runner(scheduler, "prompt", 20, priority=0, outputs=0, computed=3)
    assert decide(scheduler) == {"decode": 1, "prompt": 4}


def test_rows_stay_in_admission_order(lab):
    """d was admitted first, and stays first: rows are sorted neither by importance nor by arrival."""
    scheduler = scenarios.make(lab, FakeKV(16), policy="priority")
    for name, priority in {"a": 1, "b": 2, "c": 0, "d": 1}.items():
        runner(scheduler, name, 4, priority=priority)
    scheduler.running.insert(0, scheduler.running.pop())
    assert list(decide(scheduler).items()) == [("d", 1), ("a", 1), ("c", 1)]


@pytest.mark.parametrize("victims", ["b", "bc"])
def test_none_comes_in_while_room_is_made(lab, victims):
    """The step that preempts, one or two, admits none, however small and important; the next one does."""
    scheduler = scenarios.make(lab, FakeKV(16 + len(victims)), policy="priority")
    a = runner(scheduler, "a", 8, priority=1)
    for name, prompt in zip(victims, (9, 1), strict=False):
        runner(scheduler, name, prompt, priority=1)
    scheduler.add(make_request("small", 2, priority=0))
    assert decide(scheduler) == {"a": 1}
    assert (names(scheduler.running), names(scheduler.waiting)) == (["a"], ["small", *victims])
    a.num_computed_tokens, a.output_token_ids = 9, [0, 42]
    assert decide(scheduler) == {"a": 1, "small": 2}


def test_none_goes_for_a_newcomer(lab):
    """An important prompt of 10 finds 8 slots: it waits; the decodes have room, so none of them goes."""
    scheduler = scenarios.make(lab, FakeKV(16), policy="priority")
    runner(scheduler, "a", 4, priority=2), runner(scheduler, "b", 4, priority=2)
    scheduler.add(make_request("vip", 10, priority=0))
    assert decide(scheduler) == {"a": 1, "b": 1}
    assert names(scheduler.waiting) == ["vip"]


@pytest.mark.parametrize("slots, decided", [(12, {"a": 1}), (13, {"a": 1, "b": 4})])
def test_a_newcomer_takes_no_next_slot(lab, slots, decided):
    """The decode takes one of 4 slots: a prompt of 4 waits; it would only be preempted. With 5 it fits."""
    scheduler = scenarios.make(lab, FakeKV(slots))
    runner(scheduler, "a", 8)
    scheduler.add(newcomer := make_request("b", 4))
    assert decide(scheduler) == decided
    assert newcomer.num_preemptions == 0


def test_the_parts_it_is_given(lab):
    """The scheduler decides with the schedule_step and the clamp that it was given, in every step."""

    def one_newcomer(waiting, running, kv, *, max_num_seqs, **settings):
        from mini_engine.scheduler import schedule_step

        return schedule_step(
            waiting, running, kv, max_num_seqs=min(max_num_seqs, len(running) + 1), **settings
        )

    def three_at_most(num_new, budget, threshold):
        return min(num_new, budget, 3)

    scheduler = scenarios.make(lab, FakeKV(64), schedule_step=one_newcomer, clamp=three_at_most)
    for request in (requests := [make_request(name, 9) for name in "ab"]):
        scheduler.add(request)
    assert decide(scheduler) == {"a": 3}
    requests[0].num_computed_tokens = 3
    assert decide(scheduler) == {"a": 3, "b": 3}
    runner(scheduler, "victim", 64 - 18)
    assert decide(scheduler) == {"a": 3, "b": 3}


def test_no_limit_of_its_own(lab):
    """With 300 slots and a budget above 2**20 tokens the scheduler uses what its settings allow."""
    kv, tokens = BlockManager(301, 2**22, watermark=0), 2**20 + 9
    scheduler = scenarios.make(lab, kv, max_num_batched_tokens=tokens + 320, max_num_seqs=300)
    requests = [make_request(f"r{i}", 1, None) for i in range(301)]
    requests[0].prompt_token_ids = range(tokens)
    for request in requests:
        scheduler.add(request)
    assert {request.max_tokens for request in requests[1:]} == {301 * 2**22}
    assert scheduler.schedule() == {"r0": tokens} | {f"r{i}": 1 for i in range(1, 300)}


# -------------------------------------------------------------------------------------------- update


def test_a_chunk_advances_without_a_token(lab):
    """A chunk of 5 out of 12 advances the count by 5 and yields no token; each row is served for itself."""
    scheduler = scenarios.make(lab, FakeKV(36))
    rows = [runner(scheduler, name, 12, outputs=0, computed=2) for name in ("idle", "half", "ends")]
    assert scheduler.update({"half": 5, "ends": 10}, {"ends": [42]}) == []
    assert [request.num_computed_tokens for request in rows] == [2, 7, 12]
    assert [request.output_token_ids for request in rows] == [[], [], [42]]
    assert names(scheduler.running) == ["idle", "half", "ends"]


@pytest.mark.parametrize("token", [42, 0, 2**31])
def test_a_token_is_appended(lab, token):
    """The chunk that ends the prompt gives the first token, known, not computed; 0 and 2**31 are tokens."""
    scheduler = scenarios.make(lab, FakeKV(32))
    request = runner(scheduler, "r0", 12, outputs=0, computed=7)
    scheduler.update({"r0": 5}, {"r0": [token]})
    assert request.output_token_ids == [token]
    assert (request.num_tokens, request.num_computed_tokens, request.is_decode) == (13, 12, True)


@pytest.mark.parametrize("outputs", [0, 4], ids=["in the prompt", "in recomputed outputs"])
def test_a_token_from_a_partial_chunk_is_refused(lab, outputs):
    """A token sampled before the sequence's end says nothing about its end: an error names the request."""
    scheduler = scenarios.make(lab, FakeKV(32))
    request = runner(scheduler, "hasty", 12 - outputs, outputs=outputs, computed=4)
    with pytest.raises(ValueError, match="hasty"):
        scheduler.update({"hasty": 7}, {"hasty": [42]})
    assert len(request.output_token_ids) == outputs


def test_a_request_that_left_is_passed_over(lab):
    """It was aborted after schedule: no error, and no token for it or for the next request of its id."""
    scheduler = scenarios.make(lab, FakeKV(32))
    gone, stays = make_request("gone", 4), make_request("stays", 6)
    scheduler.add(gone), scheduler.add(stays)
    scheduled = scheduler.schedule()
    assert scheduler.abort("gone") is True
    scheduler.add(again := make_request("gone", 4))
    assert scheduler.update(scheduled, {"gone": [42], "stays": [42]}) == []
    assert (gone.output_token_ids, again.output_token_ids, stays.output_token_ids) == ([], [], [42])
    assert (again.num_computed_tokens, scheduled) == (0, {"gone": 4, "stays": 6})
    assert (names(scheduler.running), scheduler.kv.num_free_blocks) == (["stays"], 32 - 6)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_last_token_ends_it(lab, max_tokens):
    """With its last token, and no earlier, it is returned, FINISHED with a reason, and holds nothing."""
    scheduler = scenarios.make(lab, FakeKV(32))
    request = runner(scheduler, "r0", 6, outputs=0, computed=2)
    request.max_tokens = max_tokens
    if max_tokens == 2:
        assert scheduler.update({"r0": 4}, {"r0": [42]}) == []
        assert (request.finish_reason, request.status) == (None, RequestStatus.RUNNING)
    last = {"r0": request.num_new_tokens}
    assert scheduler.update(last, {"r0": [42]}) == [request]
    assert (request.finish_reason, request.status) == ("length", RequestStatus.FINISHED)
    assert (scheduler.running, scheduler.kv.num_free_blocks) == ([], 32)


def test_published_when_it_is_computed(lab):
    """kv.cache_blocks is called once a row, after the count, and before finished requests are freed."""
    seen = []

    class Watching(FakeKV):
        def cache_blocks(self, request):
            seen.append((request.request_id, request.num_computed_tokens, len(self.block_table(request))))

    scheduler = scenarios.make(lab, Watching(32))
    runner(scheduler, "idle", 3, outputs=0, computed=1)
    runner(scheduler, "half", 12, outputs=0, computed=2)
    runner(scheduler, "done", 6).max_tokens = 2
    seen.clear()
    scheduler.update({"half": 5, "done": 1}, {"done": [42]})
    assert sorted(seen) == [("done", 7, 6), ("half", 7, 12)]


def test_all_that_finish_leave_at_once(lab):
    """Three neighbours finish in one step, in row order, whatever that of `sampled` is; e and a run on."""
    scheduler = scenarios.make(lab, FakeKV(32), max_num_seqs=5)
    requests = [runner(scheduler, name, 4) for name in "abcde"]
    scheduler.running.reverse()  # as priorities may have it: the latest was admitted first
    for request in requests[1:4]:
        request.max_tokens = 2
    done = scheduler.update(dict.fromkeys("edcba", 1), {name: [42] for name in "cabed"})
    assert (names(done), names(scheduler.running)) == (["d", "c", "b"], ["e", "a"])
    assert {r.status for r in done} == {RequestStatus.FINISHED}
    assert [r.finish_reason for r in requests] == [None, "length", "length", "length", None]
    assert scheduler.kv.num_free_blocks == 32 - 2 * 4


def test_one_token_means_one(lab):
    """max_tokens=1 gives one token, out of the very step that ends the prompt: there is no decode."""
    config = SCENARIOS["two in a tight pool"]["config"] | {"num_blocks": 6}
    request = {"id": "r0", "prompt": 6, "max_tokens": 1, "at": 0}
    trace = scenarios.run(lab, {"name": "alone", "config": config, "requests": [request]})
    assert_drained(trace)
    assert (len(trace.steps), len(tokens_of(trace, "r0"))) == (1, 1)


def test_a_step_may_yield_several_tokens(lab):
    """A list of three is appended whole, in its order: three are known, and none of them is computed yet."""
    scheduler = scenarios.make(lab, FakeKV(32))
    request = runner(scheduler, "r0", 12, outputs=0, computed=7)
    sampled = {"r0": [9, 0, 4]}
    assert scheduler.update({"r0": 5}, sampled) == []
    assert (request.output_token_ids, sampled) == ([9, 0, 4], {"r0": [9, 0, 4]})
    assert (request.num_computed_tokens, request.num_new_tokens) == (12, 3)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"stop_token_ids": (7,)}, "stop"), ({"eos_token_ids": (7,)}, "stop"), ({"max_tokens": 2}, "length")],
)
def test_what_follows_a_stop_is_dropped(lab, limit, reason):
    """5, 7, 9 in one step, and 7 ends it: 9 is dropped, and the reason is that of 7."""
    scheduler = scenarios.make(lab, FakeKV(32))
    scheduler.add(request := make_request("r0", 6, **{"max_tokens": 8} | limit))
    assert names(scheduler.update(scheduler.schedule(), {"r0": [5, 7, 9]})) == ["r0"]
    assert (request.output_token_ids, request.finish_reason) == ([5, 7], reason)


@pytest.mark.parametrize("max_tokens", [8, 1])
def test_a_stop_string_ends_it(lab, max_tokens):
    """Its id is in stopped: it ends with "stop", at its last token too; the one beside it goes on."""
    scheduler = scenarios.make(lab, FakeKV(32))
    requests = [make_request("other", 4), make_request("r0", 6, max_tokens=max_tokens)]
    for request in requests:
        scheduler.add(request)
    stopped = {"r0": "END"}
    assert scheduler.update(scheduler.schedule(), {"other": [5], "r0": [5]}, stopped) == [requests[1]]
    assert [request.finish_reason for request in requests] == [None, "stop"]
    assert (requests[1].output_token_ids, stopped) == ([5], {"r0": "END"})
    assert (names(scheduler.running), scheduler.kv.num_free_blocks) == (["other"], 32 - 4)


def test_a_stop_string_ends_several_tokens(lab):
    """Three tokens of one step, in whose text a stop string ends: all three are kept; 7 ends it before."""
    scheduler = scenarios.make(lab, FakeKV(32))
    requests = [make_request("r0", 6, max_tokens=8), make_request("r1", 6, max_tokens=8, stop_token_ids=(7,))]
    for request in requests:
        scheduler.add(request)
    sampled = {"r0": [5, 7, 9], "r1": [5, 7, 9]}
    assert scheduler.update(scheduler.schedule(), sampled, {"r0", "r1"}) == requests
    assert [request.output_token_ids for request in requests] == [[5, 7, 9], [5, 7]]
    assert [request.finish_reason for request in requests] == ["stop", "stop"]


def test_a_stop_string_ends_one_request(lab):
    """An id in stopped counts for this step only: the next request of the same id is not stopped by it."""
    scheduler = scenarios.make(lab, FakeKV(32))
    scheduler.add(make_request("r0", 6, max_tokens=8))
    scheduler.update(scheduler.schedule(), {"r0": [5]}, ["r0"])
    scheduler.add(again := make_request("r0", 6, max_tokens=8))
    assert scheduler.update(scheduler.schedule(), {"r0": [5]}) == []
    assert again.finish_reason is None


def test_what_was_handed_out_stays(lab):
    """Schedules, sampled tokens and lists of the finished are the caller's: no later call changes them."""
    scheduler = scenarios.make(lab, FakeKV(32))
    for name, limit in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add(make_request(name, 4, max_tokens=limit))
    held = []
    for names_left in ("abc", "bc", "c"):
        scheduled, sampled = scheduler.schedule(), {name: [42] for name in names_left}
        held.append((scheduled, sampled, scheduler.update(scheduled, sampled)))
    assert [dict(scheduled) for scheduled, _, _ in held] == [
        {"a": 4, "b": 4, "c": 4},
        {"b": 1, "c": 1},
        {"c": 1},
    ]
    assert [sampled for _, sampled, _ in held] == [{n: [42] for n in left} for left in ("abc", "bc", "c")]
    assert [names(finished) for _, _, finished in held] == [["a"], ["b"], ["c"]]


# --------------------------------------------------------------------------------------------- abort


def test_abort_of_a_finished_request_says_so(lab):
    """A request that has finished is not aborted any more: False, and its finish_reason stays."""
    scheduler = scenarios.make(lab, FakeKV(32))
    scheduler.add(request := make_request("done", 4, max_tokens=1))
    scheduler.update(scheduler.schedule(), {"done": [42]})
    assert scheduler.abort("done") is False
    assert request.finish_reason == "length"


# --------------------------------------------------------------------------------- whole runs: policies


@pytest.mark.parametrize("policy, first", [("fcfs", "essay"), ("priority", "chat")])
def test_policies_swap_the_admission(lab, policy, first):
    """An essay of 30 tokens (priority 2) and a chat of 6 (priority 0): the policies swap which is first."""
    trace = scenarios.run(lab, SCENARIOS[f"essay and chat, {policy}"])
    assert_drained(trace)
    assert events(trace, "SCHEDULED")[0] == (0, first)
    assert events(trace, "FINISHED")[0][1] == first


def test_a_latecomer_that_matters(lab):
    """It overtakes the queue and gets the next place; those that run lose neither place nor a step."""
    trace = scenarios.run(lab, SCENARIOS["a latecomer that matters"])
    assert_drained(trace)
    assert [name for _, name in events(trace, "SCHEDULED")] == ["a", "b", "vip", "c"]
    assert events(trace, "PREEMPTED") == []
    for name, count in (("a", 8), ("b", 12)):
        assert [r.step for r in trace.steps if name in r.new_tokens] == list(range(count))


# ------------------------------------------------------------------------------ whole runs: preemption


@pytest.mark.parametrize("name", ["two in a tight pool", "the second a step later"])
def test_tight_memory_preempts_the_less_important(lab, name):
    """10 + 10 tokens in 22 slots: the one of priority 2 goes once, and ends with 10 + 10 - 1 slots."""
    trace = scenarios.run(lab, SCENARIOS[name])
    assert_drained(trace)
    assert [victim for _, victim in events(trace, "PREEMPTED")] == ["r0"]
    assert [len(tokens_of(trace, name)) for name in ("r0", "r1")] == [10, 5]
    assert [name for _, name in events(trace, "FINISHED")] == ["r1", "r0"]
    assert 22 - trace.steps[-1].num_free_blocks == 10 + 10 - 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_text_is_that_of_a_run_alone(lab, name):
    """Preempted or not, each text is that of a run alone: each token once, none taken back."""
    assert_texts_alone(SCENARIOS[name], partial(scenarios.run, lab))


def test_the_newest_recomputes_prompt_and_outputs(lab):
    """Under fcfs r1 goes, though r0 has the larger priority number, and comes back with 11 to compute."""
    trace = scenarios.run(lab, SCENARIOS["two in a tight pool, fcfs"])
    assert_drained(trace)
    assert [victim for _, victim in events(trace, "PREEMPTED")] == ["r1"]
    back = events(trace, "SCHEDULED")[-1][0]
    assert trace.steps[back].scheduled == {"r1": 10 + 1}


def test_arrival_is_never_restamped(lab):
    """A victim that came early is back before one that came later and waited all the while."""
    scenario = SCENARIOS["thrashing"]
    trace = scenarios.run(lab, scenario)
    assert_drained(trace)
    assert [name for _, name in events(trace, "FINISHED")] == ["r0", "r1", "r2", "r3", "r4"]


# ----------------------------------------------------------------------------------- random scripts


def test_random_scripts(lab):
    """Random calls in any order, refusals and aborts among them: all that can be seen is as it should be."""
    judge_random_scripts("lab-03", lab)
