"""The interface that most users need, as in vLLM: `LLM(model).generate(prompts, params)`."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, cast

from rich.console import Console
from rich.progress import Progress

from mini_engine.checks import shown
from mini_engine.engine import Engine
from mini_engine.engine_lock import EngineLock
from mini_engine.input_processor import Prompt, is_listed, take_apart
from mini_engine.interfaces import PrefixCachedKV, SchedulerLike
from mini_engine.loading.checkpoint import load
from mini_engine.outputs import CompletionOutput, Delta, Logprob, Logprobs, RequestOutput
from mini_engine.request import Request, SamplingParams
from mini_engine.text.tokenizer import Tokenizer

Conversation = list[dict[str, Any]]  # messages, each {"role": ..., "content": ...}


@dataclass(frozen=True)
class Metric:
    """A number that a server would export: a Counter only grows, a Gauge goes up and down."""

    name: str
    type: str
    value: float


def state_of(scheduler: SchedulerLike) -> tuple[dict[str, float], dict[str, float]]:
    """Return the gauges and the counters of a scheduler and its memory, under vLLM's names."""
    kv = scheduler.kv
    gauges = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": 1 - kv.num_free_blocks / kv.num_blocks,
    }
    if not isinstance(kv, PrefixCachedKV):
        return gauges, {}
    return gauges, {"prefix_cache_queries": kv.stats.queries, "prefix_cache_hits": kv.stats.hits}


@dataclass
class _Answer:
    """One answer of `LLM.generate` that is not finished: a request of the engine."""

    request: Request
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    stop_reason: str | int | None = None

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.stop_reason = delta.stop_reason
        self.logprobs.extend(delta.logprobs or ())
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs

    def output(self, index: int) -> CompletionOutput:
        request, token_ids = self.request, self.request.output_token_ids
        total, logprobs = None, None
        if request.sampling_params.logprobs is not None:
            logprobs = self.logprobs
            total = sum(of[i].logprob for i, of in zip(token_ids, logprobs, strict=False))
        end = request.finish_reason, self.stop_reason, request.error, request.is_complete
        return CompletionOutput(index, self.text, token_ids, total, logprobs, *end)


@dataclass
class _Job:
    """A prompt of `LLM.generate` with its n answers. All but the first begin when the prompt is computed."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    answers: list[_Answer] = field(default_factory=list)
    siblings: list[Request] = field(default_factory=list)

    def output(self, prompt: str | None) -> RequestOutput:
        first, of_prompt = self.answers[0].request, self.answers[0].prompt_logprobs
        name = first.request_id.removeprefix("0_") if self.params.n > 1 else first.request_id
        outputs = [answer.output(i) for i, answer in enumerate(self.answers)]
        # After a preemption its outputs may have been found, too.
        num_cached = min(first.num_cached_tokens, first.num_prompt_tokens)
        return RequestOutput(name, prompt, first.prompt_token_ids, of_prompt, outputs, True, num_cached)


def _is_token_id(value: Any) -> bool:
    """Return whether the value is an integer, of numpy's or torch's kind too."""
    return isinstance(value, Integral) or getattr(value, "ndim", None) == 0


def _several(prompts: Any) -> list[Prompt]:
    """Return the prompts as a list. Raises ValueError for a prompt that is neither text nor token ids."""
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    if not is_listed(prompts):
        raise ValueError(f"prompts must be text, token ids or a list of either, but are {shown(prompts)}")
    if len(prompts) and _is_token_id(prompts[0]):
        return [prompts]
    for i, prompt in enumerate(prompts):
        take_apart(f"prompts[{i}]", prompt)
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
        self._begin(Engine(*load(model, dtype, device), **engine_args))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """Return an LLM around an existing engine."""
        self = cls.__new__(cls)
        self._begin(engine)
        return self

    def _begin(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise ValueError(f"engine must be an Engine, but is {shown(engine)}")
        self.engine, self._lock = engine, EngineLock("LLM")
        self._counts: Counter[str] = Counter()

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer. Raises ValueError if there is none."""
        if self.engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer; give prompts as token ids")
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Return the engine's tokenizer. Raises ValueError if there is none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` takes without sampling_params: what the model's makers advise in
        generation_config.json or in the .gguf file, and vLLM's defaults for the rest."""
        return self.engine.input_processor.default_params

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; False, and nothing is changed, while a request holds blocks."""
        kv = self.engine.scheduler.kv
        return kv.reset_prefix_cache() if isinstance(kv, PrefixCachedKV) else not kv.num_cached_blocks

    def get_metrics(self) -> list[Metric]:
        """Return the state of the engine, and counts of what `generate` and `chat` have finished.

        The names are vLLM's, after "mini_engine:".
        """
        gauges, counters = state_of(self.engine.scheduler)
        names = ("prompt_tokens", "generation_tokens", "num_preemptions", "request_success")
        counters = {name: self._counts[name] for name in names} | counters
        kinds = [("gauge", gauges), ("counter", counters)]
        return [Metric(f"mini_engine:{n}", kind, v) for kind, values in kinds for n, v in values.items()]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the outputs in the order of the prompts.

        A prompt is text, token ids, or one of vLLM's dicts, {"prompt": ...} or {"prompt_token_ids": ...}.
        Give one SamplingParams for all, or one for each prompt; None is `get_default_sampling_params()`.
        `use_tqdm` shows progress on stderr, if that is a terminal. Raises ValueError, and starts nothing,
        unless every prompt is accepted. If Ctrl-C or an error of the model ends the call, it leaves none of
        its requests behind. A single request that cannot go on has finish_reason "error".
        """
        all_prompts = _several(prompts)
        n = len(all_prompts)
        if not isinstance(use_tqdm, bool):
            raise ValueError(f"use_tqdm must be True or False, but is {shown(use_tqdm)}")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.get_default_sampling_params()] * n
        params = _one_each("sampling_params", sampling_params, n)
        if priority is None or isinstance(priority, int) and not isinstance(priority, bool):
            priority = [priority or 0] * n
        priorities = _one_each("priority", priority, n)
        for i, param in enumerate(params):
            if not isinstance(param, SamplingParams):
                raise ValueError(f"sampling_params[{i}] must be a SamplingParams, but is {shown(param)}")
        jobs = [_Job(*given) for given in zip(all_prompts, params, priorities, strict=True)]
        pending: dict[str, tuple[_Job, _Answer]] = {}
        inbox: deque[Delta] = deque()
        with self._lock:
            try:
                for job in jobs:
                    self._start(job, pending, inbox)
                    self._lock.deliver_signals()
                self._run(pending, inbox, use_tqdm)
            except BaseException:
                for request_id in pending:
                    self.engine.abort(request_id)
                raise
        return [job.output(take_apart("prompt", job.prompt).text) for job in jobs]

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

    def _start(self, job: _Job, pending: dict[str, tuple[_Job, _Answer]], inbox: deque[Delta]) -> None:
        """Add the next answer of a job to the engine."""
        index, request_id, params = len(job.answers), None, job.params
        if params.n > 1:
            parent = job.answers[0].request.request_id.removeprefix("0_") if index else self.engine.new_id()
            request_id, params = f"{index}_{parent}", params.of_sample(index)
        request_id = self.engine.add_request(job.prompt, params, request_id=request_id, priority=job.priority)
        answer = _Answer(self.engine.requests[request_id])
        job.answers.append(answer)
        answer.request.siblings = job.siblings
        job.siblings.append(answer.request)
        pending[request_id] = job, answer
        self.engine.inboxes[request_id] = inbox

    def _run(self, pending: dict[str, tuple[_Job, _Answer]], inbox: deque[Delta], use_tqdm: bool) -> None:
        num_left, console = sum(job.params.n for job, _ in pending.values()), Console(stderr=True)
        with Progress(console=console, disable=not (use_tqdm and console.is_terminal), transient=True) as bar:
            task = bar.add_task("Generating", total=num_left)
            while num_left:
                if not inbox:
                    self.engine.reader.step()
                while inbox:
                    delta = inbox.popleft()
                    job, answer = pending[delta.request_id]
                    answer.take(delta)
                    while len(job.answers) < job.params.n:  # the prompt is computed: they fork
                        self._start(job, pending, inbox)
                    if delta.finish_reason:
                        num_left -= 1
                        self._count(answer.request)
                        bar.advance(task)
                self._lock.deliver_signals()

    def _count(self, request: Request) -> None:
        self._counts["prompt_tokens"] += request.num_prompt_tokens
        self._counts["generation_tokens"] += len(request.output_token_ids)
        self._counts["num_preemptions"] += request.num_preemptions
        self._counts["request_success"] += request.finish_reason in ("stop", "length")
