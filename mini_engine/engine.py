"""The engine: requests in, text out, one forward pass a step.

`Engine` is the door and the loop: add_request, abort, step, stream. What it is made of, and what a step
does, stands in parts.py and can be replaced.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from os import PathLike
from typing import Any

import torch

from mini_engine.attention import KVPool, PagedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig
from mini_engine.fast.attention import paged_backend
from mini_engine.fast.model import Fast, prepare
from mini_engine.interfaces import Clock, Row, SchedulerLike
from mini_engine.model import CausalLM
from mini_engine.outputs import Delta, Stream
from mini_engine.parts import Parts
from mini_engine.request import Request, SamplingParams, shown
from mini_engine.sampler import NotFiniteError, Sampler, top_logprobs
from mini_engine.scheduler import Scheduler
from mini_engine.text.output_text import OutputText
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Recorder, Trace, WallClock
from mini_engine.turn import Computing, EngineBusyError, Turn


@dataclass
class _Output:
    """What the engine keeps of a request beside the request itself."""

    text: OutputText
    num_given: int = 0  # tokens that were given out
    logprobs: list[dict[int, float]] = field(default_factory=list)  # not given out yet
    error: str | None = None


def is_listed(value: Any) -> bool:
    """A sequence that is no text and no bytes, or an array of numpy's or torch's kind."""
    if isinstance(value, Sequence):
        return not isinstance(value, str | bytes | bytearray | memoryview)
    return getattr(value, "ndim", 0) > 0


class Engine:
    """Serves any number of requests at once with one model.

    The settings are those of EngineConfig, as one or as keywords. Requests may be added and aborted at
    any time between two steps. `record` keeps a trace: True of all steps, a number of the last so
    many; a path streams it there (see `close`). It is in wall time unless a `clock` is given.
    `part_names` are the trace's names for the source of the `parts` that are not the engine's own, by
    default their modules. `fast` is how the model is computed on a CPU: True as quickly as can be here,
    "torch" with torch alone, False by model.py and attention.py as they stand.

    One thread at a time: a call while another is served raises EngineBusyError. Only `abort` may come
    from anywhere; in the middle of a step it takes effect at its end.

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
        self.model, self.tokenizer = prepare(model, fast), tokenizer
        self.parts = parts or Parts()
        self.config = replace(config or EngineConfig(), **settings).fitted(
            model.config.max_position_embeddings, KVPool.bytes_per_token(model.config, model.dtype)
        )
        kv = self.parts.BlockManager(self.config.num_blocks, self.config.block_size, **self.config.kv_args())
        self.scheduler: SchedulerLike = self.parts.Scheduler(
            kv,
            **self.config.scheduler_args(),
            schedule_step=self.parts.schedule_step,
            clamp=self.parts.clamp,
        )
        own = self.parts.attend_backend is PagedBackend
        self.backend = (paged_backend if own else self.parts.attend_backend)(self.model, kv, self.parts)
        if record is not False:
            self.scheduler = Recorder(
                self.scheduler,
                keep=record,
                clock=clock or WallClock(),
                backend=self.backend.name,
                parts=self.parts.origins() if part_names is None else part_names,
            )
        self.sampler = Sampler(self.config.seed)
        self.requests: dict[str, Request] = {}
        self.inboxes: dict[str, deque[Delta]] = {}  # where streams listen, by request_id
        self.computing = Computing()
        self._outputs: dict[str, _Output] = {}
        self._num_added = 0
        self._turn = Turn("engine")
        self._ready: list[Delta] = []  # of a step whose caller was interrupted
        self._fed: list[Request] = []  # whose text has a token that the scheduler has not been given yet
        self._to_abort: deque[Request] = deque()

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Queue a prompt, as text or as token ids; returns the request's id.

        Raises ValueError, naming the request, for a prompt that is empty, holds unknown token ids,
        or could never fit with its max_tokens into the model's context or the KV pool.
        """
        with self._turn:
            return self._add(prompt, sampling_params, request_id, priority, cache_salt).request_id

    def _add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        sampling = SamplingParams() if sampling is None else sampling
        if request_id is None:
            request_id = next(i for i in map("r{}".format, count(self._num_added)) if i not in self.requests)
        name = f"request {shown(request_id)}"
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"{name}: sampling_params must be a SamplingParams, but is {shown(sampling)}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        elif sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this engine has none")
        elif not is_listed(prompt):
            raise ValueError(f"{name}: a prompt is text or a list of token ids, and not {shown(prompt)}")
        elif len(prompt) > (most := self.config.max_model_len or 0):  # before it is looked through
            raise ValueError(f"{name}: prompt {len(prompt)} exceeds the model's length {most}; shorten it")
        request = Request(
            request_id,
            list(prompt),
            sampling,
            priority,
            cache_salt=cache_salt,
            eos_token_ids=self.tokenizer.eos_token_ids if self.tokenizer else (),
        )
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that is not finished")
        self._check_fits_model(request)
        output = _Output(self._text_of(request))
        self.scheduler.add(request)  # the last that can refuse it
        self.requests[request_id], self._outputs[request_id] = request, output
        self._num_added += 1
        return request

    def _text_of(self, request: Request) -> OutputText:
        return self.parts.OutputText(self.tokenizer, request.sampling.stop, request.prompt_token_ids)

    def _check_fits_model(self, request: Request) -> None:
        vocab_size = self.model.config.vocab_size
        wrong = next((t for t in request.prompt_token_ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"request {request.request_id!r}: token id {wrong} is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
        assert self.config.max_model_len is not None
        longest = self.config.max_model_len - request.num_prompt_tokens
        if longest < (request.max_tokens or 1):
            raise ValueError(
                f"request {request.request_id!r}: prompt {request.num_prompt_tokens} + max_tokens "
                f"{request.max_tokens or 1} exceeds the model's length {self.config.max_model_len}; "
                "shorten the prompt or lower max_tokens"
            )
        if request.max_tokens is None:  # to the limit: the model's here, the pool's in the scheduler
            kv = self.scheduler.kv
            room = kv.num_blocks * kv.block_size + 1 - request.num_prompt_tokens
            request.max_tokens = max(1, min(longest, room))

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if it is not there (any more).

        May be called at any time, from any thread: in the middle of a step the request is dropped when
        the step is over.
        """
        request = self.requests.get(request_id)
        try:
            with self._turn:
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
        self.scheduler.abort(request_id)
        self._deliver(Delta(request_id, [], "", "abort"))
        self._forget(request_id)
        return True

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would serve anybody."""
        return bool(self._ready) or self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Serve one step. Returns what it added: a Delta for each request that got a token or ended with an
        error. Raises NoWorkError when there is nothing to serve.

        A step is done or has not begun. When computing it fails, what was decided is taken back, and the
        error raised: nothing is lost, and the next call tries again. Ctrl-C and SIGTERM wait until the
        step is done; its Deltas then come with the next call. Pressed a second time while the model
        computes, Ctrl-C does not wait: the step is taken back.
        """
        with self._turn, torch.inference_mode():
            try:
                if not self._ready:
                    self._ready = self._step()
            finally:
                while self._to_abort:
                    self._abort(self._to_abort.popleft())
        # A signal may have raised before this line; from here to the caller nothing can.
        deltas, self._ready = self._ready, []
        return deltas

    def _step(self) -> list[Delta]:
        before = list(self.scheduler.running)
        try:
            deltas = self.parts.step(self)
        except BaseException:
            self._roll_back(before)
            raise
        for delta in deltas:
            self._deliver(delta)
        return deltas

    def _deliver(self, delta: Delta) -> None:
        if (inbox := self.inboxes.get(delta.request_id)) is not None:
            inbox.append(delta)

    def sample(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Choose a token for each row and decode it, so that a stop string is seen in time.

        logits is (S, vocab_size), a row for each of `requests`. Returns the tokens, {request_id:
        [token_id]}, and of the requests whose text has now reached a stop string which one that is.
        Raises ValueError when there are more or fewer rows.
        """
        num_rows = 0 if logits is None else len(logits)
        if num_rows != len(requests):
            raise ValueError(
                f"sample() got {num_rows} rows of logits for {len(requests)} requests; "
                "it takes a row for each request that ends its sequence in this step"
            )
        sampled: dict[str, list[int]] = {}
        stopped: dict[str, str] = {}
        if not requests:
            return sampled, stopped
        self._fed = requests
        for request, token_id, row in self._choose(logits, requests):
            output = self._outputs[request.request_id]
            try:
                stop = output.text.feed(token_id)
                if (num := request.sampling.logprobs) is not None:
                    output.logprobs.append(top_logprobs(row, token_id, num))
            except Exception as error:
                self._fail(request, error)
                continue
            sampled[request.request_id] = [token_id]
            if stop:
                stopped[request.request_id] = stop
        return sampled, stopped

    def _choose(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> Iterable[tuple[Request, int, torch.Tensor]]:
        """A token for each row. If that fails, for each by itself: one bad row is no other's harm."""
        with suppress(Exception):
            return zip(requests, self.sampler(logits, requests), logits, strict=True)
        chosen = []
        for request, row in zip(requests, logits, strict=True):
            self.sampler.forget(request.request_id)
            try:
                if isinstance(self.backend, PagedBackend) and not row.max().isfinite():
                    row = self._compute_alone(self.backend, request)
                (token_id,) = self.sampler(row.unsqueeze(0), [request])
                chosen.append((request, token_id, row))
            except Exception as error:
                self._fail(request, error)
        return chosen

    def collect(self, requests: list[Request], stopped: dict[str, str]) -> list[Delta]:
        """The Deltas of the requests that were just given tokens; forgets the finished ones.

        `stopped` is what `sample` returned: the stop strings that were reached.
        """
        self._fed = []
        return [self._delta(request, stopped.get(request.request_id)) for request in requests]

    def _delta(self, request: Request, stop_string: str | None) -> Delta:
        output, ended = self._outputs[request.request_id], request.finish_reason is not None
        token_ids = request.output_token_ids[output.num_given :]
        stop_reason: str | int | None = stop_string
        if ended and stop_string is None and token_ids and token_ids[-1] in request.sampling.stop_token_ids:
            stop_reason = token_ids[-1]
        text = ""
        try:
            if ended and stop_string is None:
                output.text.flush()
            text = output.text.take(finished=ended)
        except Exception as error:
            self._fail(request, error)
            ended = True
        logprobs = output.logprobs if request.sampling.logprobs is not None else None
        output.num_given, output.logprobs = output.num_given + len(token_ids), []
        if ended:
            self._forget(request.request_id)
        reason = request.finish_reason
        return Delta(request.request_id, token_ids, text, reason, stop_reason, logprobs, output.error)

    def _forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        del self.requests[request_id], self._outputs[request_id]

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, **kwargs: Any
    ) -> Stream:
        """Add a request and iterate over its Deltas as they come; all others move on meanwhile.

        The request is queued by the call itself. Dropping or closing the iterator aborts it.
        """
        with self._turn:
            request = self._add(prompt, sampling_params, **kwargs)
            try:
                return self.parts.Stream(self, request)
            except Exception:
                self._abort(request)
                raise

    @property
    def trace(self) -> Trace:
        """What was recorded so far. Raises RuntimeError on an engine that does not record."""
        if not isinstance(self.scheduler, Recorder):
            raise RuntimeError("this engine keeps no trace; make it with record=True")
        return self.scheduler.snapshot()

    def close(self) -> None:
        """End the recording, if there is one; a trace that is streamed to a file is whole from then on."""
        if isinstance(self.scheduler, Recorder):
            self.scheduler.close("max_steps" if self.has_work else "drained")

    # ---------------------------------------------------------------- what a fault leaves behind

    def _roll_back(self, before: list[Request]) -> None:
        """The step has failed, with `before` running at its beginning. What was computed of it is dropped,
        what was admitted waits again. Those preempted stay so: others may have written where they were.
        If the scheduler has taken the step back already, it stands, and its Deltas come with the next."""
        fed, self._fed = self._fed, []
        for request in fed:
            self.sampler.forget(request.request_id)  # its generator is made anew, as far as it was drawn
            if request.request_id in self.requests and not self._has_news(request):
                self._reread(request)
        news = [request for request in self.requests.values() if self._has_news(request)]
        if all(request.finish_reason == "error" for request in news):
            if isinstance(self.scheduler, Recorder | Scheduler):
                self.scheduler.take_back(before)
        try:
            self._ready = self.collect(news, {})
        except Exception:  # no more than was tried already; the error that came first is raised
            return
        for delta in self._ready:
            self._deliver(delta)

    def _has_news(self, request: Request) -> bool:
        """Whether it was given tokens, or an end, that no Delta has said yet."""
        given = self._outputs[request.request_id].num_given
        return request.finish_reason is not None or len(request.output_token_ids) > given

    def _reread(self, request: Request) -> None:
        """The text as it was before the token that the scheduler was not given."""
        output = self._outputs[request.request_id]
        output.text = self._text_of(request)
        for token_id in request.output_token_ids:
            output.text.feed(token_id)
            output.text.take(finished=False)
        output.logprobs.clear()

    def _compute_alone(self, backend: PagedBackend, request: Request) -> torch.Tensor:
        """Its logits once more. A NaN of one request can be read by another: masked, but 0 times NaN is NaN.
        By itself, and with the rest of its blocks cleared, a request reads nothing that is not its own."""
        kv = self.scheduler.kv
        end = len(kv.block_table(request)) * kv.block_size
        backend.clear(kv.slot_mapping(request, request.num_tokens, end))
        return backend.forward([Row(request, request.num_new_tokens, True)])[0]

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request that cannot go on."""
        if request.finish_reason == "error":  # and now its last text cannot be had either
            return
        request_id, what = request.request_id, f"{type(error).__name__}: {error}"
        if isinstance(error, NotFiniteError):
            weight = self.model.not_finite()
            what = f"{error}; the model's {weight} holds NaN or infinity" if weight else str(error)
            self._clear(request)
        self._outputs[request_id].error = f"request {request_id!r}: {what}"
        if isinstance(self.scheduler, Recorder):
            self.scheduler.abort(request_id, "error")
        else:
            self.scheduler.abort(request_id)
        request.finish_reason = "error"

    def _clear(self, request: Request) -> None:
        """Nobody is to find or read what it has computed."""
        kv = self.scheduler.kv
        if isinstance(kv, BlockManager) and isinstance(self.backend, PagedBackend):
            own, size = kv.unpublish(request), kv.block_size
            self.backend.clear([b * size + i for b in own for i in range(size)])
