"""This engine, as it comes. Variants: "torch" without its C++ kernel, "simple" without fast/, "plain" without
the drafts that it is asked for, or a slower way to serve, named as in sim/baselines.py.

"floor" is a lower bound of its steps' time: the matrix products of the same steps alone, in this process, and
the weights read once a step at the speed at which this machine reads memory.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mini_engine import __version__
from mini_engine.backends.two_pass import baseline_parts
from mini_engine.block_manager import BlockManager
from mini_engine.config import SpeculativeConfig
from mini_engine.engine import Engine
from mini_engine.fast.model import Fast, FastLM
from mini_engine.interfaces import Row
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import load_model
from mini_engine.model import CausalLM
from mini_engine.parts import Parts
from mini_engine.request import SamplingParams
from mini_engine.sim.baselines import BASELINES

FAST: dict[str, Fast] = {"": True, "torch": "torch", "simple": False, "plain": True}

Product = Callable[[Tensor], Tensor]


class Peer:
    def __init__(
        self, model: str, dtype: str, threads: int, device: str, speculative: str | None = None, **_: Any
    ) -> None:
        torch.set_num_threads(threads)
        self.speculative = speculative
        self.model = load_model(model, dtype, device)
        self.versions = {"mini-engine": __version__, "torch": torch.__version__}
        self.served: dict[str, Served] = {}

    def variant(self, name: str) -> tuple[Any, str]:
        if name == "floor":
            return self.floor, "the products of the engine's steps alone"
        if name not in self.served:
            self.served[name] = Served(self.model, name, self.speculative)
        return self.served[name], self.served[name].settings

    @torch.inference_mode()
    def floor(self, prompts: list[list[int]], num_outputs: list[int]) -> dict[str, Any]:
        """Return the seconds of the products, and of reading the weights, over this workload's steps."""
        served = self.variant("")[0]
        if served.last != (prompts, num_outputs):
            served(prompts, num_outputs)
        steps, model = served.steps, served.model
        layers, (head, width) = list(products(model)), (head_of(model), model.config.hidden_size)
        widths, most = {width, *(width for _, width in layers)}, max(num_rows for num_rows, _ in steps)
        x = {width: torch.zeros(most, width, dtype=model.dtype, device=model.device) for width in widths}
        start = time.perf_counter()
        for num_rows, num_sampled in steps:
            for product, in_features in layers:
                product(x[in_features][:num_rows])
            if num_sampled:
                logits = head(x[width][:num_sampled])
        logits[0, 0].item()  # the last step has a sampled row; a GPU is done when this is known
        seconds = time.perf_counter() - start
        reading = len(steps) * weight_bytes(model) / read_bandwidth(model.device)
        return {"seconds": seconds, "reading": reading, "num_steps": len(steps)}


def settings_on(device: torch.device) -> dict[str, Any]:
    """Return the engine's settings; on a GPU, six tenths of the free memory are for keys and values."""
    if device.type == "cpu":
        return {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    free, _ = torch.cuda.mem_get_info(device)
    return {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_bytes": free * 6 // 10}


class Served:
    """An engine of one variant, and the steps of its last workload."""

    def __init__(self, model: CausalLM, variant: str, speculative: str | None) -> None:
        settings, fast = settings_on(model.device), FAST.get(variant, True)
        if variant not in FAST | BASELINES:
            raise ValueError(f"no variant {variant!r}; there are {', '.join([*FAST, *BASELINES][1:])}")
        drafts = speculative if variant in FAST and variant != "plain" else None
        settings["speculative_config"] = SpeculativeConfig.parse(drafts) if drafts else None
        if variant not in FAST:
            settings["parts"] = Parts(**baseline_parts(variant))
            settings["enable_prefix_caching"] = BASELINES[variant].backend != "padded"
        self.engine = Engine(model, fast=fast, **settings)
        self.llm, self.model = LLM.from_engine(self.engine), self.engine.model
        with_kernel = isinstance(self.model, FastLM) and self.model.kernels
        how = "the C++ kernel" if with_kernel else "torch alone" if fast else "model.py and attention.py"
        policy = "" if variant in FAST else f"{BASELINES[variant].about}; "
        most, budget = settings["max_num_seqs"], settings["max_num_batched_tokens"]
        self.settings = f"{policy}{how}, {most} sequences, {budget:,} tokens a step"
        self.settings += f", drafts by {drafts}" if drafts else ""
        self.steps: list[tuple[int, int]] = []  # the rows of each, and those that are sampled
        self.last: object = None
        self.forward, self.engine.backend.forward = self.engine.backend.forward, self.counted  # type: ignore

    def counted(self, rows: list[Row]) -> Tensor:
        self.steps.append((sum(row.num_tokens for row in rows), sum(row.num_logits for row in rows)))
        return self.forward(rows)

    def __call__(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        if isinstance(self.engine.scheduler.kv, BlockManager):
            self.engine.scheduler.kv.reset_prefix_cache()  # every turn starts cold
        self.steps.clear()
        params = [SamplingParams(temperature=0, max_tokens=n) for n in num_outputs]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.last = (prompts, num_outputs)
        return [output.outputs[0].token_ids for output in outputs]


def products(model: CausalLM) -> Iterator[tuple[Product, int]]:
    """Yield the matrix products of all layers as the engine computes them, each with its input's width."""
    layer: Any
    config = model.config
    hidden, attention = config.hidden_size, config.num_attention_heads * config.head_dim
    if isinstance(model, FastLM):
        for layer in model.packed_layers:
            yield from ((layer.qkv, hidden), (layer.o, attention))
            yield from ((layer.gate_up, hidden), (layer.down, config.intermediate_size))
        return
    for layer in model.layers:
        yield from ((layer.self_attn.qkv_proj, hidden), (layer.self_attn.o_proj, attention))
        yield from ((layer.mlp.gate_up_proj, hidden), (layer.mlp.down_proj, config.intermediate_size))


def head_of(model: CausalLM) -> Product:
    return model.head if isinstance(model, FastLM) else model.lm_head


def weight_bytes(model: CausalLM) -> int:
    """Return the bytes of weights that a step reads: all but the embedding, of which it takes a few rows."""
    config = model.config
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    layers, head = config.num_hidden_layers * layer, config.hidden_size * config.vocab_size
    if model.quantized:  # each block of 32 has 64 bits beside its numbers of 4 and of 8 bits
        return layers * 6 // 8 + head * 10 // 8
    return (layers + head) * model.dtype.itemsize


def read_bandwidth(device: torch.device, size: int = 2**28) -> float:
    """Return the bytes per second from memory: the best of six sums over more than any cache holds."""
    values, best = torch.ones(size // 4, device=device), 0.0
    for _ in range(6):
        start = time.perf_counter()
        values.sum().item()
        best = max(best, size / (time.perf_counter() - start))
    return best
