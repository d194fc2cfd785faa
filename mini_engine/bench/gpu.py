"""nano-vLLM's own benchmark, for a GPU: 256 requests at once on a model of Qwen3-0.6B's shape.

Weights are random, since only their sizes count, and prompts and outputs have 100 to 1,024 tokens each.
Source: nano-vLLM, bench.py.
"""

from pathlib import Path

import torch

from mini_engine.bench.export import write_folder
from mini_engine.bench.process import FLOOR, OURS, Processes
from mini_engine.bench.quiet import Watch
from mini_engine.bench.race import Race, Report, run
from mini_engine.bench.workloads import Workload
from mini_engine.loading.checkpoint import DTYPES, uninitialized
from mini_engine.model import ModelConfig

AGAINST = ["transformers/batch", "nano-vllm"]
QWEN3 = ModelConfig(
    "qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    rope_theta=1e6, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip


def random_model(folder: Path, dtype: str, config: ModelConfig = QWEN3) -> Path:
    """Return a folder with a model of this shape, made once; the weights are the same on every machine."""
    place = folder / f"{config.model_type}-random-{dtype}"
    if not (place / "config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        model = uninitialized(config, "cpu").to(DTYPES[dtype])
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=generator)
        write_folder(model, place)
    return place


def race(
    folder: Path,
    device: str,
    names: list[str],
    rounds: int = 3,
    num_prompts: int = 256,
    dtype: str = "bfloat16",
    config: ModelConfig = QWEN3,
    report: Report = print,
) -> Race:
    """Run all rounds of one contestant, then of the next, so that each has the GPU's memory to itself."""
    weights = random_model(folder / "models", dtype, config)
    load = Workload.throughput(config.vocab_size, num_prompts)
    job = {"model": str(weights), "gguf": "", "dtype": dtype, "threads": 1, "device": device}
    this = Race("throughput", dtype, load.num_outputs, job)
    for name in [OURS, FLOOR, *names]:
        with Processes(folder / "logs") as processes:
            processes.start([name], job)
            run(this, load, [name], rounds, processes, Watch(0), report, folder / "throughput.json")
    return this
