"""Text to token ids and back, and conversations to token ids.

The work is done by the package `tokenizers`. mini_engine.loading.tokenizer makes a Tokenizer of a
model's files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from mini_engine.checks import check_text, shown

Messages = Sequence[Mapping[str, Any]]  # each {"role": ..., "content": ...}


class Tokenizer:
    """One model's tokenizer.

    `vocab_size` is one more than the largest id; `eos_token_ids` are the ids that end a text (of
    generation_config.json, else config.json, else the tokenizer's own); `bos` is the id that opens
    one, or None. `special_tokens` are by role ("bos_token"), as chat templates see them. Text of more
    than `max_characters` (None: of any length) is refused before it takes minutes.
    `default_sampling_params` is what the model's makers advise, as fields of SamplingParams.
    """

    max_characters: int | None = None
    default_sampling_params: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str,
        eos_token_ids: Sequence[int] = (),
        bos: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._source = source
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos = bos
        self.chat_template = chat_template
        self._special_tokens = special_tokens or {}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self.longest_token = max(map(len, vocab), default=0)  # in characters, or their bytes
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, in which special tokens are recognised.

        With `add_special_tokens` the tokenizer puts its own around the text (a BOS, where the model was
        trained with one). Leave it off for chat text: the template has written them.

        Raises ValueError for a value that is no text, and for too long a text.
        """
        check_text("the text", text)
        if self.max_characters is not None and len(text) > self.max_characters:
            raise ValueError(
                f"the text has {len(text):,} characters, but the model's context holds "
                f"{self.max_characters:,} at most; shorten it"
            )
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a conversation: the chat template's text, with nothing added."""
        text = self.apply_chat_template(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that make no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The names of special tokens, by id."""
        return {i: self.decode([i], skip_special_tokens=False) for i in sorted(self.special_token_ids)}

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each token id stands for; b"" for special tokens, and for ids that are no token."""
        decoder = json.loads(self._backend.to_str())["decoder"] or {"type": ""}
        kinds = {step["type"] for step in decoder.get("decoders", [decoder])}  # that turn tokens into text
        found = [b""] * self.vocab_size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id not in self.special_token_ids:
                found[token_id] = _bytes_of(token, kinds)
        return tuple(found)

    @cached_property
    def json(self) -> str:
        """The tokenizer as the package tokenizers writes it."""
        return self._backend.to_str()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, for other programs that read such a folder."""
        self._backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Return messages as the text the model was trained on.

        Raises ValueError for invalid messages, a model without a chat template, or a template that fails.
        """
        if self.chat_template is None:
            raise ValueError(f"{self._source} has no chat template; use a chat model, or give a plain prompt")
        _check_messages(messages)
        from mini_engine.text.chat import render  # brings in jinja2, and most runs never chat

        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return render(self.chat_template, self._source, **variables, **self._special_tokens)


def _bytes_of(token: str, kinds: set[str]) -> bytes:
    if "ByteLevel" in kinds:  # each byte is written as a character of its own
        return b"".join(
            bytes([_BYTES[character]]) if character in _BYTES else character.encode() for character in token
        )
    if "ByteFallback" in kinds:  # bytes are written <0xE2>, blanks as a lower bar
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
    return token.encode()


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones stand for themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a list of at least one message, but are {shown(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            what = '{"role": ..., "content": ...}'
            raise ValueError(f"messages[{i}] must be {what}, but is {shown(message)}")
        for key in ("role", "content"):
            check_text(f"messages[{i}][{key!r}]", message[key])
