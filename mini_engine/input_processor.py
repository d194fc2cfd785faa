"""From what a user gives to a Request: text becomes token ids, and what cannot work is refused by name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from mini_engine.checks import shown
from mini_engine.config import EngineConfig
from mini_engine.request import Request, SamplingParams
from mini_engine.sampling_params import StructuredOutputsParams
from mini_engine.structured.choose import MakeRegex, structured_grammar
from mini_engine.structured.grammar import regex_grammar
from mini_engine.structured.logits import GrammarProcessor
from mini_engine.text.tokenizer import Tokenizer

# Text, token ids, or vLLM's dicts: {"prompt": text} or {"prompt_token_ids": [...]}, and perhaps "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class Given(NamedTuple):
    """A prompt taken apart: the text if it is known, the token ids if they are given."""

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: str | None = None


def is_listed(value: Any) -> bool:
    """Whether the value is a sequence other than text and bytes, or an array of numpy's or torch's kind."""
    if isinstance(value, Sequence):
        return not isinstance(value, str | bytes | bytearray | memoryview)
    return getattr(value, "ndim", 0) > 0


def take_apart(name: str, prompt: Any) -> Given:
    """Return the parts of a prompt. Raises ValueError, naming it, for a value that is none."""
    if isinstance(prompt, str):
        return Given(prompt, None)
    if is_listed(prompt):
        return Given(None, prompt)
    if not isinstance(prompt, Mapping):
        raise ValueError(f"{name} must be text or token ids, but is {shown(prompt)}")
    if unknown := prompt.keys() - KEYS:
        has = f"has the key {shown(min(unknown, key=str))}"
        raise ValueError(f"{name} {has}; a prompt's keys are {', '.join(sorted(KEYS))}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name}'s 'prompt' must be text, but is {shown(text)}")
    if token_ids is not None and not is_listed(token_ids):
        raise ValueError(
            f"{name}'s 'prompt_token_ids' must be a list of token ids, but is {shown(token_ids)}"
        )
    if text is None and token_ids is None:
        raise ValueError(f"{name} must be text or token ids, but is {shown(prompt)}")
    return Given(text, token_ids, prompt.get("cache_salt"))


class InputProcessor:
    """Makes the requests of one engine. Their `config` is fitted to the model."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        make_regex: MakeRegex = regex_grammar,
    ):
        self.tokenizer, self.vocab_size, self.make_regex = tokenizer, vocab_size, make_regex
        self.max_model_len = cast(int, config.max_model_len)  # a fitted config has both
        self.num_slots = cast(int, config.num_blocks) * config.block_size
        self.eos_token_ids = tokenizer.eos_token_ids if tokenizer else ()
        self.default_params = SamplingParams(**tokenizer.default_sampling_params if tokenizer else {})

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Return the request. Raises ValueError, naming it, if the model could not serve it."""
        name, params = f"request {shown(request_id)}", sampling_params
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name}: sampling_params must be a SamplingParams, but is {shown(params)}")
        if params.n > 1:
            rule = f"n must be 1 for one request, but is {params.n}"
            raise ValueError(f"{name}: {rule}; LLM.generate makes n requests of it")
        text, token_ids, salt = take_apart(f"{name}: a prompt", prompt)
        if token_ids is None:
            token_ids = self._need(name, "a prompt of text").encode(cast(str, text))
        elif params.stop:
            self._need(name, "a stop string")
        if (most := params.truncate_prompt_tokens) is not None:
            most = self.max_model_len - (params.max_tokens or 1) if most == -1 else most
            token_ids = token_ids[-max(most, 1) :]
        if len(token_ids) > (longest := self.max_model_len):  # before its tokens are looked at
            raise ValueError(
                f"{name}: prompt {len(token_ids)} exceeds the model's length {longest}; shorten it"
            )
        request = Request(
            request_id,
            list(token_ids),
            params,
            priority,
            cache_salt=cache_salt if salt is None else salt,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self._spellings(name, params.bad_words) if params.bad_words else (),
        )
        self._check_token_ids(name, request)
        self._fit_to_model(name, request)
        if params.structured_outputs is not None:
            self._shape(name, request, params.structured_outputs)
        return request

    def _shape(self, name: str, request: Request, wanted: StructuredOutputsParams) -> None:
        """Give the request its grammar, which masks its logits after all other logits processors."""
        tokenizer = self._need(name, "structured_outputs")
        try:
            grammar = structured_grammar(wanted, tokenizer, self.make_regex)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        request.grammar = GrammarProcessor(grammar)
        processors = (*request.sampling_params.logits_processors, request.grammar)
        request.sampling_params = replace(request.sampling_params, logits_processors=processors)

    def _need(self, name: str, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{name}: {what} needs a tokenizer; this engine has none, so give token ids")
        return self.tokenizer

    def _spellings(self, name: str, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and, where that is one token too, after
        a space: vLLM's rule."""
        tokenizer, found = self._need(name, "bad_words"), []
        for word in words:
            texts = (word.lstrip(), " " + word.lstrip())
            alone, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
            if not alone:
                raise ValueError(f"{name}: bad_words has {shown(word)}, which is not a token; leave it out")
            found.append(alone)
            if spaced[0] != alone[0] and len(spaced) == len(alone):
                found.append(spaced)
        return tuple(found)

    def _check_token_ids(self, name: str, request: Request) -> None:
        params = request.sampling_params
        self._check_known(f"{name}: token id", request.prompt_token_ids)
        for what in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if ids := getattr(params, what):
                self._check_known(f"{name}: {what}'s", ids)
        for what in ("logprobs", "prompt_logprobs"):
            if (getattr(params, what) or 0) > self.vocab_size:
                number = f"{what} {shown(getattr(params, what))}"
                raise ValueError(
                    f"{name}: {number} exceeds the vocabulary of {self.vocab_size} tokens; -1 is all"
                )

    def _check_known(self, what: str, token_ids: Iterable[int]) -> None:
        if (wrong := next((t for t in token_ids if not 0 <= t < self.vocab_size), None)) is not None:
            raise ValueError(f"{what} {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})")

    def _fit_to_model(self, name: str, request: Request) -> None:
        """Set max_tokens, if it is None, to the most that the model and the pool allow."""
        longest = self.max_model_len - request.num_prompt_tokens
        min_tokens = request.sampling_params.min_tokens
        least = request.max_tokens or max(1, min_tokens)
        if longest < least:
            what = "max_tokens" if request.max_tokens or not min_tokens else "min_tokens"
            raise ValueError(
                f"{name}: prompt {request.num_prompt_tokens} + {what} {least} exceeds "
                f"the model's length {self.max_model_len}; shorten the prompt or lower {what}"
            )
        if request.max_tokens is None:
            request.max_tokens = max(1, min(longest, self.num_slots + 1 - request.num_prompt_tokens))
