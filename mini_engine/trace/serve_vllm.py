"""The program that `mini-engine trace record-vllm` starts in vLLM's own environment: it serves and records.

It needs vLLM and the standard library, and nothing else that is installed beside mini_engine.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mini_engine.trace.vllm import record


def serve(llm: Any, requests: list[dict[str, Any]]) -> None:
    """Serve the requests of a scenario, each from its step `at`; abort a request when its reader leaves."""
    import vllm

    engine, step = llm.llm_engine, 0
    coming = sorted(requests, key=lambda wanted: wanted["at"])
    leaves = {wanted["id"]: wanted["leaves_after"] for wanted in requests if wanted.get("leaves_after")}
    while coming or engine.has_unfinished_requests():
        while coming and (coming[0]["at"] <= step or not engine.has_unfinished_requests()):
            wanted = coming.pop(0)
            params = vllm.SamplingParams(
                temperature=0,
                max_tokens=wanted["max_tokens"],
                ignore_eos=True,
                stop_token_ids=wanted.get("stop_token_ids"),
                stop=wanted.get("stop"),
            )
            text = isinstance(wanted["prompt"], str)
            prompt = wanted["prompt"] if text else {"prompt_token_ids": wanted["prompt"]}
            engine.add_request(wanted["id"], prompt, params, priority=wanted["priority"])
        for output in engine.step():
            name = output.request_id
            if not output.finished and len(output.outputs[0].token_ids) >= leaves.get(name, sys.maxsize):
                engine.abort_request([name])
        step += 1


def main() -> None:
    """Run the job on stdin, a JSON object: `llm` (arguments of vllm.LLM), `requests`, `out`, `wall`."""
    job = json.load(sys.stdin)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # keeps the scheduler in this process
    for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; only builds for CPUs read it
    import vllm

    plain = {"async_scheduling": False, "enforce_eager": True, "disable_log_stats": True}
    llm = vllm.LLM(**plain | job["llm"])
    with record(llm, job["out"], wall=job["wall"]):
        serve(llm, job["requests"])
    sys.stdout.flush()
    os._exit(0)  # a regular exit of large libraries takes seconds
