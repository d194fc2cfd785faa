"""The engine: requests in, text out, one forward pass a step. The public API and the step loop.

output_processor.py turns sampled tokens into text, recovery.py repairs what a fault leaves behind, and
parts.py lists what can be replaced.
"""

from collections import deque
from contextlib import suppress
from functools import partial
from itertools import count
from os import PathLike
from typing import Any

import torch

from mini_engine.attention import KVPool
from mini_engine.backends.dense import prompt_logits
from mini_engine.config import EngineConfig
from mini_engine.engine_lock import EngineBusyError, EngineLock, interruptible
from mini_engine.fast.model import Fast, prepare
from mini_engine.input_processor import InputProcessor, Prompt
from mini_engine.interfaces import EngineLike, Row
from mini_engine.model import CausalLM
from mini_engine.output_processor import OutputProcessor
from mini_engine.outputs import Delta, Reader, Stream
from mini_engine.parts import NoWorkError, Parts, check_arguments
from mini_engine.recovery import Recovery
from mini_engine.request import Request, SamplingParams
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Clock, Recorder, Trace, WallClock


def step(engine: EngineLike) -> list[Delta]:
    """Run one step: schedule, compute, sample, update. Raises NoWorkError when there is nothing to do."""
    if not engine.has_work:
        raise NoWorkError("step() was called, but no request is waiting or running; add one first")
    scheduled = engine.scheduler.schedule()
    requests = ((engine.requests[request_id], num_tokens) for request_id, num_tokens in scheduled.items())
    rows = [Row(request, n, n >= request.num_new_tokens) for request, n in requests]
    if not rows:
        raise RuntimeError(
            f"the scheduler scheduled nothing with {len(engine.scheduler.waiting)} requests waiting "
            f"and {len(engine.scheduler.running)} running"
        )
    ending = [row.request for row in rows if row.is_last]
    with interruptible:
        logits = engine.backend.forward(rows)
    sampled, stopped = engine.sample(logits, ending)
    engine.scheduler.update(scheduled, sampled, stopped)
    return engine.collect(ending, stopped)


class Engine:
    """Serves any number of requests at once with one model, to one thread at a time (EngineBusyError).

    settings    the fields of EngineConfig, one by one or as `config`
    record      keep a trace: True of all steps, a number of the last so many, a path in that file
    clock       of the trace; wall time by default
    parts       what replaces the engine's own parts
    part_names  the trace's names for the sources of `parts`; their modules by default
    fast        how a CPU computes the model: True its best way, "torch" torch alone, False model.py as it is

    Raises ValueError for settings that cannot work.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        record: bool | int | str | PathLike[str] = False,
        clock: Clock | None = None,
        parts: Parts | None = None,
        part_names: dict[str, str] | None = None,
        fast: Fast = True,
        **settings: Any,
    ):
        check_arguments(
            model=model,
            tokenizer=tokenizer,
            config=config,
            record=record,
            clock=clock,
            parts=parts,
            part_names=part_names,
        )
        self.model, self.tokenizer = prepare(model, fast), tokenizer
        self.parts = parts or Parts()
        self.config = (
            (config or EngineConfig())
            .with_settings(settings)
            .fitted(model.config.max_position_embeddings, KVPool.bytes_per_token(model.config, model.dtype))
        )
        self.scheduler, self.backend = self.parts.build(self.model, self.config)
        self.recorder: Recorder | None = None
        if record is not False:
            self.scheduler = self.recorder = Recorder(
                self.scheduler,
                keep=record,
                clock=clock or WallClock(),
                backend=self.backend.name,
                parts=self.parts.origins() if part_names is None else part_names,
            )
        self.sampler = self.parts.Sampler(self.config.seed)
        self.recovery = Recovery(self.model, self.scheduler, self.backend, self.sampler)
        vocab_size, make_regex = model.config.vocab_size, self.parts.grammar
        self.input_processor = InputProcessor(self.config, tokenizer, vocab_size, make_regex)
        self.output_processor = OutputProcessor(
            partial(self.parts.make_text, tokenizer),
            self.recovery.fail,
            partial(tokenizer.decode, skip_special_tokens=False) if tokenizer else None,
            partial(prompt_logits, self.model),
        )
        self.requests: dict[str, Request] = {}
        self.inboxes: dict[str, deque[Delta]] = {}  # of the requests that are read, by request_id
        self.reader = Reader(self, self._serve_once)
        self._step = self.parts.step or step
        self._draft = self.parts.drafting(self.config, self.model, tokenizer, fast)
        self._num_added = 0
        self._lock = EngineLock("engine")
        self._ready: list[Delta] = []  # for the next caller of `step`
        self._made: list[Delta] = []  # by `collect` in this step
        self._to_abort: deque[Request] = deque()

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Queue a prompt, as text or as token ids, and return the request's id.

        Raises ValueError, naming the request, for a prompt that is empty, has unknown token ids, or could
        never fit with its max_tokens into the model's context or the KV pool.
        """
        with self._lock:
            options = {"priority": priority, "cache_salt": cache_salt}
            return self._add(prompt, sampling_params, request_id=request_id, **options).request_id

    def _add(self, *args: Any, request_id: str | None = None, **options: Any) -> Request:
        unread = {delta.request_id for delta in self._ready}
        if request_id is None:
            request_id = self.new_id()
        request = self.input_processor.make_request(request_id, *args, **options)
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that is not finished")
        if request_id in unread:
            raise ValueError(f"request id {request_id!r} is in use: call step() for the last of its Deltas")
        self.output_processor.add_request(request, self.output_processor.make_text(request))
        self.requests[request_id] = request
        try:
            self.scheduler.add(request)
        except BaseException:
            self.scheduler.abort(request_id)  # if it has it after all
            self._forget(request_id)
            raise
        self._num_added += 1
        return request

    def new_id(self) -> str:
        """Return an id that no request has."""
        used = {*self.requests, *(delta.request_id for delta in self._ready)}
        ids = map("r{}".format, count(self._num_added))
        return next(i for i in ids if i not in used and f"0_{i}" not in used)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if there is no such request (any more).

        May be called from any thread; a call in the middle of a step takes effect at the step's end.
        """
        request = self.requests.get(request_id)
        try:
            with self._lock:
                self._ready = [delta for delta in self._ready if delta.request_id != request_id]
                return request is not None and self._abort(request)
        except EngineBusyError:
            if request is not None:
                self._to_abort.append(request)
            return request is not None

    def _abort(self, request: Request) -> bool:
        request_id = request.request_id
        if self.requests.get(request_id) is not request:  # finished meanwhile; the id may be another's
            return False
        try:
            self.scheduler.abort(request_id)
        finally:
            if request.finish_reason is not None:
                if request_id in self.inboxes:
                    self._deliver([Delta(request_id, [], "", "abort")])
                self._forget(request_id)
        return True

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would serve a request, or return Deltas that wait."""
        return bool(self._ready) or self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Serve one step. Return a Delta for each request that got a token or ended with an error, but not of
        requests that a stream or `LLM.generate` reads. If such a reader has served a step meanwhile, return
        what waits since then, at once.

        A step is done or has not begun: after an error the next call tries again, and Ctrl-C and SIGTERM
        wait for its end, or for a second one while the model computes. docs/architecture.md has all cases.
        Raises NoWorkError when there is nothing to serve.
        """
        with self._lock:
            if not self._ready:
                self._serve()
        # A signal may have raised before this line; from here to the caller nothing can.
        deltas, self._ready = self._ready, []
        return deltas

    def _serve_once(self) -> None:
        with self._lock:
            self._serve()

    def _serve(self) -> None:
        """Run a step, and put its Deltas where they are read."""
        before = list(self.scheduler.running)
        self._made.clear()
        try:
            with torch.inference_mode():
                self._draft(before)
                deltas = self.recovery.run(lambda: self._step(self), before, self.output_processor)
        except BaseException:
            made = list(self._made)
            news = self.recovery.roll_back(before, self.output_processor)
            with suppress(Exception):  # the error that came first is the one to be raised
                made += self.collect(news, {})
            self._deliver(made)
            raise
        else:
            self._deliver(deltas)
        finally:
            while self._to_abort:
                self._abort(self._to_abort.popleft())

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.inboxes.get(delta.request_id, self._ready).append(delta)
            if delta.finish_reason is not None:  # by the next Delta the id may be another request's
                self.inboxes.pop(delta.request_id, None)

    def sample(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Choose a token for each row of logits (S, vocab_size) and decode it, to see stop strings in time.

        Return the tokens, {request_id: [token_id]}, and {request_id: stop string} for the requests whose
        text has now reached one. Raises ValueError unless there is a row for each of `requests`.
        """
        return self.output_processor.process(self.recovery.sample(logits, requests))

    def collect(self, requests: list[Request], stopped: dict[str, str]) -> list[Delta]:
        """Return the Deltas of requests that were just given tokens, and forget the finished ones.
        `stopped` is from `sample`: the stop strings that were reached."""
        deltas = []
        for request in requests:
            deltas.append(self.output_processor.make_delta(request, stopped.get(request.request_id)))
            self._made.append(deltas[-1])  # in case that the next one fails
            if request.finish_reason is not None:
                self._forget(request.request_id)
        return deltas

    def _forget(self, request_id: str) -> None:
        self.output_processor.remove_request(request_id)
        del self.requests[request_id]
        self.sampler.forget(request_id)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **kwargs: Any) -> Stream:
        """Add a request, at once, and return an iterator over its Deltas; all others move on meanwhile.
        Dropping or closing the iterator aborts the request."""
        with self._lock:
            request = self._add(prompt, sampling_params, **kwargs)
            try:
                return self.parts.Stream(self.reader, request)
            except BaseException:
                self.inboxes.pop(request.request_id, None)
                self._abort(request)
                raise

    @property
    def trace(self) -> Trace:
        """The recording so far. Raises RuntimeError on an engine that does not record."""
        if self.recorder is None:
            raise RuntimeError("this engine keeps no trace; make it with record=True")
        return self.recorder.snapshot()

    def close(self) -> None:
        """End the recording, if there is one; a trace that is streamed to a file is whole from then on."""
        if self.recorder is not None:
            self.recorder.close("max_steps" if self.has_work else "drained")
