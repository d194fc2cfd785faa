"""The front's own cost: CPU time a token of `mini-engine serve`, beside that of the same engine without it.

Both compute the same requests with one thread, where no time is spent on waiting for another. The streams
are read by this process, whose time does not count.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.table import Table

from mini_engine.bench.quiet import usage
from mini_engine.bench.serve import MODEL, Server, free_port

SETTINGS = ["--max-num-seqs", "256", "--no-trace", "--max-num-requests", "256"]
BARE = """
import json, sys, time
from mini_engine import LLM, SamplingParams
model, prompts, tokens = json.load(sys.stdin)
llm = LLM(model, max_num_seqs=256)
params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
llm.generate(prompts[:8], params, use_tqdm=False)
start = time.process_time()
outputs = llm.generate(prompts, params, use_tqdm=False)
print(json.dumps([time.process_time() - start, sum(len(o.outputs[0].token_ids) for o in outputs)]))
"""


def bare(model: str, prompts: list[str], tokens: int) -> float:
    """Return the CPU seconds a token of LLM.generate."""
    job = json.dumps([model, prompts, tokens])
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BARE], input=job, stdout=subprocess.PIPE, text=True, env=env, check=True
    )
    seconds, number = json.loads(done.stdout)
    return float(seconds / number)


def served(model: str, prompts: list[str], tokens: int, logs: Path) -> float:
    """Return the CPU seconds a token of a server, all of whose streams are open at once."""
    port = free_port()
    command = [sys.executable, "-m", "mini_engine", "serve", "--model", model, "--port", str(port)]
    command += [*SETTINGS, "--served-model-name", MODEL]
    with Server("mini-engine", command, port, logs / "serve-front.log", {"OMP_NUM_THREADS": "1"}) as server:
        asyncio.run(_read_all(port, prompts[:8], tokens))
        before = usage({server.popen.pid})
        number = asyncio.run(_read_all(port, prompts, tokens))
        after = usage({server.popen.pid})
    if before is None or after is None:
        raise ValueError("the CPU time of a server is read from /proc, which this system does not have")
    return (after.ours - before.ours) / number


async def _read_all(port: int, prompts: list[str], tokens: int) -> int:
    """Return the number of tokens of all streams."""
    return sum(await asyncio.gather(*(_read(port, prompt, tokens) for prompt in prompts)))


async def _read(port: int, prompt: str, tokens: int) -> int:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    sent = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: {len(sent)}"
    writer.write(head.encode() + b"\r\n\r\n" + sent)
    events = [line[6:] async for line in reader if line.startswith(b"data: {")]
    writer.close()
    return int(json.loads(events[-1])["usage"]["completion_tokens"])


def table(
    logs: Path, model: str = "shakespeare", streams: int = 200, tokens: int = 100, rounds: int = 3
) -> Table:
    """Return the table: CPU microseconds a token, medians over the rounds with the least and the greatest."""
    prompts = [f"Enter {number} lords. " for number in range(streams)]
    runs = [(bare(model, prompts, tokens), served(model, prompts, tokens, logs)) for _ in range(rounds)]
    shown = Table("CPU time a token", "µs", header_style="bold")
    shown.title = f"{streams} streams of {tokens} tokens of {model}, one thread"
    columns = {
        "the engine alone": [one for one, _ in runs],
        "mini-engine serve": [one for _, one in runs],
        "the front's own": [whole - own for own, whole in runs],
    }
    for name, seconds in columns.items():
        low, mid, high = (f"{1e6 * f(seconds):.0f}" for f in (min, statistics.median, max))
        shown.add_row(name, f"{mid} ({low} to {high})")
    return shown
