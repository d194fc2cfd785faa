"""The server among clients that do it wrong: it answers with 4xx in OpenAI's shape, and serves the others.

SOAK=1 sends 10,000 wrong requests in place of 40, and keeps 200 streams open for two minutes.
"""

import asyncio
import json
import os
import socket
import statistics
import struct
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the server is in the extra `serve`")
httpx = pytest.importorskip("httpx", reason="httpx is in the extra `dev`")

# These are imported only where the packages above are installed: hence E402.
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mini_engine.bench import environments  # noqa: E402
from mini_engine.serve import connection, protocol, streaming  # noqa: E402
from mini_engine.serve.app import Limits  # noqa: E402
from mini_engine.serve.connection import Connection  # noqa: E402
from mini_engine.tests.helpers import until  # noqa: E402
from mini_engine.tests.outside import fuzzer  # noqa: E402
from mini_engine.tests.serving import expected, http, make_engine, running, serving  # noqa: E402
from mini_engine.tests.soak import SOAK, count  # noqa: E402

SECONDS = int(os.environ.get("SOAK_SECONDS", "120"))
ALONE = {"max_tokens": 16, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone():
    return expected("go", **ALONE).outputs[0].text


@contextmanager
def among_others(address, alone):
    """Stream an answer again and again meanwhile; each must have the text that it has alone."""
    end, texts = threading.Event(), []

    def stream():
        while not end.wait(0.1) or not texts:
            answer = http.post(f"{address}/v1/completions", json={"prompt": "go", **ALONE})
            texts.append(answer.json()["choices"][0]["text"])

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield texts
    finally:
        end.set()
        thread.join(60)
    assert not thread.is_alive() and {*texts} == {alone}


def connect(address, receive_buffer=None):
    host, _, port = address.removeprefix("http://").partition(":")
    one = socket.socket()
    if receive_buffer:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    one.settimeout(30)
    one.connect((host, int(port)))
    return one


def post(body, path="/v1/completions", length=None):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {length or len(data)}\r\n\r\n"
    return head.encode() + data


def said(one):
    """Return what comes until the server closes the connection: the status, and the body as JSON."""
    data = b""
    while part := one.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def in_shape(status, body):
    """Whether an answer is one of OpenAI's errors, or no error."""
    if status < 300:
        return True
    error = body["error"]
    return (
        400 <= status < 500
        and [*error] == ["message", "type", "param", "code"]
        and isinstance(error["message"], str)
        and 0 < len(error["message"]) < 500
        and "Traceback" not in error["message"]
    )


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", "a", "\ud83d\ude00", "\x00"])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
KEYS = st.sampled_from(["type", "text", "role", "content", "json", "regex", "schema", "json_schema", "5"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": VALUES}), max_size=3
)
COMPLETION = {"prompt": st.just("ab") | st.lists(st.integers(-1, 260), max_size=4), "max_tokens": st.just(2)}
CHAT = {"messages": st.just([{"role": "user", "content": "a"}]) | MESSAGES, "max_tokens": st.just(2)}


def wrong(known, valid):
    """Return valid requests with up to three fields, known or not, of any value."""
    names = st.sampled_from(sorted(known | protocol.IGNORED | {*protocol.NOT_SUPPORTED} | {"x"}))
    # Not max_tokens: null would be an answer of any length.
    names = names.filter(lambda name: "max_" not in name)
    return st.tuples(st.fixed_dictionaries(valid), st.dictionaries(names, VALUES, max_size=3)).map(
        lambda pair: pair[0] | pair[1]
    )


REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), wrong(protocol.COMPLETION, COMPLETION) | VALUES),
    st.tuples(st.just("/v1/chat/completions"), wrong(protocol.CHAT, CHAT) | VALUES),
    st.tuples(st.sampled_from(["/tokenize", "/detokenize"]), VALUES),
    st.tuples(
        st.sampled_from(["/tokenize", "/detokenize"]),
        st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "add_special_tokens"]), VALUES),
    ),
)


def test_no_request_is_answered_with_a_fault(alone):
    number = 10_000 if SOAK else 40
    with serving(make_engine()) as address, httpx.Client(base_url=address, timeout=60) as client:

        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            derandomize=not SOAK,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(REQUESTS)
        def send(request):
            path, body = request
            data = json.dumps(body).encode()
            answer = client.post(path, content=data)
            if "text/event-stream" in answer.headers["content-type"]:
                assert '"error"' not in answer.text
                return
            assert in_shape(answer.status_code, answer.json()), (path, body, answer.text)

        with among_others(address, alone):
            send()
    count("wrong requests to the server", number)


@pytest.mark.soak
@pytest.mark.parametrize("path", fuzzer.PATHS)
def test_requests_drawn_from_openais_own_description_are_answered_or_refused_in_shape(path, alone):
    if environments.python("fuzzer") is None:
        pytest.skip(f"schemathesis is not installed; run: {environments.install_command('fuzzer')}")
    with serving(make_engine()) as address, among_others(address, alone):
        drawn, wrong = fuzzer.run(address, path, 5_000)
    assert drawn and not wrong, wrong
    count("requests drawn from OpenAI's description", drawn)


@pytest.mark.parametrize("sent", [b"POST /v1/completions HTT", b"", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_header_that_does_not_end_has_a_limit_of_time(sent, alone, monkeypatch):
    monkeypatch.setattr(Connection, "header_seconds", 0.3)
    with serving(make_engine()) as address, among_others(address, alone), connect(address) as one:
        one.sendall(sent)
        status, body = said(one)
        assert status == 408 and in_shape(status, body)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"nonsense\r\n\r\n", b"GET /" + b"a" * 70_000]
)
def test_what_is_no_http_is_answered_in_shape(sent):
    with serving(make_engine()) as address, connect(address) as one:
        one.sendall(sent)
        status, body = said(one)
        assert status == 400 and body["error"]["code"] == "invalid_http"


def test_half_a_body_has_a_limit_of_time_and_harms_no_one(alone, monkeypatch):
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.3)
    engine = make_engine()
    with serving(engine) as address, among_others(address, alone):
        waiting, leaving = connect(address), connect(address)
        for one in (waiting, leaving):
            one.sendall(post({"prompt": "a"}, length=1000))
        leaving.close()
        status, body = said(waiting)
        assert status == 408 and in_shape(status, body)
        waiting.close()


def test_killed_clients_give_everything_back(alone):
    """Twenty streams whose clients vanish without a word: the connection is reset."""
    engine = make_engine()
    with serving(engine, limits=Limits(max_num_requests=40)) as address, among_others(address, alone):
        for number in range(20):
            one = connect(address)
            one.sendall(
                post({"prompt": "a" * number + "b", "max_tokens": 200, "stream": True, "ignore_eos": True})
            )
            one.recv(100)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        until(lambda: len(engine.requests) <= 1)


def test_a_client_that_reads_nothing_stops_no_one_and_is_cut_off(alone, monkeypatch):
    """It is sent more than all buffers hold. When its time is over, nothing of it is left."""
    monkeypatch.setattr(streaming, "LAST_WORDS", 0.3)
    engine = make_engine()
    body = {"prompt": "a", "max_tokens": 250, "logprobs": 20, "stream": True, "ignore_eos": True}
    with (
        running(engine, send_buffer=2048, limits=Limits(timeout=5)) as (address, server),
        connect(address, receive_buffer=2048) as one,
    ):
        one.sendall(post(body))
        until(lambda: server.async_engine.num_requests == 1)
        with among_others(address, alone) as texts:
            until(lambda: texts)
            assert server.async_engine.num_requests >= 1
        until(lambda: server.async_engine.num_requests == 0)
        data = b""
        while part := one.recv(2**20):  # what is left in the buffers, and then the end
            data += part
        assert data.startswith(b"HTTP/1.1 200") and b"[DONE]" not in data


@pytest.mark.soak
def test_200_streams_for_two_minutes_lose_nothing_and_leave_nothing():
    """Each text is the one that it has alone; from the middle on, files and memory stay as they are."""
    engine, streams, seen, texts = make_engine(num_blocks=200, max_num_seqs=64), 200, [], [0]
    wanted = {seed: expected("go", max_tokens=20, seed=seed).outputs[0].text for seed in range(10)}

    async def stream(client, number, end):
        while time.monotonic() < end:
            seed = number % 10
            body = {"prompt": "go", "max_tokens": 20, "seed": seed, "stream": True}
            answer = await client.post("/v1/completions", json=body)
            events = [
                json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")
            ]
            assert "".join(event["choices"][0]["text"] for event in events) == wanted[seed]
            texts[0] += 1

    async def watch(end):
        while time.monotonic() < end:
            await asyncio.sleep(1)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append((len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 2**20))

    async def load(address):
        # Each request has a connection of its own: one that is kept may be closed when it is used again.
        limits, end = (
            httpx.Limits(max_connections=None, max_keepalive_connections=0),
            time.monotonic() + SECONDS,
        )
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120) as client:
            await asyncio.gather(watch(end), *(stream(client, number, end) for number in range(streams)))

    with serving(engine, limits=Limits(max_num_requests=streams)) as address:
        asyncio.run(load(address))
    third = len(seen) // 3
    (files, memory), (files_then, memory_then) = (  # files at the most, for their number goes up and down
        [
            summary(column)
            for summary, column in zip((max, statistics.median), zip(*part, strict=True), strict=True)
        ]
        for part in (seen[third:-third], seen[-third:])
    )
    assert files_then <= files and memory_then <= memory + 20, seen
    count("streams of a loaded server", texts[0])
