"""An engine for asyncio: one thread owns it, commands come through a queue, Deltas go to the event loop.

Between two steps the thread runs what has come meanwhile (add, abort, look). After a step it hands over all
Deltas at once. No caller waits for another one's step, and none blocks the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from mini_engine.checks import is_whole, shown
from mini_engine.engine import Engine
from mini_engine.input_processor import Prompt, take_apart
from mini_engine.outputs import Delta
from mini_engine.request import Request, SamplingParams

Answer = TypeVar("Answer")
TRIES = 3  # of a step that raises; it is taken back each time, so that another try may succeed
LONG = 2000  # characters of a prompt from which on it is tokenised in a thread of its own

log = logging.getLogger(__name__)


class EngineFullError(RuntimeError):
    """The AsyncEngine has as many open requests as it takes; try again later."""


class EngineClosedError(RuntimeError):
    """The AsyncEngine was closed, or its thread has ended with an error."""


@dataclass(eq=False)
class _Job:
    """A prompt with its n answers, on its way between the event loop and the engine's thread."""

    prompt: Prompt
    params: SamplingParams
    options: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    added: asyncio.Future[None]
    answers: list[Request] = field(default_factory=list)  # those that the engine has been given
    num_refused: int = 0  # answers after the first that the engine did not take
    error: str | None = None  # of an engine that cannot go on
    # Read and written in the event loop only:
    inbox: list[Delta] = field(default_factory=list)
    filled: asyncio.Future[None] | None = None  # while the reader waits for an empty inbox to be filled


class _Inbox(deque[Delta]):
    """Where the engine puts the Deltas of one answer; they go to `made`, with the job that they are of."""

    def __init__(self, made: list[tuple[_Job, Delta]], job: _Job, request: Request, number: int):
        super().__init__()
        self.made, self.job, self.request, self.number = made, job, request, number

    def append(self, delta: Delta) -> None:
        job = self.job
        if job.error is not None and delta.finish_reason is not None:
            delta = replace(delta, finish_reason="error", error=job.error)
        request, delta.index = self.request, self.number
        # After a preemption outputs may have been found, too.
        delta.num_cached_tokens = min(request.num_cached_tokens, request.num_prompt_tokens)
        self.made.append((job, delta))


class AsyncEngine:
    """Serves an Engine to any number of coroutines. From here on only its thread may call the engine.

    Raises ValueError unless max_num_requests, the most open requests, is at least 1.
    """

    def __init__(self, engine: Engine, *, max_num_requests: int = 256):
        if not isinstance(engine, Engine):
            raise ValueError(f"engine must be an Engine, but is {shown(engine)}")
        if not is_whole(max_num_requests, 1):
            raise ValueError(f"max_num_requests must be at least 1, but is {shown(max_num_requests)}")
        self.engine, self.max_num_requests = engine, int(max_num_requests)
        self.num_requests = 0  # that are open: waiting, running, or not read to the end
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: dict[str, _Job] = {}  # by request_id, of the answers that are not finished
        self._made: list[tuple[_Job, Delta]] = []
        self._ended: str | None = None  # why no request is served any more
        self._thread = Thread(target=self._serve, name="mini-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------- in the event loop

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Yield the Deltas of a request; with n answers Delta.index says of which. Leaving early aborts it.

        Raises ValueError for a request that the engine refuses, EngineFullError and EngineClosedError. The
        tokens that a slow reader has not read are kept, at most max_tokens; other requests go on.
        """
        if self._ended is not None:
            raise EngineClosedError(self._ended)
        if self.num_requests >= self.max_num_requests:
            raise EngineFullError(f"{self.num_requests} requests are open, the most that are taken")
        loop = asyncio.get_running_loop()
        options = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
        params = sampling_params or self.engine.input_processor.default_params
        job = _Job(prompt, params, options, loop, loop.create_future())
        self.num_requests += 1
        left = params.n
        try:
            job.prompt = await self._tokenised(prompt)
            self._commands.put(partial(self._add, job))
            await job.added
            while left:
                if not job.inbox:
                    job.filled = loop.create_future()
                    await job.filled
                deltas, job.inbox = job.inbox, []
                for delta in deltas:
                    left -= delta.finish_reason is not None
                    yield delta
        finally:
            self.num_requests -= 1
            if left:
                self._commands.put(partial(self._abort, job))

    async def call(self, look: Callable[[Engine], Answer]) -> Answer:
        """Return what a function of the engine returns. It is called between two steps, and must be short."""
        if self._ended is not None:
            raise EngineClosedError(self._ended)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._commands.put(partial(self._answer, loop, answer, partial(look, self.engine)))
        return await answer

    async def _tokenised(self, prompt: Prompt) -> Prompt:
        """Return the prompt as token ids, so that no step waits while a long text is tokenised."""
        tokenizer, given = self.engine.tokenizer, take_apart("prompt", prompt)
        if tokenizer is None or given.text is None or given.token_ids is not None:
            return prompt
        text, encode = given.text, tokenizer.encode
        token_ids = encode(text) if len(text) < LONG else await asyncio.to_thread(encode, text)
        return {"prompt_token_ids": token_ids, "cache_salt": given.cache_salt}

    def close(self) -> None:
        """End the thread after the step that is being computed; what is still open ends with an error."""
        self._commands.put(partial(self._end, "the engine was closed"))
        self._thread.join()

    # -------------------------------------------------------------------- in the engine's thread

    def _serve(self) -> None:
        while self._ended is None:
            self._turn()
        while not self._commands.empty():  # commands that came too late are answered, too
            self._commands.get()()
        self._hand_over()

    def _turn(self) -> None:
        """Run the commands that have come, and one step if there is work. What comes meanwhile waits."""
        try:
            for command in self._next_commands():
                command()
            if self._ended is None and self.engine.has_work:
                self._step()
            self._hand_over()
        except BaseException as error:
            log.exception("the engine's thread has ended")
            self._end(f"the engine's thread has ended with {type(error).__name__}: {error}")
            self._hand_over()

    def _next_commands(self) -> Iterable[Callable[[], None]]:
        if not self.engine.has_work:
            yield self._commands.get()  # there is nothing else to do
        for _ in range(self._commands.qsize()):
            yield self._commands.get()

    def _step(self) -> None:
        for number in range(1, TRIES + 1):
            try:
                self.engine.reader.step()
                return
            except Exception as error:  # the step is taken back
                log.exception("a step failed, try %d of %d", number, TRIES)
                why = f"the engine cannot go on: {type(error).__name__}: {error}"
        self._fail_all(why)

    def _fail_all(self, why: str) -> None:
        for request_id, job in [*self._jobs.items()]:
            job.error = why
            self.engine.abort(request_id)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        try:
            self._fail_all(self._ended)
        except Exception:
            log.exception("the engine could not be ended in good order")
            for job in self._jobs.values():
                self._made += [
                    (job, Delta(request.request_id, [], "", "error", error=why, index=index))
                    for index, request in enumerate(job.answers)
                    if request.request_id in self._jobs
                ]

    def _hand_over(self) -> None:
        """Give the Deltas to the event loops, in one call for each; start the answers that follow a first."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Delta]]] = {}
        for job, delta in self._made:
            by_loop.setdefault(job.loop, []).append((job, delta))
            if delta.finish_reason is not None and self._jobs.get(delta.request_id) is job:
                del self._jobs[delta.request_id]  # else by now the id is another's
        self._made.clear()
        for loop, made in by_loop.items():
            self._tell(loop, partial(_fill, made))
            for job, _ in made:
                self._start_others(job)

    def _start_others(self, job: _Job) -> None:
        """Start the answers after the first, whose prompt is computed now, so that they fork it."""
        while len(job.answers) + job.num_refused < job.params.n and job.error is None:
            try:
                self._start(job)
            except Exception as error:  # its id is another's, say
                number, job.num_refused = len(job.answers) + job.num_refused, job.num_refused + 1
                delta = Delta(f"{number}_", [], "", "error", error=str(error), index=number)
                self._tell(job.loop, partial(_fill, [(job, delta)]))

    def _add(self, job: _Job) -> None:
        try:
            if self._ended is not None:
                raise EngineClosedError(self._ended)
            self._start(job)
        except Exception as error:
            self._tell(job.loop, partial(_settle, job.added, None, error))
        else:
            self._tell(job.loop, partial(_settle, job.added, None, None))

    def _start(self, job: _Job) -> None:
        """Give the engine the next answer of a job."""
        index, params, options = len(job.answers) + job.num_refused, job.params, dict(job.options)
        if params.n > 1:
            name = options["request_id"] or (
                job.answers[0].request_id.removeprefix("0_") if index else self.engine.new_id()
            )
            options["request_id"], params = f"{index}_{name}", params.of_sample(index)
        request_id = self.engine.add_request(job.prompt, params, **options)
        request = self.engine.requests[request_id]
        job.answers.append(request)
        request.siblings = job.answers
        self._jobs[request_id] = job
        self.engine.inboxes[request_id] = _Inbox(self._made, job, request, index)

    def _abort(self, job: _Job) -> None:
        job.error = "aborted"  # so that no further answer is started
        for request in job.answers:
            if self._jobs.get(request.request_id) is job:
                del self._jobs[request.request_id]
                self.engine.abort(request.request_id)

    def _answer(
        self, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]", look: Callable[[], Any]
    ) -> None:
        try:
            if self._ended is not None:
                raise EngineClosedError(self._ended)
            value, error = look(), None
        except Exception as one:
            value, error = None, one
        self._tell(loop, partial(_settle, answer, value, error))

    def _tell(self, loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(what)
        except RuntimeError:  # that loop is closed, and its readers are gone
            log.debug("an event loop has gone")


def _fill(made: list[tuple[_Job, Delta]]) -> None:
    for job, delta in made:
        job.inbox.append(delta)
        if job.filled is not None and not job.filled.done():
            job.filled.set_result(None)


def _settle(future: "asyncio.Future[Any]", value: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
