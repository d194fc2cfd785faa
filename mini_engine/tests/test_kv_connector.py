"""The hand-over of KV blocks: a prompt's keys and values come from another engine, and the tokens stay."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from mini_engine import LLM, SamplingParams
from mini_engine.backends.two_pass import TwoPassBackend
from mini_engine.distributed.kv_connector import KVConnector, connect, listen
from mini_engine.engine import Engine
from mini_engine.parts import Parts
from mini_engine.tests.helpers import spy, tiny_model

PROMPT = [*range(3, 33)]  # 30 tokens: 7 blocks of 4, and 2 tokens
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make(seed=0, **settings):
    settings = {"num_blocks": 32, "block_size": 4} | settings
    return Engine(tiny_model(dtype="float32", seed=seed), **settings)


def tokens(engine, prompt=PROMPT, **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params)
    return LLM.from_engine(engine).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


@contextmanager
def serving(engine, key=None):
    """Serve blocks in a thread, and yield the address."""
    listener = listen(("127.0.0.1", 0), key)
    connector = KVConnector(engine)

    def serve():
        with suppress(OSError):  # the listener's end
            connector.serve(listener)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.address
    listener.close()


def test_tokens_are_those_of_one_engine_and_no_full_block_is_computed_twice():
    decode, alone = make(), make()
    with serving(make()) as address, connect(address) as connection:
        assert KVConnector(decode).load_kv(connection, PROMPT).num_tokens == 28
        computed = spy(decode.backend, "forward")
        assert tokens(decode) == tokens(alone)
        assert [row.num_tokens for (rows,) in computed for row in rows] == [2, *[1] * 11]
    decode.scheduler.kv.check()
    assert decode.scheduler.kv.num_free_blocks == 32


def test_keys_and_values_are_the_other_pool_s():
    prefill, decode = make(), make()
    with serving(prefill) as address, connect(address) as connection:
        KVConnector(decode).load_kv(connection, PROMPT)
    ours, theirs = (KVConnector(engine).save_kv(PROMPT) for engine in (decode, prefill))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape[1] == 7 and torch.equal(one, other) and one.abs().sum() > 0


def test_drawn_tokens_and_a_salt():
    decode, alone = make(), make()
    params = {"temperature": 0.9, "seed": 3}
    with serving(make()) as address, connect(address) as connection:
        connector = KVConnector(decode)
        assert connector.load_kv(connection, PROMPT, cache_salt="mine").num_tokens == 28
        assert connector.load_kv(connection, PROMPT).num_tokens == 28  # those of a salt are not found without
        assert tokens(decode, **params) == tokens(alone, **params)
        salted = {"prompt_token_ids": PROMPT, "cache_salt": "mine"}
        assert tokens(decode, salted, **params) == tokens(alone, salted, **params)


def test_only_blocks_that_are_not_here_come():
    decode = make()
    tokens(decode, PROMPT[:17], max_tokens=1)
    with serving(make()) as address, connect(address) as connection:
        connector = KVConnector(decode)
        first = connector.load_kv(connection, PROMPT)
        assert first.num_tokens == 28 - 16
        assert connector.load_kv(connection, PROMPT) == (0, 0)
        assert connector.load_kv(connection, [1, 2, 3]) == (0, 0)


def test_no_statistic_counts_a_hand_over():
    decode = make()
    with serving(make()) as address, connect(address) as connection:
        KVConnector(decode).load_kv(connection, PROMPT)
    assert (decode.scheduler.kv.stats.queries, decode.scheduler.kv.stats.hits) == (0, 0)
    tokens(decode)
    assert (decode.scheduler.kv.stats.queries, decode.scheduler.kv.stats.hits) == (30, 28)


def test_a_full_pool_takes_nothing_and_computes():
    decode = make(num_blocks=12)
    decode.add_request([41] * 30, GREEDY)
    decode.step()
    with serving(make()) as address, connect(address) as connection:
        assert KVConnector(decode).load_kv(connection, PROMPT) == (0, 0)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (dict(block_size=8), 'the engines differ: it has .*"block_size": 8, .* the other .*: 4,'),
        (dict(num_blocks=4), "the prefill engine refuses: .*pool"),
    ],
)
def test_a_refusal_is_an_error_here_and_the_prefill_engine_goes_on(other, match):
    decode = make()
    with serving(make(**other)) as address, connect(address) as connection:
        for _ in range(2):
            with pytest.raises(ValueError, match=match):
                KVConnector(decode).load_kv(connection, PROMPT)
    decode.scheduler.kv.check()
    assert tokens(decode) == tokens(make())


def test_other_weights_are_refused():
    prefill = make()
    prefill.model.norm.weight.data += 1
    with serving(prefill) as address, connect(address) as connection:
        with pytest.raises(ValueError, match="the engines differ"):
            KVConnector(make()).load_kv(connection, PROMPT)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 40])
def test_what_is_no_question_gets_an_error(data):
    answer = load(KVConnector(make())._answer(data))
    assert [*answer] == ["error"] and len(answer["error"])


def test_without_the_key_nothing_is_answered():
    with serving(make(), key="secret") as address:
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            connect(address, "wrong")
        with connect(address, "secret") as connection:
            assert KVConnector(make()).load_kv(connection, PROMPT).num_tokens == 28


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (dict(enable_prefix_caching=False), "set enable_prefix_caching=True"),
        (dict(parts=Parts(attend_backend=TwoPassBackend)), "use the engine's own backend"),
    ],
)
def test_engines_that_cannot(settings, match):
    with pytest.raises(ValueError, match=match):
        KVConnector(make(**settings))


# ------------------------------------------------------------------------------- two processes


@pytest.mark.soak
def test_the_page_s_snippet_with_a_prefill_engine_in_another_process(capsys):
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    command = [sys.executable, "-m", "mini_engine", "prefill", "--model", "shakespeare", "--port", "0"]
    env = {name: value for name, value in os.environ.items() if name != "MINI_ENGINE_API_KEY"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            port = re.search(r"at 127.0.0.1:(\d+);", process.stderr.readline())[1]
            exec(code.replace("6100", port).replace("smollm2", "shakespeare"), {})
        finally:
            process.terminate()
            assert process.wait(30) == 143
    said = capsys.readouterr().out
    assert re.search(r"[1-9]\d* tokens in [1-9]\d* bytes", said) and "the same: True" in said
