"""The server over HTTP: the client that people use, and what wrong clients send."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mini_engine.commands import app as commands

pytest.importorskip("starlette", reason="the server is in the extra `serve`")
pytest.importorskip("uvicorn", reason="the server is in the extra `serve`")
httpx = pytest.importorskip("httpx", reason="httpx is in the extra `dev`")

# These are imported only where the packages above are installed: hence E402.
from mini_engine.serve import metrics, protocol  # noqa: E402
from mini_engine.serve.app import Limits  # noqa: E402
from mini_engine.tests.helpers import byte_tokenizer, until  # noqa: E402
from mini_engine.tests.serving import (  # noqa: E402
    expected,
    http,
    make_engine,
    openai,
    running,
    serving,
    slowed,
)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai().OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_is_what_generate_gives(client):
    params = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "stop": ["q"], "presence_penalty": 0.5}
    answer = client.completions.create(model="tiny", prompt="To be", **params)
    output = expected("To be", **params)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (output.outputs[0].text, output.outputs[0].finish_reason)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(output.outputs[0].token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_prompts_of_all_kinds_and_n_answers(client):
    """Texts, token ids, several of each; choice p * n + i is answer i to prompt p."""
    params = {"max_tokens": 4, "temperature": 1.0, "seed": 1, "n": 2}
    for prompts in (["one", "two"], [[70, 71], [72]], "one", [70, 71]):
        answer = client.completions.create(model="tiny", prompt=prompts, **params)
        several = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
        wanted = [one.text for prompt in several for one in expected(prompt, **params).outputs]
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_same_text_in_pieces(client, n):
    params = {"max_tokens": 10, "temperature": 1.0, "seed": 4, "n": n}
    whole = client.completions.create(model="tiny", prompt="abc", **params)
    pieces, ends, usage = [""] * n, [None] * n, None
    for chunk in client.completions.create(
        model="tiny", prompt="abc", stream=True, stream_options={"include_usage": True}, **params
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert ends[choice.index] is None, "something comes after the end"
            pieces[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert pieces == [choice.text for choice in whole.choices] and ends == ["length"] * n
    assert usage.completion_tokens == whole.usage.completion_tokens == 10 * n


def test_a_chat_in_one_piece_and_streamed(client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Good "}, {"type": "text", "text": "day"}]}
    ]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    output = expected("user: Good day\nassistant:", max_tokens=6, temperature=0, logprobs=2)
    assert whole.choices[0].message.content == output.outputs[0].text
    shown = whole.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in shown).decode(errors="replace") == output.outputs[0].text
    assert [one.logprob for one in shown] == pytest.approx(
        [
            of[i].logprob
            for i, of in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ],
        abs=1e-5,
    )
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in shown)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == output.outputs[0].text
    with client.chat.completions.stream(**asked) as stream:  # the client's own reader of events
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == output.outputs[0].text


def test_logprobs_and_echo_of_completions(client):
    shown = client.completions.create(
        model="tiny", prompt="x", max_tokens=3, temperature=0, logprobs=2
    ).choices[0]
    assert len(shown.logprobs.tokens) == len(shown.logprobs.token_logprobs) == 3
    assert shown.logprobs.text_offset[0] == 0 and [len(top) for top in shown.logprobs.top_logprobs] == [
        2,
        2,
        2,
    ]
    hot = {"temperature": 2, "seed": 3, "logprobs": 0}  # what was sampled is there, however unlikely
    drawn = client.completions.create(model="tiny", prompt="x", max_tokens=9, **hot).choices[0].logprobs
    chances = zip(drawn.tokens, drawn.token_logprobs, strict=True)
    assert drawn.top_logprobs == [{token: logprob} for token, logprob in chances]
    echoed = client.completions.create(
        model="tiny", prompt="x", max_tokens=3, temperature=0, echo=True
    ).choices[0]
    assert echoed.text == "x" + shown.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_log_probabilities_of_the_prompt(client, stream):
    asked = {"model": "tiny", "prompt": ["hé", "abc"], "max_tokens": 2, "temperature": 0, "logprobs": 1}
    answer = client.completions.create(**asked, echo=True, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    for number, prompt in enumerate(asked["prompt"]):
        of = expected(prompt, max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=1)
        ids, found = (
            of.prompt_token_ids + of.outputs[0].token_ids,
            of.prompt_logprobs + of.outputs[0].logprobs,
        )
        wanted = [one and one[i].logprob for i, one in zip(ids, found, strict=True)]
        shown = [choice.logprobs for choice in choices if choice.index == number]
        assert [one for part in shown for one in part.token_logprobs] == pytest.approx(wanted, abs=1e-5)
        assert shown[0].tokens[0] == prompt[0] and shown[0].top_logprobs[0] is None
        assert [at for part in shown for at in part.text_offset] == [*range(len(ids))]


def test_an_echo_names_special_tokens_and_the_offsets_count_them(client):
    prompt = [256, *byte_tokenizer().encode("ab"), 256]
    shown = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert shown.text.startswith("<eos>ab<eos>")
    assert shown.logprobs.tokens[:4] == ["<eos>", "a", "b", "<eos>"]
    assert shown.logprobs.text_offset == [0, 5, 6, 7, 12]


def test_offsets_count_tokens_though_the_text_waits_for_a_stop_string(client):
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    text = client.completions.create(**asked).choices[0].text
    asked["stop"] = [text[1:4] + "~"]
    whole = client.completions.create(**asked).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert whole.text == text and "" in [part.text for part in parts], "nothing was held back"
    assert [at for part in parts for at in part.logprobs.text_offset] == whole.logprobs.text_offset


def test_an_answer_has_the_shape_that_is_asked_for(client):
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 60, "temperature": 1.0, "seed": 1}
    shape = {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}}
    for text in [choice.text for choice in client.completions.create(**asked, n=4, extra_body=shape).choices]:
        assert re.fullmatch("(yes|no), [0-9]{3}", text)


def test_a_json_schema_is_kept(client):
    pytest.importorskip("llguidance", reason="JSON schemas are in the extra `structured`")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
    }
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "seed": 1}
    for stream in (False, True):
        answer = client.chat.completions.create(**asked, response_format=wanted, stream=stream)
        pieces = [chunk.choices[0].delta.content for chunk in answer] if stream else []
        text = "".join(pieces) if stream else answer.choices[0].message.content
        assert [*json.loads(text)] == ["on"]


def test_usage_in_every_chunk(client):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "n": 2, "stream": True, "seed": 1}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(**asked, stream_options=options)
    counts = [(c.choices[0].index, c.usage.prompt_tokens, c.usage.completion_tokens) for c in chunks]
    assert sorted(counts) == [(index, 3, number) for index in range(2) for number in range(1, 5)]
    assert last.choices == [] and last.usage.completion_tokens == 8


def test_log_probabilities_of_prompts(client):
    """Those of a completion are in the choice, those of a chat beside the choices, as in vLLM."""
    ask = {"model": "tiny", "max_tokens": 1, "extra_body": {"prompt_logprobs": 1}}
    shown = client.completions.create(prompt=["abc", "de"], **ask).choices
    assert [len(choice.prompt_logprobs) for choice in shown] == [3, 2]
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], **ask)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens and chat.prompt_logprobs[0] is None
    none = client.completions.create(prompt="ab", **ask | {"extra_body": {"prompt_logprobs": None}})
    assert none.choices[0].prompt_logprobs is None


def test_a_prefix_that_is_known_is_reported(client):
    prompt = "the same beginning for both of these requests"
    for cached in (0, 40):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0).usage
        assert usage.prompt_tokens_details.cached_tokens == cached


ASK = {"prompt": "a", "max_tokens": 2}
REFUSED = [
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": ["a", 1]}, "prompt"),
    ("completions", {"prompt": ["a"] * 129}, "prompt"),
    ("completions", {"prompt": ""}, None),
    ("completions", {"prompt": [999]}, "prompt"),
    ("completions", {"prompt": [[5], [-60]], "echo": True}, "prompt"),  # before any answer, and no text of it
    ("completions", {"prompt": [2**70], "echo": True}, "prompt"),
    ("completions", {"prompt": "a" * 300}, None),
    ("completions", ASK | {"max_tokens": 10**6}, None),
    ("completions", ASK | {"max_tokens": 0}, "max_tokens"),
    ("completions", ASK | {"max_tokens": "7"}, "max_tokens"),
    ("completions", ASK | {"n": 0}, "n"),
    ("completions", ASK | {"n": 1.5}, "n"),
    ("completions", ASK | {"temperature": -1}, "temperature"),
    ("completions", ASK | {"temperature": True}, "temperature"),
    ("completions", ASK | {"top_p": 0}, "top_p"),
    ("completions", ASK | {"top_k": "all"}, "top_k"),
    ("completions", ASK | {"seed": -1}, "seed"),
    ("completions", ASK | {"stop": {"a": 1}}, "stop"),
    ("completions", ASK | {"stop": [""]}, "stop"),
    ("completions", ASK | {"logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", ASK | {"logit_bias": [1]}, "logit_bias"),
    ("completions", ASK | {"logit_bias": {"5": "a"}}, "logit_bias"),
    ("completions", ASK | {"logit_bias": {"999": 1}}, "logit_bias"),
    ("completions", ASK | {"logprobs": -1}, "logprobs"),
    ("completions", ASK | {"logprobs": 21}, "logprobs"),
    ("completions", ASK | {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("completions", ASK | {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("completions", ASK | {"n": 129}, "n"),
    ("completions", ASK | {"stream": "yes"}, "stream"),
    ("completions", ASK | {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", ASK | {"stream": True, "stream_options": {"x": 1}}, "stream_options"),
    ("completions", ASK | {"suffix": "x"}, "suffix"),
    ("completions", ASK | {"best_of": 3}, "best_of"),
    ("completions", ASK | {"nonsense": 1}, "nonsense"),
    ("completions", ASK | {"messages": []}, "messages"),
    ("completions", ASK | {"priority": "high"}, "priority"),
    ("completions", ASK | {"cache_salt": 5}, "cache_salt"),
    ("completions", ASK | {"response_format": {"type": "xml"}}, "response_format"),
    ("completions", ASK | {"response_format": {"type": "json_schema"}}, "response_format"),
    ("completions", ASK | {"structured_outputs": {}}, "structured_outputs"),
    ("completions", ASK | {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": 5}, "logprobs"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_is_refused_names_the_field(address, engine, path, body, param):
    answer = http.post(f"{address}/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300 and "Traceback" not in answer.text and ".py" not in answer.text


def test_what_asks_for_nothing_is_taken(client):
    """Fields that clients send unasked, with the values that change nothing."""
    extra = {
        "best_of": 1,
        "tools": None,
        "metadata": {"a": "b"},
        "min_p": None,
        "logit_bias": None,
        "stop": None,
    }
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=2, user="me", extra_body=extra)
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{", 400), (b"[1]", 400), (b"5", 400), (b'{"prompt": NaN}', 400), (b"\xff\xfe", 400),
     (b"[" * 10_000, 400), (b'{"prompt": "' + b"a" * 30_000 + b'"}', 413)],
    ids=lambda one: str(one)[:20],
)  # fmt: skip
def test_a_body_that_is_no_request(address, body, status):
    answer = http.post(f"{address}/v1/completions", content=body)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_the_page_has_all_fields():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    table = page.partition("<!-- fields -->")[2].partition("\n\n")[0]
    rows = [{*re.findall(r"`(\w+)`", line)} for line in table.splitlines() if "`" in line]
    common = protocol.COMPLETION & protocol.CHAT
    own = [protocol.COMPLETION - common, protocol.CHAT - common]
    assert rows == [common, *own, protocol.IGNORED, {*protocol.NOT_SUPPORTED}]


def test_other_paths_methods_and_models(address, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai().NotFoundError, match="is not served here"):
        client.models.retrieve("gpt")
    with pytest.raises(openai().NotFoundError, match="is not served here"):
        client.completions.create(model="gpt", prompt="a")
    assert http.get(f"{address}/v2").status_code == 404
    assert http.get(f"{address}/v1/completions").status_code == 405
    assert http.get(f"{address}/v2").json()["error"]["type"] == "not_found_error"


def test_tokens_and_back(address):
    shown = http.post(f"{address}/tokenize", json={"prompt": "héllo"}).json()
    assert shown["count"] == len(shown["tokens"]) == 6 and shown["max_model_len"] == 256
    back = http.post(f"{address}/detokenize", json={"tokens": shown["tokens"]}).json()
    assert back == {"prompt": "héllo"}
    chat = http.post(f"{address}/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert chat["count"] == len("user: a\nassistant:")
    for path, body in (("tokenize", {}), ("tokenize", {"prompt": 5}), ("detokenize", {"tokens": [999]})):
        assert http.post(f"{address}/{path}", json=body).status_code == 400


def test_numbers_for_prometheus(address, client):
    def number(name):
        lines = http.get(f"{address}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    names = ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count")
    before = [number(name) for name in names]
    client.completions.create(model="tiny", prompt="abcd", max_tokens=7, temperature=0)
    deadline = time.monotonic() + 10
    while [number(name) for name in names] != [before[0] + 7, before[1] + 4, before[2] + 1]:
        assert time.monotonic() < deadline
    assert number("num_requests_running") == number("kv_cache_usage_perc") == 0


def test_a_histogram_counts_what_is_not_longer_than_each_bound():
    histogram = metrics.Histogram("wait_seconds", "A wait.")
    for seconds in (0.0, 0.001, 0.0011, 2.0, 61.0):
        histogram.observe(seconds)
    samples = histogram.family("m").samples
    counts = {one.labels.get("le"): one.value for one in samples if one.name == "vllm:wait_seconds_bucket"}
    assert (counts["0.001"], counts["0.005"], counts["1.0"], counts["2.0"]) == (2, 3, 3, 4)
    assert (counts["60.0"], counts["+Inf"]) == (4, 5)
    assert [one.value for one in samples if one.name == "vllm:wait_seconds_sum"] == [pytest.approx(63.0021)]


def test_health_state_trace_and_pages(address, client):
    client.completions.create(model="tiny", prompt="seen", max_tokens=3, temperature=0)
    assert http.get(f"{address}/health").json() == {"status": "ok"}
    state = http.get(f"{address}/state").json()
    assert state["model"] == "tiny" and state["chats"] and state["free"] == state["blocks"] == 64
    trace = http.get(f"{address}/trace/steps").json()
    assert trace["step"] == trace["traces"][0]["steps"][-1]["step"]
    for path in ("/", "/chat.js", "/pages.css", "/trace", "/trace.js"):
        page = http.get(address + path)
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("shell.html", "player.js", "player.css"):
        assert http.get(f"{address}/player/{name}").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_names_its_request_in_the_engine(address, engine, stream):
    """The pages mark the reader's own request by it."""
    asked = {"prompt": ["a", "b"], "max_tokens": 20, "stream": stream, "ignore_eos": True}
    first = engine.new_id()
    name = http.post(f"{address}/v1/completions", json=asked).headers["x-request-id"]
    steps = http.get(f"{address}/trace/steps").json()["traces"][0]["steps"]
    assert name == first and f'"{name}"' in json.dumps(steps)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(stream):
    engine, go = make_engine(), threading.Event()
    passes = slowed(engine, go)
    with serving(engine) as address:

        async def leave():
            async with httpx.AsyncClient() as client:
                body = {"prompt": "a", "max_tokens": 200, "stream": stream, "ignore_eos": True}
                post = asyncio.create_task(client.post(f"{address}/v1/completions", json=body, timeout=60))
                while not passes:
                    await asyncio.sleep(0.01)
                post.cancel()
                await asyncio.gather(post, return_exceptions=True)

        asyncio.run(leave())
        go.set()
        until(lambda: not engine.requests)
        assert len(passes) < 150, "it went on to the end"


def test_too_many_get_429_and_the_others_their_answers():
    engine, go = make_engine(), threading.Event()
    passes = slowed(engine, go)
    limits = Limits(max_num_requests=2, timeout=30)
    with serving(engine, limits=limits) as address:
        answers = []

        def ask():
            body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            answers.append(http.post(f"{address}/v1/completions", json=body))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(
            lambda: passes and http.get(f"{address}/metrics").status_code == 200 and len(engine.requests) >= 1
        )
        time.sleep(0.2)  # the second one is on its way, or there
        refused = http.post(f"{address}/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 3})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        go.set()
        for thread in threads:
            thread.join(30)
        assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_ends_with_an_error(stream):
    engine, go = make_engine(), threading.Event()
    passes = slowed(engine, go)
    with serving(engine, limits=Limits(timeout=0.3)) as address:
        threading.Timer(0.6, go.set).start()
        body = {"prompt": "a", "max_tokens": 100, "stream": stream, "ignore_eos": True}
        answer = http.post(f"{address}/v1/completions", json=body)
        assert "timeout" in answer.text and (stream or answer.status_code == 504)
        until(lambda: not engine.requests)
    assert passes


def test_a_fault_of_the_engine_is_an_answer_and_the_server_lives():
    engine = make_engine()
    forward = engine.backend.forward
    engine.backend.forward = lambda rows: 1 / 0
    with serving(engine) as address:
        body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
        whole = http.post(f"{address}/v1/completions", json=body)
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_error"
        streamed = http.post(f"{address}/v1/completions", json=body | {"stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "engine_error" and "Traceback" not in streamed
        engine.backend.forward = forward
        assert http.post(f"{address}/v1/completions", json=body).status_code == 200


def test_an_engine_that_has_ended_is_reported_as_unavailable():
    with running(make_engine()) as (address, server):
        server.async_engine.close()
        for path in ("/state", "/trace/steps", "/health"):
            assert http.get(address + path).status_code == 503
        answer = http.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_closed"


def test_the_key_guards_everything_but_health_and_the_pages():
    with serving(make_engine(), api_key="secret") as address:
        for path in ("/v1/models", "/state", "/trace/steps", "/metrics"):
            assert http.get(address + path).status_code == 401
            assert http.get(address + path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            right = http.get(address + path, headers={"Authorization": "Bearer secret"})
            assert right.status_code == 200 and "access-control-allow-origin" not in right.headers
        for path in ("/health", "/"):
            assert http.get(address + path).status_code == 200


def test_many_streams_at_once_lose_nothing():
    """Forty streams, each with the tokens that it has alone; then nothing is held any more."""
    engine = make_engine(num_blocks=48, max_num_seqs=16)
    alone = {seed: expected("go", max_tokens=8, seed=seed).outputs[0].text for seed in range(5)}

    async def all_of_them(address):
        limits = httpx.Limits(max_connections=None)
        own = httpx.AsyncClient(limits=limits, timeout=120)
        async with openai().AsyncOpenAI(base_url=f"{address}/v1", api_key="x", http_client=own) as client:

            async def one(seed):
                text = ""
                asked = {"model": "tiny", "prompt": "go", "max_tokens": 8, "seed": seed, "stream": True}
                async for chunk in await client.completions.create(**asked):
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(number % 5) for number in range(40)))

    with serving(engine, limits=Limits(max_num_requests=40)) as address:
        texts = asyncio.run(all_of_them(address))
    assert texts == [alone[number % 5] for number in range(40)]


def serve_command(*options):
    line = [sys.executable, "-m", "mini_engine", "serve", "-m", "shakespeare", *options]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True)


def test_the_command_serves_and_ends_in_good_order():
    """SIGTERM in the midst of a stream: the stream has its end, and the exit code is the signal's."""
    with serve_command("--port", "0") as process:
        address = re.search(r"http://[\d.:]+", process.stderr.readline())[0]
        body = {"prompt": "To be", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(60) == 128 + signal.SIGTERM and "Traceback" not in process.stderr.read()


@pytest.mark.soak
def test_what_is_not_written_when_the_time_to_shut_down_is_over_is_cut_off():
    """The others were given their time above; this stream would go on for thousands of tokens."""
    with serve_command("--port", "0", "--shutdown-timeout", "1") as process:
        address = re.search(r"http://[\d.:]+", process.stderr.readline())[0]
        asked = {"prompt": "To be", "max_tokens": 800, "n": 20, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            try:
                rest = [line for line in lines if line]
            except httpx.RemoteProtocolError:
                rest = []
        assert not any('"finish_reason":"length"' in line for line in rest)
        assert process.wait(60) == 128 + signal.SIGTERM and "Traceback" not in process.stderr.read()
        assert time.monotonic() - began < 15


def test_a_port_that_is_taken_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = CliRunner().invoke(commands, ["serve", "-m", "shakespeare", "--port", str(port)])
    said = f"error: cannot listen at 127.0.0.1, port {port}: Address already in use; choose another\n"
    assert (ended.exit_code, ended.stderr) == (2, said)
