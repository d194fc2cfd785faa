"""The text of one request as it grows, in whole characters and without its stop string."""

from collections.abc import Sequence
from functools import lru_cache

from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer


class OutputText:
    """A request's text; the possible beginning of a stop string is held back until the next tokens decide.

    Stop strings that end within the first `min_tokens` tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...],
        prompt: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ):
        self.detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens) if tokenizer else None
        self.stop = [StopString(s) for s in stop]
        self.text = ""  # all that was decoded, up to a stop string if there was one
        self._num_given = 0
        self._min_tokens, self._num_tokens = min_tokens, 0

    def feed(self, token_id: int) -> str | None:
        """Add a token; return the stop string that the text has now reached, or None."""
        self._num_tokens += 1
        return self.append(self.detokenizer.feed(token_id)) if self.detokenizer else None

    def flush(self) -> str | None:
        """Add the text of an incomplete character; return the stop string that it completes, or None."""
        return self.append(self.detokenizer.flush()) if self.detokenizer else None

    def append(self, text: str) -> str | None:
        """Add text, cut before the stop string that it reaches; return that, or None.

        The stop string that begins first in the text counts; of two that begin at one place, the shorter.
        """
        self.text += text
        if not self.stop:
            return None
        before = len(self.text) - len(text)
        ends = [(end, stop.text) for stop in self.stop for end in stop.feed(text)]
        if not ends or self._min_tokens and self._num_tokens <= self._min_tokens:
            return None
        at, stop = min((before + end - len(stop), stop) for end, stop in ends)
        self.text = self.text[:at]
        return stop

    def take(self, finished: bool) -> str:
        """Return the text that may be given out now and was not before."""
        doubts = 0 if finished or not self.stop else max(stop.num_matched for stop in self.stop)
        end = max(len(self.text) - doubts, self._num_given)
        given, self._num_given = self.text[self._num_given : end], end
        return given


class StopString:
    """Looks for one string in text that comes in pieces, at the same cost for a character however long it is.

    `num_matched` is the length of its longest beginning that the text ends with (Knuth, Morris and Pratt,
    Fast Pattern Matching in Strings, 1977).
    """

    def __init__(self, text: str):
        self.text, self._borders, self.num_matched = text, borders(text), 0

    def feed(self, piece: str) -> list[int]:
        """Return where in `piece` the string ends, each time."""
        ends = []
        for i, char in enumerate(piece, 1):
            self.num_matched = _longer(self.text, self._borders, self.num_matched, char)
            if self.num_matched == len(self.text):
                ends.append(i)
                self.num_matched = self._borders[-1]
        return ends


@lru_cache(maxsize=64)
def borders(text: str) -> list[int]:
    """Return for each beginning of the text the length of its longest proper end that is a beginning, too."""
    found = [0]
    for char in text[1:]:
        found.append(_longer(text, found, found[-1], char))
    return found


def _longer(text: str, found: list[int], matched: int, char: str) -> int:
    while matched and text[matched] != char:
        matched = found[matched - 1]
    return matched + (text[matched] == char)
