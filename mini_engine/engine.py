"""The engine: requests in, text out, one forward pass a step.

`Engine` is the door and the loop: add_request, abort, step, stream. What it is made of, and what a step
does, stands in parts.py and can be replaced.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from os import PathLike
from typing import Any

import torch

from mini_engine.attention import KVPool, PagedBackend
from mini_engine.config import EngineConfig
from mini_engine.fast.attention import paged_backend
from mini_engine.fast.model import Fast, prepare
from mini_engine.interfaces import Clock, SchedulerLike
from mini_engine.model import CausalLM
from mini_engine.outputs import Delta, Stream
from mini_engine.parts import Parts
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import Sampler, top_logprobs
from mini_engine.text.output_text import OutputText
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Recorder, Trace, WallClock


@dataclass
class _Output:
    """What the engine keeps of a request beside the request itself."""

    text: OutputText
    num_given: int = 0  # tokens that were given out
    logprobs: list[dict[int, float]] = field(default_factory=list)  # not given out yet


class Engine:
    """Serves any number of requests at once with one model.

    The settings are those of EngineConfig, as one or as keywords. Requests may be added and aborted at
    any time between two steps. `record` keeps a trace: True of all steps, a number of the last so
    many; a path streams it there (see `close`). It is in wall time unless a `clock` is given.
    `part_names` are the trace's names for the source of the `parts` that are not the engine's own, by
    default their modules. `fast` is how the model is computed on a CPU: True as quickly as can be here,
    "torch" with torch alone, False by model.py and attention.py as they stand.

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
        self._outputs: dict[str, _Output] = {}
        self._num_added = 0

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
        sampling = sampling_params or SamplingParams()
        if request_id is None:
            request_id = next(i for i in map("r{}".format, count(self._num_added)) if i not in self.requests)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        elif sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this engine has none")
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
        self.scheduler.add(request)
        self.requests[request_id] = request
        text = self.parts.OutputText(self.tokenizer, sampling.stop, request.prompt_token_ids)
        self._outputs[request_id] = _Output(text)
        self._num_added += 1
        return request_id

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
        """Drop a request wherever it is; False if it is not there (any more)."""
        found = self.scheduler.abort(request_id)
        if found:
            self._deliver(Delta(request_id, [], "", "abort"))
            self._forget(request_id)
        return found

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Serve one step; what it added, a Delta for each request that got a token."""
        deltas = self.parts.step(self)
        for delta in deltas:
            self._deliver(delta)
        return deltas

    def _deliver(self, delta: Delta) -> None:
        if delta.request_id in self.inboxes:
            self.inboxes[delta.request_id].append(delta)

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
        token_ids = self.sampler(logits, requests)
        for request, token_id, row in zip(requests, token_ids, logits, strict=True):
            output = self._outputs[request.request_id]
            sampled[request.request_id] = [token_id]
            if stop := output.text.feed(token_id):
                stopped[request.request_id] = stop
            if (num := request.sampling.logprobs) is not None:
                output.logprobs.append(top_logprobs(row, token_id, num))
        return sampled, stopped

    def collect(self, requests: list[Request], stopped: dict[str, str]) -> list[Delta]:
        """The Deltas of the requests that were just given tokens; forgets the finished ones.

        `stopped` is what `sample` returned: the stop strings that were reached.
        """
        return [self._delta(request, stopped.get(request.request_id)) for request in requests]

    def _delta(self, request: Request, stop_string: str | None) -> Delta:
        output, ended = self._outputs[request.request_id], request.finish_reason is not None
        token_ids = request.output_token_ids[output.num_given :]
        stop_reason: str | int | None = stop_string
        if ended and stop_string is None:
            output.text.flush()
            if token_ids[-1] in request.sampling.stop_token_ids:
                stop_reason = token_ids[-1]
        text = output.text.take(finished=ended)
        logprobs = output.logprobs if request.sampling.logprobs is not None else None
        output.num_given, output.logprobs = output.num_given + len(token_ids), []
        if ended:
            self._forget(request.request_id)
        return Delta(request.request_id, token_ids, text, request.finish_reason, stop_reason, logprobs)

    def _forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        del self.requests[request_id], self._outputs[request_id]

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, **kwargs: Any
    ) -> Stream:
        """Add a request and iterate over its Deltas as they come; all others move on meanwhile.

        The request is queued by the call itself. Dropping or closing the iterator aborts it.
        """
        request_id = self.add_request(prompt, sampling_params, **kwargs)
        return self.parts.Stream(self, self.requests[request_id])

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
