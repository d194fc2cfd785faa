"""From sampled tokens to what users read: text, stop strings, log probabilities, Deltas.

A step calls `process` with its new tokens before the scheduler has them, and `make_delta` afterwards.
If it fails in between, `undo` restores the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mini_engine.outputs import Delta, Logprob, Logprobs
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import top_logprobs
from mini_engine.text.output_text import OutputText

Fail = Callable[[Request, Exception], None]
# Requests with their new tokens, and the logits (num_tokens, vocab_size) that these were sampled from.
Sampled = list[tuple[Request, list[int], Tensor]]
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


@dataclass
class RequestState:
    """The outputs of one request, beside the request itself."""

    request: Request
    text: OutputText
    stop: str | None = None  # the stop string that the text has reached
    num_given: int = 0  # tokens that a Delta has reported
    logprobs: Logprobs = field(default_factory=list)  # of the tokens after those
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # until the first Delta
    stop_token_ids: frozenset[int] = frozenset()  # end the request

    def ends(self, token_id: int, num_outputs: int) -> bool:
        """Whether the request ends with this token as its output of this number, and the text before it."""
        return token_id in self.stop_token_ids and num_outputs >= self.request.sampling_params.min_tokens

    @property
    def has_news(self) -> bool:
        """Whether the request got tokens, or its end, that no Delta has reported."""
        return self.request.finish_reason is not None or len(self.request.output_token_ids) > self.num_given


class OutputProcessor:
    """Keeps the outputs of all requests that are not finished.

    make_text  makes the OutputText of a request
    fail       ends a request whose text cannot be made; its finish_reason is set afterwards
    decode     token ids to text, for log probabilities
    prompt_logits  yields logits (num_rows, vocab_size) after each token of a prompt but the last, in order
    """

    def __init__(
        self,
        make_text: Callable[[Request], OutputText],
        fail: Fail,
        decode: Callable[[list[int]], str] | None = None,
        prompt_logits: Callable[[list[int]], Iterator[Tensor]] | None = None,
    ):
        self.make_text, self.fail, self.decode, self.prompt_logits = make_text, fail, decode, prompt_logits
        self.request_states: dict[str, RequestState] = {}
        self._fed: list[Request] = []  # whose texts have tokens that the scheduler has not been given yet

    def add_request(self, request: Request, text: OutputText) -> None:
        """Begin the outputs of a request, with the text that `make_text` has made."""
        params = request.sampling_params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        self.request_states[request.request_id] = RequestState(request, text, stop_token_ids=frozenset(ends))

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has finished."""
        del self.request_states[request_id]

    def process(self, sampled: Sampled) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Take each request's new tokens into its text.

        Return {request_id: token ids}, up to the token with which the text reached a stop string, and
        {request_id: stop string}. A request that fails is in neither.
        """
        self._fed += [request for request, _, _ in sampled]
        accepted: dict[str, list[int]] = {}
        stopped: dict[str, str] = {}
        for request, token_ids, logits in sampled:
            state = self.request_states[request.request_id]
            try:
                num_accepted = self._append(state, token_ids, logits)
            except Exception as error:
                fresh = RequestState(request, self._read(state), stop_token_ids=state.stop_token_ids)
                if not comes_again(error, partial(self._append, fresh, token_ids, logits)):
                    raise
                self.fail(request, error)
                continue
            accepted[request.request_id] = token_ids[:num_accepted]
            if state.stop:
                stopped[request.request_id] = state.stop
        return accepted, stopped

    def _append(self, state: RequestState, token_ids: list[int], logits: Tensor) -> int:
        """Take tokens into the text, up to the one that ends the request; return their number."""
        request, params, num = state.request, state.request.sampling_params, len(token_ids)
        if params.prompt_logprobs is not None and not request.output_token_ids:
            state.prompt_logprobs = self._of_prompt(request.prompt_token_ids, params)
        for i, token_id in enumerate(token_ids, 1):
            ends = token_id in state.stop_token_ids and state.ends(
                token_id, len(request.output_token_ids) + i
            )
            if not ends or params.include_stop_str_in_output:
                state.stop = state.text.feed(token_id)
            if params.logprobs is not None:
                state.logprobs.append(self._logprobs(logits[i - 1], token_id, params.logprobs, params))
            if ends or state.stop or i < num and request.check_stop(token_ids[:i]):
                return i
        return num

    def _of_prompt(self, token_ids: list[int], params: SamplingParams) -> list[dict[int, Logprob] | None]:
        found: list[dict[int, Logprob] | None] = [None]  # nothing comes before the first token
        if self.prompt_logits and params.prompt_logprobs is not None:
            for rows in self.prompt_logits(token_ids):
                for row in rows:
                    found.append(self._logprobs(row, token_ids[len(found)], params.prompt_logprobs, params))
        return found

    def _logprobs(
        self, logits: Tensor, token_id: int, num: int, params: SamplingParams
    ) -> dict[int, Logprob]:
        found = top_logprobs(logits, token_id, num)
        if self.decode and params.detokenize:
            for i, logprob in found.items():
                logprob.decoded_token = self.decode([i])
        return found

    def make_delta(self, request: Request, stop_string: str | None = None) -> Delta:
        """Return what the request got since its last Delta. `stop_string` is the one it has reached."""
        self._fed = []
        state, params = self.request_states[request.request_id], request.sampling_params
        ended = request.finish_reason is not None
        token_ids = request.output_token_ids[state.num_given :]
        stop_string = stop_string or state.stop
        stop_reason: str | int | None = stop_string
        if ended and stop_string is None and token_ids and token_ids[-1] in params.stop_token_ids:
            stop_reason = token_ids[-1]
        text, flush = "", ended and stop_string is None
        try:
            text = _take(state.text, flush, ended)
        except Exception as error:
            if not comes_again(error, lambda: _take(self._read(state), flush, ended)):
                state.text = self._read(state)
                raise
            self.fail(request, error)
        if stop_string and params.include_stop_str_in_output:
            text += stop_string
        logprobs = state.logprobs if params.logprobs is not None else None
        of_prompt, state.prompt_logprobs = state.prompt_logprobs, None
        state.num_given, state.logprobs = state.num_given + len(token_ids), []
        name, reason = request.request_id, request.finish_reason
        delta = Delta(name, token_ids, text, reason, stop_reason, logprobs, request.error, of_prompt)
        delta.is_complete = request.is_complete if ended else None
        return delta

    def _read(self, state: RequestState) -> OutputText:
        """Return the text of the request's tokens, made anew and given out as far as Deltas have it."""
        text, shown = self.make_text(state.request), state.request.sampling_params.include_stop_str_in_output
        for i, token_id in enumerate(state.request.output_token_ids):
            if shown or not state.ends(token_id, i + 1):
                text.feed(token_id)
            if i < state.num_given:
                text.take(finished=False)
        return text

    def news(self) -> list[Request]:
        """Return the requests with tokens, or an end, that no Delta has reported."""
        return [state.request for state in self.request_states.values() if state.has_news]

    def undo(self) -> None:
        """Restore the texts as they were before `process`.

        The text of a request that was then given tokens, or an end, is left as it is.
        """
        fed, self._fed = self._fed, []
        for request in fed:
            state = self.request_states.get(request.request_id)
            if state and not state.has_news:
                state.text, state.stop = self._read(state), None
                state.logprobs.clear()


def _take(text: OutputText, flush: bool, finished: bool) -> str:
    if flush:
        text.flush()
    return text.take(finished)


def comes_again(error: Exception, attempt: Callable[[], object]) -> bool:
    """Return whether an error is a request's own: one that comes again when that request is tried alone.

    A time-out does not, and the lack of memory never counts."""
    if isinstance(error, OUT_OF_MEMORY):
        return False
    try:
        attempt()
    except Exception:
        return True
    return False
