"""The simulator against arithmetic, against the engine, and against a recording of a real run."""

import json
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.request import SamplingParams
from mini_engine.sim.baselines import BASELINES
from mini_engine.sim.cost_model import CostModel, backend_of, fit, step_loads
from mini_engine.sim.resimulate import resimulate
from mini_engine.sim.simulate import compare, simulate
from mini_engine.sim.workloads import WORKLOADS, Arrival, arrivals, read_arrivals, workload
from mini_engine.tests.soak import SOAK
from mini_engine.trace import Header, Trace, first_difference, read_trace
from mini_engine.trace.metrics import summary

RECORDING = Path(__file__).parent / "data" / "recording.jsonl"
COST = CostModel(per_forward=10, per_token=1, per_kv_token=0.01)


# -------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize(
    ("name", "number", "spread", "rel"), [("poisson", 20_000, 1, 0.03), ("bursty", 50_000, 10**0.5, 0.05)]
)
def test_gaps_between_arrivals(name, number, spread, rel):
    """6 per second on average. A Poisson process deviates by its mean, shape 0.1 by sqrt(10) times that."""
    times = [a.timestamp for a in workload(name, number, rate=6)]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert fmean(gaps) == pytest.approx(1000 / 6, rel=rel)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(spread, rel=rel)


def test_lengths():
    """Medians as asked for, a longer tail with more spread, nothing beyond the longest."""
    for name in ("poisson", "long-tail"):
        lengths = sorted(a.input_length for a in workload(name, 10_001, input_length=200))
        assert lengths[5000] == pytest.approx(200, rel=0.05)
        assert 1 <= lengths[0] and lengths[-1] == 1024
    constant = list(arrivals(50, input_length=7, output_length=3, spread=0))
    assert {(a.input_length, a.output_length) for a in constant} == {(7, 3)}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_repeat_and_stream(name):
    """The same seed gives the same arrivals; nothing is made before it is asked for."""
    first = [next(workload(name, 10**12, seed=3)) for _ in range(2)]
    assert first[0] == first[1] != next(workload(name, 10**12, seed=4))


def test_contents_are_equal_where_they_should_be():
    """A prefix group shares its prefix, equal hash ids their blocks, and nothing else is shared."""
    a, b, other = (Arrival(0, 30, 1, 0, group, 20).request(i) for i, group in enumerate(["x", "x", "y"]))
    assert a.prompt_token_ids[:20] == b.prompt_token_ids[:20] != other.prompt_token_ids[:20]
    assert not set(a.prompt_token_ids[20:]) & set(b.prompt_token_ids[20:])
    assert not set(a.prompt_token_ids) & set(other.prompt_token_ids)
    a, b = (Arrival(0, 1100, 1, hash_ids=ids).request(i) for i, ids in enumerate([(5, 6, 7), (5, 6, 8)]))
    assert len(a.prompt_token_ids) == 1100
    assert a.prompt_token_ids[:1024] == b.prompt_token_ids[:1024]
    assert not set(a.prompt_token_ids[1024:]) & set(b.prompt_token_ids[1024:])
    whole, part = (Arrival(0, n, 1, n, "x").request(n) for n in (10, 6))
    assert whole.prompt_token_ids[:6] == part.prompt_token_ids and (whole.priority, part.priority) == (10, 6)


def test_arrivals_from_a_file(tmp_path):
    """Our fields and Mooncake's, in order of time. test_input_errors.py has the lines that are refused."""
    path = tmp_path / "arrivals.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 30.5, "input_length": 10, "output_length": 2, "prefix_group": "a", "priority": 1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert list(read_arrivals(path)) == [Arrival(0, 700, 5, hash_ids=(0, 1)), Arrival(30.5, 10, 2, 1, "a")]
    path.write_text("\n".join(map(json.dumps, reversed(rows))))
    with pytest.raises(ValueError, match="line 2: earlier than the line before"):
        list(read_arrivals(path))


# ------------------------------------------------------------------------------------- simulating


def test_times_by_hand():
    """Two requests worked out on paper: the second comes during the first step and waits for it."""
    run = simulate([Arrival(100, 4, 3), Arrival(105, 2, 1)], cost=COST, num_blocks=8, block_size=4)
    # Step 0: 10 + 4 + 0.04. Step 1: a decode that reads 5, and 2 prompt tokens. Step 2: one decode.
    ends = [100 + 14.04, 100 + 14.04 + 13.07, 100 + 14.04 + 13.07 + 11.06]
    assert [record.t_end for record in run.trace.steps] == pytest.approx(ends)
    assert [record.scheduled for record in run.trace.steps] == [{"r0": 4}, {"r0": 1, "r1": 2}, {"r0": 1}]
    result = run.metrics.requests()
    assert result["r0"].ttft == pytest.approx(14.04)
    assert result["r1"].ttft == pytest.approx(ends[1] - 105), "from its arrival, not from the step's end"
    assert result["r0"].tpot == pytest.approx((13.07 + 11.06) / 2)
    # Nothing runs between two distant arrivals, and no step is recorded for it.
    run = simulate([Arrival(0, 1, 1), Arrival(5000, 1, 1)], cost=COST)
    assert [record.t for record in run.trace.steps] == [0, 5000]


def test_requests_that_can_never_fit_are_refused_and_counted():
    run = simulate([Arrival(0, 100, 1), Arrival(0, 10, 1)], num_blocks=2, block_size=16)
    assert run.num_refused == 1
    assert run.summary().num_completed == 1


# From slow to quick, in the order of docs/simulate.md.
WAYS = ["one-at-a-time", "padded", "static", "two-pass", "prefill-first", "over-commit", "mixed"]


def default_run(name, seed):
    """Run one baseline as `mini-engine simulate` does; return the columns of its table."""
    result = simulate(workload("poisson", 500, seed=seed), name, keep=False)
    run = result.summary(ttft_limit=1000, tpot_limit=50)
    assert (run.num_completed, result.num_refused) == (500, 0)
    assert result.trace.header.parts.get("Scheduler", "mixed") == name
    rates = run.output_throughput * 1000, run.goodput * 1000
    return [rates[0], run.ttft.p50, run.ttft.p99, run.tpot.p50, run.max_itl, run.num_preemptions, rates[1]]


def test_the_default_load_is_the_table_of_the_docs():
    """docs/simulate.md, number by number, and its order; here of two ways, in the soak of all."""
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    table = {
        name: [float(n.replace(",", "")) for n in numbers] for name, *numbers in rows if name in BASELINES
    }
    assert list(table) == WAYS and set(WAYS) == set(BASELINES)
    found = {name: default_run(name, 0) for name in (WAYS if SOAK else ["static", "mixed"])}
    for name in found:
        assert found[name] == pytest.approx(table[name], rel=0.02, abs=0.2), name
    mixed_steps_win({name: table[name] for name in WAYS[2:]})


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_the_default_load_teaches_why_mixed_steps_win(seed):
    """The statements of docs/simulate.md hold for other arrivals of the same kind."""
    mixed_steps_win({name: default_run(name, seed) for name in WAYS[2:]})


def mixed_steps_win(result):
    speed, ttft, _, tpot, _, preemptions, good = (
        dict(zip(result, column, strict=True)) for column in zip(*result.values(), strict=True)
    )
    assert list(result) == sorted(result, key=lambda name: round(speed[name], -1))
    assert list(result) == sorted(result, key=ttft.get, reverse=True)
    assert list(result) == sorted(result, key=good.get)
    assert 1.5 * speed["static"] < speed["two-pass"] and ttft["over-commit"] > 1.2 * ttft["mixed"]
    most = min(preemptions[name] for name in ("prefill-first", "over-commit"))
    assert preemptions["static"] == 0 < preemptions["mixed"] < most
    assert preemptions["over-commit"] > 1.9 * preemptions["mixed"]
    assert tpot["two-pass"] == max(tpot.values())


def test_with_room_to_spare_the_continuous_ways_are_equal():
    """With less load there is no difference: at 6 per second four ways give the same throughput."""
    ways = ("mixed", "prefill-first", "two-pass", "over-commit")[: 4 if SOAK else 2]
    runs = [simulate(workload("poisson", 300, rate=6), name, keep=False) for name in ways]
    speeds = [run.summary().output_throughput for run in runs]
    assert max(speeds) < 1.001 * min(speeds)


def test_long_runs_keep_no_steps(tmp_path):
    """keep=False leaves nothing but the metrics, which take each record; a path takes the same trace as it
    comes."""
    load = list(workload("poisson", 30))
    kept, path = simulate(load), tmp_path / "trace.jsonl"
    streamed, dropped = simulate(load, keep=path), simulate(load, keep=False)
    assert streamed.trace.steps == dropped.trace.steps == []
    assert streamed.summary() == dropped.summary() == kept.summary() == summary(kept.trace)
    written = read_trace(path)
    assert (written.steps, written.end) == (kept.trace.steps, kept.trace.end)
    with pytest.raises(ValueError, match="priority must be a whole number"):
        simulate([Arrival(0, 1, 1, priority="high")], keep=tmp_path / "failed.jsonl")
    assert list(tmp_path.iterdir()) == [path]
    for keep in (0, -1):
        with pytest.raises(ValueError, match=f"keep must be .* or a number from 1, but is {keep}"):
            simulate(load, keep=keep)


# ------------------------------------------------------------------------------- simulated and real


def in_wall_time(trace: Trace, seconds) -> Trace:
    """Return the trace as if each step had taken `seconds(load)` on the wall clock."""
    trace.header.clock, trace.header.unit = "wall", "s"
    time = 0.0
    for record, load in zip(trace.steps, list(step_loads(trace)), strict=True):
        record.t, time = time, time + seconds(load)
        record.t_end = time
    return trace


def test_fit_finds_the_prices_of_a_run_and_none_below_zero():
    """From a run with known prices fit returns those, in milliseconds. Steps that get cheaper with more KV
    would have a negative price by least squares alone."""
    trace = simulate(workload("poisson", 40)).trace
    cost = fit(in_wall_time(trace, lambda load: COST.step_time(load) / 1000))
    assert (cost.per_forward, cost.per_token, cost.per_kv_token) == pytest.approx((10, 1, 0.01))
    cost = fit(in_wall_time(trace, lambda load: (50 + load.num_tokens - 0.001 * load.num_kv_tokens) / 1000))
    assert cost.per_forward > 0 and cost.per_token > 0 and cost.per_kv_token == 0


def test_fit_refuses_virtual_time_and_an_empty_trace():
    with pytest.raises(ValueError, match="only a trace in wall time"):
        fit(simulate([Arrival(0, 1, 1)]).trace)
    with pytest.raises(ValueError, match="no steps"):
        fit(Trace(Header("wall", "s", "", {}, {})))


def test_the_header_s_backend_is_what_a_run_is_priced_by():
    """lab-04's padded steps cost what padding costs. An unknown backend has no price."""
    trace = simulate(workload("poisson", 20), "padded").trace
    trace.header.parts = {"attend_backend": "lab-04"}
    assert backend_of(trace) == "padded"
    assert list(step_loads(trace)) == list(step_loads(trace, "padded")) != list(step_loads(trace, "paged"))
    again = resimulate(trace)
    assert again.header.backend == "padded"
    took = [[record.t_end - record.t for record in run.steps] for run in (again, trace)]
    assert took[0] == pytest.approx(took[1])
    trace.header.backend = ""  # no model computed it
    assert backend_of(trace) == "paged"
    trace.header.backend = "sparse"
    with pytest.raises(ValueError, match="backend must be one of paged, two-pass, padded, but is 'sparse'"):
        step_loads(trace)


def test_settings_are_an_engine_s():
    """They are an EngineConfig, its fields, or both. A pool must be given: no model determines its size."""
    load = list(workload("poisson", 10))
    config = EngineConfig(max_num_batched_tokens=300, max_num_seqs=4, num_blocks=256)
    given = simulate(load, config=config, policy="priority").trace
    assert given.header.config["policy"] == "priority" and given.header.config["max_num_seqs"] == 4
    fields = {"max_num_batched_tokens": 300, "max_num_seqs": 4, "num_blocks": 256, "policy": "priority"}
    assert simulate(load, **fields).trace == given
    with pytest.raises(ValueError, match="num_blocks must be given"):
        simulate(load, config=EngineConfig())
    with pytest.raises(TypeError, match="num_sequences"):
        simulate(load, num_sequences=4)


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "padded"])
def test_resimulation_repeats_a_simulation(name):
    """Arrivals by step, preemptions and resumed prefixes included: the same decisions again."""
    load = workload("bursty", 60, rate=30, input_length=60, output_length=60, longest=150)
    trace = simulate(load, name, num_blocks=80, max_num_seqs=16, max_num_batched_tokens=304).trace
    assert first_difference(resimulate(trace), trace) is None


def test_resimulation_repeats_an_engine(model):
    """A real engine with a tiny model, with stops, aborts and preemption: the same decisions again."""
    engine = Engine(
        model, max_num_batched_tokens=32, max_num_seqs=6, block_size=4, num_blocks=30, seed=1, record=True
    )
    for i in range(12):
        params = SamplingParams(temperature=1, max_tokens=20, stop_token_ids=(3,))
        engine.add_request([i] * (5 + 3 * i), params)
        engine.step()
        engine.step()
    engine.abort("r11")
    while engine.has_work:
        engine.step()
    trace = engine.trace
    kinds = {(e.type, getattr(e, "reason", None)) for r in trace.steps for e in r.events}
    assert kinds >= {("FINISHED", "stop"), ("FINISHED", "length"), ("FINISHED", "abort"), ("PREEMPTED", None)}
    assert first_difference(resimulate(trace), trace) is None
    trace.steps[9].scheduled = {}
    assert first_difference(resimulate(trace), trace) == 9, "the comparison sees a change"


def test_a_shared_prefix_and_the_end_of_a_run_cannot_be_replayed():
    trace = simulate([Arrival(1000 * i, 40, 2, 0, "g") for i in range(2)]).trace
    with pytest.raises(ValueError, match="'r1' began with a cached prefix"):
        resimulate(trace)
    with pytest.raises(ValueError, match="begins in the middle of a run"):
        resimulate(simulate(workload("poisson", 20), keep=5).trace)


def test_the_recording_of_a_real_run():
    """The engine with a real model in wall time: identical schedule, total time within 15 %.

    The prices are fitted on every other step and must predict the total of those between.
    """
    trace = read_trace(RECORDING)
    assert trace.header.clock == "wall"
    assert sum(e.type == "PREEMPTED" for record in trace.steps for e in record.events) >= 10
    cost = fit(trace, steps=slice(0, None, 2))
    simulated = resimulate(trace, cost)
    assert first_difference(simulated, trace) is None
    real = [1000 * (record.t_end - record.t) for record in trace.steps]
    ours = [record.t_end - record.t for record in simulated.steps]
    assert sum(ours[1::2]) == pytest.approx(sum(real[1::2]), rel=0.15)
    assert sum(ours) == pytest.approx(sum(real), rel=0.15)


def test_baselines_are_compared_in_processes_of_their_own():
    """The same figures as one after the other, in the order asked for; an error there is raised here."""
    load = partial(workload, "poisson", 40, seed=2)
    names = ["static", "mixed", "prefill-first"]
    done = compare(load, names, ttft_limit=200.0, keep=False)
    assert list(done) == names
    for name, found in done.items():
        alone = simulate(load(), name, keep=False)
        assert found == (alone.summary(ttft_limit=200.0), alone.num_refused, alone.why_refused)
    with pytest.raises(ValueError, match="baseline must be one of .* but is 'fastest'"):
        compare(load, ["mixed", "fastest"])
