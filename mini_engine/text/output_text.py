"""The text of one request as it grows, in whole characters and without its stop string."""

from collections.abc import Sequence

from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer


class OutputText:
    """A request's text; the possible beginning of a stop string is held back until the next tokens decide."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], prompt: Sequence[int] = ()):
        self.detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self.stop = stop
        self.text = ""  # all that was decoded, up to a stop string if there was one
        self._num_given = 0

    def feed(self, token_id: int) -> str | None:
        """Add a token; return the stop string that the text has now reached, or None."""
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self) -> str | None:
        """Add the text of an incomplete character; return the stop string that it completes, or None."""
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def append(self, text: str) -> str | None:
        """Add text, cut before the stop string that it reaches; return that, or None.

        The stop string that begins first in the text counts; of two that begin at one place, the shorter.
        """
        self.text += text
        # A stop string may begin in what was decoded before, but not before what was given out.
        found = [(at, s) for s in self.stop if (at := self.text.find(s, self._num_given)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def take(self, finished: bool) -> str:
        """Return the text that may be given out now and was not before."""
        doubts = (n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n]))
        end = len(self.text) - (0 if finished else max(doubts, default=0))
        given, self._num_given = self.text[self._num_given : end], max(end, self._num_given)
        return given
