"""From what a user gives to a Request: text becomes token ids, and what cannot work is refused by name."""

from collections.abc import Sequence
from typing import Any, cast

from mini_engine.config import EngineConfig
from mini_engine.request import Request, SamplingParams, shown
from mini_engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def is_listed(value: Any) -> bool:
    """Whether the value is a sequence other than text and bytes, or an array of numpy's or torch's kind."""
    if isinstance(value, Sequence):
        return not isinstance(value, str | bytes | bytearray | memoryview)
    return getattr(value, "ndim", 0) > 0


class InputProcessor:
    """Makes the requests of one engine. Their `config` is fitted to the model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.max_model_len = cast(int, config.max_model_len)  # a fitted config has both
        self.num_slots = cast(int, config.num_blocks) * config.block_size
        self.eos_token_ids = tokenizer.eos_token_ids if tokenizer else ()

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
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name}: sampling_params must be a SamplingParams, but is {shown(params)}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        elif params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this engine has none")
        elif not is_listed(prompt):
            raise ValueError(f"{name}: a prompt is text or a list of token ids, and not {shown(prompt)}")
        elif len(prompt) > (most := self.max_model_len):  # before its tokens are looked at
            raise ValueError(f"{name}: prompt {len(prompt)} exceeds the model's length {most}; shorten it")
        request = Request(
            request_id,
            list(prompt),
            params,
            priority,
            cache_salt=cache_salt,
            eos_token_ids=self.eos_token_ids,
        )
        self._fit_to_model(request)
        return request

    def _fit_to_model(self, request: Request) -> None:
        """Set max_tokens, if it is None, to the most that the model and the pool allow."""
        name = f"request {request.request_id!r}"
        wrong = next((t for t in request.prompt_token_ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"{name}: token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})"
            )
        longest = self.max_model_len - request.num_prompt_tokens
        if longest < (request.max_tokens or 1):
            raise ValueError(
                f"{name}: prompt {request.num_prompt_tokens} + max_tokens {request.max_tokens or 1} exceeds "
                f"the model's length {self.max_model_len}; shorten the prompt or lower max_tokens"
            )
        if request.max_tokens is None:
            request.max_tokens = max(1, min(longest, self.num_slots + 1 - request.num_prompt_tokens))
