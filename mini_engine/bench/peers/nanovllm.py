"""nano-vLLM, from the folder that the user named, on a CUDA device. It cannot sample greedily, so its tokens
differ from those of the others; their number does not."""

from types import SimpleNamespace
from typing import Any


class Peer:
    def __init__(self, model: str, **_: Any) -> None:
        import nanovllm
        import torch
        from nanovllm.engine import llm_engine

        # Random weights have no tokenizer, and prompts are token ids.
        none = SimpleNamespace(eos_token_id=-1, decode=lambda token_ids: "")
        llm_engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: none)
        self.params = nanovllm.SamplingParams
        self.llm = nanovllm.LLM(model, enforce_eager=False, max_model_len=4096)
        self.versions = {"nano-vllm": "from source", "torch": torch.__version__}

    def variant(self, name: str) -> tuple[Any, str]:
        return self.serve, "CUDA graphs, its own defaults"

    def serve(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        params = [self.params(temperature=0.6, ignore_eos=True, max_tokens=n) for n in num_outputs]
        return [output["token_ids"] for output in self.llm.generate(prompts, params, use_tqdm=False)]
