"""The interface that most users need, as in vLLM: `LLM(model).generate(prompts, params)`."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, cast

from rich.progress import Progress

from mini_engine.engine import Engine
from mini_engine.engine_lock import EngineLock
from mini_engine.input_processor import Prompt, is_listed
from mini_engine.loading.checkpoint import load
from mini_engine.outputs import Delta
from mini_engine.request import Request, SamplingParams, shown
from mini_engine.text.tokenizer import Tokenizer

Conversation = list[dict[str, Any]]  # messages, each {"role": ..., "content": ...}


@dataclass
class CompletionOutput:
    """One answer of a request. `logprobs` has {token id: log probability} for each token."""

    index: int  # always 0: a request has one answer
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    error: str | None = None  # the message, when finish_reason is "error"


@dataclass
class RequestOutput:
    """A finished request, with vLLM's fields."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


@dataclass
class _Pending:
    """A request of `LLM.generate` that is not finished."""

    request: Request
    prompt: str | None
    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    stop_reason: str | int | None = None

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.stop_reason = delta.stop_reason
        self.logprobs.extend(delta.logprobs or ())

    def output(self) -> RequestOutput:
        request = self.request
        completion = CompletionOutput(
            0,
            self.text,
            request.output_token_ids,
            self.logprobs if request.sampling_params.logprobs is not None else None,
            request.finish_reason,
            self.stop_reason,
            request.error,
        )
        return RequestOutput(
            request.request_id,
            self.prompt,
            request.prompt_token_ids,
            [completion],
            True,
            # After a preemption its outputs may have been found, too.
            min(request.num_cached_tokens, request.num_prompt_tokens),
        )


def _is_token_id(value: Any) -> bool:
    """Return whether the value is an integer, of numpy's or torch's kind too."""
    return isinstance(value, Integral) or getattr(value, "ndim", None) == 0


def _several(prompts: Any) -> list[Prompt]:
    """Return the prompts as a list. Raises ValueError for a prompt that is neither text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not is_listed(prompts):
        raise ValueError(f"prompts must be text, token ids or a list of either, but are {shown(prompts)}")
    if len(prompts) and _is_token_id(prompts[0]):
        return [prompts]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_listed(prompt):
            raise ValueError(f"prompts[{i}] must be text or token ids, but is {shown(prompt)}")
    return list(prompts)


def _one_each(name: str, values: Any, n: int) -> Sequence[Any]:
    if not is_listed(values) or isinstance(values, str):
        raise ValueError(f"{name} must be a list with one for each prompt, but is {shown(values)}")
    if len(values) != n:
        raise ValueError(f"there are {n} prompts, but {len(values)} {name}; give one for each prompt")
    return cast(Sequence[Any], values)


class LLM:
    """A model to generate with: `LLM("smollm2").generate(prompts, sampling_params)`.

    `model` is a name from `mini-engine models`, a Hugging Face folder or a .gguf file; the other
    arguments are the Engine's. A call while `generate` or `chat` runs, in another thread or in a callback,
    raises EngineBusyError.
    """

    def __init__(
        self, model: str = "shakespeare", *, dtype: str = "auto", device: str = "auto", **engine_args: Any
    ):
        self.engine, self._lock = Engine(*load(model, dtype, device), **engine_args), EngineLock("LLM")

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """Return an LLM around an existing engine."""
        self = cls.__new__(cls)
        self.engine, self._lock = engine, EngineLock("LLM")
        return self

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer. Raises ValueError if there is none."""
        if self.engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer; give prompts as token ids")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the outputs in the order of the prompts.

        A prompt is text or token ids. Give one SamplingParams for all, or one for each prompt. Raises
        ValueError, and starts nothing, unless every prompt is accepted. If Ctrl-C or an error of the
        model ends the call, it leaves none of its requests behind. A single request that cannot go on
        has finish_reason "error".
        """
        all_prompts = _several(prompts)
        n = len(all_prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * n
        params = _one_each("sampling_params", sampling_params, n)
        priorities = _one_each("priority", [0] * n if priority is None else priority, n)
        for i, param in enumerate(params):
            if not isinstance(param, SamplingParams):
                raise ValueError(f"sampling_params[{i}] must be a SamplingParams, but is {shown(param)}")
        pending: dict[str, _Pending] = {}
        inbox: deque[Delta] = deque()
        with self._lock:
            try:
                for prompt, param, prio in zip(all_prompts, params, priorities, strict=True):
                    request_id = self.engine.add_request(prompt, param, priority=prio)
                    text = prompt if isinstance(prompt, str) else None
                    pending[request_id] = _Pending(self.engine.requests[request_id], text)
                    self.engine.inboxes[request_id] = inbox
                    self._lock.deliver_signals()
                self._run(pending, inbox, progress)
            except BaseException:
                for request_id in pending:
                    self.engine.abort(request_id)
                raise
        return [p.output() for p in pending.values()]

    def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **kwargs: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several, through the model's chat template.

        A conversation is a list of messages, {"role": ..., "content": ...}. Raises ValueError for any
        other value, and when the model has no chat template.
        """
        if not is_listed(messages) or isinstance(messages, str):
            raise ValueError(f"messages must be a list of messages or of conversations: {shown(messages)}")
        if len(messages) and isinstance(messages[0], Mapping):
            messages = [messages]
        prompts = [self.tokenizer.encode_chat(one) for one in cast(list[Conversation], messages)]
        return self.generate(prompts, sampling_params, **kwargs)

    def _run(self, pending: dict[str, _Pending], inbox: deque[Delta], progress: bool) -> None:
        left = set(pending)
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("Generating", total=len(left))
            while left:
                if not inbox:
                    self.engine.reader.step()
                while inbox:
                    delta = inbox.popleft()
                    pending[delta.request_id].take(delta)
                    if delta.finish_reason:
                        left.discard(delta.request_id)
                        bar.advance(task)
                self._lock.deliver_signals()
