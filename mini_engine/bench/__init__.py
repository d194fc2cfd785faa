"""The engine against transformers, on the same weights and prompts, in tokens a second.

The workload is the one that static batching is bad at: prompts and outputs of mixed length. The
opponents take turns, so that a noisy machine is noisy to both; medians are compared.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import DTYPES, choose_device, load_model
from mini_engine.request import SamplingParams


@dataclass
class Workload:
    prompts: list[list[int]]
    num_outputs: list[int]

    @classmethod
    def mixed(cls, vocab_size: int, num_prompts: int = 32, seed: int = 0) -> "Workload":
        """Prompts of 16 to 256 random tokens, outputs of 16, 32, 64 or 128."""
        rng = random.Random(seed)
        prompts = [
            [rng.randrange(vocab_size) for _ in range(rng.randint(16, 256))] for _ in range(num_prompts)
        ]
        return cls(prompts, [rng.choice((16, 32, 64, 128)) for _ in prompts])


@dataclass
class Result:
    """Wall seconds of every round, and the tokens that each contestant gave."""

    seconds: dict[str, list[float]]
    tokens: dict[str, list[list[int]]]
    num_output_tokens: int

    def rate(self, name: str) -> float:
        """Output tokens a second, by the median round."""
        return self.num_output_tokens / statistics.median(self.seconds[name])

    def ratios(self, name: str, baseline: str) -> list[float]:
        """How many times faster `name` was, round by round."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def num_equal(self, name: str, baseline: str) -> int:
        pairs = zip(self.tokens[name], self.tokens[baseline], strict=True)
        return sum(ours == theirs for ours, theirs in pairs)


def run(
    contestants: dict[str, Callable[[Workload], list[list[int]]]],
    load: Workload,
    rounds: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """Let each contestant serve the workload once to warm up, then in turns; `tell` hears of each turn."""
    tokens: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, serve in contestants.items():
            start = time.perf_counter()
            tokens[name] = serve(load)
            seconds[name].append(time.perf_counter() - start)
            tell(
                f"{f'round {number} of {rounds}' if number else 'warm-up'}: {name} {seconds[name][-1]:.2f} s"
            )
    timed = {name: all_seconds[1:] for name, all_seconds in seconds.items()}
    return Result(timed, tokens, sum(load.num_outputs))


def table(result: Result, name: str = "mini-engine", baseline: str = "transformers"):
    """The comparison as a rich table, and the ratio with its spread as its caption."""
    shown = Table("", "median s", "min s", "max s", "output tokens/s", header_style="bold")
    for who, seconds in result.seconds.items():
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        shown.add_row(who, *(f"{n:.2f}" for n in numbers), f"{result.rate(who):.1f}")
    ratios = result.ratios(name, baseline)
    shown.caption = (
        f"{name} is {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f} "
        f"over {len(ratios)} rounds); tokens equal in {result.num_equal(name, baseline)} of "
        f"{len(result.tokens[name])} requests"
    )
    shown.caption_justify = "left"
    return shown


def mini_engine_contestant(path: Path, dtype: str = "float32", device: str = "auto", **engine_args):
    engine_args = {"max_num_seqs": 64, "max_num_batched_tokens": 512, **engine_args}
    model = load_model(path, dtype=dtype, device=device)
    engine = Engine(model, **engine_args)

    def serve(load: Workload) -> list[list[int]]:
        engine.scheduler.kv.reset_prefix_cache()  # every round starts cold
        tokens: dict[str, list[int]] = {}
        for prompt, n in zip(load.prompts, load.num_outputs, strict=True):
            tokens[engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=n))] = []
        while engine.has_work:
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
        return list(tokens.values())

    serve.vocab_size = model.config.vocab_size
    return serve


def transformers_contestant(path: Path, dtype: str = "float32", device: str = "auto"):
    """One left-padded batch, held together until its longest member is done.

    Raises ValueError for a dtype that is not one by name: "auto" is not the same on both sides.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(DTYPES)}, the same for both, but is {dtype!r}")
    device = choose_device(device)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if path.suffix == ".gguf" else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **where).eval().to(device)
    model.generation_config.eos_token_id = None  # run to the length that was asked for

    @torch.inference_mode()
    def serve(load: Workload) -> list[list[int]]:
        width = max(map(len, load.prompts))
        ids = torch.zeros(len(load.prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(load.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(load.num_outputs),
            do_sample=False,
            pad_token_id=0,
        )
        return [row[width : width + n].tolist() for row, n in zip(out, load.num_outputs, strict=True)]

    return serve
