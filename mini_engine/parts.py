"""The parts that an engine is built from, each under the name by which the labs replace it.

No part is put into an engine in any other way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from os import PathLike
from typing import Any

from mini_engine import scheduler as _scheduler
from mini_engine.backends.draft import draft_proposer
from mini_engine.block_manager import BlockManager
from mini_engine.checks import is_whole, shown
from mini_engine.config import EngineConfig
from mini_engine.fallbacks import let_fork, let_share_within_step
from mini_engine.fast.attention import paged_backend
from mini_engine.fast.model import Fast
from mini_engine.interfaces import Backend, EngineLike, KVManager, SamplerLike, SchedulerLike
from mini_engine.model import CausalLM
from mini_engine.outputs import Delta, Stream
from mini_engine.renamed import adopt
from mini_engine.request import Request
from mini_engine.sampler import Sampler
from mini_engine.speculative.adaptive import AdaptiveProposer, Proposer, draft
from mini_engine.speculative.ngram import NgramProposer
from mini_engine.structured.grammar import StructuredOutputGrammar, regex_grammar
from mini_engine.text import output_text
from mini_engine.text.tokenizer import Tokenizer


def check_arguments(**given: Any) -> None:
    """Raise ValueError for an argument of Engine that is of another kind than it must be."""
    for name, (holds, rule) in _RULES.items():
        if not holds(given[name]):
            raise ValueError(f"{name} must be {rule}, but is {shown(given[name])}")


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


def _keeps(value: Any) -> bool:
    return (
        isinstance(value, bool)
        or is_whole(value, 0)
        or isinstance(value, str | PathLike)
        and str(value) != ""
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(s, str) for pair in value.items() for s in pair)


class NoWorkError(RuntimeError):
    """`step` was called with no request to serve."""


@dataclass(frozen=True)
class Parts:
    """The parts of an engine; the labs replace them one by one. `step` None means engine.step.

    `propose` is given the decodes of a step and returns drafts of the next tokens of each, to be verified.
    None means what EngineConfig's speculative_config says.
    """

    clamp: Callable[[int, int, int], int] = _scheduler.clamp
    next_chunk: Callable[[Request, int], _scheduler.Chunk] = _scheduler.next_chunk
    schedule_step: Callable[..., dict[str, int]] = _scheduler.schedule_step
    Scheduler: Callable[..., SchedulerLike] = _scheduler.Scheduler
    BlockManager: Callable[..., KVManager] = BlockManager
    attend_backend: Callable[..., Backend] = paged_backend
    Sampler: Callable[[int], SamplerLike] = Sampler
    OutputText: Callable[..., output_text.OutputText] = output_text.OutputText
    Stream: Callable[..., Stream] = Stream
    grammar: Callable[..., StructuredOutputGrammar] = regex_grammar
    step: Callable[[EngineLike], list[Delta]] | None = None
    propose: Callable[[list[Request]], list[list[int]]] | None = None

    def build(self, model: CausalLM, config: EngineConfig) -> tuple[SchedulerLike, Backend]:
        """Return the scheduler, with its KV manager, and the backend, for a config fitted to the model."""
        kv = adopt(self.BlockManager(config.num_blocks, config.block_size, **config.kv_args()))
        functions = {"schedule_step": self.schedule_step, "clamp": self.clamp}
        scheduler = self.Scheduler(kv, **config.scheduler_args(), **functions)
        backend = self.attend_backend(model, kv, self.next_chunk)
        let_fork(kv, backend)
        let_share_within_step(kv, scheduler, backend)
        return scheduler, backend

    def drafting(
        self, config: EngineConfig, model: CausalLM, tokenizer: Tokenizer | None, fast: Fast
    ) -> Callable[[list[Request]], None]:
        """Return what gives running requests their drafts before a step: by `propose`, or as configured.
        Raises ValueError for a draft model that does not fit the model."""
        propose, settings = self.propose, config.speculative_config
        if propose is None and settings is not None:
            most = settings.num_speculative_tokens
            proposer: Proposer = NgramProposer(*settings.lookup_lengths, most)
            if settings.model is not None:
                proposer = draft_proposer(settings, config.seed, model, tokenizer, fast)
            propose = AdaptiveProposer(proposer, most)
        return partial(draft, propose=propose) if propose else lambda running: None

    def make_text(self, tokenizer: Tokenizer | None, request: Request) -> output_text.OutputText:
        """Return the text of a request. Raises ValueError for an option that a replaced OutputText lacks."""
        params = request.sampling_params
        options: dict[str, Any] = {}
        if params.min_tokens and params.stop:
            options["min_tokens"] = params.min_tokens
        if not params.skip_special_tokens:
            options["skip_special_tokens"] = False
        tokenizer = tokenizer if params.detokenize else None
        try:
            return self.OutputText(tokenizer, params.stop, request.prompt_token_ids, **options)
        except TypeError as error:
            if not options or self.OutputText is output_text.OutputText:
                raise
            what = f"this engine's OutputText does not take {' and '.join(options)} ({error})"
            raise ValueError(f"request {request.request_id!r}: {what}") from None

    def origins(self) -> dict[str, str]:
        """Return {name: module} of the parts that are not the engine's own."""
        replaced = (f.name for f in fields(self) if getattr(self, f.name) is not f.default)
        return {name: getattr(getattr(self, name), "__module__", "?") for name in replaced}


# Of the arguments of Engine: whether a value is right, and the rule in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (
        _has("config", "dtype"),
        "a CausalLM, which mini_engine.loading.checkpoint.load makes",
    ),
    "tokenizer": (
        lambda v: v is None or _has("decode", "eos_token_ids", "default_sampling_params")(v),
        "a Tokenizer or None",
    ),
    "config": (lambda v: v is None or isinstance(v, EngineConfig), "an EngineConfig or None"),
    "record": (_keeps, "True, False, a number of steps, or a path"),
    "clock": (lambda v: v is None or _has("kind", "unit", "now", "advance")(v), "a Clock or None"),
    "parts": (lambda v: v is None or isinstance(v, Parts), "a Parts or None"),
    "part_names": (lambda v: v is None or _are_names(v), "{part: source} or None"),
}
