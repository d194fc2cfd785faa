"""How many drafts each request gets: as many as are accepted, and none where none is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from mini_engine.request import Request

Propose = Callable[[list[Request]], list[list[int]]]
FIRST_PAUSE, LONGEST_PAUSE = 4, 64


class Proposer(Protocol):
    """Where drafts come from."""

    def propose(self, request: Request, most: int | None = None) -> list[int]:
        """Return tokens that may follow the request's text, `most` at most."""


@dataclass
class _Record:
    """A request's drafts of late, and what became of them."""

    limit: int  # drafts in a step
    num_outputs: int  # when the drafts were proposed
    pause: int = FIRST_PAUSE  # the length of the next pause
    left: int = 0  # steps without drafts, before one is tried again
    drafts: list[int] = field(default_factory=list)


class AdaptiveProposer:
    """Asks `proposer` for up to `num_speculative_tokens` drafts of each request.

    A request begins with two. A step that accepts none halves their number, one that accepts some makes it
    the most, a single draft two.
    Where none is left the request pauses, and then tries one: after 4 steps, 8, and so on up to 64, until two
    steps in a row have accepted some.
    """

    def __init__(self, proposer: Proposer, num_speculative_tokens: int):
        self.proposer, self.num_speculative_tokens = proposer, num_speculative_tokens
        self._records: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()

    def __call__(self, requests: list[Request]) -> list[list[int]]:
        """Return drafts for each request, [] for one that pauses."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> list[int]:
        if (record := self._records.get(request)) is None:
            limit = min(2, self.num_speculative_tokens)
            record = self._records[request] = _Record(limit, len(request.output_token_ids))
        self._learn(record, request.output_token_ids[record.num_outputs :])
        record.num_outputs = len(request.output_token_ids)
        if record.left:
            record.left -= 1
        else:
            still = (request.max_tokens or 1) - record.num_outputs - 1  # the step's last token is the model's
            record.drafts = self.proposer.propose(request, max(0, min(record.limit, still)))
        return record.drafts

    def _learn(self, record: _Record, said: list[int]) -> None:
        """Compare the drafts with what was said since. One that was right counts as accepted even where the
        step had no room for it."""
        drafts, record.drafts = record.drafts, []
        if not drafts or not said:  # a step that failed is tried again
            return
        most = self.num_speculative_tokens
        if drafts[0] == said[0]:
            if record.limit == 1 < most:
                record.limit = 2
            else:
                record.limit, record.pause = most, FIRST_PAUSE
            return
        record.limit //= 2
        if record.limit == 0:
            record.limit, record.left = 1, record.pause
            record.pause = min(2 * record.pause, LONGEST_PAUSE)


def draft(running: list[Request], propose: Propose) -> None:
    """Give each decode its drafts of the step that comes, as far as its grammar allows them."""
    decodes = [request for request in running if request.is_decode]
    for request, drafts in zip(decodes, propose(decodes), strict=True):
        if request.grammar is not None:
            drafts = request.grammar.validate(request.output_token_ids, drafts)
        request.spec_token_ids = list(drafts)
