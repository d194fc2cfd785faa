"""Token ids to text, token by token: what has become certain, and never half a character."""

from collections.abc import Sequence

from mini_engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as they come, for streaming.

    `feed` returns the text that has become certain, `flush` what is held back at the end; together
    they are `tokenizer.decode` of all tokens. A character whose bytes are spread over several
    tokens is held until it is whole. `context` are the tokens before the first one that is fed
    (the end of a prompt): they are not repeated, but decide about a leading space.

    Only a short window is decoded each time, from `_prefix` (tokens whose text is out, kept because
    decoding depends on what stands before) to the end, so a token costs the same however long the
    text is. The technique is that of Text Generation Inference and vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = [i for i in context[-8:] if i not in self._skipped]
        self._read = len(self._window)  # tokens of the window whose text is out

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd"):  # a character that has only begun, or one that never will be
            return self._give_up_early(text) if len(self._window) - self._read > 12 else ""
        delta = self._beyond_read(text)
        del self._window[: self._read]
        self._read = len(self._window)
        return delta

    def flush(self) -> str:
        """The text held back: what the last tokens are worth, if no more come."""
        delta = self._beyond_read(self._decode(self._window))
        self._read = len(self._window)
        return delta

    def _give_up_early(self, text: str) -> str:
        # No character takes more than four bytes, so all but the last few tokens are settled, for
        # better or worse. Without this, a model that babbles bytes makes the window grow for ever.
        head, tail = self._window[:-4], self._window[-4:]
        settled = self._decode(head)
        if settled + self._decode(tail) != text:
            return ""  # a character lies across the cut; the next token moves it
        delta = self._beyond_read(settled)
        self._window, self._read = tail, 0
        return delta

    def _beyond_read(self, text: str) -> str:
        return text[len(self._decode(self._window[: self._read])) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
