"""Token ids to text, token by token, in whole characters."""

from collections.abc import Sequence

from mini_engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes tokens one by one, for streaming.

    `feed` returns the text that later tokens cannot change, `flush` the rest at the end; together
    they are `tokenizer.decode` of all tokens. A character whose bytes are spread over several
    tokens is held back until it is complete. `context` are the tokens before the first one that is fed
    (the end of a prompt): they are not repeated, but decide about a leading space.

    Only a short window is decoded each time: some tokens whose text was returned, because decoding depends
    on the tokens before, and the new ones. So a token costs the same however long the text is. The technique
    is that of Text Generation Inference and vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = [i for i in context[-8:] if i not in self._skipped]
        self._read = len(self._window)  # tokens of the window whose text was returned

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd"):  # an incomplete or an invalid character
            return self._give_up_early(text) if len(self._window) - self._read > 12 else ""
        delta = self._beyond_read(text)
        del self._window[: self._read]
        self._read = len(self._window)
        return delta

    def flush(self) -> str:
        """Return the text that is held back, when no more tokens come."""
        delta = self._beyond_read(self._decode(self._window))
        self._read = len(self._window)
        return delta

    def _give_up_early(self, text: str) -> str:
        # No character takes more than four bytes, so no later token changes any but the last few. Without
        # this, a model that puts out invalid bytes makes the window grow for ever.
        head, tail = self._window[:-4], self._window[-4:]
        settled = self._decode(head)
        if settled + self._decode(tail) != text:
            return ""  # a character lies across the cut, which the next token moves
        delta = self._beyond_read(settled)
        self._window, self._read = tail, 0
        return delta

    def _beyond_read(self, text: str) -> str:
        return text[len(self._decode(self._window[: self._read])) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
