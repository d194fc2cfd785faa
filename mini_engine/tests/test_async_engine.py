"""AsyncEngine: any number of coroutines on one engine; nothing is lost, nothing is left behind.

labs/lab-11/test_lab.py judges it too: its turns, its places, and ids that are used again.
"""

import asyncio
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

from mini_engine import SamplingParams, async_engine
from mini_engine.async_engine import AsyncEngine, EngineClosedError
from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.tests.helpers import greedy, scripted_engine, text_of, tiny_model, tokens_of

TEXTS = {"a": "one two", "b": "three", "c": "four five six", "d": "seven"}


def run(engine, scenario, **options):
    """Return what the scenario, a coroutine function of an AsyncEngine, returns; then close the engine."""

    async def main():
        front = AsyncEngine(engine, **options)
        try:
            return await asyncio.wait_for(scenario(front), 60)
        finally:
            await asyncio.to_thread(front.close)

    return asyncio.run(main())


async def read(front, name, params=None, request_id=None):
    return [d async for d in front.stream(name, params or greedy(), request_id=request_id or name)]


@contextmanager
def waiting(front):
    """Keep the engine's thread from its next turn: what comes inside is taken in one turn after it."""
    go = threading.Event()
    front._commands.put(partial(go.wait, 30))
    try:
        yield
    finally:
        go.set()


def stopped_in_step(engine, number):
    """Return two events: the step with this number has begun, and, to be set, that it may be computed."""
    begun, go, forward, count = threading.Event(), threading.Event(), engine.backend.forward, [0]

    def forward_when_let(rows):
        count[0] += 1
        if count[0] >= number:
            begun.set()
            assert go.wait(30)
        return forward(rows)

    engine.backend.forward = forward_when_let
    return begun, go


def everything_is_back(engine):
    assert not engine.requests and not engine.inboxes
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks


def test_many_at_once_lose_nothing():
    engine = scripted_engine(TEXTS, max_num_seqs=2)

    async def scenario(front):
        return await asyncio.gather(*(read(front, name, greedy(len(TEXTS[name]))) for name in TEXTS))

    said = run(engine, scenario)
    assert [text_of(deltas) for deltas in said] == [*TEXTS.values()]
    assert [deltas[-1].finish_reason for deltas in said] == ["length"] * 4
    everything_is_back(engine)


def test_a_prompt_is_tokenised_outside_the_engines_thread(monkeypatch):
    """A short one in the event loop, a long one beside it: no step waits for either."""
    engine, threads = scripted_engine(TEXTS), []
    encode = engine.tokenizer.encode

    def noted(text):
        threads.append(threading.current_thread())
        return encode(text)

    async def scenario(front):
        for length in (100, 1):
            monkeypatch.setattr(async_engine, "LONG", length)
            await read(front, "a", greedy(2))
        return front._thread

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    owner = run(engine, scenario)
    assert threads[0] is threading.main_thread() and len({owner, *threads}) == 3


def test_n_answers_fork_and_are_those_of_generate():
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    prompt = [*range(1, 11)]
    alone = LLM.from_engine(Engine(tiny_model(), num_blocks=32, block_size=4)).generate(
        [prompt], params, use_tqdm=False
    )
    engine = Engine(tiny_model(), num_blocks=32, block_size=4)

    async def scenario(front):
        return [delta async for delta in front.stream(prompt, params)]

    said = run(engine, scenario)
    answers = [tokens_of([d for d in said if d.index == i]) for i in range(3)]
    assert answers == [one.token_ids for one in alone[0].outputs]
    assert len({tuple(one) for one in answers}) > 1, "three equal answers prove little"
    assert {d.num_cached_tokens for d in said if d.index} == {9}, (
        "all but the last token of the prompt is shared"
    )
    everything_is_back(engine)


@pytest.mark.parametrize(("n", "name"), [(1, "x"), (2, "x"), (3, "x"), (3, None)])
def test_answers_are_numbered_before_one_name(n, name):
    """0_x, 1_x and 2_x, whether the name is given or made; one answer alone has the name itself."""
    engine = Engine(tiny_model(), num_blocks=32, block_size=4)

    async def scenario(front):
        stream = front.stream([1, 2, 3], SamplingParams(n=n, seed=1, max_tokens=2), request_id=name)
        return [delta async for delta in stream], front

    said, front = run(engine, scenario)
    ids = sorted({delta.request_id for delta in said})
    own = name or ids[0].removeprefix("0_")
    assert ids == ([own] if n == 1 else [f"{i}_{own}" for i in range(n)])
    assert front._jobs == {}, "what has finished is forgotten"


def test_leaving_before_the_first_token_starts_no_other_answer():
    """The prompt is computed in chunks, and its reader leaves during the first: the engine is empty then."""
    engine = Engine(tiny_model(), num_blocks=32, block_size=4, long_prefill_token_threshold=2, record=True)
    begun, go = stopped_in_step(engine, 1)

    async def scenario(front):
        stream = front.stream(list(range(8)), SamplingParams(n=2, seed=1, max_tokens=2), request_id="x")
        reader = asyncio.create_task(anext(stream))
        assert await asyncio.to_thread(begun.wait, 30)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        go.set()
        await front.call(lambda engine: None)  # in the turn of the abort; the next call is in one behind it
        return await front.call(lambda engine: engine.has_work), front

    has_work, front = run(engine, scenario)
    assert not has_work and front._jobs == {} and len(engine.trace.steps) == 1
    everything_is_back(engine)


def test_an_idle_engine_takes_no_time_of_the_processor():
    """Without work its thread sleeps until a command comes."""

    async def scenario(front):
        before = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before

    taken = run(scripted_engine(TEXTS), scenario)
    assert taken < 0.25


def test_one_place_or_256():
    """The fewest places that may be asked for, and as many as there are without a word."""

    async def scenario(front):
        said = await read(front, "b", greedy(5))
        return text_of(said), front.max_num_requests

    assert run(scripted_engine(TEXTS), scenario, max_num_requests=1) == ("three", 1)
    assert run(scripted_engine(TEXTS), scenario) == ("three", 256)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_leaving_early_aborts_and_the_others_go_on(after):
    engine = scripted_engine(TEXTS)

    async def scenario(front):
        other = asyncio.create_task(read(front, "c", greedy(13)))
        stream = front.stream("a", greedy(50), request_id="a")
        for _ in range(after):
            await anext(stream)
        if not after:
            stream = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        else:
            await stream.aclose()
        assert "a" not in await front.call(lambda engine: [*engine.requests])
        said = await other
        assert front.num_requests == 0
        return said

    assert text_of(run(engine, scenario)) == TEXTS["c"]
    everything_is_back(engine)


def test_what_is_refused_harms_no_one():
    engine = scripted_engine(TEXTS)

    async def scenario(front):
        other = asyncio.create_task(read(front, "b", greedy(5)))
        for prompt, params in (([], greedy()), ("x", greedy(10**6)), ([999], greedy()), (5, greedy())):
            with pytest.raises(ValueError):
                await anext(front.stream(prompt, params))
        with waiting(front):
            twice = [asyncio.create_task(read(front, "a", greedy(40))) for _ in range(2)]
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="in use"):
            await asyncio.gather(*twice)
        return await other

    assert text_of(run(engine, scenario)) == "three"
    everything_is_back(engine)


@pytest.mark.parametrize("taken", [[1], [1, 2]])
def test_a_later_answer_whose_id_is_taken_harms_no_one(taken):
    engine = scripted_engine(TEXTS)
    params = SamplingParams(n=len(taken) + 2, seed=1, max_tokens=5)

    async def scenario(front):
        with waiting(front):
            others = [asyncio.create_task(read(front, f"{i}_x", greedy(30))) for i in taken]
            answers = asyncio.create_task(read(front, "c", params, request_id="x"))
            await asyncio.sleep(0)
        return await answers, await asyncio.gather(*others)

    answers, others = run(engine, scenario)
    ends = [(d.index, d.finish_reason) for d in answers if d.finish_reason]
    assert sorted(ends) == [(i, "error" if i in taken else "length") for i in range(params.n)]
    assert all(len(tokens_of(other)) == 30 for other in others)
    assert "in use" in next(d.error for d in answers if d.error)
    everything_is_back(engine)


def failing(engine, *numbers):
    """Make the forward passes with these numbers raise, counted from 1."""
    forward, count = engine.backend.forward, [0]

    def forward_or_fail(rows):
        count[0] += 1
        if count[0] in numbers or not numbers:
            raise OSError("the device is gone")
        return forward(rows)

    engine.backend.forward = forward_or_fail
    return forward


def test_a_step_that_fails_is_tried_again():
    engine = scripted_engine(TEXTS)
    failing(engine, 2, 3)

    async def scenario(front):
        return await asyncio.gather(read(front, "a", greedy(7)), read(front, "b", greedy(5)))

    assert [text_of(deltas) for deltas in run(engine, scenario)] == ["one two", "three"]
    everything_is_back(engine)


@pytest.mark.parametrize(("failed", "reason"), [((2, 3), "length"), ((2, 3, 4), "error")])
def test_a_step_is_tried_three_times(failed, reason):
    """A step that succeeds in the third try goes on; a fourth does not come, although it would succeed."""
    engine = scripted_engine(TEXTS)
    failing(engine, *failed)
    said = run(engine, lambda front: read(front, "a", greedy(7)))
    assert said[-1].finish_reason == reason
    everything_is_back(engine)


def test_an_engine_that_cannot_go_on_says_so_to_all_and_serves_the_next():
    engine = scripted_engine(TEXTS)
    forward = failing(engine)

    async def scenario(front):
        broken = await asyncio.gather(read(front, "a"), read(front, "b"))
        engine.backend.forward = forward
        return [*broken, await read(front, "c", greedy(13))]

    *broken, healed = run(engine, scenario)
    for deltas in broken:
        assert [delta.finish_reason for delta in deltas] == ["error"]
        assert "the device is gone" in deltas[0].error
    assert text_of(healed) == TEXTS["c"]
    everything_is_back(engine)


def test_close_ends_what_is_open_and_refuses_the_rest():
    engine = scripted_engine(TEXTS)
    begun, go = stopped_in_step(engine, 2)

    async def main():
        front = AsyncEngine(engine)
        stream = front.stream("a", greedy(50), request_id="a")
        await anext(stream)
        assert await asyncio.to_thread(begun.wait, 30)
        closed = asyncio.create_task(asyncio.to_thread(front.close))
        while front._commands.empty():
            await asyncio.sleep(0.001)
        assert not closed.done(), "close() returned in the middle of a step"
        assert engine.requests["a"].priority == 0
        go.set()
        await closed
        assert not front._thread.is_alive()
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason == "error" and rest[-1].error == "the engine was closed"
        for call in (anext(front.stream("b", greedy())), front.call(len)):
            with pytest.raises(EngineClosedError, match="was closed"):
                await call

    asyncio.run(main())
    everything_is_back(engine)


def test_a_thread_that_dies_leaves_no_one_waiting(monkeypatch):
    engine = scripted_engine(TEXTS)
    begun, go = stopped_in_step(engine, 2)

    async def main():
        front = AsyncEngine(engine)
        stream = front.stream("a", greedy(50), request_id="a")
        await anext(stream)
        assert await asyncio.to_thread(begun.wait, 30)
        monkeypatch.setattr(front, "_step", lambda: 1 / 0)
        go.set()
        rest = [delta async for delta in stream]
        assert "ZeroDivisionError" in rest[-1].error
        with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
            await anext(front.stream("b", greedy()))

    asyncio.run(main())
    everything_is_back(engine)


def test_a_step_does_not_block_the_event_loop():
    engine, go = scripted_engine(TEXTS), threading.Event()
    forward = engine.backend.forward
    engine.backend.forward = lambda rows: go.wait(30) and forward(rows)

    async def scenario(front):
        reader = asyncio.create_task(read(front, "b", greedy(5)))
        await asyncio.sleep(0.05)  # the step has begun, and waits for this coroutine
        go.set()
        return await reader

    assert text_of(run(engine, scenario)) == "three"


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(ValueError, match="engine must be an Engine"):
        AsyncEngine(None)
    with pytest.raises(ValueError, match="max_num_requests must be at least 1"):
        AsyncEngine(scripted_engine({}), max_num_requests=0)
