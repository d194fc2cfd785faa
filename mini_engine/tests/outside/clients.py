"""Clients that others wrote, tried with `mini-engine serve`: `python -m mini_engine.tests.outside.clients`.

It makes their environment (`mini-engine bench peers clients`), starts a server, and prints the table of
docs/serving.md. In their environment it runs again, with the address: there it needs none of our packages.
"""

import asyncio
import importlib.metadata
import subprocess
import sys
from pathlib import Path

MODEL = "smollm2"
MESSAGES = [{"role": "user", "content": "Name three rivers."}]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


def openai_client(url):
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", max_retries=0)


def openai_whole_and_streamed(url):
    client = openai_client(url)
    whole = client.chat.completions.create(**ASKED)
    chunks = list(
        client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    prompt = client.completions.create(model=MODEL, prompt="The sea", max_tokens=5, temperature=0, logprobs=2)
    assert len(prompt.choices[0].logprobs.tokens) == 5
    assert [model.id for model in client.models.list()] == [MODEL]


def openai_refusals(url):
    import openai

    for error, asked in (
        (openai.NotFoundError, {"model": "gpt"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ):
        try:
            openai_client(url).chat.completions.create(**ASKED | asked)
        except error as refused:
            assert refused.body["param"] == next(iter(asked)), refused.body
        else:
            raise AssertionError(f"{asked} was not refused")


def openai_asynchronous(url):
    from openai import AsyncOpenAI

    async def ask():
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one():
                stream = await client.chat.completions.create(**ASKED, stream=True)
                return "".join([chunk.choices[0].delta.content async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert len({*asyncio.run(ask())}) == 1


def openai_stream_helper(url):
    asked = ASKED | {"stop": ["."], "max_tokens": 200}  # it raises an error for an answer that is cut short
    with openai_client(url).chat.completions.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text and text == stream.get_final_completion().choices[0].message.content


def openai_parse(url):
    from pydantic import BaseModel

    class River(BaseModel):
        name: str
        long: bool

    asked = ASKED | {"max_tokens": 200}
    answer = openai_client(url).chat.completions.parse(**asked, response_format=River)
    assert isinstance(answer.choices[0].message.parsed, River)


def langchain(url):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_tokens=24, temperature=0)
    whole = model.invoke("Name three rivers.")
    assert "".join(chunk.content for chunk in model.stream("Name three rivers.")) == whole.content
    assert whole.usage_metadata["output_tokens"] == 24
    assert [answer.content for answer in model.batch(["Name three rivers."] * 3)] == [whole.content] * 3


def litellm(url):
    import litellm as client

    asked = ASKED | {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}
    whole = client.completion(**asked)
    stream = client.completion(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content and whole.usage.completion_tokens == 24


def instructor(url):
    import instructor as client
    from pydantic import BaseModel

    class River(BaseModel):
        name: str
        countries: list[str]
        long: bool

    asked = ASKED | {"max_tokens": 300, "temperature": 0.7, "seed": 1}
    with_schema = client.from_openai(openai_client(url), mode=client.Mode.JSON_SCHEMA)
    assert isinstance(
        with_schema.chat.completions.create(**asked, response_model=River, max_retries=0), River
    )


ROWS = [
    ("openai", "whole, streamed, usage, logprobs, models", openai_whole_and_streamed),
    ("openai", "asynchronous, eight streams at once", openai_asynchronous),
    ("openai", "`chat.completions.stream`", openai_stream_helper),
    ("openai", "`chat.completions.parse` with a schema", openai_parse),
    ("openai", "what is refused is its own error, with the field", openai_refusals),
    ("langchain-openai", "`invoke`, `stream`, `batch`", langchain),
    ("litellm", "whole, streamed, usage", litellm),
    ("instructor", "an object of a JSON schema", instructor),
]


def try_all(url):
    """Print a row of the table for each client; return how many failed."""
    print("| client | version | tried | |\n|---|---|---|---|")
    failed = 0
    for package, what, attempt in ROWS:
        try:
            attempt(url)
            end = "works"
        except Exception as error:
            end, failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", failed + 1
        print(f"| {package} | {importlib.metadata.version(package)} | {what} | {end} |", flush=True)
    return failed


def main():
    if len(sys.argv) > 1:
        return try_all(sys.argv[1])
    from mini_engine.bench import environments
    from mini_engine.bench.serve import Server, free_port

    environments.make("clients", lambda line: print(line, file=sys.stderr))
    port = free_port()
    command = [sys.executable, "-m", "mini_engine", "serve", "--model", MODEL, "--port", str(port)]
    with Server("mini-engine", command, port, Path("out/clients-server.log"), {}) as server:
        me = [environments.python("clients"), __file__, f"{server.address}/v1"]
        return subprocess.run(me, stderr=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
