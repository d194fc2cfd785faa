"""Measures fast/ part by part: python -m mini_engine.bench.measure WHAT [DTYPE [THREADS]]

`products`, `attention` and `sampling` are microseconds a call, at the sizes of SmolLM2-135M. The ways
alternate, each on weights or pages that the caches have forgotten, and medians are shown. `quality` is the
perplexity of the first 4,000 characters of Hamlet. docs/performance.md says what came of it; the whole engine
is measured by `mini-engine bench`.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mini_engine.attention import PagedBackend
from mini_engine.batch import build_batch
from mini_engine.block_manager import BlockManager
from mini_engine.fast import blocks, kernels, onednn, panels
from mini_engine.fast.attention import FastBackend
from mini_engine.fast.model import FastLM, Product
from mini_engine.interfaces import Row
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import DTYPES
from mini_engine.loading.shakespeare.plays import load_plays
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import Sampler

SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 2048, tie_word_embeddings=True)
PRODUCTS = {"gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}  # columns in, columns out
ROWS = (1, 8, 32, 128, 512)
CACHE = 2**27  # bytes: more than a processor's caches hold
KERNELS = "kernels"
LAYERS = 8  # so many layers' pages together, too
WAYS = ("attention.py", "torch", "kernel")
# Requests as (new tokens, tokens in all).
STEPS = {
    "1 decode at 100": [(1, 100)],
    "32 decodes at 60 to 320": [(1, random.Random(i).randint(60, 320)) for i in range(32)],
    "32 decodes at 560, 512 shared": [(1, 560)] * 32,
    "4 decodes at 2,000": [(1, 2000)] * 4,
    "4 first chunks of 130": [(130, 130)] * 4,
    "a chunk, 1,488 to 2,000": [(512, 2000)],
}
SAMPLING = {
    "greedy": SamplingParams(max_tokens=1, temperature=0),
    "temperature 1": SamplingParams(max_tokens=1),
    "temperature 1, top_p 0.9": SamplingParams(max_tokens=1, top_p=0.9),
}


def medians(ways: Mapping[str, Callable[[int], object]], num_copies: int, rounds: int) -> dict[str, float]:
    """Microseconds of each way's call on copy 0, 1, 2 … of what it reads, after a round to warm up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, call in ways.items():
            for copy in range(num_copies):
                start = time.perf_counter()
                call(copy)
                if turn:
                    seconds[way].append(time.perf_counter() - start)
    return {way: 1e6 * statistics.median(all_seconds) for way, all_seconds in seconds.items()}


def products(dtype: str, rounds: int = 3) -> Iterator[list[str]]:
    """A line for each matrix and number of rows: plain, packed by oneDNN, by the kernels; then how often the
    kernels are quicker than the better of the others, and their GB and GFLOP a second."""
    wide = DTYPES.get(dtype, torch.float32)
    built = kernels.load(wide)
    packings: dict[str, Callable[[Tensor], Product]] = (
        {"oneDNN": onednn.Linear} if onednn.can_pack(wide) else {}
    )
    if built:
        packings[KERNELS] = (
            partial(blocks.Linear, built, 4) if dtype == "q4" else partial(panels.Linear, built)
        )
    for name, (columns_in, columns_out) in PRODUCTS.items():
        size = columns_in * columns_out * wide.itemsize
        weights = [torch.randn(columns_out, columns_in, dtype=wide) for _ in range(max(2, CACHE // size))]
        copies: dict[str, Sequence[Callable[[Tensor], Tensor]]] = {
            "F.linear": [partial(F.linear, weight=w) for w in weights]
        }
        copies |= {way: [pack(w) for w in weights] for way, pack in packings.items()}
        if dtype == "q4":
            size = size * 6 // 32  # of 32 bits, 4 and a share of the block's 64
        for rows in ROWS:
            x = torch.randn(rows, columns_in, dtype=wide)
            took = medians(
                {way: partial(_multiplied, of, x) for way, of in copies.items()}, len(weights), rounds
            )
            line = [f"{took[way]:,.0f}" if way in took else "" for way in ("F.linear", "oneDNN", KERNELS)]
            if ours := took.pop(KERNELS, 0):
                speed = size / ours / 1e3, 2 * rows * columns_in * columns_out / ours / 1e3
                line += [f"{min(took.values()) / ours:.2f}", *(f"{s:.0f}" for s in speed)]
            yield [f"{name}, {rows}", *line]


def _multiplied(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor, copy: int) -> Tensor:
    return products[copy](x)


def attention(dtype: str, rounds: int = 10) -> Iterator[list[str]]:
    """A line for each kind of step: one layer's attention by attention.py, by torch, by the kernel."""
    config = replace(SMOLLM2, num_hidden_layers=LAYERS, vocab_size=8)
    wide = DTYPES[dtype]
    model = CausalLM(config).to(wide).requires_grad_(False)
    kv = BlockManager(600, 16, enable_prefix_caching=False)
    backends = [PagedBackend(model, kv), *(FastBackend(FastLM(model, way), kv) for way in (False, True))]
    for name, requests in STEPS.items():
        rows = [_row(kv, str(i), *request) for i, request in enumerate(requests)]
        heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        qkv = torch.randn(sum(row.num_tokens for row in rows), sum(heads), config.head_dim, dtype=wide)
        q, k, v = torch.split(qkv, heads, dim=1)
        batches = [build_batch(rows, kv) for _ in backends]
        if "shared" in name:
            for batch in batches:
                batch.block_tables[:, :32] = batch.block_tables[0, :32]
        calls = [
            partial(backend.attention_of(batch), q=q, k=k, v=v)
            for backend, batch in zip(backends, batches, strict=True)
        ]
        took = medians(dict(zip(WAYS, calls, strict=True)), LAYERS, rounds)
        yield [name, *(f"{us:,.0f}" for us in took.values())]
        for row in rows:
            kv.free(row.request)


def sampling(dtype: str) -> Iterator[list[str]]:
    """A line for each kind of sampling: microseconds of the Sampler for 1 and 32 rows."""
    logits = 3 * torch.randn(32, SMOLLM2.vocab_size, dtype=DTYPES[dtype])
    for name, params in SAMPLING.items():
        requests = [Request(str(i), [0], params) for i in range(32)]

        took = medians({str(n): partial(_sample, logits[:n], requests[:n]) for n in (1, 32)}, 1, 10)
        yield [name, *(f"{us:,.0f}" for us in took.values())]


def _sample(logits: Tensor, requests: list[Request], copy: int) -> list[int]:
    return Sampler()(logits, requests)


def quality(dtype: str) -> Iterator[list[str]]:
    """A line for each model that is here: its perplexity in float32 and in this dtype."""
    text = load_plays()["hamlet"][:4000]
    for model in ("shakespeare", "smollm2"):
        with suppress(FileNotFoundError):
            yield [model, *(f"{_perplexity(LLM(model, dtype=d), text):.3f}" for d in ("float32", dtype))]


def _perplexity(llm: LLM, text: str) -> float:
    """Perplexity of a text, in pieces of 500 tokens."""
    tokens = llm.tokenizer.encode(text)
    pieces = [tokens[i : i + 500] for i in range(0, len(tokens), 500)]
    outputs = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    pairs = [zip(one.prompt_token_ids, one.prompt_logprobs or (), strict=True) for one in outputs]
    logprobs = [of[token].logprob for pair in pairs for token, of in pair if of is not None]
    return math.exp(-statistics.fmean(logprobs))


def _row(kv: BlockManager, request_id: str, num_new: int, length: int) -> Row:
    """A request that has computed all but `num_new` of its tokens, its pages in no order."""
    request = Request(request_id, [0] * length, SamplingParams(max_tokens=1))
    kv.admit(request)
    random.Random(0).shuffle(kv.block_table(request))
    request.num_computed_tokens = length - num_new
    return Row(request, num_new, True)


@torch.inference_mode()
def main(what: str = "", dtype: str = "float32", threads: str = "2") -> None:
    measures: dict[str, tuple[Any, list[str]]] = {
        "products": (products, ["matrix, rows", "F.linear", "oneDNN", KERNELS, "ratio", "GB/s", "GFLOP/s"]),
        "attention": (attention, ["step", *WAYS]),
        "sampling": (sampling, ["tokens are", "1 row", "32 rows"]),
        "quality": (quality, ["model", "float32", dtype]),
    }
    known = DTYPES if what in ("attention", "sampling") else (*DTYPES, "q4")
    if what not in measures or dtype not in known or not threads.isdigit():
        raise SystemExit(__doc__)
    if (what == "attention" or dtype == "q4") and kernels.load(DTYPES.get(dtype, torch.float32)) is None:
        raise SystemExit("the kernels are not built; run mini-engine kernels build")
    torch.set_num_threads(int(threads))
    measure, columns = measures[what]
    unit = "perplexity" if what == "quality" else "microseconds"
    table = Table(*columns, title=f"{dtype}, {threads} threads, {unit}", header_style="bold")
    for line in measure(dtype):
        table.add_row(*line)
    Console(width=100).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
