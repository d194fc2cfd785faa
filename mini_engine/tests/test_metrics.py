"""Metrics of hand-written traces, where every number can be checked on paper."""

import pytest

from mini_engine.show.tables import metrics_table
from mini_engine.trace import Blocked, End, Finished, Header, Preempted, Queued, Scheduled, StepTrace, Trace
from mini_engine.trace.metrics import Stats, request_metrics, summary

CONFIG = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "num_blocks": 10, "block_size": 4}


def queued(rid, t=0.0, prompt=4, max_tokens=3):
    return Queued(rid, t, prompt, max_tokens, priority=0, arrival=0)


def admitted(rid, cached=0):
    return Scheduled(rid, cached, cached_blocks=[])


def make(*steps, unit="ms", end=None):
    """A trace of steps (t, t_end, scheduled, ids that got a token, free blocks, events)."""
    records = [
        StepTrace(
            step=i,
            t=t,
            t_end=t_end,
            scheduled=scheduled,
            num_batched_tokens=sum(scheduled.values()),
            num_running=len(scheduled),
            num_waiting=0,
            blocked=Blocked("empty"),
            blocks={},
            new_tokens={rid: [7] for rid in tokens},
            num_free_blocks=free,
            num_cached_blocks=0,
            events=events,
        )
        for i, (t, t_end, scheduled, tokens, free, events) in enumerate(steps)
    ]
    return Trace(Header("virtual", unit, "", {}, CONFIG), records, end or End("drained", len(records)))


@pytest.fixture
def life():
    """`a` waits one step, prefills in two chunks, gets a token, is preempted, resumes, finishes; `b`
    gets one token and ends; `c` is aborted while it waits; `d` still waits at the end."""
    return make(
        (
            0,
            2,
            {"b": 3},
            ["b"],
            9,
            [queued("b", 0, 3, 1), queued("a", 0, 10, 3), admitted("b"), Finished("b", "length")],
        ),
        (2, 5, {"a": 4}, [], 6, [queued("c", 4, 5), admitted("a", cached=4)]),
        (5, 6, {"a": 2}, ["a"], 6, [Finished("c", "abort")]),
        (6, 10, {}, [], 10, [Preempted("a", for_="a", needs=1, free=0)]),
        (10, 12, {"a": 3}, ["a"], 7, [admitted("a", cached=8)]),
        (12, 13, {"a": 1}, ["a"], 7, [queued("d", 12.5), Finished("a", "stop")]),
    )


def test_a_life_with_every_event(life):
    """Queue time, prefill time, TTFT, ITL, TPOT and e2e come from the right ends of the right steps."""
    assert list(request_metrics(life)) == ["b", "a", "c", "d"]  # in order of arrival
    a = request_metrics(life)["a"]
    assert (a.queue_time, a.queue_steps) == (2, 1)
    assert a.prefill_time == 6 - 2
    assert a.ttft == 6
    assert a.itl == (6, 1)  # the first gap spans the preemption
    assert a.tpot == 3.5
    assert a.e2e == 13
    assert (a.num_prompt_tokens, a.num_output_tokens, a.num_preemptions) == (10, 3, 1)
    assert (a.num_cached_tokens, a.num_resumed_cached_tokens) == (4, 8)
    assert a.finish_reason == "stop"


def test_undefined_values_are_none(life):
    """One token has no TPOT; a request that never ran has no TTFT, no queue time and no e2e."""
    metrics = request_metrics(life)
    b, c, d = metrics["b"], metrics["c"], metrics["d"]
    assert (b.ttft, b.tpot, b.itl, b.e2e) == (2, None, (), 2)
    assert (c.queue_time, c.queue_steps, c.ttft, c.tpot, c.e2e, c.finish_reason) == (*[None] * 5, "abort")
    assert (d.queue_time, d.ttft, d.e2e, d.finish_reason) == (None, None, None, None)
    # An abort after tokens has a TTFT, but no e2e.
    trace = make(
        (0, 1, {"a": 4}, ["a"], 9, [queued("a"), admitted("a")]),
        end=End("drained", 1, events=[Finished("a", "abort")]),
    )
    a = request_metrics(trace)["a"]
    assert (a.ttft, a.e2e, a.finish_reason) == (1, None, "abort")
    assert summary(trace).num_completed == 0


def test_summary(life):
    """Totals, rates over the whole duration, and utilisation averaged over the steps."""
    result = summary(life)
    assert (result.num_requests, result.num_completed, result.num_steps, result.duration) == (4, 2, 6, 13)
    assert (result.num_prompt_tokens, result.num_output_tokens, result.num_computed_tokens) == (22, 4, 13)
    assert (result.num_preemptions, result.num_cached_tokens) == (1, 4)
    assert result.output_throughput == 4 / 13
    assert result.total_throughput == 26 / 13
    assert result.goodput == 2 / 13
    assert result.budget_utilisation == 13 / (8 * 6)
    assert result.kv_utilisation == pytest.approx((1 + 4 + 4 + 0 + 3 + 3) / 60)
    assert result.max_kv_utilisation == 0.4
    assert result.ttft == Stats(2, 4, 4, pytest.approx(5.6), pytest.approx(5.96), 6)
    assert result.tpot.mean == 3.5
    assert (result.itl.mean, result.max_itl) == (3.5, 6)
    assert result.unit == "ms"


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({}, 2),
        ({"ttft_limit": 6, "tpot_limit": 3.5}, 2),  # a limit that is just met is met
        ({"ttft_limit": 5}, 1),
        ({"tpot_limit": 3}, 1),  # b has no TPOT to exceed
        ({"ttft_limit": 1}, 0),
    ],
)
def test_goodput_counts_requests_that_met_every_limit(life, limits, good):
    assert summary(life, **limits).goodput == good / 13


def test_an_empty_trace_has_no_rates_and_no_averages():
    result = summary(make())
    assert (result.num_requests, result.num_steps, result.duration) == (0, 0, 0)
    undefined = "output_throughput goodput ttft max_itl budget_utilisation kv_utilisation max_kv_utilisation"
    assert [getattr(result, name) for name in undefined.split()] == [None] * 7


def test_a_request_queued_before_the_first_step_counts_from_its_own_time():
    """With a wall clock a request arrives between steps: its wait starts there."""
    trace = make((5, 7, {"a": 4}, ["a"], 9, [queued("a", t=3), admitted("a")]))
    assert request_metrics(trace)["a"].ttft == 4
    assert summary(trace).duration == 4


def test_drafts():
    """Three tokens are computed in the second step and one is rejected: two are output, at the same time."""
    trace = make(
        (0, 2, {"a": 4}, ["a"], 9, [queued("a", max_tokens=3), admitted("a")]),
        (2, 3, {"a": 3}, [], 8, [Finished("a", "length")]),
    )
    record = trace.steps[1]
    record.new_tokens, record.draft_token_ids = {"a": [5, 9]}, {"a": [5, 6]}
    record.num_accepted_tokens = {"a": 1}
    a, result = request_metrics(trace)["a"], summary(trace)
    assert (a.num_output_tokens, a.itl, a.tpot, a.e2e) == (3, (1, 0), 0.5, 3)
    assert (a.num_draft_tokens, a.num_accepted_tokens) == (2, 1)
    assert (result.num_draft_tokens, result.num_accepted_tokens, result.acceptance_rate) == (2, 1, 0.5)
    assert (result.num_computed_tokens, result.output_throughput) == (7, 1)
    without = make((0, 2, {"a": 4}, ["a"], 9, [queued("a"), admitted("a")]))
    assert summary(without).acceptance_rate is None
    shown = [column.header for column in metrics_table(trace).columns]
    assert "accepted\ndrafts" in shown and "1/2" in list(
        metrics_table(trace).columns[shown.index("accepted\ndrafts")].cells
    )
    assert "accepted\ndrafts" not in [column.header for column in metrics_table(without).columns]
