"""The seams: what may be replaced, and what a replacement must do.

Labs, engine, simulator and tests meet here. Nothing needs to inherit from these classes: whatever
has the methods fits. The shapes of tensors: N rows of a flat batch, S of them sampled, L layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mini_engine.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from mini_engine.trace.records import StepTrace


class Row(NamedTuple):
    """One request's part in a step, made once from the schedule and kept in its order."""

    request: Request
    num_tokens: int
    is_last: bool  # the chunk reaches num_tokens, so a token is sampled from its last row


class KVManager(Protocol):
    """KV memory in equal blocks: which request holds which, and whether there is room.

    Admission claims room for the whole sequence as it stands, so chunks never allocate; only
    decodes can run short. `watermark` blocks stay free at admission while others hold blocks.
    """

    num_blocks: int
    block_size: int
    watermark: int
    enable_prefix_caching: bool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, in use or free."""

    def admit(self, request: Request) -> bool:
        """Find the cached prefix, claim room for the whole sequence and set `num_computed_tokens`
        to that prefix, at most num_tokens - 1. False changes nothing."""

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make sure there is room for num_computed_tokens + num_new_tokens; a no-op for what
        admission claimed. False changes nothing."""

    def num_new_blocks(self, request: Request, num_new_tokens: int) -> int:
        """How many blocks `allocate` would take."""

    def publish(self, request: Request) -> None:
        """After a step: the request's full, computed blocks can be found by others."""

    def free(self, request: Request) -> None:
        """Give back all that the request holds; nothing happens if it holds nothing."""

    def block_table(self, request: Request) -> list[int]:
        """The request's block ids, in order of position."""

    def slot_mapping(self, request: Request, start: int, end: int) -> list[int]:
        """The pool slots of the positions [start, end): block id times block_size plus offset."""

    def check(self) -> None:
        """Raise RuntimeError, naming what is wrong, if an invariant of the pool is broken."""


class Queue(Protocol):
    """The waiting requests, the first in policy order in front."""

    def push(self, request: Request) -> None:
        """Put a request in its place."""

    def peek(self) -> Request:
        """The first request, which stays."""

    def pop(self) -> Request:
        """Take the first request."""

    def remove(self, request: Request) -> None:
        """Take a request from anywhere. Raises ValueError when it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class SchedulerLike(Protocol):
    """Decides each step. The engine's Scheduler, a learner's, a policy to compare with, a Recorder."""

    kv: KVManager
    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    waiting: Queue
    running: list[Request]  # in admission order, which is the row order of a step

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, naming it, if it could never finish."""

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if there is no such request (any more)."""

    def schedule(self) -> dict[str, int]:
        """Decide the next step: {request_id: number of tokens}, in row order."""

    def update(
        self, scheduled: dict[str, int], sampled: dict[str, list[int]], stopped: Collection[str] = ()
    ) -> list[Request]:
        """Take back a computed step; returns the requests that have finished, in row order.

        `sampled` has the tokens of each request that reached the end of its sequence: one from this
        engine, more from one that decodes speculatively. `stopped` are the ids of requests whose text,
        with the last of these tokens, has reached a stop string."""


class Attend(Protocol):
    """Attention of one layer, handed to the model, which knows nothing of caches."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q and the result are (*S, num_heads, head_dim), k and v (*S, num_kv_heads, head_dim), RoPE
        applied. Stores k and v wherever it likes."""


class Backend(Protocol):
    """Computes a step. Made with the model, the KV manager and the engine's Parts."""

    name: str  # what the trace's header says: paged, padded, two-pass

    def forward(self, rows: list[Row]) -> Tensor:
        """One forward pass over the rows; logits (S, vocab_size) of those with `is_last`, in order."""


class Clock(Protocol):
    """Where a trace's times come from."""

    kind: str  # virtual or wall
    unit: str  # step, ms or s

    def now(self) -> float:
        """The time, in `unit`."""

    def advance(self, record: StepTrace) -> None:
        """The step of this record is over: virtual time moves on by what it cost."""
