"""OpenAI's responses, written: one object in the end, or a chunk for each Delta."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_engine.outputs import Delta, Logprob, Logprobs
from mini_engine.serve.protocol import Asked

JSON = dict[str, Any]
encoded = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass
class _Choice:
    """One answer as far as it has come."""

    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens


class Answer:
    """The response to one request. Choice p * n + i is answer i to prompt p.

    `token_bytes` has the bytes of each token id; a token may be half a character.
    """

    def __init__(self, asked: Asked, num_prompt_tokens: Sequence[int], token_bytes: Sequence[bytes]):
        self.asked, self.num_prompt_tokens, self.token_bytes = asked, num_prompt_tokens, token_bytes
        self.id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices = [_Choice() for _ in range(len(asked.prompts) * asked.params.n)]
        self.head = encoded(self._object("chunk"))[:-1]  # of every chunk

    def event(self, number: int, delta: Delta, echo: str = "") -> bytes:
        """Take a Delta of a choice, and return the event that a stream sends for it: a chunk as JSON."""
        choice = encoded(self.take(number, delta, echo))
        usage = f',"usage":{encoded(self._usage_of(number))}' if self.asked.continuous_usage else ""
        return f'data: {self.head},"choices":[{choice}]{usage}}}\n\n'.encode()

    def take(self, number: int, delta: Delta, echo: str = "") -> JSON:
        """Take a Delta of a choice, and return the choice of a chunk. Raises RuntimeError for one that
        could not go on."""
        if delta.finish_reason == "error":
            raise RuntimeError(delta.error)
        choice, first = self.choices[number], not self.choices[number].token_ids
        length = len(choice.text)
        choice.take(delta)
        text = (echo if first else "") + delta.text
        logprobs = self._logprobs(delta.token_ids, delta.logprobs, length)
        if self.asked.is_chat:
            said = {"role": "assistant", "content": text} if first else {"content": text}
            body: JSON = {"delta": said}
        else:
            body = {"text": text}
        return {"index": number, **body, "logprobs": logprobs, **self._end(choice)}

    def usage_chunk(self) -> JSON:
        """Return the last chunk of a stream that asked for its usage."""
        return self._object("chunk") | {"choices": [], "usage": self.usage()}

    def whole(self, echoes: Sequence[str]) -> JSON:
        """Return the response in one piece."""
        choices = []
        for number, choice in enumerate(self.choices):
            text = echoes[number // self.asked.params.n] + choice.text
            body: JSON = {"message": {"role": "assistant", "content": text, "refusal": None}}
            if not self.asked.is_chat:
                body = {"text": text}
            logprobs = self._logprobs(choice.token_ids, choice.logprobs, 0)
            more = {} if self.asked.is_chat else {"prompt_logprobs": _plain(choice.prompt_logprobs)}
            choices.append({"index": number, **body, "logprobs": logprobs, **more, **self._end(choice)})
        whole = self._object() | {"choices": choices, "usage": self.usage()}
        if self.asked.is_chat:  # which has one prompt
            whole["prompt_logprobs"] = _plain(self.choices[0].prompt_logprobs)
        return whole

    def usage(self) -> JSON:
        """Return the tokens that were read and written; the answers to one prompt read it once."""
        prompt, written = sum(self.num_prompt_tokens), sum(len(one.token_ids) for one in self.choices)
        cached = sum(one.num_cached_tokens for one in self.choices[:: self.asked.params.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _usage_of(self, number: int) -> JSON:
        prompt = self.num_prompt_tokens[number // self.asked.params.n]
        written = len(self.choices[number].token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _object(self, kind: str = "") -> JSON:
        name = f"chat.completion{kind and '.' + kind}" if self.asked.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.asked.model}

    @staticmethod
    def _end(choice: _Choice) -> JSON:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _logprobs(self, token_ids: Sequence[int], found: Logprobs | None, offset: int) -> JSON | None:
        if self.asked.params.logprobs is None or found is None:
            return None
        if self.asked.is_chat:
            pairs = zip(token_ids, found, strict=False)
            return {"content": [self._token(i, of[i]) | {"top_logprobs": self._top(of)} for i, of in pairs]}
        lengths = [len(self.token_bytes[i].decode("utf-8", errors="replace")) for i in token_ids]
        offsets = [offset + sum(lengths[:i]) for i in range(len(lengths))]
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [of[i].logprob for i, of in zip(token_ids, found, strict=False)],
            "top_logprobs": [{self._text(i): one.logprob for i, one in of.items()} for of in found],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        """Return a token's text; of one that is no whole character, the bytes, as OpenAI writes them."""
        data = self.token_bytes[token_id]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _token(self, token_id: int, one: Logprob) -> JSON:
        data = self.token_bytes[token_id]
        return {"token": self._text(token_id), "logprob": one.logprob, "bytes": list(data)}

    def _top(self, found: dict[int, Logprob]) -> list[JSON]:
        most = self.asked.params.logprobs or 0
        best = sorted((one.rank, token_id) for token_id, one in found.items() if one.rank <= most)
        return [self._token(token_id, found[token_id]) for _, token_id in best]


def _plain(prompt_logprobs: Any) -> list[Any] | None:
    return prompt_logprobs and [of and {str(i): vars(one) for i, one in of.items()} for of in prompt_logprobs]
