"""Replicas on Ray Serve: what the server makes of several engines; test_input_errors has what is refused.

`make soak` starts two real ones and kills one; it needs `pip install -e '.[ray]' -c constraints.txt`.
"""

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mini_engine.async_engine import AsyncEngine, EngineClosedError
from mini_engine.distributed.replica_server import make_app, together
from mini_engine.distributed.replicas import Routed
from mini_engine.request import SamplingParams
from mini_engine.serve.app import Limits
from mini_engine.tests.serving import expected, make_engine

ROOT = Path(__file__).resolve().parents[2]


def test_ray_and_torchs_processes_are_imported_in_functions_of_one_folder_only():
    imports = re.compile(r"^\s*(?:import|from) (ray|torch\.distributed)\b", re.M)
    found = {
        path.relative_to(ROOT).as_posix(): set(imports.findall(path.read_text("utf-8")))
        for path in [*(ROOT / "mini_engine").rglob("*.py"), *(ROOT / "labs").rglob("*.py")]
        if "tests" not in path.parts
    }
    assert {path: names for path, names in found.items() if names} == {
        "mini_engine/distributed/ranks.py": {"torch.distributed"},
        "mini_engine/distributed/replicas.py": {"ray"},
    }
    source = (ROOT / "mini_engine/distributed/replicas.py").read_text("utf-8")
    at_once = re.sub(r"^if TYPE_CHECKING:\n(    .*\n)+", "", source, flags=re.M)
    assert not re.search(r"^(?:import|from) ray\b", at_once, re.M)


def test_prompts_that_begin_alike_are_text_that_begins_alike_for_rays_router():
    routed = [Routed(ids, SamplingParams(), 0, salt) for ids, salt in (([5, 6, 7], ""), ([5, 6, 9], ""))]
    first, second = (one.prompt for one in routed)
    assert len(first) == 3 and first[:2] == second[:2] and first[2] != second[2]
    assert Routed([5, 6, 7], SamplingParams(), 0, "mine").prompt == "mine" + first


# ----------------------------------------------------------- two engines here, as if they were elsewhere


class Near:
    """Replicas without Ray: engines of this process, which take turns. `killed` ends one."""

    def __init__(self, engines):
        self.fronts = [AsyncEngine(engine) for engine in engines]
        self.num_requests, self.turn, self.killed = 0, 0, set()

    async def stream(self, prompt, params, **options):
        number = self.turn = (self.turn + 1) % len(self.fronts)
        async for delta in self.fronts[number].stream(prompt, params, **options):
            if number in self.killed:
                raise EngineClosedError("the replica has ended")
            yield delta

    async def each(self, look):
        alive = [front for number, front in enumerate(self.fronts) if number not in self.killed]
        if not alive:
            raise EngineClosedError("no replica answers")
        return list(await asyncio.gather(*(front.call(look) for front in alive)))

    def close(self):
        for front in self.fronts:
            front.close()


@pytest.fixture
def near():
    engines = [make_engine(record=False), make_engine(record=False)]
    replicas = Near(engines)
    app = make_app(replicas, engines[0].tokenizer, engines[0].model.config, "tiny", None, Limits())
    with TestClient(app) as client:
        yield replicas, client


ASKED = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_answers_are_those_of_one_engine_and_numbers_those_of_all(near):
    _, client = near
    for _ in range(2):
        text = client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        assert text == expected("hello", max_tokens=8, temperature=0, ignore_eos=True).outputs[0].text
    assert client.get("/health").json() == {"status": "ok", "replicas": 2}
    state = client.get("/state").json()
    assert (state["free"], state["blocks"], state["replicas"], state["requests"]) == (128, 128, 2, [])
    numbers = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(numbers['vllm:prefix_cache_queries_total{model_name="tiny"}']) == 2 * len("hello")
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    refusal = client.get("/trace/steps")
    assert refusal.status_code == 404 and "without --ray" in refusal.json()["error"]["message"]


def test_a_replica_that_ends_ends_its_stream_with_an_error_and_others_go_on(near):
    replicas, client = near
    replicas.killed = {0}  # turns begin with 1
    assert client.get("/health").json()["replicas"] == 1
    whole, lost = (client.post("/v1/completions", json=ASKED | {"stream": True}) for _ in range(2))
    assert whole.text.count("data:") == 8 + 1 and "error" not in whole.text
    assert lost.status_code == 503 and lost.json()["error"]["message"] == "the replica has ended"
    replicas.killed = {0, 1}
    assert client.get("/health").status_code == 503


def test_numbers_are_added_and_shares_averaged():
    one = {"num_requests_running": 1, "kv_cache_usage_perc": 0.5}, {"prefix_cache_hits": 0}
    other = {"num_requests_running": 0, "kv_cache_usage_perc": 0.0}, {"prefix_cache_hits": 0}
    assert together([one, other]) == (
        {"num_requests_running": 1, "kv_cache_usage_perc": 0.25},
        {"prefix_cache_hits": 0},
    )


# -------------------------------------------------------------------------------------- two real ones

STREAMS, TOKENS = 24, 400
# They begin differently: those that begin alike may all go to one replica.
PROMPTS = [f"{letter} lords enter. O Romeo, " for letter in "ABCDEFGH"]


def processes():
    """The replicas on this machine: {pid}."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ServeReplica:mini-engine"):
                found.add(int(path.parent.name))
        except OSError:  # it has just ended
            pass
    return found


@pytest.fixture
def two(tmp_path):
    """The address of a server of two replicas, and their processes."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; pip install -e '.[ray]' -c constraints.txt")
    if not Path("/proc").is_dir():
        pytest.skip("processes are found in /proc, which this system does not have")
    others, log = processes(), tmp_path / "log"
    command = [sys.executable, "-m", "mini_engine", "serve", "--model", "shakespeare", "--port", "0"]
    with log.open("w") as out:
        server = subprocess.Popen([*command, "--ray", "--replicas", "2"], stderr=out, stdout=out)
    try:
        while not (at := re.search(r"served at (http://\S+)/v1", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
        yield at[1], processes() - others
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(120) is not None
    assert not processes() - others


def health(address):
    with urllib.request.urlopen(address + "/health", timeout=60) as answer:
        return json.load(answer)


def read(address, number, came):
    """Return the replica, the text, the error if there is one, and whether the stream was ended in order."""
    asked = {"prompt": PROMPTS[number % 8], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"model": "shakespeare", "stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + "/v1/completions", body, headers)
    text, error, is_done = "", None, False
    with urllib.request.urlopen(request, timeout=300) as answer:
        replica = answer.headers["X-Request-Id"].rpartition("-")[0]
        for line in answer:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                error = said.get("error", {}).get("message", error)
                text += "" if "error" in said else said["choices"][0]["text"]
                came[number] += 1
            is_done |= line.startswith(b"data: [DONE]")
    return replica, number % 8, text, error, is_done


@pytest.mark.soak
def test_a_killed_replica_loses_its_own_streams_only_and_comes_back(two):
    address, (victim, *_) = two
    assert health(address) == {"status": "ok", "replicas": 2}
    came = Counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        reads = [pool.submit(read, address, number, came) for number in range(STREAMS)]
        while sum(came[number] >= 5 for number in range(STREAMS)) < STREAMS:
            time.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        found = [one.result() for one in reads]
    assert all(is_done for *_, is_done in found)
    lost = [one for one in found if one[3]]
    whole = [one for one in found if not one[3]]
    assert {error for *_, error, _ in lost} == {
        "the replica that computed this request has ended, and the answer is lost; send the request again"
    }
    assert len({replica for replica, *_ in lost}) == len({replica for replica, *_ in whole}) == 1
    assert {replica for replica, *_ in lost} != {replica for replica, *_ in whole}
    texts = {number: text for _, number, text, _, _ in whole}
    assert all(len(text) == TOKENS and text == texts[number] for _, number, text, _, _ in whole)
    assert all(texts.get(number, text).startswith(text) for _, number, text, _, _ in lost)
    deadline = time.monotonic() + 120
    while health(address)["replicas"] < 2:
        assert time.monotonic() < deadline, "the replica does not come back"
        time.sleep(1)
