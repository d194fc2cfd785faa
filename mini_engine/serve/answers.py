"""OpenAI's responses, written: one object in the end, or a chunk for each Delta."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mini_engine.outputs import Delta, Logprob, Logprobs
from mini_engine.serve.protocol import Asked

JSON = dict[str, Any]
encoded = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_names = random.Random()  # a name need not be secret: os.urandom, as in uuid4, gives up the GIL


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
    offset: int = 0  # characters of the tokens whose log probabilities were sent; the text may lag behind

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens


class Answer:
    """The response to one request. Choice p * n + i is answer i to prompt p.

    `prompts` are its prompts' token ids, and `echoes` the texts that come before the answers to them.
    `token_bytes` has the bytes of each token id; a token may be half a character. `special` has the names of
    special tokens, which stand in an echo, and in the text of an answer if it is not to skip them.
    """

    def __init__(
        self,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        token_bytes: Sequence[bytes],
        special: Mapping[int, str],
    ):
        self.asked, self.prompts, self.echoes = asked, prompts, echoes
        self.token_bytes, self.special = token_bytes, special
        self.id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{_names.getrandbits(128):032x}"
        self.created = int(time.time())
        self.choices = [_Choice() for _ in range(len(asked.prompts) * asked.params.n)]
        self.head = encoded(self._object("chunk"))[:-1]  # of every chunk

    def event(self, number: int, delta: Delta) -> bytes:
        """Take a Delta of a choice, and return the event that a stream sends for it: a chunk as JSON.

        It is written for every token: a template, of which only text and what is not null are encoded anew.
        Raises RuntimeError for a choice that could not go on.
        """
        choice = self.choices[number]
        first = not choice.token_ids
        self.take(number, delta)
        text = encoded(self._echo(number) + delta.text if first else delta.text)
        if self.asked.is_chat:
            role = '"role":"assistant",' if first else ""
            said = f'"delta":{{{role}"content":{text}}}'
        else:
            said = f'"text":{text}'
        logprobs = _or_null(self._logprobs(number, delta.token_ids, delta.logprobs, first))
        end = f'"finish_reason":{_or_null(choice.finish_reason)},"stop_reason":{_or_null(choice.stop_reason)}'
        usage = f',"usage":{encoded(self._usage_of(number))}' if self.asked.continuous_usage else ""
        chunk = f'"choices":[{{"index":{number},{said},"logprobs":{logprobs},{end}}}]{usage}'
        return f"data: {self.head},{chunk}}}\n\n".encode()

    def take(self, number: int, delta: Delta) -> None:
        """Take a Delta of a choice. Raises RuntimeError for a choice that could not go on."""
        if delta.finish_reason == "error":
            raise RuntimeError(delta.error)
        self.choices[number].take(delta)

    def usage_chunk(self) -> JSON:
        """Return the last chunk of a stream that asked for its usage."""
        return self._object("chunk") | {"choices": [], "usage": self.usage()}

    def whole(self) -> JSON:
        """Return the response in one piece."""
        choices = []
        for number, choice in enumerate(self.choices):
            text = self._echo(number) + choice.text
            body: JSON = {"message": {"role": "assistant", "content": text, "refusal": None}}
            if not self.asked.is_chat:
                body = {"text": text}
            logprobs = self._logprobs(number, choice.token_ids, choice.logprobs, first=True)
            more = {} if self.asked.is_chat else {"prompt_logprobs": _plain(choice.prompt_logprobs)}
            end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            choices.append({"index": number, **body, "logprobs": logprobs, **more, **end})
        whole = self._object() | {"choices": choices, "usage": self.usage()}
        if self.asked.is_chat:  # which has one prompt
            whole["prompt_logprobs"] = _plain(self.choices[0].prompt_logprobs)
        return whole

    def usage(self) -> JSON:
        """Return the tokens that were read and written; the answers to one prompt read it once."""
        prompt, written = sum(map(len, self.prompts)), sum(len(one.token_ids) for one in self.choices)
        cached = sum(one.num_cached_tokens for one in self.choices[:: self.asked.params.n])
        return _usage(prompt, written) | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _usage_of(self, number: int) -> JSON:
        prompt = len(self.prompts[number // self.asked.params.n])
        return _usage(prompt, len(self.choices[number].token_ids))

    def _object(self, kind: str = "") -> JSON:
        name = f"chat.completion{kind and '.' + kind}" if self.asked.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.asked.model}

    def _echo(self, number: int) -> str:
        return self.echoes[number // self.asked.params.n]

    def _logprobs(
        self, number: int, token_ids: Sequence[int], found: Logprobs | None, first: bool
    ) -> JSON | None:
        """Return what is asked for of tokens of a choice; with echo, before the first those of its prompt."""
        if self.asked.params.logprobs is None or found is None:
            return None
        if self.asked.is_chat:
            content = [
                self._token(i, of[i]) | {"top_logprobs": self._top(of)}
                for i, of in zip(token_ids, found, strict=False)
            ]
            return {"content": content}
        choice, of_each = self.choices[number], list[dict[int, Logprob] | None](found)
        num_named = 0 if self.asked.params.skip_special_tokens else len(token_ids)
        if first and self.asked.echo and (of_prompt := choice.prompt_logprobs):
            prompt = self.prompts[number // self.asked.params.n]
            token_ids = [*prompt[-len(of_prompt) :], *token_ids]  # what was truncated was not read
            of_each, num_named = of_prompt + of_each, num_named + len(of_prompt)
        pairs = list(zip(token_ids, of_each, strict=False))
        names = [self.special.get(i, "") if at < num_named else "" for at, i in enumerate(token_ids)]
        texts = [self.token_bytes[i].decode("utf-8", errors="replace") for i in token_ids]
        lengths = [len(name or text) for name, text in zip(names, texts, strict=True)]
        *offsets, choice.offset = accumulate(lengths, initial=choice.offset)
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [of and of[i].logprob for i, of in pairs],
            "top_logprobs": [of and {self._text(i): one.logprob for i, one in of.items()} for _, of in pairs],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        """Return a token's text; of one that is no whole character, the bytes, as OpenAI writes them."""
        data = self.token_bytes[token_id]
        try:
            return self.special.get(token_id) or data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _token(self, token_id: int, one: Logprob) -> JSON:
        data = self.token_bytes[token_id]
        return {"token": self._text(token_id), "logprob": one.logprob, "bytes": list(data)}

    def _top(self, found: dict[int, Logprob]) -> list[JSON]:
        most = self.asked.params.logprobs or 0
        best = sorted((one.rank, token_id) for token_id, one in found.items() if one.rank <= most)
        return [self._token(token_id, found[token_id]) for _, token_id in best]


def _usage(prompt: int, written: int) -> JSON:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _or_null(value: Any) -> str:
    return "null" if value is None else encoded(value)


def _plain(prompt_logprobs: Any) -> list[Any] | None:
    return prompt_logprobs and [of and {str(i): vars(one) for i, one in of.items()} for of in prompt_logprobs]
