"""The simulated cluster: against the simulator of one engine, against arithmetic, and on random workloads,
against every rule of an engine."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.invariants import watch
from mini_engine.sim import cluster
from mini_engine.sim.cluster import Transfer, figures, simulate_cluster
from mini_engine.sim.cost_model import CostModel
from mini_engine.sim.routers import ROUTERS, PrefixAware, block_hashes
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import Arrival, arrivals, workload
from mini_engine.tests.helpers import make_request
from mini_engine.tests.soak import SOAK
from mini_engine.trace import Fold, read_trace

COST = CostModel(per_forward=10, per_token=1, per_kv_token=0)


@pytest.mark.parametrize(
    ("router", "name"), list(zip(ROUTERS, ["poisson", "bursty", "shared-prefix"], strict=True))
)
def test_a_cluster_of_one_is_the_simulator(name, router):
    """Step by step, and in every figure of the summary."""
    alone, run = simulate(workload(name, 40)), simulate_cluster(workload(name, 40), 1, router)
    assert run.traces == [alone.trace]
    assert run.summaries(ttft_limit=1000) == dict.fromkeys(
        ("engine-0", "together"), alone.summary(ttft_limit=1000)
    )


# ------------------------------------------------------------------------------- random workloads


@pytest.fixture
def watched(monkeypatch):
    """Every engine of every cluster is watched: its rules are checked after each call."""

    class Watched(cluster.SimulatedEngine):
        def __init__(self, *args):
            super().__init__(*args)
            self.watching = watch(self.recorder, args[0])
            self.watching.__enter__()

    monkeypatch.setattr(cluster, "SimulatedEngine", Watched)


@pytest.mark.parametrize("router", ROUTERS)
def test_no_request_is_lost_or_doubled(watched, router, tmp_path):
    """Small pools, so that decodes are preempted; shared prefixes; any numbers of engines of each kind."""
    rng = random.Random(router)
    preempted = moved = 0
    for seed in range(8):
        replicas = rng.randint(1, 5)
        prefill = rng.randint(0, replicas - 1)
        given = list(
            arrivals(
                15,
                rate=rng.choice([5, 40, 400]),
                input_length=rng.choice([20, 60]),
                output_length=rng.choice([1, 30]),
                num_prefix_groups=rng.choice([0, 3]),
                prefix_length=rng.choice([16, 40]),
                longest=60,
                seed=seed,
            )
        )
        settings = {
            "num_blocks": rng.choice([10, 16]),
            "max_num_batched_tokens": rng.choice([24, 128]),
            "max_num_seqs": 8,
            "enable_prefix_caching": rng.random() < 0.7,
        }
        run = simulate_cluster(given, replicas, router, prefill=prefill, seed=seed, keep=tmp_path, **settings)
        traces = [read_trace(tmp_path / f"{engine.name}.jsonl") for engine in run.engines]
        events = {
            e.name: [x for r in t.steps for x in r.events] for e, t in zip(run.engines, traces, strict=True)
        }
        queued = Counter((x.id, name) for name, each in events.items() for x in each if x.type == "QUEUED")
        ended = Counter((x.id, name) for name, each in events.items() for x in each if x.type == "FINISHED")
        outputs = Counter()
        for engine, trace in zip(run.engines, traces, strict=True):
            for record in trace.steps:
                outputs.update({(i, engine.name): len(tokens) for i, tokens in record.new_tokens.items()})
        path = [(name, engine) for name, engines in run.routed.items() for engine in engines]
        assert run.num_refused == 0 and queued == ended == Counter(path), seed
        assert [len(run.routed[f"r{i}"]) for i in range(15)] == [1 + bool(prefill)] * 15
        for i, arrival in enumerate(given):
            assert outputs[f"r{i}", run.routed[f"r{i}"][-1]] == arrival.output_length
            if prefill:
                assert outputs[f"r{i}", run.routed[f"r{i}"][0]] == 1
        assert all(engine.load == 0 and not engine.pool.moved for engine in run.engines)
        preempted += sum(x.type == "PREEMPTED" for each in events.values() for x in each)
        moved += len(run.moves)
        for trace in traces:  # what can be found is what the pool says, also after moves
            fold = Fold(trace.header)
            assert [len(fold.add(r) and fold.cached) for r in trace.steps] == [
                r.num_cached_blocks for r in trace.steps
            ]
    assert preempted > 3 and moved > 30


def test_the_same_seed_is_the_same_run():
    runs = [figures(replicas=3, router="random", requests=40, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


# ----------------------------------------------------------------------------------------- routers


def replicas(*loads, num_blocks=64):
    return [SimpleNamespace(load=load, pool=BlockManager(num_blocks, 4)) for load in loads]


def prompt(group, own=0):
    """Three blocks that a group shares, and one of its own."""
    return make_request(f"{group}-{own}", [1000 * group + i for i in range(12)] + [-1 - own] * 4)


def test_a_prefix_stays_with_its_engine_until_that_is_loaded_too_far():
    engines = replicas(0, 0, 0)
    router = PrefixAware(engines, imbalance=4)
    home = router.choose(prompt(1))
    for own in range(1, 5):
        engines[home].load = own  # nothing has ended
        assert router.choose(prompt(1, own)) == home
    engines[home].load = 5
    away = router.choose(prompt(1, 9))
    assert away != home
    engines[home].load = engines[away].load = 3  # now both have the prefix, one has the whole prompt
    assert router.choose(prompt(1, 9)) == away and router.choose(prompt(1, 4)) == home
    engines[away].load = 2
    assert router.choose(prompt(1, 99)) == away  # equally long: the less loaded


def test_a_new_prefix_goes_to_the_least_loaded():
    for loads, least in (((2, 0, 1), 1), ((0, 5, 5), 0), ((3, 3, 1), 2)):
        for name in ("least-loaded", "prefix"):
            assert ROUTERS[name](replicas(*loads)).choose(prompt(1)) == least
    drawn = {ROUTERS["least-loaded"](replicas(1, 0, 0), seed).choose(prompt(1)) for seed in range(20)}
    assert drawn == {1, 2}


def test_a_router_forgets_what_a_pool_cannot_hold():
    """The last blocks first; and what was sent again counts as new."""
    router = PrefixAware(replicas(0, num_blocks=8))
    for group in (1, 2, 1, 3):
        router.choose(prompt(group))
    (sent,) = router._sent
    kept = {group: sum(h in sent for h in prompt_hashes(group)) for group in (1, 2, 3)}
    assert kept == {1: 4, 2: 0, 3: 4}
    router.choose(make_request("long", list(range(5000, 5020))))
    kept = {group: [h in sent for h in prompt_hashes(group)] for group in (1, 3)}
    assert kept == {1: [False] * 4, 3: [True, True, True, False]}


def prompt_hashes(group):
    return block_hashes(prompt(group), 4)


def test_a_prefix_aware_router_computes_less_than_a_blind_one():
    """The claim of docs/simulate.md, for other arrivals than its own."""
    blind, aware = (figures(router=r, requests=120, seed=1) for r in ("random", "prefix"))
    assert aware["cached_tokens"] > 1.1 * blind["cached_tokens"]
    assert aware["goodput"] > blind["goodput"] and aware["ttft_p50"] < blind["ttft_p50"]
    assert json.loads(json.dumps(aware)) == aware and sum(aware["load"].values()) == 120


def test_the_tables_of_the_docs():
    """docs/simulate.md, number by number: three routers, and prefill apart from decode."""
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text("utf-8")
    split = {"kind": "poisson", "rate": 40, "router": "least-loaded"}
    rows = {name: {"router": name, "rate": 56} for name in ROUTERS} | {
        "none only prefills": split,
        "one only prefills": split | {"prefill": 1},
        "two only prefill": split | {"prefill": 2},
        "two, 20 ms a block": split | {"prefill": 2, "transfer": Transfer(per_block=20)},
    }
    for name in rows if SOAK else ("prefix", "two only prefill"):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        shown = [float(cell.strip(" %").replace(",", "")) for cell in line.split("|")[2:-1]]
        found = figures(replicas=4, requests=200, **rows[name])
        cached = 100 * found["cached_tokens"] / found["prompt_tokens"]
        times = [found[key] for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput")]
        assert shown == pytest.approx([cached, *times][-len(shown) :], rel=0.02, abs=0.6), name


def test_the_simulated_rows_of_scaling_are_those_of_simulate():
    docs = Path(__file__).parents[2] / "docs"
    whole = {tuple(line.split(" | ")[1:]) for line in (docs / "simulate.md").read_text("utf-8").splitlines()}
    shown = (docs / "scaling.md").read_text("utf-8").partition("## Simulated")[2].partition("\n### ")[0]
    rows = [
        line.strip("| ").split(" | ")[1:] for line in shown.splitlines() if re.match(r"\| .*\d \|$", line)
    ]
    wanted = [cells for cells in rows if cells[0] != "TTFT p50 (ms)"]
    assert len(wanted) == 5
    for cells in wanted:
        assert any(set(cells) <= {cell.strip(" |") for cell in row} for row in whole), cells


# ---------------------------------------------------------------------------------- disaggregation

PRICE = Transfer(per_transfer=5, per_block=2)


def moved(given, **options):
    return simulate_cluster(given, 2, "least-loaded", prefill=1, cost=COST, transfer=PRICE, **options)


def test_decoding_starts_when_the_blocks_are_there_by_hand():
    """40 tokens are 3 blocks of 16: 50 ms to compute, 5 + 3 * 2 to move; then a token of 11 ms each."""
    run = moved([Arrival(100, 40, 3)])
    (move,) = run.moves.values()
    assert (move.source, move.target, move.t_start, move.t_end) == ("prefill-0", "decode-0", 150, 161)
    first, second = run.traces
    assert [(r.t, r.t_end, r.scheduled) for r in first.steps] == [(100, 150, {"r0": 40})]
    assert [(r.t, r.t_end, r.scheduled) for r in second.steps] == [
        (161 + 11 * i, 172 + 11 * i, {"r0": 1}) for i in range(3)
    ]
    queued, scheduled = second.steps[0].events
    assert (queued.t, scheduled.num_cached_tokens, scheduled.num_external_computed_tokens) == (161, 39, 39)
    assert len(scheduled.cached_blocks) == 2  # the third block is not full
    together = run.summaries()["together"]
    assert (together.ttft.p50, together.itl.p50, together.duration) == (72, 11, 94)
    assert (together.num_requests, together.num_prompt_tokens, together.num_output_tokens) == (1, 40, 3)
    assert (together.num_computed_tokens, together.num_cached_tokens) == (43, 0)


def test_blocks_that_are_there_are_not_moved_again():
    """The second prompt begins with the two full blocks of the first: one block is moved, for 7 ms."""
    given = [Arrival(0, 40, 1, prefix_group="a", prefix_length=32) for _ in range(2)]
    run = moved([given[0], replace(given[1], timestamp=1000)])
    assert [move.num_blocks for move in run.moves.values()] == [3, 1]
    assert [move.t_end - move.t_start for move in run.moves.values()] == [11, 7]
    event = run.traces[1].steps[1].events[1]
    assert (event.num_cached_tokens, event.num_external_computed_tokens) == (39, 7)
    assert run.summaries()["decode-0"].num_cached_tokens == 32
    without = moved([given[0], replace(given[1], timestamp=1000)], enable_prefix_caching=False)
    assert [move.num_blocks for move in without.moves.values()] == [3, 3]


def test_what_was_moved_is_computed_again_after_a_preemption():
    """Two grow until the pool of 5 blocks is full: the second loses what was moved to it."""
    run = moved([Arrival(0, 30, 20), Arrival(0, 30, 20)], num_blocks=5, watermark=0)
    events = [e for r in run.traces[1].steps for e in r.events if e.type in ("SCHEDULED", "PREEMPTED")]
    assert [(e.type, e.id) for e in events] == [
        ("SCHEDULED", "r0"), ("SCHEDULED", "r1"), ("PREEMPTED", "r1"), ("SCHEDULED", "r1"),
    ]  # fmt: skip
    assert [e.num_external_computed_tokens for e in events if e.type == "SCHEDULED"] == [29, 29, 0]


def test_decodes_beside_no_prefill_have_shorter_gaps():
    whole, split = (
        figures(replicas=4, router="least-loaded", kind="poisson", rate=40, requests=80, prefill=n)
        for n in (0, 2)
    )
    assert split["itl_p99"] < 0.5 * whole["itl_p99"] and split["moved_blocks"] > whole["moved_blocks"] == 0


def test_a_prompt_that_fits_no_pool_is_refused_once():
    for prefill in (0, 1):
        run = simulate_cluster([Arrival(0, 60, 60), Arrival(1, 10, 2)], 2, num_blocks=6, prefill=prefill)
        assert run.num_refused == 1 and "r0" in run.why_refused
        assert all(engine.load == 0 and not engine.pool.moved for engine in run.engines)
        assert run.summaries()["together"].num_completed == 1


def test_a_run_that_fails_leaves_no_file(tmp_path):
    def failing():
        yield Arrival(0, 10, 2)
        raise OSError("the workload's file is gone")

    with pytest.raises(OSError, match="is gone") as failed:  # which keeps the engines alive
        simulate_cluster(failing(), 3, keep=tmp_path)
    assert list(tmp_path.iterdir()) == [] and failed
