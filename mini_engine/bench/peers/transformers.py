"""Hugging Face's transformers. Variants: "32", static batches of 32 (all at once without a number);
"compiled", all at once with its static cache, whose forward pass torch.compile compiles; or "batch", its own
continuous batching (generate_batch)."""

import time
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

PAGE = 32  # tokens in a block of generate_batch's cache
BUDGET = {"cpu": 512, "cuda": 8192}  # in a step


class Peer:
    def __init__(self, model: str, dtype: str, threads: int, device: str, **_: Any) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(model, dtype=getattr(torch, dtype)).eval().to(device)
        self.model.generation_config.eos_token_id = None  # run to the length that was asked for
        self.seen: set[tuple[int, ...]] = set()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def variant(self, name: str) -> tuple[Any, str]:
        if name == "batch":
            budget = BUDGET[self.model.device.type]
            return self.continuous, f"generate_batch, {budget:,} tokens a step, pages of {PAGE}"
        if name == "compiled":
            return self.compiled, "generate, one static batch, compiled with a static cache"
        if name and not name.isdigit():
            known = "batch, compiled, and numbers, the size of a static batch"
            raise ValueError(f"no variant {name!r}; there are {known}")
        return partial(self.static, int(name or 0)), f"generate, static batches of {name or 'all'}"

    def compiled(self, prompts: list[list[int]], num_outputs: list[int]) -> dict[str, Any]:
        """Time a static batch that has been compiled: each new shape is served once before."""
        everywhere = transformers.CompileConfig(mode="default")
        everywhere._compile_all_devices = True  # left alone, generate compiles on accelerators only
        how = {"cache_implementation": "static", "compile_config": everywhere}
        shape = (len(prompts), max(map(len, prompts)), max(num_outputs))
        if shape not in self.seen:
            self.static(0, prompts, num_outputs, **how)
            self.seen.add(shape)
        start = time.perf_counter()
        tokens = self.static(0, prompts, num_outputs, **how)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    @torch.no_grad()  # a compiled cache may not be made of inference tensors
    def static(
        self, size: int, prompts: list[list[int]], num_outputs: list[int], **how: Any
    ) -> list[list[int]]:
        """Left-padded batches as they come, each held together until its longest member is done."""
        size, rows = size or len(prompts), []
        for i in range(0, len(prompts), size):
            batch = [torch.tensor(prompt, device=self.model.device) for prompt in prompts[i : i + size]]
            ids = pad_sequence(batch, batch_first=True, padding_side="left")
            mask = pad_sequence([torch.ones_like(p) for p in batch], batch_first=True, padding_side="left")
            wanted = num_outputs[i : i + size]
            greedy = {"max_new_tokens": max(wanted), "do_sample": False, "pad_token_id": 0, **how}
            out = self.model.generate(ids, attention_mask=mask, **greedy)[:, ids.shape[1] :]
            rows += [row[:n].tolist() for row, n in zip(out, wanted, strict=True)]
        return rows

    def continuous(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        """Do what generate_batch does, with a length for each request, where it takes one for all."""
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        pairs = list(zip(prompts, num_outputs, strict=True))
        # Room for all at once; left alone, it takes nine tenths of the memory, and touches it.
        num_blocks = sum(-(-(len(prompt) + n) // PAGE) for prompt, n in pairs) + len(pairs)
        budget = BUDGET[self.model.device.type]
        room = {"page_size": PAGE, "num_blocks": num_blocks, "max_batch_tokens": budget}
        with self.model.continuous_batching_context_manager(
            generation_config=greedy,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**room),
        ) as manager:
            ids = [manager.add_request(prompt, max_new_tokens=n) for prompt, n in pairs]
            done: dict[str, list[int]] = {}
            while len(done) < len(ids):
                result = manager.get_result(timeout=1)
                if result and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    done[result.request_id] = list(result.generated_tokens)
                elif not result and not manager.is_running():
                    raise RuntimeError("generate_batch ended before all requests were served")
        return [done[i] for i in ids]
