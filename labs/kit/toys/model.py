"""A model whose tokens show what its KV memory holds, so that a wrong entry changes the text."""

import hashlib

from labs.kit.toys.requests import VOCAB
from mini_engine.interfaces import KVManager
from mini_engine.request import Request


class ToyModel:
    """A model whose next token is a hash of the (position, token) pairs that its KV really holds.

    So a wrong position, a stale entry or a missing one changes the text, as it would with a real
    model. `forwards` counts the steps.
    """

    def __init__(self, kv: KVManager):
        self.kv = kv
        self.memory: dict[int, tuple[int, int]] = {}  # slot: (position, token)
        self.forwards = 0

    def forward(self, rows: list[tuple[Request, list[int], list[int], bool]]) -> dict[str, list[int]]:
        """Rows of (request, token_ids, positions, sample); {request_id: [token]} of those that sample.

        Row i of a request's chunk is written to the slot of the i-th position that is not computed.
        """
        self.forwards += 1
        for request, token_ids, positions, _ in rows:
            start = request.num_computed_tokens
            slots = self.kv.slot_mapping(request, start, start + len(token_ids))
            self.memory.update(zip(slots, zip(positions, token_ids, strict=True), strict=True))
        sampled = {}
        for request, token_ids, _, sample in rows:
            if sample:
                end = request.num_computed_tokens + len(token_ids)
                held = [self.memory.get(slot) for slot in self.kv.slot_mapping(request, 0, end)]
                digest = hashlib.blake2b(repr(held).encode(), digest_size=4).digest()
                sampled[request.request_id] = [int.from_bytes(digest, "big") % VOCAB]
        return sampled
