"""Routers: which engine of a cluster serves a request. They know what they sent, and what has ended."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from mini_engine.block_manager import BlockManager
from mini_engine.prefix_cache import hash_block
from mini_engine.request import Request

IMBALANCE = 10  # requests; Ray Serve's PrefixCacheAffinityRouter has the same default


class Replica(Protocol):
    """An engine as a router sees it: the requests that it has open, and the size of its pool."""

    load: int

    @property
    def pool(self) -> BlockManager: ...


class Router:
    """Chooses at random."""

    def __init__(self, replicas: Sequence[Replica], seed: int = 0):
        self.replicas, self.rng = list(replicas), random.Random(seed)

    def choose(self, request: Request) -> int:
        """Return the index of the replica that gets the request."""
        return self.rng.randrange(len(self.replicas))


class LeastLoaded(Router):
    """Chooses a replica with the fewest open requests; a draw decides between equals."""

    def choose(self, request: Request) -> int:
        least = min(replica.load for replica in self.replicas)
        return self.rng.choice([i for i, replica in enumerate(self.replicas) if replica.load == least])


class PrefixAware(LeastLoaded):
    """Chooses the replica that was sent the longest part of the prompt, unless it is loaded too far.

    That is: unless it has over `imbalance` more requests open than the least loaded one, which then gets the
    request. Of each replica it remembers as many blocks as the pool has, the latest ones. Nothing is asked
    of the replicas, so a prefix counts from the moment that it is sent.
    """

    def __init__(self, replicas: Sequence[Replica], seed: int = 0, imbalance: int = IMBALANCE):
        super().__init__(replicas, seed)
        self.imbalance = imbalance
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in self.replicas]

    def choose(self, request: Request) -> int:
        hashes = block_hashes(request, self.replicas[0].pool.block_size)
        found = [_num_leading(hashes, sent) for sent in self._sent]
        chosen = super().choose(request)
        loads = [replica.load for replica in self.replicas]
        best = max(range(len(loads)), key=lambda i: (found[i], -loads[i]))
        if found[best] and loads[best] <= loads[chosen] + self.imbalance:
            chosen = best
        sent = self._sent[chosen]
        for hash in reversed(hashes):  # the first block is the last to be forgotten
            sent[hash] = None
            sent.move_to_end(hash)
        while len(sent) > self.replicas[chosen].pool.num_blocks:
            sent.popitem(last=False)
        return chosen


def _num_leading(hashes: list[bytes], sent: OrderedDict[bytes, None]) -> int:
    return next((i for i, hash in enumerate(hashes) if hash not in sent), len(hashes))


def block_hashes(request: Request, block_size: int) -> list[bytes]:
    """Return the hashes of the prompt's full blocks. The request keeps them for the engine's prefix cache."""
    hashes, size = request.block_hashes, block_size
    for first in range(len(hashes) * size, request.num_prompt_tokens - size + 1, size):
        parent = hashes[-1] if hashes else request.cache_salt.encode()
        hashes.append(hash_block(parent, tuple(request.token_ids(first, first + size))))
    return hashes


ROUTERS = {"random": Router, "least-loaded": LeastLoaded, "prefix": PrefixAware}
