"""lab-11 in the real server, over a real socket: what `python -m labs demo lab-11 --serve` runs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the server is in the extra `serve`")

# These are imported only where the packages above are installed: hence E402.
from labs.kit.author.check import ALTERNATIVES  # noqa: E402
from labs.kit.judge import loading  # noqa: E402
from labs.kit.learner import front as learner_front  # noqa: E402
from labs.kit.learner.parts import LearnerParts  # noqa: E402
from mini_engine import LLM, SamplingParams  # noqa: E402
from mini_engine.engine import Engine  # noqa: E402
from mini_engine.serve.app import Limits, make_app  # noqa: E402
from mini_engine.tests.helpers import byte_tokenizer, tiny_model  # noqa: E402
from mini_engine.tests.serving import openai  # noqa: E402

OTHERS = sorted(ALTERNATIVES.glob("lab_11_*.py"))


def model():
    return tiny_model(vocab_size=257, dtype="float32", max_position_embeddings=256), byte_tokenizer()


def make_engine():
    return Engine(*model(), num_blocks=64, block_size=8)


@contextmanager
def served(module, places=8):
    """Serve an engine with a lab's front at a free port; yield a client, and the engine."""
    engine = make_engine()
    limits = Limits(max_num_requests=places, timeout=20)
    app = make_app(engine, "tiny", limits=limits, front=partial(learner_front.LearnerFront, module))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        with openai().OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            yield partial(client.completions.create, model="tiny"), engine
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive(), "the server does not end"


@pytest.mark.parametrize("path", [None, *OTHERS], ids=lambda path: path.stem if path else "solution")
def test_clients_read_what_the_engine_says_and_a_client_that_leaves_is_aborted(path):
    if path:
        module = loading.execute(path.read_text("utf-8"), path.stem, path)
    else:
        module = loading.load("lab-11", "solution")
    prompts = [f"line {number}" for number in range(6)]
    params = {"max_tokens": 12, "temperature": 0}
    with served(module) as (ask, engine):

        def text(prompt):
            return "".join(part.choices[0].text for part in ask(prompt=prompt, stream=True, **params))

        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = list(pool.map(text, prompts))
        gone = ask(prompt="long", max_tokens=240, stream=True)
        next(iter(gone))
        gone.close()
        for _ in range(1000):  # the server notices that the connection is closed
            if not engine.requests:
                break
            time.sleep(0.01)
        assert not engine.requests and engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
        assert ask(prompt=prompts[0], **params).choices[0].text == texts[0]
    llm = LLM.from_engine(make_engine())
    expected = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    assert texts == [one.outputs[0].text for one in expected]


def test_a_full_server_and_n_answers_are_refused():
    """One that holds the only place makes the next get 429; lab-11 knows one answer to a prompt."""
    with served(loading.load("lab-11", "solution"), places=1) as (ask, _):
        first = ask(prompt="long", max_tokens=240, stream=True)
        next(iter(first))
        with pytest.raises(openai().RateLimitError):
            ask(prompt="another", max_tokens=1)
        first.close()
        with pytest.raises(openai().BadRequestError, match="n must be 1 with lab-11's front"):
            for _ in range(100):  # until the place is free again
                try:
                    ask(prompt="x", max_tokens=1, n=2)
                except openai().RateLimitError:
                    time.sleep(0.05)


def test_the_demo_reads_through_the_front_and_finds_one_that_keeps_what_has_left():
    learner = LearnerParts.from_labs("lab-11", "solution")
    assert ("AsyncEngine", "lab-11, yours") in learner.table()
    right, lines = learner_front.compared(learner, *model())
    assert right and len(lines) == 1 + len(learner_front.PROMPTS)
    source = loading.load("lab-11", "solution").__source__
    wrong = source.replace("                self.send(abort)\n", "                pass\n")
    assert wrong != source
    learner.front = loading.execute(wrong, "never_aborts", "starter.py")
    right, lines = learner_front.compared(learner, *model())
    assert not right and "is still in the engine" in lines[-1]
