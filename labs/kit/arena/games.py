"""The eight workloads of the arena, their memory and their limits. All times are in milliseconds.

A seed gives the same requests everywhere. `max_tokens` is the real length of an answer here: a policy may
use it, where a server would have to predict it.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mini_engine.sim.workloads import Arrival, arrivals

BUDGET, SLOTS, BLOCK_SIZE = 2048, 32, 16  # max_num_batched_tokens, max_num_seqs, block_size of each game
TTFT, ITL = 2000.0, 100.0  # limits: of the time to the first token, and of each gap between two tokens
BOUND = 30_000.0  # no request goes longer without a token being computed for it


@dataclass(frozen=True)
class Game:
    """One workload; `draw(seed)` yields its arrivals. `ttft` has the priorities with a limit of their own."""

    name: str
    about: str
    draw: Callable[[int], Iterable[Arrival]]
    num_blocks: int = 1024
    ttft: dict[int, float] = field(default_factory=dict)

    def arrivals(self, seed: int) -> list[Arrival]:
        """Return the requests in order of arrival."""
        return sorted(self.draw(seed), key=lambda arrival: arrival.timestamp)

    def ttft_limit(self, priority: int) -> float:
        """Return the limit of the time to first token for requests of a priority."""
        return self.ttft.get(priority, TTFT)


def steady(num_requests: int, **options: Any) -> Callable[[int], Iterable[Arrival]]:
    return lambda seed: arrivals(num_requests, seed=seed, **options)


def flash(seed: int) -> Iterator[Arrival]:
    """Yield a quiet stream of chats, and forty more requests within half a second."""
    yield from arrivals(40, rate=5, input_length=200, output_length=64, seed=seed)
    for arrival in arrivals(50, rate=100, input_length=500, output_length=48, seed=seed + 1):
        yield replace(arrival, timestamp=3000 + arrival.timestamp)


def agents(seed: int) -> Iterator[Arrival]:
    """Yield the calls of sixteen agents: each repeats all that came before, and a tool's answer."""
    draw = random.Random(seed)
    for agent in range(16):
        time, context = draw.uniform(0, 4000), 300
        for _ in range(6):
            own = draw.randint(50, 500)
            output = draw.randint(16, 64)
            yield Arrival(time, context + own, output, prefix_group=f"agent {agent}", prefix_length=context)
            context += own
            time += 1500 + draw.uniform(0, 1500)


def giant(seed: int) -> Iterator[Arrival]:
    """Yield small requests, and one of 12,000 tokens among them."""
    yield from arrivals(90, rate=12, input_length=120, output_length=64, seed=seed)
    yield Arrival(1500, 12_000, 64)


GAMES = (
    Game("chat", "short prompts, steady arrivals", steady(120, rate=16, output_length=64)),
    Game(
        "documents",
        "long prompts, short answers",
        steady(30, rate=2.2, input_length=4000, output_length=48, spread=0.5, longest=9000),
    ),
    Game("crowd", "forty requests within half a second", flash),
    Game(
        "prefixes",
        "twelve system prompts, shared",
        steady(90, rate=10, input_length=80, output_length=64, num_prefix_groups=12, prefix_length=1024),
        num_blocks=800,
    ),
    Game("agents", "sixteen agents that call again with all that came before", agents, num_blocks=768),
    Game("giant", "one prompt of 12,000 tokens among small ones", giant),
    Game(
        "priorities",
        "more work than the engine can do, a third of it urgent",
        steady(160, rate=40, output_length=64, priorities=(0, 1, 1)),
        ttft={0: 500.0, 1: 8000.0},
    ),
    Game(
        "memory",
        "memory for a few requests only",
        steady(80, rate=9, input_length=120, output_length=96),
        num_blocks=130,
    ),
)
