"""The records of a trace. docs/trace.md describes each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mini_engine.trace.record import Record

VERSION = 3  # 3 added drafts; 2 is read, too
READABLE = (2, 3)

# -------------------------------------------------------------------------------------------- events


@dataclass(slots=True)
class EventRecord(Record):
    """An event in the life of one request; `type` is its kind in the file."""

    what: ClassVar[str] = "the event"
    tags: ClassVar[tuple[str, ...]] = ("type",)
    type: ClassVar[str]
    id: str


@dataclass(slots=True)
class Queued(EventRecord):
    """The request was added."""

    type: ClassVar[str] = "QUEUED"
    t: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival: int


@dataclass(slots=True)
class Scheduled(EventRecord):
    """The request was admitted; `num_cached_tokens` of its tokens had been computed: in the prefix cache,
    `num_forked_tokens` of them in another answer to its prompt, and `num_external_computed_tokens` in another
    engine. `cached_blocks` are the full blocks of these tokens."""

    type: ClassVar[str] = "SCHEDULED"
    num_cached_tokens: int
    cached_blocks: list[int]
    num_forked_tokens: int = 0
    num_external_computed_tokens: int = 0


@dataclass(slots=True)
class Preempted(EventRecord):
    """The request was preempted: the running requests needed `needs` blocks, `free` were free, and `for_` was
    the first that lacked one."""

    type: ClassVar[str] = "PREEMPTED"
    for_: str
    needs: int
    free: int


@dataclass(slots=True)
class Finished(EventRecord):
    """The request ended; `reason` is stop, length, abort or error."""

    type: ClassVar[str] = "FINISHED"
    reason: str


Event = Queued | Scheduled | Preempted | Finished


# ------------------------------------------------------------------------------------ requests, lines


@dataclass(slots=True)
class RequestView(Record):
    """The state of one request in one step, folded from the records (see fold.py).

    `state` is waiting, prefill, decode, preempted (in this step) or finished (in an earlier one). A time or
    the number of a step is None before it is reached, and where the trace does not have it.
    """

    what: ClassVar[str] = "the header's request"
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival: int
    state: str = "waiting"
    running: bool = False
    num_scheduled: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0  # of the latest admission, those of a fork included
    num_first_cached_tokens: int = 0  # of the first, in the prefix cache
    num_resumed_cached_tokens: int = 0  # of those after a preemption, together
    blocks: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    queued_step: int | None = None
    scheduled_step: int | None = None  # of the first admission, as t_scheduled
    t_queued: float | None = None
    t_scheduled: float | None = None
    t_first_token: float | None = None
    t_last_token: float | None = None
    t_finished: float | None = None

    @property
    def num_new_tokens(self) -> int:
        """Known tokens that were not computed before this step: prompt and outputs, less the cached ones."""
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        known = self.num_prompt_tokens + self.num_output_tokens
        return self.num_output_tokens > 0 and known - self.num_computed_tokens == 1


@dataclass(slots=True)
class Header(Record):
    """The settings of a run. If the trace begins in the middle of a run, also its state at that point: the
    requests, and the blocks whose content the prefix cache could find."""

    what: ClassVar[str] = "the header"
    tags: ClassVar[tuple[str, ...]] = ("trace", "version")
    trace: ClassVar[str] = "mini-engine"
    version: ClassVar[int] = VERSION
    clock: str
    unit: str
    backend: str
    parts: dict[str, str]
    config: dict[str, Any]
    requests: list[RequestView] = field(default_factory=list)
    cached_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Blocked(Record):
    """The reason why the front of the queue was not admitted; for memory, the blocks needed and free."""

    what: ClassVar[str] = "the step's 'blocked'"
    reason: str
    id: str | None = None
    needs: int | None = None
    free: int | None = None


@dataclass(slots=True)
class StepTrace(Record):
    """One step. The counts are those after scheduling, before finished requests return their blocks."""

    what: ClassVar[str] = "the step"
    step: int
    t: float
    t_end: float
    scheduled: dict[str, int]  # tokens, in row order
    num_batched_tokens: int
    num_running: int
    num_waiting: int
    blocked: Blocked
    blocks: dict[str, list[int]]  # newly allocated
    new_tokens: dict[str, list[int]]
    num_free_blocks: int
    num_cached_blocks: int
    events: list[Event]
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # proposed and scheduled
    num_accepted_tokens: dict[str, int] = field(default_factory=dict)  # of those
    returned_blocks: dict[str, list[int]] = field(default_factory=dict)  # of the others


@dataclass(slots=True)
class End(Record):
    """The end of a run: drained, stuck, max_steps or error; and the events after its last step."""

    what: ClassVar[str] = "the end"
    end: str
    step: int
    num_free_blocks: int | None = None
    waiting: list[str] | None = None
    running: list[str] | None = None
    error: str | None = None
    events: list[Event] = field(default_factory=list)


@dataclass
class Trace:
    """A recorded run."""

    header: Header
    steps: list[StepTrace] = field(default_factory=list)
    end: End | None = None

    def lines(self) -> list[Record]:
        """The records in the order of the file."""
        return [self.header, *self.steps, *([self.end] if self.end else [])]
