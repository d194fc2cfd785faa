"""The engine, and transformers' generate, on the same weights. Each serves a Workload greedily."""

from pathlib import Path
from typing import Any

import torch

from mini_engine.bench.workload import Workload
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.loading.checkpoint import DTYPES, choose_device, load_model
from mini_engine.request import SamplingParams


class MiniEngine:
    """The engine; every workload starts with a cold prefix cache."""

    def __init__(self, path: Path, dtype: str = "float32", device: str = "auto", **engine_args: Any) -> None:
        model = load_model(path, dtype=dtype, device=device)
        self.engine = Engine(model, **{"max_num_seqs": 64, "max_num_batched_tokens": 512, **engine_args})
        assert isinstance(self.engine.scheduler.kv, BlockManager)  # the engine's own, as no parts are given
        self.kv = self.engine.scheduler.kv
        self.vocab_size = model.config.vocab_size

    def __call__(self, load: Workload) -> list[list[int]]:
        self.kv.reset_prefix_cache()
        tokens: dict[str, list[int]] = {}
        for prompt, n in zip(load.prompts, load.num_outputs, strict=True):
            tokens[self.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=n))] = []
        while self.engine.has_work:
            for delta in self.engine.step():
                tokens[delta.request_id] += delta.token_ids
        return list(tokens.values())


class Transformers:
    """One left-padded batch, held together until its longest member is done.

    Raises ValueError for a dtype that is not one by name: "auto" is not the same on both sides.
    """

    def __init__(self, path: Path, dtype: str = "float32", device: str = "auto") -> None:
        from transformers import AutoModelForCausalLM

        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {', '.join(DTYPES)}, the same for both, but is {dtype!r}")
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if path.suffix == ".gguf" else path
        self.device = choose_device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **where)
        self.model = model.eval().to(self.device)
        self.model.generation_config.eos_token_id = None  # run to the length that was asked for

    @torch.inference_mode()
    def __call__(self, load: Workload) -> list[list[int]]:
        width = max(map(len, load.prompts))
        ids = torch.zeros(len(load.prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(load.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max(load.num_outputs),
            do_sample=False,
            pad_token_id=0,
        )
        return [row[width : width + n].tolist() for row, n in zip(out, load.num_outputs, strict=True)]
