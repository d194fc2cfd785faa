"""The module `tests.utils` of vLLM's tests, with this server in place of theirs; vllm_tests.py puts it there.

It is a plugin of pytest too: it skips the tests that do not apply, with the reason.
"""

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

JOB = json.loads(os.environ["AS_VLLM"])  # python, names of models by MODEL_NAME, reasons by test
TAKEN = {"--max-num-seqs", "--shutdown-timeout"}  # of vLLM's options; the tests promise nothing of the others


class RemoteOpenAIServer:
    """`mini-engine serve` with a model of ours, under the name that the test has for its own."""

    def __init__(self, model, args, env_dict=None, **_):
        from vllm.utils.network_utils import get_open_port

        port = get_open_port()
        self.url_root = f"http://127.0.0.1:{port}"
        command = [JOB["python"], "-m", "mini_engine", "serve", "--model", JOB["models"][model]]
        command += ["--served-model-name", model, "--port", str(port), *taken(args)]
        command += ["--num-blocks", "100"]  # an answer without a limit has 1,600 tokens, and not 8,000
        self.proc = subprocess.Popen(command, cwd=JOB["root"])

    def __enter__(self):
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url_root}/health", timeout=5)
                return self
            except OSError:
                assert self.proc.poll() is None, "the server has ended"
                time.sleep(0.1)
        raise TimeoutError("the server does not answer")

    def __exit__(self, *_):
        self.proc.terminate()
        try:
            self.proc.wait(40)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def get_client(self, **options):
        import openai

        options = {"timeout": 3600, "max_retries": 0} | options
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="none", **options)

    def get_async_client(self, **options):
        import openai

        options = {"timeout": 3600, "max_retries": 0} | options
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="none", **options)


def taken(args):
    """Return the options of a list that the server has, too."""
    return [
        word for name, value in zip(args, args[1:], strict=False) if name in TAKEN for word in (name, value)
    ]


def pytest_configure():
    """Let the fixtures that download LoRA adapters for theirs find nothing to do."""
    import huggingface_hub

    huggingface_hub.snapshot_download = lambda *_, **__: ""
    with contextlib.suppress(ImportError):
        from vllm.transformers_utils import repo_utils

        repo_utils.hf_api = lambda *_, **__: huggingface_hub


def pytest_collection_modifyitems(items):
    for item in items:
        name = f"{Path(str(item.fspath)).stem}::{item.name}"
        for pattern, reason in JOB["reasons"].items():
            if re.match(pattern, name):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


def main(argv):
    """Serve as `python -m tests.utils --model NAME OPTIONS`, in place of vLLM's own command."""
    model = argv[argv.index("--model") + 1]
    command = [JOB["python"], "-m", "mini_engine", "serve", "--model", JOB["models"][model]]
    command += ["--served-model-name", model, "--port", argv[argv.index("--port") + 1], *taken(argv)]
    os.execv(JOB["python"], command)


if __name__ == "__main__":
    import sys

    main(sys.argv)
