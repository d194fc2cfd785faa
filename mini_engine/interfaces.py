"""The seams: the parts that can be replaced, and what a replacement must do.

Labs, engine, simulator and tests meet here. Nothing needs to inherit from these classes: an object
that has the methods fits. Shapes of tensors: N rows of a flat batch, S of them sampled, L layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from mini_engine.outputs import Delta
from mini_engine.request import Request

if TYPE_CHECKING:  # labs 01 to 03 and 06 run without torch
    from torch import Tensor


class Row(NamedTuple):
    """One request's part in a step."""

    request: Request
    num_tokens: int
    is_last: bool  # the chunk reaches num_tokens, so a token is sampled from its last row

    @property
    def num_logits(self) -> int:
        """The number of its rows that are sampled: none, the last, or one more for each of its drafts."""
        return 1 + self.num_tokens - self.request.num_new_tokens if self.is_last else 0


class KVManager(Protocol):
    """KV memory in equal blocks: the blocks of each request, and the room that is left.

    Admission claims room for the whole sequence, so chunks never allocate; only decodes can run
    short. `watermark` blocks stay free at admission while others hold blocks.
    """

    num_blocks: int
    block_size: int
    watermark: int
    enable_prefix_caching: bool

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds."""

    @property
    def num_cached_blocks(self) -> int:
        """The number of blocks that can be found by their content, in use or free."""

    def admit(self, request: Request) -> bool:
        """Find the cached prefix, claim room for the whole sequence and set `num_computed_tokens`
        to that prefix, at most num_tokens - 1. False changes nothing."""

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make sure there is room for num_computed_tokens + num_new_tokens; a no-op for what
        admission claimed. False changes nothing."""

    def num_new_blocks(self, request: Request, num_new_tokens: int) -> int:
        """Return the number of blocks that `allocate` would take."""

    def cache_blocks(self, request: Request) -> None:
        """After a step: let other requests find the request's full, computed blocks."""

    def free(self, request: Request) -> None:
        """Give back all blocks of the request; a no-op if it holds none."""

    def block_table(self, request: Request) -> list[int]:
        """Return the request's block ids, in order of position."""

    def slot_mapping(self, request: Request, start: int, end: int) -> list[int]:
        """Return the pool slots of the positions [start, end): block id times block_size plus offset."""

    def check(self) -> None:
        """Raise RuntimeError, naming what is wrong, if an invariant of the pool is broken."""


class Queue(Protocol):
    """The waiting requests, the first in policy order in front."""

    def push(self, request: Request) -> None:
        """Put a request in its place."""

    def peek(self) -> Request:
        """Return the first request, without taking it."""

    def pop(self) -> Request:
        """Take the first request."""

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. Raises ValueError when it is not there."""

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
        """Take in a computed step. Return the requests that have finished, in row order.

        `sampled` has the tokens of each request that reached the end of its sequence: one, or more where
        drafts (spec_token_ids) were scheduled with it. `stopped` are the ids of requests whose text,
        with the last of these tokens, has reached a stop string."""


class Attend(Protocol):
    """Attention of one layer, passed to the model, which has no cache of its own."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q and the result are (*S, num_heads, head_dim), k and v (*S, num_kv_heads, head_dim), RoPE
        applied. Stores k and v."""


class Backend(Protocol):
    """Computes a step. Made with the model, the KV manager and the engine's `next_chunk`."""

    name: str  # in the trace's header: paged, padded, two-pass

    def forward(self, rows: list[Row]) -> Tensor:
        """Run one forward pass. Return logits (S, vocab_size) of the rows with `is_last`, in order: those
        after the last `num_logits` tokens of each."""


class SamplerLike(Protocol):
    """Chooses tokens. Made with the engine's seed."""

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        """Return a token id for each row of logits (S, vocab_size). The random number of a request's output i
        depends on its seed and i alone. Rows of one request are consecutive: the first is that of its next
        output, each other one that of the output after the draft before it."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; if it goes on, nothing has changed."""


class EngineLike(Protocol):
    """The engine as the replaceable `step` and `Stream` see it."""

    requests: dict[str, Request]  # by id, all that are not finished
    inboxes: dict[str, deque[Delta]]  # by request id: of those whose Deltas a stream or `generate` reads
    scheduler: SchedulerLike
    backend: Backend

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would serve a request."""

    def step(self) -> list[Delta]:
        """Serve one step and return its Deltas."""

    def sample(self, logits: Tensor, requests: list[Request]) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Choose a token for each row of logits (S, vocab_size). Return {request_id: [token_id]}, and
        {request_id: stop string} for the requests whose text has now reached one."""

    def collect(self, requests: list[Request], stopped: dict[str, str]) -> list[Delta]:
        """Return the Deltas of requests that were given tokens, and forget the finished ones."""

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if there is no such request."""


# -------------------------------------------------- optional abilities, for undoing a failed step, for forks
# The engine asks for each once, when it is built; fallbacks.py has what stands in for a missing one.


@runtime_checkable
class RecoverableKV(Protocol):
    """A KVManager that can undo what it did for a request."""

    def unadmit(self, request: Request) -> None:
        """Undo `admit`: give back its blocks, reset its counters, and do not count it in the statistics."""

    def shrink(self, request: Request) -> None:
        """Give back the blocks that admission did not claim and that no computed token needs."""

    def uncache_blocks(self, request: Request) -> None:
        """Undo `cache_blocks` for the tokens that the request does not count as computed."""

    def evict_blocks(self, request: Request) -> list[int]:
        """Remove what the request computed from the prefix cache, because it is wrong. Return its blocks
        that no other request holds."""


@runtime_checkable
class StepCachingKV(Protocol):
    """A KVManager whose blocks can be found in the step that computes them, by requests admitted behind."""

    caches_scheduled: bool  # False, as it begins: `cache_scheduled_blocks` does nothing

    def cache_scheduled_blocks(self, request: Request, num_new_tokens: int) -> None:
        """While a step is decided: let other requests find the full blocks that the request has when it has
        computed so many tokens, drafts apart. `unadmit` and `uncache_blocks` undo it."""


@runtime_checkable
class StepSharingBackend(Protocol):
    """A Backend that says whether a row may read what another row of its step writes."""

    # In each layer all rows are written before one is read, or those in front are computed before the others.
    writes_before_reading: bool


@runtime_checkable
class ForkingKV(Protocol):
    """A KVManager that can share a prompt between the answers to it, `Request.siblings`."""

    # Copies the first num_tokens of a block into another: (source, target, num_tokens). None: it cannot.
    copy_block: Callable[[int, int, int], object] | None

    def fork(self, parent: Request, child: Request) -> bool:
        """Admit a request that has the prompt of another, which has computed it. False changes nothing."""


@runtime_checkable
class CopyingBackend(Protocol):
    """A Backend that can copy blocks."""

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first keys and values of a block into another, in every layer."""


class PrefixCacheCounts(Protocol):
    """Counts of tokens, once for each admission."""

    queries: int  # looked up
    hits: int  # found


@runtime_checkable
class PrefixCachedKV(Protocol):
    """A KVManager whose prefix cache can be emptied, and counts what it finds."""

    stats: PrefixCacheCounts

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content; False while blocks are held."""


@runtime_checkable
class RecoverableScheduler(Protocol):
    """A SchedulerLike that can undo its last `schedule`, and end a request with an error."""

    def take_back(self, before: list[Request]) -> None:
        """Undo a step that was decided while `before` ran and is not computed. Preemptions stand. No block
        that it was to compute can be found any more."""

    def fail(self, request: Request) -> None:
        """Drop a request that cannot go on; its finish_reason becomes "error". In mid-step no block that it
        was to compute can be found any more."""


@runtime_checkable
class RecoverableBackend(Protocol):
    """A Backend that can compute a request apart from the others."""

    def compute_alone(self, request: Request) -> Tensor | None:
        """Return the logits (vocab_size,) after the request's last token; None if it cannot."""

    def clear(self, slots: list[int]) -> None:
        """Write zeros into these slots of every layer."""
