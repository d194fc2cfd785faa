"""The engine: requests in, text out, one forward pass a step.

`Engine` is the loop: add_request, abort, step, stream. Everything it is made of is named in `Parts`
and can be replaced.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count
from operator import index

import torch

from mini_engine import scheduler as _scheduler
from mini_engine.attention import KVPool, PagedBackend
from mini_engine.block_manager import BlockManager
from mini_engine.model import CausalLM
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import Sampler, top_logprobs
from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Recorder, Trace, WallClock


class NoWorkError(RuntimeError):
    """`step` was called with no request to serve."""


@dataclass
class Delta:
    """What one step added to one request. `finish_reason` is set with the last of them."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: dict[int, float] | None = None


class OutputText:
    """The text of one request as it grows: whole characters, and never a stop string.

    Text that might be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], prompt: Sequence[int] = ()):
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stop = stop
        self.text = ""  # all that was decoded, up to a stop string if there was one
        self._num_given = 0

    def feed(self, token_id: int) -> str | None:
        """Take a token; the stop string that the text has now reached, or None."""
        if self.detokenizer:
            return self._append(self.detokenizer.feed(token_id))
        return None

    def flush(self) -> str | None:
        """Decode what was waiting for the rest of a character; may complete a stop string too."""
        return self._append(self.detokenizer.flush()) if self.detokenizer else None

    def take(self, finished: bool) -> str:
        """What may be given out now and was not before."""
        end = len(self.text) if finished else len(self.text) - self._undecided()
        given, self._num_given = self.text[self._num_given : end], max(end, self._num_given)
        return given

    def _append(self, text: str) -> str | None:
        # A stop string may begin in what was decoded before, but not before what was given out.
        search_from = self._num_given
        self.text += text
        found = [(at, s) for s in self.stop if (at := self.text.find(s, search_from)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def _undecided(self) -> int:
        longest = max((len(s) - 1 for s in self.stop), default=0)
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self.stop):
                return n
        return 0


def step(engine: "Engine") -> list[Delta]:
    """One turn of the engine: decide, compute, sample, take back.

    Raises NoWorkError when there is nothing to do.
    """
    if not engine.has_work:
        raise NoWorkError("step() was called, but no request is waiting or running; add one first")
    scheduled = engine.scheduler.schedule()
    rows = [(engine.requests[request_id], num_tokens) for request_id, num_tokens in scheduled.items()]
    if not rows:
        raise RuntimeError(
            f"the scheduler scheduled nothing with {len(engine.scheduler.waiting)} requests waiting "
            f"and {len(engine.scheduler.running)} running"
        )
    ending = [request for request, num_tokens in rows if num_tokens == request.num_new_tokens]
    logits = engine.backend.forward(rows)
    sampled = engine.sample(logits, ending)
    engine.scheduler.update(scheduled, sampled)
    return engine.collect(ending)


@dataclass(frozen=True)
class Parts:
    """What an engine is built from. The labs replace these one by one."""

    clamp: Callable = _scheduler.clamp
    next_chunk: Callable = _scheduler.next_chunk
    schedule_step: Callable = _scheduler.schedule_step
    Scheduler: Callable = _scheduler.Scheduler
    BlockManager: Callable = BlockManager
    attend_backend: Callable = PagedBackend
    step: Callable = step

    def origins(self) -> dict[str, str]:
        """The parts that are not the engine's own, and the module each comes from."""
        replaced = (f.name for f in fields(self) if getattr(self, f.name) is not f.default)
        return {name: getattr(getattr(self, name), "__module__", "?") for name in replaced}


class Engine:
    """Serves any number of requests at once with one model.

    `max_num_seqs` None is 64, or the token budget if that is smaller. `num_blocks` None sizes the KV
    pool by `kv_cache_bytes`. Requests may be added and aborted at any time between two steps.
    `clock` None with `record` traces in wall time; `part_names` are the trace's names for who wrote
    the `parts` that are not the engine's own, by default their modules.

    Raises ValueError for settings that cannot work.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        policy: str = "fcfs",
        max_num_batched_tokens: int = 512,
        max_num_seqs: int | None = None,
        long_prefill_token_threshold: int = 0,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int = 512 * 2**20,
        watermark: int | None = None,
        enable_prefix_caching: bool = True,
        max_model_len: int | None = None,
        seed: int = 0,
        record: bool = True,
        clock=None,
        parts: Parts | None = None,
        part_names: dict[str, str] | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.parts = parts or Parts()
        longest = model.config.max_position_embeddings
        self.max_model_len = longest if max_model_len is None else max_model_len
        for name, value in (("max_model_len", self.max_model_len), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {longest}"
            )
        if max_num_seqs is None:
            max_num_seqs = min(64, max_num_batched_tokens)
        if num_blocks is None:
            affordable = kv_cache_bytes // (KVPool.bytes_per_token(model.config, model.dtype) * block_size)
            useful = max_num_seqs * -(-self.max_model_len // block_size)
            num_blocks = max(1, min(affordable, useful))
        kv = self.parts.BlockManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, watermark=watermark
        )
        self.scheduler = self.parts.Scheduler(
            kv,
            policy=policy,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=long_prefill_token_threshold,
            schedule_step=self.parts.schedule_step,
            clamp=self.parts.clamp,
        )
        if record:
            names = self.parts.origins() if part_names is None else part_names
            self.scheduler = Recorder(self.scheduler, clock=clock or WallClock(), parts=names)
        self.backend = self.parts.attend_backend(model, kv, next_chunk=self.parts.next_chunk)
        self.sampler = Sampler(seed)
        self.requests: dict[str, Request] = {}
        self._texts: dict[str, OutputText] = {}
        self._logprobs: dict[str, dict[int, float]] = {}  # of this step's tokens
        self.inboxes: dict[str, deque[Delta]] = {}  # where streams listen, by request_id
        self._num_added = 0

    # -------------------------------------------------------------------------------- requests

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
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that is not finished")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        elif sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this engine has none")
        request = Request(
            request_id,
            _token_ids(prompt, request_id),
            sampling,
            priority,
            cache_salt=cache_salt,
            eos_token_ids=self.tokenizer.eos_token_ids if self.tokenizer else (),
        )
        self._check_fits_model(request)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self._texts[request_id] = OutputText(self.tokenizer, sampling.stop, request.prompt_token_ids)
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
        longest = self.max_model_len - request.num_prompt_tokens
        if request.max_tokens is None and longest >= 1:
            kv = self.scheduler.kv
            room = kv.num_blocks * kv.block_size + 1 - request.num_prompt_tokens
            request.max_tokens = max(1, min(longest, room))
        if longest < (request.max_tokens or 1):
            raise ValueError(
                f"request {request.request_id!r}: prompt {request.num_prompt_tokens} + max_tokens "
                f"{request.max_tokens or 1} exceeds the model's length {self.max_model_len}; "
                "shorten the prompt or lower max_tokens"
            )

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if it is not there (any more)."""
        found = self.scheduler.abort(request_id)
        if found:
            if request_id in self.inboxes:
                self.inboxes[request_id].append(Delta(request_id, [], "", "abort"))
            self._forget(request_id)
        return found

    # ------------------------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Serve one step; what it added, a Delta for each request that got a token."""
        deltas = self.parts.step(self)
        for delta in deltas:
            if delta.request_id in self.inboxes:
                self.inboxes[delta.request_id].append(delta)
        return deltas

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> dict[str, int]:
        """Choose a token for each row and decode it, so that a stop string is seen in time.

        logits is (S, vocab_size), a row for each of `requests`; returns {request_id: token_id}.
        Raises ValueError when there are more or fewer rows.
        """
        num_rows = 0 if logits is None else len(logits)
        if num_rows != len(requests):
            raise ValueError(
                f"sample() got {num_rows} rows of logits for {len(requests)} requests; "
                "it takes a row for each request that ends its sequence in this step"
            )
        if not requests:
            return {}
        token_ids = self.sampler(logits, requests)
        for request, token_id, row in zip(requests, token_ids, logits, strict=True):
            request.stop_string = self._texts[request.request_id].feed(token_id)
            if request.sampling.logprobs is not None:
                self._logprobs[request.request_id] = top_logprobs(row, token_id, request.sampling.logprobs)
        return {request.request_id: token for request, token in zip(requests, token_ids, strict=True)}

    def collect(self, requests: list[Request]) -> list[Delta]:
        """The Deltas of the requests that were just given a token; forgets the finished ones."""
        deltas = []
        for request in requests:
            text = self._texts[request.request_id]
            if request.finish_reason and not request.stop_string:
                text.flush()
            deltas.append(
                Delta(
                    request.request_id,
                    request.output_token_ids[-1:],
                    text.take(finished=bool(request.finish_reason)),
                    request.finish_reason,
                    self._logprobs.pop(request.request_id, None),
                )
            )
            if request.finish_reason:
                self._forget(request.request_id)
        return deltas

    def _forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        for kept in (self.requests, self._texts, self._logprobs):
            kept.pop(request_id, None)

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, **kwargs
    ) -> "Stream":
        """Add a request and iterate over its Deltas as they come; all others move on meanwhile.

        The request is queued by the call itself. Dropping or closing the iterator aborts it.
        """
        request_id = self.add_request(prompt, sampling_params, **kwargs)
        return Stream(self, self.requests[request_id])

    @property
    def trace(self) -> Trace:
        """What was recorded so far. Raises RuntimeError on an engine built with record=False."""
        if not isinstance(self.scheduler, Recorder):
            raise RuntimeError("this engine was built with record=False and has no trace")
        return self.scheduler.close("drained" if not self.has_work else "max_steps")


class Stream(Iterator[Delta]):
    """The Deltas of one request, each when it is there. Made by `Engine.stream`.

    Not a generator: one that was never started does not notice that it is dropped.
    """

    def __init__(self, engine: Engine, request: Request):
        self._engine, self._request = engine, request
        self._inbox = engine.inboxes[request.request_id] = deque()
        self._closed = False

    def __next__(self) -> Delta:
        if self._closed:
            raise StopIteration
        while not self._inbox:
            self._engine.step()
        delta = self._inbox.popleft()
        if delta.finish_reason:
            self.close()
        return delta

    def close(self) -> None:
        """Abort the request if it is not finished."""
        self._closed = True
        inboxes, request_id = self._engine.inboxes, self._request.request_id
        # By now the id may be another request's.
        if inboxes.get(request_id) is self._inbox:
            del inboxes[request_id]
        if self._request.finish_reason is None:
            self._engine.abort(request_id)

    __del__ = close


def _token_ids(prompt: Sequence[int], request_id: str) -> list[int]:
    """As plain ints, whatever kind of integers they are."""
    token_ids = []
    for token_id in prompt:
        try:
            token_ids.append(index(token_id))
        except TypeError:
            raise ValueError(f"request {request_id!r}: {token_id!r} is not a token id") from None
    return token_ids
