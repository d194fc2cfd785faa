"""lab-11's front on a real engine: behind the server, and for `python -m labs demo`."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any, TypeVar

from labs.kit.learner.parts import LearnerParts
from mini_engine.async_engine import EngineClosedError, EngineFullError
from mini_engine.engine import Engine
from mini_engine.input_processor import Prompt
from mini_engine.model import CausalLM
from mini_engine.outputs import Delta
from mini_engine.request import SamplingParams
from mini_engine.text.tokenizer import Tokenizer

T = TypeVar("T")
PROMPTS = ("O Romeo, ", "HAMLET:\n", "Enter ", "My kingdom for ")
SECONDS = 60  # for all of them together


@dataclass
class Asked:
    """A request on its way through the front, which reads its id alone."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)


class Seat:
    """An Engine with the names that lab-11 calls."""

    def __init__(self, engine: Engine):
        self.engine, self.step, self.abort = engine, engine.step, engine.abort

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add_request(self, request: Asked) -> None:
        options = request.options | {"request_id": request.request_id}
        self.engine.add_request(request.prompt, request.params, **options)


class LearnerFront:
    """A lab-11 as the server calls an AsyncEngine. It is made at the first request, in the server's loop."""

    def __init__(self, module: ModuleType, engine: Engine, *, max_num_requests: int = 256):
        self.module, self.engine, self.max_num_requests = module, engine, max_num_requests
        self.thread, self.numbers = ThreadPoolExecutor(1, "mini-engine"), count()
        self.made: Any = None

    @property
    def front(self) -> Any:
        if self.made is None:
            self.loop = asyncio.get_running_loop()
            self.made = self.module.AsyncEngine(Seat(self.engine), self.run, self.max_num_requests)
        return self.made

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    @property
    def num_requests(self) -> int:
        return int(self.made.num_requests) if self.made else 0

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[Delta, None]:
        """Yield the Deltas of a request. Raises ValueError for n above 1, which lab-11 has not."""
        if sampling_params.n > 1:
            raise ValueError(f"n must be 1 with lab-11's front, but is {sampling_params.n}")
        options = {"priority": priority, "cache_salt": cache_salt}
        asked = Asked(f"r{next(self.numbers)}", prompt, sampling_params, options)
        try:
            async with aclosing(self.front.stream(asked)) as deltas:
                async for delta in deltas:
                    yield delta
        except self.module.EngineFullError as error:
            raise EngineFullError(str(error)) from None
        except self.module.EngineClosedError as error:
            raise EngineClosedError(str(error)) from None

    async def call(self, look: Callable[[Engine], T]) -> T:
        """Return what a function of the engine returns, called between two steps."""
        try:
            answer: T = await self.front.send(lambda: look(self.engine))
        except self.module.EngineClosedError as error:
            raise EngineClosedError(str(error)) from None
        return answer

    def close(self) -> None:
        """End the engine's thread; not to be called in the event loop."""
        if self.made is not None:
            asyncio.run_coroutine_threadsafe(self.made.close(), self.loop).result(SECONDS)
        self.thread.shutdown()


async def streamed(learner: LearnerParts, engine: Engine) -> list[str]:
    """Return the texts of all prompts, read at once; another reader leaves after its first token."""
    assert learner.front is not None
    front = LearnerFront(learner.front, engine)

    async def read(prompt: str, most: int, max_tokens: int = 24) -> str:
        text, params = "", SamplingParams(temperature=0, max_tokens=max_tokens)
        async with aclosing(front.stream(prompt, params)) as deltas:
            async for delta in deltas:
                text += delta.text
                most -= 1
                if not most:
                    break
        return text

    try:
        *texts, _ = await asyncio.gather(*(read(one, 99) for one in PROMPTS), read("The ", 1, 200))
        if left := await front.call(lambda engine: [*engine.requests]):
            raise RuntimeError(f"lab-11: {left[0]} is still in the engine, and its reader has left")
        if front.num_requests:
            raise RuntimeError(f"lab-11: num_requests is {front.num_requests}, and no client reads")
        return list(texts)
    finally:
        await asyncio.to_thread(front.close)


def compared(learner: LearnerParts, model: CausalLM, tokenizer: Tokenizer) -> tuple[bool, list[str]]:
    """Return whether readers of the learner's front get what the engine says, and the lines that say so."""
    title = f"{len(PROMPTS)} readers at once, through lab-11's front, and one that leaves:"
    engine, plain = Engine(model, tokenizer, **learner.engine_args), Engine(model, tokenizer)
    try:
        yours = asyncio.run(asyncio.wait_for(streamed(learner, engine), SECONDS))
    except TimeoutError:
        return False, [title, f"  lab-11: a reader still waits after {SECONDS} s"]
    except Exception as error:
        return False, [title, f"  {learner.explain(error)}"]
    params, lines, right = SamplingParams(temperature=0, max_tokens=24), [title], True
    for prompt, text in zip(PROMPTS, yours, strict=True):
        expected = "".join(delta.text for delta in plain.stream(prompt, params))
        verdict = "" if text == expected else f"  DIFFERS: the engine's own gives {expected!r}"
        lines, right = [*lines, f"  {prompt!r} {text!r}{verdict}"], right and not verdict
    return right, lines


def served(learner: LearnerParts, name: str, model: CausalLM, tokenizer: Tokenizer, port: int) -> None:
    """Serve a model to OpenAI's clients, with the learner's parts and front. Raises ValueError."""
    from mini_engine.commands.serve import STEPS, check_installed, listen, serve_engine

    assert learner.front is not None
    check_installed()
    listening = listen("127.0.0.1", port)
    engine = Engine(model, tokenizer, **learner.engine_args | {"record": STEPS})
    serve_engine(engine, name, listening, front=partial(LearnerFront, learner.front))
