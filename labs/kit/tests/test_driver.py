"""The driver and its toys: how runs end, what is refused, and that the toy model sees its memory."""

import re

import pytest

from labs.kit import (
    FakeKV,
    StepLoop,
    ToyModel,
    assert_close,
    assert_drained,
    drive,
    load,
    log_ops,
    make_request,
)
from labs.kit.judge import compare
from labs.kit.toys.driver import RUNS, ScheduleError, one_step

solution = load("lab-01", "solution")
CONFIG = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "num_blocks": 32}
REQUESTS = [
    {"id": "a", "prompt": 12, "max_tokens": 3},
    {"id": "b", "prompt": 5, "max_tokens": 4, "at": 1},
    {"id": "c", "prompt": 5, "max_tokens": 2, "at": 9},
]


def scenario(**more):
    return {"name": "here", "config": CONFIG, "requests": REQUESTS} | more


def run(step=solution.schedule_step, *, raise_errors=True, **more):
    loop = StepLoop(FakeKV(32), step, max_num_batched_tokens=8, max_num_seqs=2)
    return drive(loop, scenario(**more), raise_errors=raise_errors)


def texts(trace):
    said = {}
    for record in trace.steps:
        for name, tokens in record.new_tokens.items():
            said.setdefault(name, []).extend(tokens)
    return said


def test_a_run_drains_and_gives_back_its_memory():
    trace = run()
    assert_drained(trace)
    assert {name: len(text) for name, text in texts(trace).items()} == {"a": 3, "b": 4, "c": 2}
    queued = {e.id: r.step for r in trace.steps for e in r.events if e.type == "QUEUED"}
    assert queued == {"a": 0, "b": 1, "c": 9}, "late arrivals are waited for"
    assert trace.end.num_free_blocks == 32


def test_neither_a_late_arrival_nor_many_empty_steps_in_all_are_being_stuck():
    late = [{"id": "late", "prompt": 3, "max_tokens": 2, "at": 120}]
    assert run(requests=[*REQUESTS, *late]).end.end == "drained"
    calls = iter(range(1000))

    def step(*args, **kwargs):
        return {} if next(calls) % 40 else solution.schedule_step(*args, **kwargs)

    assert_drained(run(step, max_steps=1000))


def test_abort_ends_a_request_wherever_it_is():
    trace = run(aborts=[{"step": 1, "id": "a"}])
    assert_drained(trace)
    assert "a" not in texts(trace)
    assert trace.end.num_free_blocks == 32


def test_no_progress_ends_as_stuck_and_names_who_is_left():
    trace = run(lambda *args, **kwargs: {})
    assert (trace.end.end, len(trace.steps)) == ("stuck", 50)
    with pytest.raises(AssertionError, match=r"no progress for 50 steps; waiting was \['a', 'b', 'c'\]"):
        assert_drained(trace)


def test_a_step_limit_ends_a_run_and_the_run_departs_there():
    trace, reference = run(max_steps=3), run()
    assert (trace.end.end, len(trace.steps)) == ("max_steps", 3)
    with pytest.raises(AssertionError, match="max_steps"):
        assert_drained(trace)
    found = compare.departure(trace, reference)
    assert (found.index, found.yours) == (3, None)
    assert "max_steps" in compare.show(scenario(), trace, reference, found)


def test_errors_are_raised_for_a_test_and_kept_for_a_grader():
    def broken(*args, **kwargs):
        raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError):
        run(broken)
    trace = run(broken, raise_errors=False)
    assert (trace.end.end, trace.end.error) == ("error", "ZeroDivisionError: oops")


@pytest.mark.parametrize(
    "scheduled, words",
    [
        (None, "must be a dict"),
        ({"ghost": 1}, "'ghost' is scheduled but not in running"),
        ({7: 1}, "7 is a key of the schedule: it needs a request_id"),
        ({"a": 0}, "a is scheduled for 0 tokens"),
        ({"a": -2}, "a is scheduled for -2 tokens"),
        ({"a": 13}, "a is scheduled for 13 tokens, and has 12 left"),
        ({"a": 1.5}, "a is scheduled for 1.5 tokens"),
    ],
)
def test_referee_refuses_what_no_engine_could_run(scheduled, words):
    def step(waiting, running, kv, **settings):
        if waiting and kv.admit(waiting.peek()):
            running.append(waiting.pop())
        return scheduled

    with pytest.raises(ScheduleError, match=words):
        run(step)


@pytest.mark.parametrize(
    "move, words",
    [
        (lambda waiting, running: running.append(waiting.peek()), "a is in waiting and in running at once"),
        (lambda waiting, running: running.extend([waiting.pop()] * 2), r"is in running twice: \['a', 'a'\]"),
    ],
)
def test_referee_refuses_a_request_that_is_there_twice(move, words):
    def step(waiting, running, kv, **settings):
        kv.admit(waiting.peek())
        move(waiting, running)
        return {"a": 4}

    with pytest.raises(ScheduleError, match=words):
        run(step)


def test_lost_memory_is_noticed():
    def step(waiting, running, kv, **settings):
        kv._free.popleft()
        return solution.schedule_step(waiting, running, kv, **settings)

    with pytest.raises(RuntimeError, match="31 of 32"):
        run(step)


def toy(positions, token_ids=None):
    """The token that a 4-token prompt gets, computed at these positions."""
    kv = FakeKV(8)
    request = make_request("r", [5, 6, 7, 8])
    kv.admit(request)
    return ToyModel(kv).forward([(request, token_ids or [5, 6, 7, 8], positions, True)])["r"]


def test_toy_model_is_sensitive_to_positions_and_tokens():
    right = toy([0, 1, 2, 3])
    assert toy([0, 1, 2, 3]) == right
    assert toy([1, 2, 3, 4]) != right
    assert toy([0, 1, 0, 1]) != right
    assert toy([0, 1, 2, 3], [5, 6, 7, 9]) != right


def test_toy_model_notices_missing_and_stale_entries():
    kv = FakeKV(8)
    model = ToyModel(kv)
    old, new = make_request("old", [1, 2]), make_request("new", [1, 2, 3])
    kv.admit(old)
    model.forward([(old, [1, 2], [0, 1], False)])
    kv.free(old)
    kv._free.rotate(-kv._free.index(0))  # the same slots again
    kv.admit(new)
    new.num_computed_tokens = 2  # a lie: only old's entries are there
    stale = model.forward([(new, [3], [2], True)])
    model.memory.clear()
    missing = model.forward([(new, [3], [2], True)])
    assert stale != missing


def test_fake_kv_changes_nothing_when_it_says_no():
    kv = FakeKV(10, watermark=2)
    first, second = make_request("first", 5), make_request("second", 4)
    assert kv.admit(first)
    assert not kv.admit(second)  # 4 and the 2 held back do not fit into 5
    assert (kv.num_free_blocks, kv.block_table(second), second.num_computed_tokens) == (5, [], 0)
    first.num_computed_tokens = 5
    assert not kv.allocate(first, 6)
    assert len(kv.block_table(first)) == 5
    kv.check()


def test_fake_kv_leaves_a_token_to_compute_and_waives_the_watermark_for_one_alone():
    request = make_request("r", 6)
    assert FakeKV(10, watermark=8, cached={"r": 6}).admit(request)
    assert request.num_computed_tokens == 5


def ops(kv):
    def perform(name, arguments):
        return name == "admit" and kv.admit(make_request(*arguments))

    script = {"config": {}, "ops": [["admit", "a", 5], ["admit", "b", 9]]}
    return log_ops(script, perform, lambda: {"num_free_blocks": kv.num_free_blocks})


def test_operation_logs_are_compared_whole():
    trace, larger = ops(FakeKV(10)), ops(FakeKV(20))
    assert [step.returned for step in trace.steps] == [True, False]
    found = compare.departure(trace, larger)
    assert found.index == 0
    text = compare.show({"name": "ops"}, trace, larger, found)
    assert "admit(a, 5)" in text and "num_free_blocks" in text
    assert compare.departure(trace, ops(FakeKV(10))) is None


@pytest.mark.parametrize("columns", [60, 88])
def test_a_long_name_does_not_run_into_its_value(columns):
    keys = ("left", "front of waiting", "a.num_computed_tokens", "published (id, num_computed_tokens)")

    def log(value):
        return log_ops({"config": {}, "ops": [["pop"]]}, lambda *_: None, lambda: dict.fromkeys(keys, value))

    text = compare.show({}, log(7), log(8), compare.departure(log(7), log(8)), columns)
    assert all(len(line) <= columns for line in text.splitlines())
    for key in keys:
        found = re.search(rf"> {re.escape(key)}(\n>)?  *7  +8\n", text + "\n")
        assert found and bool(found[1]) is (len(key) > (22 if columns >= 80 else 11)), text


def test_traces_differ_in_order_but_not_in_time():
    trace, same = run(), run()
    for step in same.steps:
        step.t += 100
        step.blocks = {}
        step.blocked.reason = "none"
    assert compare.departure(trace, same) is None
    assert compare.fingerprint(trace) == compare.fingerprint(same)
    index, mixed = next((i, s) for i, s in enumerate(same.steps) if len(s.scheduled) == 2)
    mixed.scheduled = dict(reversed(mixed.scheduled.items()))
    assert compare.departure(trace, same).index == index


def test_runs_of_equal_steps_that_end_otherwise_differ():
    trace, same = run(), run()
    same.end.end = "stuck"
    found = compare.departure(trace, same)
    assert (found.index, found.yours, found.reference) == (len(trace.steps), None, None)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        ([[1.0, float("nan")]], r"logits: NaN, first at \[0, 1\]"),
        ([[1.0, 2.5]], r"logits: off by 0.5 at \[0, 1\]"),
        ([1.0, 2.0], r"logits: shape \(2,\) instead of \(1, 2\)"),
    ],
)
def test_unequal_tensors_are_reported_in_words(actual, words):
    torch = pytest.importorskip("torch", reason="only tensors hold a NaN that assert_close could miss")
    expected = torch.tensor([[1.0, 2.0]])
    assert_close(expected.clone(), expected, "logits")
    with pytest.raises(AssertionError, match=words):
        assert_close(torch.tensor(actual), expected, "logits")


def test_one_step_is_recorded_and_counts_nothing():
    running = [make_request("a", 9)]
    kv = FakeKV(9)
    kv.admit(running[0])
    limits = {"max_num_batched_tokens": 5, "max_num_seqs": 1}
    assert one_step(solution.schedule_step, (), running, kv, **limits) == {"a": 5}
    assert [step.scheduled for step in RUNS[-1][1].steps] == [{"a": 5}]
    assert running[0].num_computed_tokens == 0
