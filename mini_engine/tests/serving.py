"""A server of a tiny model in this process, for the tests of what it does over HTTP."""

import socket
import threading
import time
from contextlib import contextmanager
from types import ModuleType

import httpx
import pytest
import uvicorn

from mini_engine import LLM, SamplingParams
from mini_engine.engine import Engine
from mini_engine.serve.app import Limits, make_app
from mini_engine.serve.connection import config
from mini_engine.tests.helpers import byte_tokenizer, tiny_model

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
LIMITS = Limits(max_num_requests=8, max_body_bytes=20_000, timeout=20)
# One for all: a client takes long to make. It keeps no connection, for the servers end.
http = httpx.Client(timeout=60, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


def openai() -> ModuleType:
    """Return the client's package: it takes seconds to load, so files that import this one do not."""
    return pytest.importorskip("openai", reason="the client is in the extra `dev`")


def make_engine(**settings):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    settings = {"num_blocks": 64, "block_size": 8, "record": 50} | settings
    return Engine(
        tiny_model(vocab_size=257, dtype="float32", max_position_embeddings=256), tokenizer, **settings
    )


@contextmanager
def serving(engine, **options):
    """Serve an engine at a free port, and yield the address. Afterwards nothing is held any more."""
    with running(engine, **options) as (address, _):
        yield address
    assert not engine.requests and engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert not engine.inboxes


@contextmanager
def running(engine, send_buffer=None, **options):
    """Serve an engine at a free port, and yield the address and the Server."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=200)
    if send_buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    app = make_app(engine, "tiny", **{"limits": LIMITS} | options)
    server = uvicorn.Server(config(app, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=[[listening]])
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", app.state.server
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive(), "the server does not end"


def expected(prompt, **params):
    """Return the answers of a fresh engine to one prompt."""
    llm = LLM.from_engine(make_engine())
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def slowed(engine, go):
    """Let no forward pass end before `go` is set; return a counter of them."""
    forward, passes = engine.backend.forward, []

    def wait(rows):
        passes.append(len(rows))
        go.wait(30)
        return forward(rows)

    engine.backend.forward = wait
    return passes
