"""Shared parts of the engine's tests.

`record_run` runs a scheduler with made-up tokens. `SlotEngine` is scheduler and block manager with a model
of fingerprints, without torch, that checks itself in every step. Below it: tiny real models, the dense
reference, a tokenizer of bytes, and an engine whose "model" gives the tokens of a script.
"""

import copy
import functools
import hashlib
import random
import time

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.interfaces import Row
from mini_engine.request import Request, SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.trace import Recorder, Trace, VirtualClock

VOCAB = 5  # of the fingerprint model: so few that equal blocks are common


def make_request(request_id, prompt=4, max_tokens=4, *, priority=0, cache_salt="", eos=(), **sampling):
    """`prompt` is a list of token ids, or a length; of one length and id, always the same tokens."""
    if isinstance(prompt, int):
        rng = random.Random(str(request_id))
        prompt = [rng.randrange(VOCAB) for _ in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **sampling)
    return Request(request_id, prompt, params, priority, cache_salt=cache_salt, eos_token_ids=eos)


def greedy(max_tokens=8, **sampling):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **sampling)


def computed(kv, request: Request, num_tokens=None) -> list[int]:
    """Admit a request, act as if its tokens, or so many, were computed, and return its block table."""
    assert kv.admit(request)
    request.num_computed_tokens = num_tokens or request.num_tokens
    kv.cache_blocks(request)
    return kv.block_table(request)


def record_run(scheduler, arrivals, *, token=lambda request: 7, before=None, after=None, **options) -> Trace:
    """Return the trace of (step, Request) arrivals, by step, each output of which is `token(request)`.

    `before` and `after` are called around each step, with the Recorder; `options` are the Recorder's.
    """
    recorder, left, requests = Recorder(scheduler, **options), list(arrivals), {}
    while left or recorder.has_work:
        while left and (left[0][0] <= recorder.step or not recorder.has_work):
            request = left.pop(0)[1]
            requests[request.request_id] = request
            recorder.add(request)
        if before:
            before(recorder)
        if not recorder.has_work:
            continue
        scheduled = recorder.schedule()
        assert scheduled, "nothing is scheduled although there is work"
        ends = [name for name, n in scheduled.items() if n == requests[name].num_new_tokens]
        recorder.update(scheduled, {name: [token(requests[name])] for name in ends})
        if after:
            after(recorder)
    return recorder.close("drained")


@functools.lru_cache(2**16)
def fingerprint(before: bytes, token_id: int) -> bytes:
    """Return the fingerprint of a sequence from its last token and that of all before it."""
    return hashlib.blake2b(before + token_id.to_bytes(4, "big"), digest_size=8).digest()


def choice(request: Request, read: bytes) -> int:
    """Return the model's token after a sequence with this fingerprint. Seeds make siblings differ."""
    return (read[0] + (request.sampling_params.seed or 0)) % VOCAB


def expected_tokens(request: Request) -> list[int]:
    """Return the outputs of a request by the fingerprint model, alone and computed in one piece."""
    read, outputs = b"", []
    for token_id in request.prompt_token_ids:
        read = fingerprint(read, token_id)
    while len(outputs) < request.max_tokens:
        outputs.append(choice(request, read))
        if outputs[-1] in request.sampling_params.stop_token_ids:
            break
        if outputs[-1] in request.eos_token_ids and not request.sampling_params.ignore_eos:
            break
        read = fingerprint(read, outputs[-1])
    return outputs


class SlotEngine:
    """An engine whose KV slots hold fingerprints.

    The right content of a slot is known for every position of every request, so each read is checked:
    it must be the fingerprint of exactly this request's tokens up to there. `trace` has the run.
    """

    def __init__(self, num_blocks=64, block_size=4, *, caching=True, watermark=0, manager=None, **settings):
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
        manager = manager or BlockManager
        self.kv = manager(num_blocks, block_size, enable_prefix_caching=caching, watermark=watermark)
        self.recorder = Recorder(Scheduler(self.kv, **settings), clock=VirtualClock())
        self.scheduler = self.recorder.scheduler
        self.settings = settings
        self.slots: dict[int, bytes] = {}
        self.requests: dict[str, Request] = {}
        self.preemptions: list[str] = []  # ids, in order
        self.copies: list[int] = []  # numbers of tokens
        self.kv.copy_block = self.copy_block

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        self.copies.append(num_tokens)
        for i in range(num_tokens):
            self.slots[target * self.kv.block_size + i] = self.slots[source * self.kv.block_size + i]

    @property
    def trace(self) -> Trace:
        return self.recorder.snapshot()

    def add(self, *requests: Request) -> "SlotEngine":
        for request in requests:
            self.recorder.add(request)
            self.requests[request.request_id] = request
        return self

    def abort(self, request_id: str) -> bool:
        found = self.recorder.abort(request_id)
        self.kv.check()
        return found

    def step(self) -> dict[str, int]:
        """Run one step and check its invariants; return what was scheduled."""
        before = list(self.scheduler.running)
        scheduled = self.recorder.schedule()
        running = self.scheduler.running
        gone = [request.request_id for request in before if request not in running]
        admitted = [request for request in running if request not in before]
        self.preemptions += gone
        assert sum(scheduled.values()) <= self.settings["max_num_batched_tokens"]
        assert len(running) <= self.settings["max_num_seqs"]
        assert list(scheduled) == [request.request_id for request in running], "each runs, in admission order"
        assert all(num_tokens > 0 for num_tokens in scheduled.values())
        assert not (gone and admitted), "no request is admitted in a step that preempts"
        finished = self.recorder.update(scheduled, self.compute(running, scheduled))
        assert not any(request in self.scheduler.running for request in finished)
        self.kv.check()
        return scheduled

    def compute(self, running, scheduled) -> dict[str, list[int]]:
        """Compute the forward pass: every request writes its slots, then each reads all of its own."""
        truth = {}
        for request in running:
            prints, size = [b""], scheduled[request.request_id]
            for token_id in request.token_ids():
                prints.append(fingerprint(prints[-1], token_id))
            start, end = request.num_computed_tokens, request.num_computed_tokens + size
            assert end <= request.num_tokens
            for position, slot in zip(
                range(start, end), self.kv.slot_mapping(request, start, end), strict=True
            ):
                self.slots[slot] = prints[position + 1]
            truth[request.request_id] = prints
        sampled = {}
        for request in running:
            prints = truth[request.request_id]
            end = request.num_computed_tokens + scheduled[request.request_id]
            for position, slot in enumerate(self.kv.slot_mapping(request, 0, end)):
                assert self.slots.get(slot) == prints[position + 1], (
                    f"{request.request_id} reads foreign content at position {position} (slot {slot})"
                )
            if end == request.num_tokens:
                sampled[request.request_id] = [choice(request, prints[end])]
        return sampled

    def run(self, max_steps=2000) -> "SlotEngine":
        """Run to the end; every request must then have the tokens that it has alone."""
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < max_steps, "no end"
        self.check_drained()
        for request in self.requests.values():
            expected = expected_tokens(request)
            if request.finish_reason == "abort":
                expected = expected[: len(request.output_token_ids)]
            assert request.output_token_ids == expected, request.request_id
        return self

    def check_drained(self) -> None:
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert len(self.scheduler.waiting) == 0 and self.scheduler.running == []
        assert not any(self.kv.block_table(request) for request in self.requests.values())
        self.kv.check()


def random_workload(seed: int) -> tuple[dict, list[tuple[int, Request]]]:
    """Return settings for a SlotEngine, and requests with their steps of arrival. Pools are tight:
    the longest request fits, and little more."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 7])
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    arrivals = []
    for i in range(rng.randint(3, 9)):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
        prompt = shared[: rng.choice([0, 0, 5, 12])] + own
        request = make_request(f"q{i}", prompt, rng.randint(1, 12), priority=rng.choice([0, 0, 1, 2]))
        arrivals.append((rng.randint(0, 8), request))
    longest = max(r.num_prompt_tokens + r.max_tokens - 1 for _, r in arrivals)
    max_num_seqs = rng.randint(1, 6)
    settings = dict(
        num_blocks=-(-longest // block_size) + rng.randint(0, 3),
        block_size=block_size,
        caching=rng.random() < 0.7,
        watermark=rng.choice([0, 0, 1]),
        policy=rng.choice(["fcfs", "priority"]),
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 5, 40]),
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 4]),
    )
    settings["watermark"] = min(settings["watermark"], settings["num_blocks"] - 1)
    return settings, sorted(arrivals, key=lambda item: item[0])


def play(settings: dict, arrivals, *, before=None, stop_after: int | None = None, **options) -> SlotEngine:
    """Run requests that arrive at given steps to the end, or for some steps. `before` is called with the
    engine before each; `options` are the Recorder's."""
    engine, left, step = SlotEngine(**settings), list(arrivals), 0
    if options:
        engine.recorder = Recorder(engine.scheduler, **options)
    while left or engine.scheduler.has_work:
        while left and left[0][0] <= step:
            engine.add(left.pop(0)[1])
        if before:
            before(engine)
        if engine.scheduler.has_work:
            engine.step()
        step += 1
        assert step < 3000, "no end"
        if step == stop_after:
            return engine
    return engine.run()


@functools.cache
def random_run(seed: int) -> SlotEngine:
    """Return the finished run of a random workload. It is shared: do not change it."""
    return play(*random_workload(seed))


@functools.lru_cache(None, typed=True)  # 1 is not True
def random_trace(seed: int, keep=True, stop_after: int | None = None) -> Trace:
    """Return a shared run: tight pools, late arrivals, aborts between steps, reused ids, its own clock."""
    rng = random.Random(seed)

    def abort_some(engine):
        if rng.random() < 0.15 and (there := [*engine.scheduler.running, *engine.scheduler.waiting]):
            request = rng.choice(there)
            engine.abort(request.request_id)
            if rng.random() < 0.5:
                engine.add(make_request(request.request_id, request.prompt_token_ids, 3))

    options = {"clock": VirtualClock(lambda record: 0.25 + record.num_batched_tokens), "keep": keep}
    return play(*random_workload(seed), before=abort_some, stop_after=stop_after, **options).trace


def drafted(num_blocks, size=1, prompt=3, max_tokens=9, drafts=(5, 5, 5), others=0):
    """A scheduler with requests in decode, the first of them with drafts, and that request."""
    kv = BlockManager(num_blocks, size, watermark=0)
    scheduler = Scheduler(kv, max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(1 + others):
        scheduler.add(make_request(f"q{i}", prompt, max_tokens))
    scheduler.update(scheduler.schedule(), {f"q{i}": [4] for i in range(1 + others)})
    scheduler.running[0].spec_token_ids = list(drafts)
    return scheduler, scheduler.running[0]


def refusal(call, *words, error=ValueError):
    """The call is refused at once, with one short line that has the words."""
    started = time.perf_counter()
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert len(said.splitlines()) == 1 and len(said) < 600, said
    for word in words:
        assert word in said, said
    assert time.perf_counter() - started < 5, "sizes are judged before work"


def until(holds, seconds=30):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never comes true"
        time.sleep(0.01)


def table(rows):
    return pytest.mark.parametrize("row", rows, ids=[ascii_id(i, row[0]) for i, row in enumerate(rows)])


def every_third(one, values, other, others):
    """Parametrize two arguments by every third pair of values; the others are left to the soak."""
    rows = [
        pytest.param(a, b, marks=pytest.mark.soak if (i + j) % 3 else ())
        for i, a in enumerate(values)
        for j, b in enumerate(others)
    ]
    return pytest.mark.parametrize((one, other), rows)


def ascii_id(number, name):
    return f"{number}-{name}"[:70].encode("ascii", "replace").decode()


# ------------------------------------------------------------------------------ with torch


def tiny_model(model_type="llama", dtype="float64", seed=0, **changes):
    """A random decoder of two layers, every weight drawn, biases and norms too."""
    import torch

    from mini_engine.loading.config import read_config
    from mini_engine.model import CausalLM

    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    config = read_config(
        dict(
            model_type=model_type,
            vocab_size=64,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            max_position_embeddings=128,
        )
        | changes
    )
    model = CausalLM(config).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model.to(getattr(torch, dtype))


def dense_logits(model, token_ids):
    """Return (num tokens, vocab_size): one plain causal forward pass without cache and batch."""
    return _dense_logits(model, tuple(token_ids))


@functools.cache
def _dense_logits(model, token_ids):
    import torch

    from mini_engine.model import sdpa

    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        positions = torch.arange(len(token_ids)).unsqueeze(0)
        hidden = model(ids, positions, lambda layer, q, k, v: sdpa(q, k, v, is_causal=True))
        return model.logits(hidden)[0]


def alone(model, prompt, sampling) -> list[int]:
    """Return the outputs of a request alone, with the whole sequence computed again for each token."""
    return list(_alone(model, tuple(prompt), sampling))


@functools.cache
def _alone(model, prompt, sampling):
    from mini_engine.sampler import Sampler

    request, sampler = Request("alone", prompt, sampling), Sampler()
    while request.finish_reason is None:
        logits = dense_logits(model, request.token_ids())[-1:]
        request.output_token_ids += sampler(logits, [request])
        request.finish_reason = request.check_stop()
    return request.output_token_ids


def byte_tokenizer():
    """Return a tokenizer of bytes: ids 0 to 255 in the order of the byte-level alphabet; 256 ends a text."""
    return copy.copy(_byte_tokenizer())  # a test may give it a template


@functools.cache
def _byte_tokenizer():
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from mini_engine.text.tokenizer import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, source="bytes", eos_token_ids=[256])


def scripted_engine(scripts: dict, **settings):
    """Return an Engine whose model gives request `id` the tokens (or the text) scripts[id], one per step.

    After its script a request gets only ".". `engine.backend.calls` counts the forward passes.
    """
    import torch

    from mini_engine.engine import Engine
    from mini_engine.parts import Parts

    tokenizer = byte_tokenizer()
    tokens = {i: tokenizer.encode(s) if isinstance(s, str) else s for i, s in scripts.items()}
    dot = tokenizer.encode(".")[0]

    class Scripted:
        name = "scripted"
        writes_before_reading = True  # it does neither

        def __init__(self, model, kv, parts):
            self.calls = 0

        def forward(self, rows):
            self.calls += 1
            chosen = []
            for row in rows:
                script, done = tokens.get(row.request.request_id, []), len(row.request.output_token_ids)
                script = script[done : done + row.num_logits]
                chosen += script + [dot] * (row.num_logits - len(script))
            return 10.0 * torch.nn.functional.one_hot(torch.tensor(chosen, dtype=torch.int64), 257)

        def copy_block(self, source, target, num_tokens):
            pass  # it reads no keys and values

    settings = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    settings = {"record": True} | settings
    parts = Parts(attend_backend=Scripted, **settings.pop("parts", {}))
    return Engine(_unread_model(), tokenizer, parts=parts, **settings)


@functools.cache
def _unread_model():
    from mini_engine.fast.model import prepare

    return prepare(tiny_model(vocab_size=257, dtype="float32"))


def drain(engine, max_steps=1000) -> dict[str, list]:
    """Step an Engine to the end, with the block manager checked each time; return the deltas by request."""
    deltas: dict[str, list] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        engine.scheduler.kv.check()
    assert not engine.has_work, "no end"
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    return deltas


def generated(engine, prompts, params) -> list[list[int]]:
    """Return the tokens of requests that are added together, in their order."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    deltas = drain(engine)
    return [tokens_of(deltas[request_id]) for request_id in ids]


def tokens_of(deltas: list) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def text_of(deltas: list) -> str:
    return "".join(delta.text for delta in deltas)


def outcome(said: dict[str, list]) -> dict[str, tuple]:
    """Return what came of each request: its tokens, its text, and why it ended."""
    return {n: (tokens_of(d), text_of(d), d[-1].finish_reason, d[-1].stop_reason) for n, d in said.items()}


def row(request: Request, num_tokens: int) -> Row:
    """Return the row of a request that computes `num_tokens` in a step."""
    return Row(request, num_tokens, num_tokens == request.num_new_tokens)


def spy(owner, name: str) -> list[tuple]:
    """Wrap a method and return the list of its calls' arguments."""
    calls, method = [], getattr(owner, name)

    def noting(*args):
        calls.append(args)
        return method(*args)

    setattr(owner, name, noting)
    return calls
