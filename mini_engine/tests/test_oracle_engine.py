"""The whole engine against transformers' generate: float32, greedy, token for token.

Requests run together, chunked, cached and preempted.
"""

import random

import pytest
import torch

from mini_engine.engine import Engine
from mini_engine.loading import registry as models
from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.tests.helpers import generated, greedy
from mini_engine.tests.soak import SOAK, count
from mini_engine.tests.test_oracle_model import LLAMA3, make, their_greedy, transformers


def generate(theirs, prompts, max_tokens):
    """transformers' answers, in one batch; in the soak one by one, which needs no padding."""
    if not SOAK:
        return their_greedy(theirs, prompts, max_tokens)
    return [their_greedy(theirs, [prompt], max_tokens)[0] for prompt in prompts]


def serve(model, prompts, max_tokens, tokenizer=None, **settings):
    """All prompts at once, greedy: (outputs in order, the engine)."""
    engine = Engine(model, tokenizer, record=True, **settings)
    return generated(engine, prompts, greedy(max_tokens)), engine


def num_preempted(engine):
    return sum(e.type == "PREEMPTED" for r in engine.trace.steps for e in r.events)


SMALL = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
TINY = {
    "llama": ("Llama", dict(num_key_value_heads=2, rope_parameters=LLAMA3)),
    "llama-tied-biases": ("Llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "qwen2": ("Qwen2", dict(num_key_value_heads=2)),
    "qwen3": ("Qwen3", dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)),
}


@pytest.fixture(scope="module", params=TINY)
def tiny(request, tmp_path_factory):
    """(our model, theirs): a random checkpoint that transformers has saved."""
    family, changes = TINY[request.param]
    theirs = make(family, SMALL | changes)
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    return load_model(path, device="cpu"), theirs


@pytest.mark.parametrize("part", range(4 if SOAK else 1))
def test_random_workloads(tiny, part):
    """Small random workloads: lengths, shared beginnings, limits, pools and budgets, all drawn."""
    ours, theirs = tiny
    preempted = hits = 0
    for number in range(64 if SOAK else 3):
        seed = f"oracle {part} {number}"
        rng = random.Random(seed)
        shared = [rng.randrange(96) for _ in range(rng.randint(1, 30))]
        prompts = [
            shared[: rng.choice([0, 99])] + [rng.randrange(96) for _ in range(rng.randint(1, 12))]
            for _ in range(rng.randint(2, 5))
        ]
        max_tokens, block_size, slots = rng.randint(1, 16), rng.randint(1, 17), rng.randint(1, 5)
        longest = max(map(len, prompts)) + max_tokens - 1
        found, engine = serve(
            ours,
            prompts,
            max_tokens,
            block_size=block_size,
            num_blocks=-(-longest // block_size) + rng.randint(0, 2),
            max_num_batched_tokens=slots + rng.choice([0, 2, 9, 60]),
            max_num_seqs=slots,
            long_prefill_token_threshold=rng.choice([0, 0, 1, 6]),
            policy=rng.choice(["fcfs", "priority"]),
            enable_prefix_caching=rng.random() < 0.7,
            fast=rng.choice([True, "torch", False]),
        )
        assert found == generate(theirs, prompts, max_tokens), seed
        preempted += num_preempted(engine)
        hits += engine.scheduler.kv.stats.hits
        count("differential workloads against transformers")
        count("tokens compared with transformers", sum(map(len, found)))
    assert preempted and hits


PLAYS = ["O Romeo, ", "KING LEAR.\n", "To be", "Enter two", "The ", "My lord, I have ", "A", "What, ho!\n\n"]


def test_shakespeare():
    """The embedded model, eight openings through one engine with a tight pool."""
    path = models.resolve("shakespeare")
    theirs = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    prompts = [tokenizer.encode(text) for text in PLAYS]
    answers = generate(theirs, prompts, 40)
    for block_size in (4, 16) if SOAK else (4,):
        settings = {"num_blocks": -(-192 // block_size), "max_num_batched_tokens": 12, "max_num_seqs": 8}
        found, engine = serve(ours, prompts, 40, tokenizer, block_size=block_size, **settings)
        assert num_preempted(engine) > 0 and found == answers


CHATS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 2 + 3?",
    "Name three colours.",
    "Who wrote Hamlet?",
]
TEXTS = [
    "Once upon a time, there was a",
    "The three laws of motion are",
    "def fibonacci(n):\n",
    "In 1969, the first",
    "Water boils at",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_oracle):
    """(our model, tokenizer, prompts, their answers) of SmolLM2, both read from the same file."""
    path, theirs = smollm2_oracle
    tokenizer = load_tokenizer(path)
    prompts = []
    for text, question in zip(TEXTS, CHATS, strict=True):
        prompts.append(tokenizer.encode(text))
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": question}]))
    theirs.generation_config.eos_token_id = list(tokenizer.eos_token_ids)
    answers = their_greedy(theirs, prompts, 12)
    return load_model(path, device="cpu"), tokenizer, prompts, answers


@pytest.mark.soak
@pytest.mark.parametrize(("block_size", "budget"), [(3, 24), (16, 64)])
def test_smollm2(smollm2, block_size, budget):
    """Ten prompts of chat and plain text through one engine, chunked and preempted."""
    model, tokenizer, prompts, answers = smollm2
    settings = {"num_blocks": -(-80 // block_size), "max_num_batched_tokens": budget, "max_num_seqs": 10}
    found, engine = serve(model, prompts, 12, tokenizer, block_size=block_size, **settings)
    assert num_preempted(engine) > 0
    assert found == answers
    assert "Paris" in tokenizer.decode(found[1])
