"""Tensor parallel: the shares of a model together are the model, whatever happens to its requests.

Most tests run the ranks as threads of one process. `make soak` starts real ones with torchrun.
"""

import os
import queue
import re
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

from mini_engine.attention import KVPool
from mini_engine.distributed.ranks import ParallelError, Ranks
from mini_engine.distributed.sharding import local_config, share
from mini_engine.distributed.tensor_parallel import Worker, connect, parallel_backend
from mini_engine.engine import Engine
from mini_engine.fast.model import prepare
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.registry import MODELS
from mini_engine.loading.weights import open_folder
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.tests.helpers import drain, generated, spy
from mini_engine.tests.test_checkpoint import CONFIG, write_folder

BIASED = CONFIG | {
    "attention_bias": True,
    "mlp_bias": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NINE_HEADS = BIASED | {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "intermediate_size": 48,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[*range(3, 20)], [*range(3, 17), 5], [7, 8], [11] * 9]


class Threads(Ranks):
    """Ranks that are threads: the same calls, over queues and a barrier instead of connections."""

    def __init__(self, size, rank, barrier, parts, inboxes):
        self.size, self.rank, self.failure, self._agreed, self._has_failed = size, rank, None, False, False
        self.barrier, self.parts, self.inboxes = barrier, parts, inboxes
        self.num_sums, self.sum_seconds, self.seconds = 0, 0.0, 0.0

    def _send(self, command):
        for inbox in self.inboxes[1:]:
            inbox.put(command)

    def sum(self, part):
        self.num_sums += 1
        self.parts[self.rank] = part.clone()
        self.barrier.wait(20)
        part.copy_(torch.stack(self.parts).sum(0))
        self.barrier.wait(20)
        return part

    def obey(self, calls):
        while (heard := self.inboxes[self.rank].get(timeout=20)) is not None:
            calls(heard[0])(*heard[1])

    def fail(self, error):
        self.failure = f"rank {self.rank}: {type(error).__name__}: {error}"
        self.barrier.abort()
        return self.failure

    def __exit__(self, kind, error, trace):
        self._send(None)


@pytest.fixture
def ranks_of(tmp_path):
    """A function from (config, size, fast) to rank 0's model, its Ranks, the workers and the whole model."""
    started = []

    def start(config, size, fast=False):
        folder = write_folder(tmp_path / f"model{len(started)}", config)
        shares = [
            load_model(folder, "float32", "cpu", partial(share, rank=rank, size=size)) for rank in range(size)
        ]
        common = threading.Barrier(size), [None] * size, [queue.Queue() for _ in range(size)]
        ranks = [Threads(size, rank, *common) for rank in range(size)]
        models = [connect(prepare(m, fast), r) for m, r in zip(shares, ranks, strict=True)]
        workers = [Worker(model) for model in models[1:]]
        threads = [
            threading.Thread(target=worker.work, args=[r], daemon=True)
            for worker, r in zip(workers, ranks[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        started.append((ranks[0], threads))
        return models[0], ranks[0], workers, load_model(folder, "float32", "cpu")

    yield start
    for first, threads in started:
        first._send(None)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def engines(started, fast=False, **settings):
    """Return an engine of the shared model, and one of the whole model."""
    model, ranks, _, whole = started
    settings = {"num_blocks": 64, "block_size": 4} | settings
    parts = Parts(attend_backend=parallel_backend(ranks))
    return Engine(model, parts=parts, fast=fast, **settings), Engine(whole, fast=fast, **settings)


def outputs(engine):
    return generated(engine, PROMPTS, GREEDY)


QWEN = BIASED | {"model_type": "qwen3", "head_dim": 32, "mlp_bias": False}


@pytest.mark.parametrize("config", [BIASED, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("fast", [False, "torch"])
def test_tokens_are_those_of_the_whole_model(ranks_of, config, fast):
    shared, whole = engines(ranks_of(config, 2, fast), fast)
    assert outputs(shared) == outputs(whole)


def test_three_ranks(ranks_of):
    started = ranks_of(NINE_HEADS, 3)
    shared, whole = engines(started)
    assert outputs(shared) == outputs(whole)
    assert started[1].num_sums == 2 * NINE_HEADS["num_hidden_layers"] * NUM_STEPS


NUM_STEPS = 12  # of `outputs`: all prompts fit into the first


def test_preemption_and_chunks(ranks_of):
    tight = dict(num_blocks=12, max_num_batched_tokens=8, max_num_seqs=4)
    shared, whole = engines(ranks_of(BIASED, 2), **tight)
    freed = spy(shared.scheduler.kv, "free")
    assert outputs(shared) == outputs(whole)
    assert any(args[0].num_preemptions for args in freed), "nothing was preempted"


def test_answers_to_one_prompt_copy_its_last_block_on_every_rank(ranks_of):
    shared, whole = engines(ranks_of(BIASED, 2))
    copied = spy(shared.scheduler.kv, "copy_block")
    params = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=4, n=2)
    ours, theirs = (LLM.from_engine(engine).generate(PROMPTS, params) for engine in (shared, whole))
    assert [[a.token_ids for a in o.outputs] for o in ours] == [
        [a.token_ids for a in o.outputs] for o in theirs
    ]
    assert copied, "no block was copied"


def test_logprobs_of_prompts_are_summed_too(ranks_of):
    shared, whole = engines(ranks_of(BIASED, 2))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    ours, theirs = (LLM.from_engine(engine).generate(PROMPTS, params) for engine in (shared, whole))
    for one, other in zip(ours, theirs, strict=True):
        for chances, expected in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            values = {i: shown.logprob for i, shown in expected.items()}
            assert {i: shown.logprob for i, shown in chances.items()} == pytest.approx(values, abs=1e-4)


def test_a_step_that_is_taken_back_and_an_abort_are_rank_0s_alone(ranks_of, monkeypatch):
    shared, whole = engines(ranks_of(BIASED, 2))
    sampler, calls = shared.recovery.sampler, []

    def failing(logits, requests):
        calls.append(len(requests))
        if len(calls) == 3:
            raise TimeoutError("once")
        return sampler(logits, requests)

    monkeypatch.setattr(shared.recovery, "sampler", failing)
    ids = [shared.add_request(prompt, GREEDY) for prompt in PROMPTS]
    kept = [shared.requests[i] for i in ids[1:]]
    for number in range(5):
        try:
            shared.step()
        except TimeoutError:
            assert number == 2
    assert shared.abort(ids[0])
    drain(shared)
    assert [request.output_token_ids for request in kept] == outputs(whole)[1:]


def test_a_pool_has_the_local_heads_only(ranks_of):
    started = ranks_of(BIASED, 2)
    (shared, whole), worker = engines(started), started[2][0]
    drain(shared)
    outputs(shared)
    size = whole.backend.pool.k.shape
    assert shared.backend.pool.k.shape == worker.backend.pool.k.shape == (*size[:3], size[3] // 2, size[4])
    config = started[0].config
    assert 2 * KVPool.bytes_per_token(config, torch.float32) == KVPool.bytes_per_token(
        whole.model.config, torch.float32
    )


def test_an_error_on_one_rank_is_every_call_s_from_then_on(ranks_of):
    started = ranks_of(BIASED, 2)
    shared, _ = engines(started)
    shared.add_request(PROMPTS[0], GREEDY)
    shared.step()
    started[1].failure = "rank 1: ValueError: injected"
    for _ in range(2):
        with pytest.raises(ParallelError, match="^rank 1: ValueError: injected$"):
            shared.step()
    shared.abort("r0")


@pytest.mark.parametrize("size", [2, 4, 5])
def test_sizes_that_do_not_divide_are_refused(tmp_path, size):
    weights = open_folder(write_folder(tmp_path / "model", NINE_HEADS))
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} does not divide .* use 1 or 3$"):
        share(weights, 0, size)


def test_sizes_of_the_known_models():
    for name, works in {"shakespeare": [1, 2], "smollm2": [1, 3]}.items():
        if not MODELS[name].is_present:
            continue
        config = sizes(name)
        found = []
        for size in range(1, 10):
            try:
                local_config(config, size)
                found.append(size)
            except ValueError:
                pass
        assert found == works, name


def sizes(name):
    from mini_engine.loading.files import opened
    from mini_engine.loading.weights import open_gguf

    source = opened(MODELS[name].path)
    return (open_folder(source) if name == "shakespeare" else open_gguf(source)).config


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({}, "needs 2 processes; start them with: torchrun --standalone --nproc-per-node 2 -m mini_engine"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "tensor_parallel_size is 2, but torchrun has started 3 processes"),
    ],
)
def test_without_torchrun_or_with_others(environment, match, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        Ranks(2)


# ------------------------------------------------------------------------------ real processes

INJECT = """
import os, sys
from mini_engine.commands import main
from mini_engine.distributed.tensor_parallel import Worker
calls, compute = [], Worker.compute
def failing(self, batch):
    calls.append(1)
    if len(calls) == 5 and os.environ["RANK"] == "1":
        open(os.environ["FAILED_AT"], "w").close()
        if os.environ["HOW"] == "killed":
            os.kill(os.getpid(), 9)
        raise ValueError("injected")
    compute(self, batch)
Worker.compute = failing
main()
"""


def generate(size, *args, script=None, **environment):
    """Run `mini-engine generate` in so many processes."""
    options = ["--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--logprobs", "0", *args]
    command = [sys.executable, "-m", "mini_engine", "generate", *options]
    if size > 1:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        target = [str(script)] if script else ["-m", "mini_engine"]
        command = [*run, *target, "generate", "--tensor-parallel", str(size), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


PLAYS = ["-m", "shakespeare", "-p", "O Romeo, ", "-p", "First " * 20 + "O Romeo, "]
CHATS = ["-m", "smollm2", "-p", "The capital of France is", "-p", "What? " * 20 + "Name three rivers."]


@pytest.mark.soak
@pytest.mark.parametrize(("size", "args"), [(2, PLAYS), (3, CHATS)], ids=["shakespeare", "smollm2"])
def test_torchrun_prints_the_tokens_of_one_process(size, args):
    if not MODELS[args[1]].is_present:
        pytest.skip(f"{args[1]} is not here; mini-engine models fetch {args[1]}")

    def tokens(run):
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        return [line.split()[0] for line in out.splitlines() if line[:6].strip().isdigit()], err

    (alone, _), (together, stderr) = tokens(generate(1, *args)), tokens(generate(size, *args))
    assert alone == together and len(alone) == 48
    num_sums = 2 * {"shakespeare": 4, "smollm2": 30}[args[1]]
    said = rf"24 steps of {num_sums} all-reduces on {size} ranks: [\d.]+ of a step's [\d.]+ ms"
    assert re.search(said, stderr), stderr


@pytest.mark.soak
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_an_error_on_one_rank_ends_all_within_five_seconds(how, tmp_path):
    script, failed = tmp_path / "inject.py", tmp_path / "failed"
    script.write_text(INJECT)
    run = generate(2, *PLAYS, script=script, FAILED_AT=str(failed), HOW=how)
    came = [(line, time.time()) for line in run.stderr]
    ended = next(when for line, when in came if "ChildFailedError" in line)  # torchrun has seen all end
    assert ended - failed.stat().st_mtime < 5
    stderr = "".join(line for line, _ in came)
    assert run.wait(60) == 1 and "Signal 6" not in stderr
    words = "error: rank 1: ValueError: injected" if how == "raises" else r"Signal 9 \(SIGKILL\) received"
    assert re.search(words, stderr), stderr
