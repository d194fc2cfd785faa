"""The text of one request as it grows: whole characters, and never a stop string."""

from collections.abc import Sequence

from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer


class OutputText:
    """The text of one request as it grows: whole characters, and never a stop string.

    Text that might be the beginning of a stop string is held back until that is decided.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...], prompt: Sequence[int] = ()
    ) -> None:
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stop = stop
        self.text = ""  # all that was decoded, up to a stop string if there was one
        self._num_given = 0

    def feed(self, token_id: int) -> str | None:
        """Take a token; the stop string that the text has now reached, or None."""
        if self.detokenizer:
            return self._append(self.detokenizer.feed(token_id))
        return None

    def flush(self) -> str | None:
        """Decode what was waiting for the rest of a character; may complete a stop string too."""
        return self._append(self.detokenizer.flush()) if self.detokenizer else None

    def take(self, finished: bool) -> str:
        """What may be given out now and was not before."""
        end = len(self.text) if finished else len(self.text) - self._undecided()
        given, self._num_given = self.text[self._num_given : end], max(end, self._num_given)
        return given

    def _append(self, text: str) -> str | None:
        # A stop string may begin in what was decoded before, but not before what was given out.
        search_from = self._num_given
        self.text += text
        found = [(at, s) for s in self.stop if (at := self.text.find(s, search_from)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def _undecided(self) -> int:
        longest = max((len(s) - 1 for s in self.stop), default=0)
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self.stop):
                return n
        return 0
