"""The engine, and transformers' generate, on the same weights. Each serves a Workload greedily."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from mini_engine.bench.race import Workload
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import DTYPES, choose_device, load_model
from mini_engine.request import SamplingParams


class MiniEngine:
    """The engine; every workload starts with a cold prefix cache."""

    def __init__(self, path: Path, dtype: str = "float32", device: str = "auto") -> None:
        engine = Engine(load_model(path, dtype, device), max_num_seqs=64, max_num_batched_tokens=512)
        assert isinstance(engine.scheduler.kv, BlockManager)  # the engine's own, as no parts are given
        self.kv, self.llm = engine.scheduler.kv, LLM.from_engine(engine)
        self.vocab_size = engine.model.config.vocab_size

    def __call__(self, load: Workload) -> list[list[int]]:
        self.kv.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=n) for n in load.num_outputs]
        outputs = self.llm.generate(load.prompts, params, progress=False)
        return [output.outputs[0].token_ids for output in outputs]


class Transformers:
    """One left-padded batch, held together until its longest member is done.

    Raises ValueError for a dtype that is not one by name: "auto" is not the same on both sides.
    """

    def __init__(self, path: Path, dtype: str = "float32", device: str = "auto") -> None:
        from transformers import AutoModelForCausalLM

        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {', '.join(DTYPES)}, the same for both, but is {dtype!r}")
        folder, file = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
        self.device = choose_device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], gguf_file=file)
        self.model = model.eval().to(self.device)
        self.model.generation_config.eos_token_id = None  # run to the length that was asked for

    @torch.inference_mode()
    def __call__(self, load: Workload) -> list[list[int]]:
        prompts = [torch.tensor(prompt, device=self.device) for prompt in load.prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids, mask = pad(prompts), pad([torch.ones_like(prompt) for prompt in prompts])
        greedy = {"max_new_tokens": max(load.num_outputs), "do_sample": False, "pad_token_id": 0}
        out = self.model.generate(ids, attention_mask=mask, **greedy)[:, ids.shape[1] :]
        return [row[:n].tolist() for row, n in zip(out, load.num_outputs, strict=True)]
