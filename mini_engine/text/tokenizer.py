"""Text to token ids and back, and conversations to token ids.

The work is done by the package `tokenizers`. mini_engine.loading.tokenizer makes a Tokenizer of a
model's files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

Messages = Sequence[Mapping[str, Any]]  # each {"role": ..., "content": ...}


class Tokenizer:
    """One model's tokenizer.

    `vocab_size` is one more than the largest id; `eos_token_ids` are the ids that end a text (of
    generation_config.json, else config.json, else the tokenizer's own); `bos` is the id that opens
    one, or None. `special_tokens` are by role ("bos_token"), as chat templates see them.
    """

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
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, in which special tokens are recognised.

        `add_special_tokens` lets the tokenizer put its own around the text (a BOS, where the model
        has been trained with one). Leave it off for chat text: the template has written them.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation: the chat template's text, with nothing added."""
        text = self.apply_chat_template(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that make no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Messages as the text the model was trained on.

        Raises ValueError when the model has no chat template, or its template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self._source} has no chat template; use a chat model, or give a plain prompt")
        from mini_engine.text.chat import render  # brings in jinja2, and most runs never chat

        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return render(self.chat_template, self._source, **variables, **self._special_tokens)
