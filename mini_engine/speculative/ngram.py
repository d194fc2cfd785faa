"""Proposals by prompt lookup: what followed the last time the text ended like this.

Saxena, Prompt Lookup Decoding (2023). Text that repeats itself, such as edited code, is predicted for free.
"""

from weakref import WeakKeyDictionary

from mini_engine.request import Request

Index = dict[tuple[int, ...], int]  # of each n-gram, where its latest occurrence ends


class NgramProposer:
    """Proposes up to `num_speculative_tokens` tokens; the longest end of the text that occurred counts.

    Ends of `prompt_lookup_max` tokens down to `prompt_lookup_min` are looked up in an index that grows with
    each request's text: a step costs as much as it has new tokens.
    """

    def __init__(
        self, prompt_lookup_min: int = 1, prompt_lookup_max: int = 3, num_speculative_tokens: int = 4
    ):
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        self.num_speculative_tokens = num_speculative_tokens
        self._indexes: WeakKeyDictionary[Request, tuple[Index, int]] = WeakKeyDictionary()

    def propose(self, request: Request, most: int | None = None) -> list[int]:
        """Return what followed the latest earlier occurrence of the text's end, [] if there is none. `most`
        tokens at most; None: num_speculative_tokens."""
        index, num_tokens = self._index(request), request.num_tokens
        most = self.num_speculative_tokens if most is None else most
        end = request.token_ids(max(0, num_tokens - self.prompt_lookup_max))
        for n in range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1):
            follows = index.get(tuple(end[-n:]))
            if follows is not None:
                return request.token_ids(follows, min(follows + most, num_tokens))
        return []

    def _index(self, request: Request) -> Index:
        """Return the index of all n-grams that end before the text does."""
        index, done = self._indexes.get(request, ({}, self.prompt_lookup_min))
        first = max(0, done - self.prompt_lookup_max)
        token_ids = request.token_ids(first)
        for end in range(done, request.num_tokens):
            for n in range(self.prompt_lookup_min, min(self.prompt_lookup_max, end) + 1):
                index[tuple(token_ids[end - first - n : end - first])] = end
        self._indexes[request] = index, max(done, request.num_tokens)
        return index
